"""An envelope as a JSON object, checked without pydantic models.

Invariant: a document accepted by `read_answer` has every key that the command line reads, with a
value of the right type, so that showing it cannot fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fumehood.core.json_types import JsonObject

if TYPE_CHECKING:
    from fumehood.core.envelope import Envelope

Types = tuple[type, ...]

TEXT: Types = (str,)
NUMBER: Types = (int, float)
OBJECT: Types = (dict,)
ABSENT = type(None)

ENVELOPE: Mapping[str, Types] = {
    "success": (bool,), "status": TEXT, "data": OBJECT, "error": (dict, ABSENT),
    "metadata": OBJECT,
}  # fmt: skip
ERROR: Mapping[str, Types] = {
    "code": TEXT, "message": TEXT, "approval_id": (str, ABSENT), "details": (dict, ABSENT),
}  # fmt: skip
MAYBE_IN_ERROR: JsonObject = {"approval_id": None, "details": None}
METADATA: Mapping[str, Types] = {
    "tool_name": (str, ABSENT), "tool_version": (str, ABSENT), "call_id": (str, ABSENT),
    "trace_id": TEXT, "execution_time_ms": NUMBER, "sandbox": (dict, ABSENT), "usage": OBJECT,
    "warnings": (list,),
}  # fmt: skip
SANDBOX: Mapping[str, Types] = {"placement": TEXT, "isolation": TEXT, "ended_by": TEXT}
USAGE: Mapping[str, Types] = {"cost": TEXT, "currency": TEXT}


def read_answer(raw: bytes) -> JsonObject:
    """Parse the bytes of an answer into an envelope.

    Raises:
        ValueError: the bytes are not an envelope.
    """
    try:
        document = json.loads(raw.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _require(document, ENVELOPE)
    error, metadata = document["error"], document["metadata"]
    if error is not None:
        _require({**MAYBE_IN_ERROR, **error}, ERROR)
    _require(metadata, METADATA)
    _require(metadata["usage"], USAGE)
    if metadata["sandbox"] is not None:
        _require(metadata["sandbox"], SANDBOX)
    if not all(isinstance(warning, str) for warning in metadata["warnings"]):
        raise ValueError("a warning is not a string")
    envelope: JsonObject = document
    return envelope


def document_of(envelope: Envelope | JsonObject) -> JsonObject:
    """Return an answer as a JSON object."""
    if isinstance(envelope, dict):
        return envelope
    document: JsonObject = json.loads(envelope.model_dump_json())
    return document


def _require(document: Any, types: Mapping[str, Types]) -> None:
    if not isinstance(document, dict):
        raise ValueError("not an object")  # noqa: TRY004
    for key, wanted in types.items():
        if key not in document or not isinstance(document[key], wanted):
            raise ValueError(f"{key} is missing or has the wrong type")
