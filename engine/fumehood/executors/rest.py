"""REST tools: one HTTP request for a call.

Host side; below it `upstreams`, which sends. The engine itself sends the request: no wall is
around it, and `addresses` decides what it may reach. An argument fills its place in the endpoint's
path or query, or in a header; all others are the query (GET, HEAD, DELETE) or a JSON body.
Invariants: no argument changes the host, the number of path segments, what the endpoint's own query
says or how many headers there are; everything that comes back is the service's word, bounded, and
free of the values of secrets.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import anyio
import anyio.to_thread

from fumehood.core.errors import (
    ArgumentsRefused,
    EndedBy,
    EngineError,
    ExecutionError,
    NetworkError,
    OutputLimitExceeded,
    RateLimited,
    Timeout,
    UpstreamTimeout,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.executors.upstreams import (
    Attempt,
    BodyTooLarge,
    UpstreamAnswer,
    UpstreamRequest,
    Upstreams,
)
from fumehood.protocol import strict_json
from fumehood.redaction.redactor import Redactor
from fumehood.redaction.secret_values import SecretValues
from fumehood.registry.definitions import (
    MAX_HEADER_VALUE,
    PLACEHOLDER,
    QUERY_METHODS,
    QUERY_PLACE,
    SECRET_REFERENCE,
    is_header_value,
)

MAX_BODY_SHOWN = 4096
"""Characters of an error's body in `details.body`."""

MAX_ADDRESS = 16 * 1024
"""Characters of an address with its arguments. Services cut the connection at longer ones, which
looks like a failure: a few such calls of one caller would open the circuit for everybody."""

MAX_TYPE_SHOWN = 200
"""Characters of a content type."""

_PLACEMENT = Placement(
    "host",
    "host",
    "the executor 'http' sends the request from the engine's own process, to public addresses "
    "and to the hosts that rest.allowed_hosts names",
)
_CONTENTS = frozenset({"content_base64"})
"""A file's content, which is never shortened."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class RestExecutor(Executor):
    """Tools that are an HTTP request."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    def run(self, run: ToolRun) -> Coroutine[Any, Any, Outcome]:
        return run_request(
            run.tool.definition,
            run.arguments,
            run.limits,
            run.upstreams,
            run.redactor,
            trace_parent(run.trace_id, run.call_id),
        )


async def run_request(
    tool: ToolDefinition,
    arguments: JsonObject,
    limits: Limits,
    upstreams: Upstreams,
    redactor: Redactor,
    traceparent: str,
) -> Outcome:
    """Send the request of one call, and read its answer."""
    attempt, values, started = Attempt(), SecretValues(), time.monotonic()
    outcome = Outcome(EndedBy.OK, "none")
    try:
        request = make_request(tool, arguments, traceparent)
        answer = await _ask(request, tool, limits, upstreams, redactor, attempt, values)
        outcome = replace(outcome, output_bytes=len(answer.body))
        data = _data(answer, values, redactor)
        whole = frozenset[str]() if _is_json(answer) else _CONTENTS
        outcome = replace(outcome, data=data, whole_fields=whole)
    except EngineError as error:
        error.was_sent = attempt.was_sent
        if isinstance(error, NetworkError | UpstreamTimeout) and error.was_sent:
            _advise(error, tool)
        outcome = replace(outcome, ended_by=_ended_by(error), error=error)
    network_ms = (time.monotonic() - started) * 1e3
    return replace(outcome, network_ms=network_ms, redacted=values.count)


def _advise(error: NetworkError | UpstreamTimeout, tool: ToolDefinition) -> None:
    """Say whether to repeat a request that was sent. A 503 says itself that it may be."""
    turned_away = (error.details or {}).get("status") == 503
    error.may_retry = error.may_retry and (tool.idempotent or turned_away)
    advice = "Repeat the call later." if error.may_retry else "It may or may not have taken effect."
    error.message = f"{error.message} {advice}"


def _ended_by(error: EngineError) -> EndedBy:
    match error:
        case Timeout():
            return EndedBy.WALL_TIME
        case OutputLimitExceeded():
            return EndedBy.OUTPUT
        case _:
            return EndedBy.EXCEPTION


async def _ask(
    request: UpstreamRequest,
    tool: ToolDefinition,
    limits: Limits,
    upstreams: Upstreams,
    redactor: Redactor,
    attempt: Attempt,
    values: SecretValues,
) -> UpstreamAnswer:
    """The successful answer.

    Raises:
        EngineError: there is none.
    """
    timeout_s = limits.wall_s if tool.timeout is None else min(limits.wall_s, tool.timeout / 1e3)
    try:
        with anyio.fail_after(timeout_s):
            secrets = await _secrets(tool, upstreams)
            values.add(secrets.values())
            for value in secrets.values():
                redactor.learn(value)  # other tools and the log may come by it, too
            filled = fill_secrets(request, secrets)
            answer = await upstreams.ask(filled, limits.output_bytes, attempt, values)
    except TimeoutError:
        raise UpstreamTimeout(
            f"The tool's service did not answer in {timeout_s:g} s."
            if attempt.was_sent
            else f"The tool's service could not be reached in {timeout_s:g} s. Nothing was sent.",
            details={"ended_by": "wall_time", "limit": {"timeout_seconds": timeout_s}},
        ) from None
    except BodyTooLarge:
        raise OutputLimitExceeded(
            f"The answer of the tool's service is over {limits.output_bytes} bytes. Ask for less.",
            details={"ended_by": "output", "limit": {"output_bytes": limits.output_bytes}},
        ) from None
    if not 200 <= answer.status < 300:
        raise _error(answer, values, redactor)
    return answer


async def _secrets(tool: ToolDefinition, upstreams: Upstreams) -> dict[str, str]:
    texts = [tool.endpoint or "", *(tool.headers or {}).values()]
    if not any(map(SECRET_REFERENCE.search, texts)):
        return {}
    return await anyio.to_thread.run_sync(upstreams.secrets.values, tool)


# -- the request ---------------------------------------------------------------------------


def make_request(tool: ToolDefinition, arguments: JsonObject, traceparent: str) -> UpstreamRequest:
    """The request of one call, with references in the place of secrets.

    Raises:
        ArgumentsRefused: an argument cannot stand in a path or a query, or is too long for it.
    """
    endpoint, method = tool.endpoint or "", tool.method or "GET"
    head, question, query = endpoint.partition("?")
    placed = {*PLACEHOLDER.findall(head), *QUERY_PLACE.findall(query)}
    url = _fill_path(head, arguments)
    query = _fill_query(query, arguments)
    headers, in_headers = _fill_headers(tool.headers or {}, arguments)
    placed |= in_headers
    others = {name: value for name, value in arguments.items() if name not in placed}
    headers.setdefault("accept", "application/json, */*;q=0.5")
    headers.setdefault("user-agent", "fumehood")
    headers.setdefault("traceparent", traceparent)
    body = None
    if method in QUERY_METHODS:
        query = "&".join(filter(None, (query, _query(others, query))))
    else:
        headers.setdefault("content-type", "application/json")
        body = strict_json.dumps(others)
    rows = tuple(headers.items())
    given = {name.lower(): value for name, value in (tool.headers or {}).items()}
    secret = {name for name, value in given.items() if SECRET_REFERENCE.search(value)}
    url += f"?{query}" if query else question
    if len(url) > MAX_ADDRESS:
        raise ArgumentsRefused(
            f"The arguments are too long for an address: with them it has {len(url)} characters, "
            f"at most {MAX_ADDRESS} are sent."
        )
    return UpstreamRequest(
        method=method,
        url=url,
        headers=tuple(row for row in rows if row[0] not in secret),
        secret_headers=tuple(row for row in rows if row[0] in secret),
        body=body,
    )


def fill_secrets(request: UpstreamRequest, secrets: Mapping[str, str]) -> UpstreamRequest:
    """The request with the values of its secrets; percent-encoded in the address."""
    if not secrets:
        return request
    return replace(
        request,
        url=SECRET_REFERENCE.sub(lambda found: quote(secrets[found[1]], safe=""), request.url),
        secret_headers=tuple(
            (name, SECRET_REFERENCE.sub(lambda found: secrets[found[1]], value))
            for name, value in request.secret_headers
        ),
    )


def _fill_path(head: str, arguments: JsonObject) -> str:
    """Scheme, host and path, with arguments in their places.

    Services that decode `%2F` and resolve dots afterwards would see another path; so a segment
    that could become one of dots is refused, however it is encoded.
    """
    if "{" not in head:
        return head
    segments = []
    for segment in head.split("/"):
        names = PLACEHOLDER.findall(segment)
        texts = {name: _path_text(name, arguments.get(name)) for name in names}
        plain = _filled(segment, texts)
        seen = (plain, unquote(plain), unquote(unquote(plain)))
        if names and any(_has_dots(each) for each in seen):
            raise _refused(names[0], "cannot be a step to another path ('.' or '..')")
        segments.append(_filled(segment, {n: quote(text, safe="") for n, text in texts.items()}))
    return "/".join(segments)


def _filled(segment: str, texts: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda found: texts[found[1]], segment)


def _path_text(name: str, value: Any) -> str:
    if not isinstance(value, str | int | float) or value == "":
        raise _refused(name, "stands in the address, so it must be a text or a number, not empty")
    text = _text(value)
    if _CONTROL.search(text):
        raise _refused(name, "stands in the address and cannot hold control characters")
    return text


def _has_dots(segment: str) -> bool:
    return any(part.partition(";")[0] in (".", "..") for part in re.split(r"[/\\]", segment))


def _fill_query(query: str, arguments: JsonObject) -> str:
    """The endpoint's own query, with arguments in their places."""
    if "{" not in query:
        return query
    filled: list[str] = []
    for pair in query.split("&"):
        place = QUERY_PLACE.search(pair)
        if place is None:
            filled.append(pair)
        else:
            texts = _texts(place[1], arguments.get(place[1]))
            filled += [f"{pair[: place.start()]}{text}" for text in texts]
    return "&".join(filled)


def _query(arguments: JsonObject, own: str) -> str:
    """The arguments as a query: a repeated name for a list, nothing for null."""
    taken = {name for name, _ in parse_qsl(own, keep_blank_values=True)}
    pairs = []
    for name, value in arguments.items():
        if name in taken:
            raise _refused(name, "is a part of the endpoint's own query")
        pairs += [f"{quote(name, safe='')}={text}" for text in _texts(name, value)]
    return "&".join(pairs)


def _texts(name: str, value: Any) -> Iterator[str]:
    """An argument's values in a query, percent-encoded."""
    for element in value if isinstance(value, list) else [value]:
        if isinstance(element, dict | list):
            raise _refused(name, "stands in the query and cannot be an object or nested list")
        if element is not None:
            yield quote(_text(element), safe="")


def _fill_headers(
    given: Mapping[str, str], arguments: JsonObject
) -> tuple[dict[str, str], set[str]]:
    """The headers, with arguments in their places, and the names of these arguments.

    A place without an argument leaves its header out.
    """
    rows: dict[str, str] = {}
    placed: set[str] = set()
    for name, value in given.items():
        place = PLACEHOLDER.fullmatch(value)
        if place is None:
            rows[name.lower()] = value
            continue
        placed.add(place[1])
        argument = arguments.get(place[1])
        if argument is not None:
            rows[name.lower()] = _header_text(place[1], argument)
    return rows, placed


def _header_text(name: str, value: Any) -> str:
    text = _text(value) if isinstance(value, str | int | float) else None
    if text is None or not is_header_value(text):
        raise _refused(
            name,
            "stands in a header, so it must be a number or a text of printable ASCII without space "
            f"around it, of at most {MAX_HEADER_VALUE} characters",
        )
    return text


def _text(value: str | float | bool) -> str:
    return value if isinstance(value, str) else strict_json.dumps(value).decode()


def _refused(name: str, reason: str) -> ArgumentsRefused:
    return ArgumentsRefused(f"The arguments are wrong: {name[:80]} {reason}.", fields=[name[:80]])


def trace_parent(trace_id: str, call_id: str) -> str:
    """The header `traceparent` of a call. Ids that are not W3C's are hashed into its form."""
    # *Source*: W3C Trace Context, section 3.2.
    if not re.fullmatch(r"(?!0{32})[0-9a-f]{32}", trace_id):
        trace_id = hashlib.sha256(trace_id.encode()).hexdigest()[:32]
    return f"00-{trace_id}-{hashlib.sha256(call_id.encode()).hexdigest()[:16]}-01"


# -- the answer ----------------------------------------------------------------------------


def _data(answer: UpstreamAnswer, values: SecretValues, redactor: Redactor) -> JsonObject:
    """The tool's result: a JSON object as it is, other JSON, a text, or bytes in base64.

    Raises:
        ExecutionError: the body is not the JSON that its type promises.
    """
    if not answer.body:
        return {"status": answer.status}
    if _is_json(answer):
        try:
            value = values.value(strict_json.loads(answer.body))
        except strict_json.StrictJsonError as error:
            raise ExecutionError(
                f"The tool's service answered with invalid JSON: {values.text(str(error))}.",
                details=_details(answer, values, redactor),
            ) from None
        return value if isinstance(value, dict) else {"value": value}
    kind = values.text(answer.headers.get("content-type", ""))[:MAX_TYPE_SHOWN] or None
    try:
        return {"text": values.text(answer.body.decode("utf-8")), "content_type": kind}
    except UnicodeDecodeError:
        encoded = base64.b64encode(values.data(answer.body)).decode()
        return {"content_base64": encoded, "content_type": kind}


def _is_json(answer: UpstreamAnswer) -> bool:
    return answer.content_type == "application/json" or answer.content_type.endswith("+json")


def _error(answer: UpstreamAnswer, values: SecretValues, redactor: Redactor) -> EngineError:
    """The error for a status that is no success."""
    status, details = answer.status, _details(answer, values, redactor)
    said = f"The tool's service answered with status {status}"
    if status == 429:
        return RateLimited(
            f"{said}: too many requests. Repeat the call later.",
            retry_after_ms=answer.retry_after_ms,
            details=details,
        )
    if status >= 500:
        return NetworkError(
            f"{said}: it failed.",
            retry_after_ms=answer.retry_after_ms if status == 503 else None,
            details=details,
        )
    if status < 400:
        return ExecutionError(f"{said}, which is not followed. Do not retry.", details=details)
    return ExecutionError(
        f"{said}, its reason is in details.body. Change the arguments, or do not retry.",
        details=details,
    )


def _details(answer: UpstreamAnswer, values: SecretValues, redactor: Redactor) -> JsonObject:
    """Status, type and a bounded part of the body."""
    kind = values.text(answer.headers.get("content-type", ""))[:MAX_TYPE_SHOWN]
    details: JsonObject = {"status": answer.status, "content_type": kind or None}
    if not answer.body:
        return details
    try:
        value, count = redactor.value(values.value(strict_json.loads(answer.body)))
        values.count += count
        text = strict_json.dumps(value).decode()
        return {**details, "body": value if len(text) <= MAX_BODY_SHOWN else text[:MAX_BODY_SHOWN]}
    except strict_json.StrictJsonError:
        pass
    # Redacted before it is cut: half a key is not found any more.
    text, count = redactor.text(values.text(answer.body.decode("utf-8", "replace")))
    values.count += count
    if answer.is_cut:  # the cut may have gone through a secret
        text = text[: max(0, len(text) - values.longest)]
    return {**details, "body": text[:MAX_BODY_SHOWN]}
