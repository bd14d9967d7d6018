"""Incoming: parse calls and queries from outside into values, or refuse them.

This module runs before the pipeline. The engine, HTTP and the other entry points use it. Calls from
an embedding program are parsed as strictly as requests over a socket.
"""

from __future__ import annotations

from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fumehood.call_options import CallBody
from fumehood.core.call import MAX_KEYS, replaced
from fumehood.core.decision import DecisionBody
from fumehood.core.errors import InvalidParams, faults_of
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

M = TypeVar("M", bound=BaseModel)

_NO_ARGUMENTS = CallBody(arguments={})

_MISPLACED = "It is an option: put it into `options`"


def parse_own_call(
    tool: str, arguments: JsonObject | None, options: JsonObject
) -> tuple[str, CallBody]:
    """Parse a call that comes from this process itself. Check it as strictly as a call that arrives
    over a socket.

    Return the tool's name and the call's body. Raises InvalidParams.
    """
    call = {"arguments": arguments if arguments is not None else {}, "options": options}
    raw = as_sent({"tool": str(tool), "call": call}, "call")
    return raw["tool"], parse_call_body(raw["call"])


def as_sent(value: Any, part: str) -> Any:
    """Convert a value of an embedding program to JSON and back, so that it is the same as if it had
    arrived over a socket. `part` names the value in the error's message.

    Raises:
        InvalidParams: the value cannot be represented in JSON.
    """
    try:
        return strict_json.loads(strict_json.dumps(value), max_depth=65)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParams(f"The {part} is not JSON: {error}.") from None


def validated(model: type[M], document: JsonObject) -> M:
    """Validate JSON with a strict model. As in JSON Schema, `269.0` counts as an integer.

    In `document`, such floats are replaced by integers. Raises ValidationError if the document is
    invalid.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        if not _make_whole(document, error):
            raise
    return model.model_validate(document)


def _make_whole(document: Any, error: ValidationError) -> bool:
    """Replace floats like `269.0` by integers where `error` requires an integer. Return True if any
    float was replaced.
    """
    found = False
    for fault in error.errors(include_url=False):
        if fault["type"] == "int_type" and isinstance(fault["input"], float):
            *above, last = fault["loc"]
            holder = reduce(getitem, above, document)
            if holder[last].is_integer():
                holder[last] = int(holder[last])
                found = True
    return found


def parse_call_body(document: Any) -> CallBody:
    """Parse the body of a call from a JSON document.

    Raises:
        InvalidParams: some fields are invalid; the error names each of them.
    """
    given = document if isinstance(document, dict) else {}
    arguments = given.get("arguments")
    if len(given) == 1 and type(arguments) is dict and len(arguments) <= MAX_KEYS:
        return replaced(_NO_ARGUMENTS, arguments=arguments)  # fast path for most calls
    for where in (given, given.get("options"), arguments):
        if isinstance(where, dict) and len(where) > MAX_KEYS:
            raise InvalidParams(f"An object in the call has more than {MAX_KEYS} keys.")
    return parsed(CallBody, document, "call")


def parse_own_decision(document: JsonObject) -> DecisionBody:
    """Parse a decision request that comes from this process itself. Check it as strictly as a
    request that arrives over a socket.

    Raises InvalidParams.
    """
    return parsed(DecisionBody, as_sent(document, "decision"), "decision")


def parsed(model: type[M], document: JsonObject, part: str) -> M:
    """Validate the body, the query or another section of a request. `part` names the section in
    errors.

    Raises:
        InvalidParams: some fields are invalid; the error names at most 20 of them.
    """
    try:
        return validated(model, document)
    except ValidationError as error:
        options = model.model_fields.get("options")
        known = getattr(options and options.annotation, "model_fields", {})
        faults = [
            (path[:120], said if path in model.model_fields or path not in known else _MISPLACED)
            for path, said in faults_of(error)[:20]
        ]
        words = "; ".join(f"{path}: {said}" if path else said for path, said in faults)
        fields = [path for path, _ in faults if path]
        raise InvalidParams(f"The {part} is wrong: {words}.", fields=fields) from None
