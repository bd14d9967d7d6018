"""One request, how its answer is read, and the clients' exceptions.

No socket and no models: a command that sends one call loads this module alone. Invariant: a
caller's name is one part of the address, whatever it contains. Otherwise a name with a slash would
change the address.
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
"""The longest time of a call without a timeout of its own: the maximum of every wall."""

LONGEST_WAIT_S = 3600.0
"""The longest wait for approval if the call does not limit it: the maximum of the configuration."""


class DaemonUnavailable(FumehoodError):
    """No engine answers, or not in time. The message says what to do.

    `may_have_acted` is whether an engine may still have received the request. A call may then have
    run, and only its owner knows whether it is safe to send it again.
    """

    def __init__(self, message: str, *, may_have_acted: bool = False) -> None:
        super().__init__(message)
        self.may_have_acted = may_have_acted


class Refused(EnvelopeError):
    """The engine refused a request other than a call; `envelope` and `code` have the reason."""


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[T]):
    """One request and the reader of its answer.

    `read` raises Refused, or ValueError if the bytes are not an engine's answer. `work_s` is how
    long the engine may work before it answers. `headers` are sent in addition to the usual ones.
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
    """Make a request. Its answer is read by `data_of`, `field_of`, `plain` or a similar function.

    Raises:
        ValueError: a part would change the address, or the body is not JSON.
    """
    path = address(*parts) + query_text(query or {})
    content = None if body is None else encode(body)
    return ApiRequest(method, path, read, content, work_s, headers or {})


def ask_for_bytes(path: str, work_s: float = 0.0) -> ApiRequest[None]:
    """Make a request that is answered with bytes; `read` is for a refusal instead of them."""

    def refused(raw: bytes) -> None:
        from fumehood.protocol.messages import decode_envelope

        raise Refused(decode_envelope(raw))

    return ApiRequest("GET", path, refused, work_s=work_s)


def call_read_by(
    read: Callable[[bytes], T], tool: str, arguments: JsonObject | None, options: JsonObject
) -> ApiRequest[T]:
    """Make the request of a call. Raises ValueError if it is not JSON or has an invalid name."""
    content = encode(call_body(arguments, options))
    return ApiRequest("POST", address("tools", tool, "call"), read, content, _work_s(options))


def decision_read_by(
    read: Callable[[bytes], T],
    tool: str,
    arguments: JsonObject | None,
    context: JsonObject | None,
    options: JsonObject,
) -> ApiRequest[T]:
    """Make the request of a decision. Raises ValueError if it is not JSON."""
    body = {"tool": tool, "context": context or {}, **call_body(arguments, options)}
    return ApiRequest("POST", address("decisions"), read, encode(body), _work_s(options))


def call_body(arguments: JsonObject | None, options: JsonObject) -> JsonObject:
    """Make the body of a call."""
    return {"arguments": arguments if arguments is not None else {}, "options": options}


def batch_work_s(calls: Sequence[Any], options: JsonObject) -> float:
    """Return how long a batch may take: its own timeout and one call, or all calls in sequence."""
    given = [call.get("options") for call in calls if isinstance(call, dict)]
    longest_s = max((_work_s(o) for o in given if isinstance(o, dict)), default=0.0)
    longest_s = max(longest_s, LONGEST_CALL_S)
    timeout_s = _seconds(options.get("timeout_seconds"))
    return len(calls) * longest_s if timeout_s is None else timeout_s + longest_s


def _work_s(options: JsonObject) -> float:
    """Return how long the call may wait for approval and run."""
    wait: Any = options.get("wait_for_approval")
    waits_s = LONGEST_WAIT_S if wait is True else _seconds(wait) or 0.0
    return waits_s + (_seconds(options.get("timeout_seconds")) or LONGEST_CALL_S)


def _seconds(asked: Any) -> float | None:
    """Return a valid time, else None: the engine refuses it immediately."""
    if isinstance(asked, int | float) and not isinstance(asked, bool) and asked > 0:
        return float(asked)
    return None


def address(*parts: str) -> str:
    """Return `/v1/…` with each part quoted.

    Raises:
        ValueError: a part would change the address.
    """
    for part in parts:
        if part in ("", ".", "..") or "/" in part:
            raise ValueError(f"{part[:80]!r} can be no name or id.")
    return "/v1/" + "/".join(quote(part, safe="@") for part in parts)


def query_text(fields: JsonObject) -> str:
    """Encode the given fields as a query, without those that are None."""
    chosen = {name: _text(value) for name, value in fields.items() if value is not None}
    return f"?{urlencode(chosen)}" if chosen else ""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    return value.isoformat() if isinstance(value, datetime) else ",".join(value)


def given(**fields: Any) -> JsonObject:
    """Return the fields of a body that are not None, as JSON."""
    return {name: json_of(value) for name, value in fields.items() if value is not None}


def json_of(value: Any) -> Any:
    """Return a field's value as JSON. Of a model, only the fields that were set, at every depth."""
    if isinstance(value, list):
        return [json_of(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    dump = getattr(value, "model_dump", None)
    return value if dump is None else dump(mode="json", exclude_unset=True)


def encode(body: JsonObject) -> bytes:
    """Encode a body as JSON.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return strict_json.dumps(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"The request is not JSON: {error}.") from None


def listed(names: Iterable[str] | None) -> list[str] | None:
    """Return a list of names. One string is refused: its characters would be taken for names."""
    if isinstance(names, str):
        raise ValueError(f"A list of names is needed, not {names[:80]!r} alone.")  # noqa: TRY004
    return None if names is None else list(names)


def data_of(model: type[M]) -> Callable[[bytes], M]:
    """Read an envelope's `data` as a value of the model."""

    def read(raw: bytes) -> M:
        return model.model_validate(_data(raw))

    return read


def field_of(name: str, kind: type[T]) -> Callable[[bytes], T]:
    """Read one field of an envelope's `data` as a value of the type."""

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
    """Read an answer without an envelope."""
    return model.model_validate_json


def object_of(raw: bytes) -> JsonObject:
    """Read any JSON object."""
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
