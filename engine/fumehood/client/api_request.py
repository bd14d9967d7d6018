"""Requests, the readers of their answers, and the clients' exceptions.

This module imports neither socket code nor models, so that a command that sends one call starts
quickly. Invariant: a name from the caller is always exactly one segment of the address. A name that
would change the address, such as one with a slash, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from urllib.parse import quote, urlencode

from fumehood.core.errors import EnvelopeError, FumehoodError
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter


T = TypeVar("T")
M = TypeVar("M", bound="BaseModel")

CONNECT_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 30.0
"""Seconds that the client waits for the answer after the engine's own time limit."""


LONGEST_CALL_S = 600.0
"""Maximum seconds that a call without its own timeout may run. No wall allows a longer time."""

LONGEST_WAIT_S = 3600.0
"""Seconds for which a call without its own limit may wait for approval. The configuration allows no
longer wait."""


class DaemonUnavailable(FumehoodError):
    """No engine answered in time. The message says what to do.

    `may_have_acted` is True if an engine may have received the request. The requested call may then
    have run. Only the user of the client can know whether it is safe to send the request again.
    """

    def __init__(self, message: str, *, may_have_acted: bool = False) -> None:
        super().__init__(message)
        self.may_have_acted = may_have_acted


class Refused(EnvelopeError):
    """The engine refused a request other than a call; `envelope` and `code` give the reason."""


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[T]):
    """One request, and the function that parses its answer.

    `read` parses the answer. It raises Refused if the engine refused the request, and ValueError if
    the bytes are not an engine's answer. `work_s` is how many seconds the engine may work before it
    answers. `headers` are sent in addition to the usual headers.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    content: bytes | None = None
    work_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)


def ask(
    method: str,
    read: Callable[[bytes], T],
    *parts: str,
    query: JsonObject | None = None,
    body: JsonObject | None = None,
    work_s: float = 0.0,
    headers: Mapping[str, str] | None = None,
) -> ApiRequest[T]:
    """Create a request for the address `/v1/PART/PART…`, without sending it.

    `method` is the HTTP method. Each of `parts` is one segment of the address. `query` has the
    query parameters, and `body` the JSON body. `work_s` is how many seconds the engine may work
    before it answers. `read` is the function that parses the answer, for example the result of
    `data_of(…)`, `field_of(…)` or `plain(…)`.

    Raises:
        ValueError: a part would change the address, for example because of a slash, or the body is
            not JSON.
    """
    path = address(*parts) + query_text(query or {})
    content = None if body is None else encode(body)
    return ApiRequest(method, path, read, content, work_s, headers or {})


def ask_for_bytes(path: str, work_s: float = 0.0) -> ApiRequest[None]:
    """Create a request whose answer is raw bytes, without sending it.

    `path` is the whole address. `work_s` is how many seconds the engine may work before it answers.
    The request's `read` function takes the body of a refusal, and always raises Refused.
    """

    def refused(raw: bytes) -> None:
        from fumehood.protocol.messages import decode_envelope

        raise Refused(decode_envelope(raw))

    return ApiRequest("GET", path, refused, work_s=work_s)


def call_read_by(
    read: Callable[[bytes], T], tool: str, arguments: JsonObject | None, options: JsonObject
) -> ApiRequest[T]:
    """Create the request for a call. `read` parses the call's answer.

    Raises:
        ValueError: the arguments or options are not JSON, or the tool's name is invalid.
    """
    content = encode(call_body(arguments, options))
    return ApiRequest("POST", address("tools", tool, "call"), read, content, _work_s(options))


def decision_read_by(
    read: Callable[[bytes], T],
    tool: str,
    arguments: JsonObject | None,
    context: JsonObject | None,
    options: JsonObject,
) -> ApiRequest[T]:
    """Create the request for a decision: the engine decides whether the caller may run `tool`
    itself. `read` parses the answer. `context` is everything besides the arguments that determines
    the effect of the tool; None means that there is nothing.

    Raises:
        ValueError: the arguments, context or options are not JSON.
    """
    body = {"tool": tool, "context": context or {}, **call_body(arguments, options)}
    return ApiRequest("POST", address("decisions"), read, encode(body), _work_s(options))


def call_body(arguments: JsonObject | None, options: JsonObject) -> JsonObject:
    """Return the body of a call's request. If `arguments` is None, the body has empty arguments."""
    return {"arguments": arguments if arguments is not None else {}, "options": options}


def batch_work_s(calls: Sequence[Any], options: JsonObject) -> float:
    """Return the maximum number of seconds that a batch may take. `options` are the batch's
    options.

    With a timeout, this is the timeout plus the maximum time of the longest call. Without a
    timeout, it is the maximum time of the longest call multiplied by the number of calls.
    """
    given = [call.get("options") for call in calls if isinstance(call, dict)]
    longest_s = max((_work_s(o) for o in given if isinstance(o, dict)), default=0.0)
    longest_s = max(longest_s, LONGEST_CALL_S)
    timeout_s = _seconds(options.get("timeout_seconds"))
    # Without a timeout, the calls may run one after another.
    return len(calls) * longest_s if timeout_s is None else timeout_s + longest_s


def _work_s(options: JsonObject) -> float:
    """Return the maximum number of seconds for which a call with these options may wait for
    approval and run.
    """
    wait: Any = options.get("wait_for_approval")
    waits_s = LONGEST_WAIT_S if wait is True else _seconds(wait) or 0.0
    return waits_s + (_seconds(options.get("timeout_seconds")) or LONGEST_CALL_S)


def _seconds(asked: Any) -> float | None:
    """Return a requested time limit if it is a positive number of seconds, or None for any other
    value.

    The engine refuses an invalid value immediately, so the client need not allow any time for it.
    """
    if isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0:
        return float(asked)
    return None


def address(*parts: str) -> str:
    """Return the address `/v1/PART/PART…`, with each part quoted.

    Raises:
        ValueError: a part would change the address, for example because of a slash.
    """
    for part in parts:
        if part in ("", ".", "..") or "/" in part:
            raise ValueError(f"{part[:80]!r} can be no name or id.")
    return "/v1/" + "/".join(quote(part, safe="@") for part in parts)


def query_text(fields: JsonObject) -> str:
    """Return the query string `?NAME=VALUE&…` for the fields that are not None, or "" if there are
    none.
    """
    chosen = {name: _text(value) for name, value in fields.items() if value is not None}
    return f"?{urlencode(chosen)}" if chosen else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    return value.isoformat() if isinstance(value, datetime) else ",".join(value)


def given(**fields: Any) -> JsonObject:
    """Return a request body with all fields that are not None. Their values are converted to JSON
    values.
    """
    return {name: json_of(value) for name, value in fields.items() if value is not None}


def json_of(value: Any) -> Any:
    """Convert a field's value to a JSON value.

    A model, even inside another value, becomes an object with only the fields that were set.
    """
    if isinstance(value, list):
        return [json_of(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(mode="json", exclude_unset=True)


def encode(body: JsonObject) -> bytes:
    """Encode a body as JSON.

    Raises:
        ValueError: the body is not JSON.
    """
    try:
        return strict_json.dumps(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"The request is not JSON: {error}.") from None


def listed(names: Iterable[str] | None) -> list[str] | None:
    """Return the names as a list, or None if `names` is None.

    Raises:
        ValueError: `names` is a single string. Its characters would otherwise be taken for names.
    """
    if isinstance(names, str):
        raise ValueError(f"A list of names is needed, not {names[:80]!r} alone.")  # noqa: TRY004
    return None if names is None else list(names)


def data_of(model: type[M]) -> Callable[[bytes], M]:
    """Return a function that parses an envelope, and returns its `data` as an instance of
    `model`.
    """

    def read(raw: bytes) -> M:
        return model.model_validate(_data(raw))

    return read


def field_of(name: str, kind: type[T]) -> Callable[[bytes], T]:
    """Return a function that takes the bytes of an envelope. It returns the field `name` of the
    envelope's `data`, as a value of the type `kind`.
    """

    def read(raw: bytes) -> T:
        adapter = _adapter(cast("Any", kind))
        found: T = adapter.validate_python(_data(raw).get(name))
        return found

    return read


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def plain(model: type[M]) -> Callable[[bytes], M]:
    """Return a function that parses an answer without an envelope as an instance of `model`."""
    return model.model_validate_json


def object_of(raw: bytes) -> JsonObject:
    """Parse an answer that may be any JSON object. Raises ValueError for any other answer."""
    document = strict_json.loads(raw)
    if not isinstance(document, dict):
        raise strict_json.StrictJsonError("no object")
    return document


def _data(raw: bytes) -> JsonObject:
    from fumehood.protocol.messages import decode_envelope

    envelope = decode_envelope(raw)
    if envelope.error is not None:
        raise Refused(envelope)
    return envelope.data
