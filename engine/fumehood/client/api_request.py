"""One request, and how its answer is read: the part of a client that knows no socket.

Invariant: what a caller names stands in the address as one part of it, whatever it holds. A
name with a slash would otherwise address something else than the method says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from fumehood.client.errors import Refused
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from pydantic import BaseModel

    from fumehood.core.envelope import Envelope

T = TypeVar("T")
M = TypeVar("M", bound="BaseModel")

CONNECT_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 30.0
"""How much longer than the engine may work this side waits for the answer."""


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[T]):
    """What to send, and what its answer means.

    `read` raises Refused, or ValueError where the bytes are no answer of an engine's.
    `work_s` is how long the engine may work on it before it answers. `headers` go with those
    that every request has.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    content: bytes | None = None
    work_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)


def address(*parts: str) -> str:
    """`/v1/…` with each part quoted.

    Raises:
        ValueError: a part that would address something else.
    """
    for part in parts:
        if part in ("", ".", "..") or "/" in part:
            raise ValueError(f"{part[:80]!r} can be no name or id.")
    return "/v1/" + "/".join(quote(part, safe="@") for part in parts)


def query_text(given: JsonObject) -> str:
    """What is given, as a query; what is None is left out."""
    chosen = {name: _text(value) for name, value in given.items() if value is not None}
    return f"?{urlencode(chosen)}" if chosen else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, datetime) else str(value)


def encode(body: JsonObject) -> bytes:
    """A body as JSON.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return strict_json.dumps(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"The request is not JSON: {error}.") from None


def listed(names: Iterable[str]) -> list[str]:
    """A list of names. One string is an iterable too, of names that nobody meant."""
    if isinstance(names, str):
        raise ValueError(f"A list of names is needed, not {names[:80]!r} alone.")  # noqa: TRY004
    return list(names)


def data_of(model: type[M]) -> Callable[[bytes], M]:
    """Read an envelope's `data` as a value of the model."""

    def read(raw: bytes) -> M:
        from fumehood.protocol.messages import decode_envelope

        return model.model_validate(_data(decode_envelope(raw)))

    return read


def plain(model: type[M]) -> Callable[[bytes], M]:
    """Read an answer that is no envelope."""
    return model.model_validate_json


def object_of(raw: bytes) -> JsonObject:
    """Read any JSON object."""
    document = strict_json.loads(raw)
    if not isinstance(document, dict):
        raise strict_json.StrictJsonError("no object")
    return document


def _data(envelope: Envelope) -> JsonObject:
    if envelope.error is not None:
        raise Refused(envelope)
    return envelope.data
