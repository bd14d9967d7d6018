"""The executor of REST tools: each call is one HTTP request.

Host side, above the part `outgoing`. The engine's own process sends the request (`upstreams`),
without a wall, and `addresses` decides which hosts it may reach. If the endpoint or a header of the
definition has a placeholder for an argument, the argument replaces it. All other arguments become
the query (GET, HEAD, DELETE) or a JSON body.

A definition can map values in a service's JSON to the result of the tool. If such a result has
several pages, the engine makes the `next_cursor` of a page. It contains the service's own position
of the next page, and is signed for the tool, the other arguments of the call and the principal.

Invariants:

* No argument changes the host, the number of path segments, the endpoint's own query or the name of
  a header.
* Everything in an answer is treated as hostile, limited in size, and free of the values of secrets.
* A position is sent only as the value of one parameter.
* No cursor contains a secret.
"""

from __future__ import annotations

import base64
import re
import time
from codecs import getincrementaldecoder
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

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
    UpstreamTimeout,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.long_text import is_long
from fumehood.core.tool import (
    CURSOR,
    MAX_HEADER_VALUE,
    PLACEHOLDER,
    QUERY_PLACE,
    SECRET_REFERENCE,
    ResponseMapping,
    ToolDefinition,
    is_header_value,
)
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.outcome import MAX_DATA_BYTES, CutText, Outcome
from fumehood.executors.parts import Pieces
from fumehood.executors.program import KeptStreams, KeptText
from fumehood.outgoing.in_engine import Outgoing
from fumehood.outgoing.secret_values import SecretStream, SecretValues
from fumehood.outgoing.upstreams import (
    MAX_BODY_SHOWN,
    Attempt,
    BodyTooLarge,
    UpstreamAnswer,
    UpstreamRequest,
    Upstreams,
    concluded,
)
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.definitions import QUERY_METHODS
from fumehood.registry.index import RegisteredTool

MAX_ADDRESS = 16 * 1024
"""Maximum length in characters of a URL with its arguments. Many services close the connection if a
URL is longer, which looks like a failure of the service. A few such calls by one caller would then
open the circuit breaker of the service for all callers.
"""

DRAINED_BYTES = 1 << 20
"""When this many bytes of a relayed answer have been read, reading pauses until the disk and the
listener have caught up.
"""

_CONTENTS = frozenset({"content_base64"})
"""The fields of a result that contain the content of a file. They are never shortened."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_PORTS = {"https": 443, "http": 80}


class RestExecutor(Executor):
    """Runs REST tools. Each call is one HTTP request."""

    place = Placement(
        "host",
        "host",
        "the executor 'http' sends the request from the engine's own process, to public addresses "
        "and to the hosts that rest.allowed_hosts names",
    )

    def upstream(self, tool: ToolDefinition) -> str | None:
        if tool.endpoint is None:
            return None
        parts = urlsplit(tool.endpoint)
        host = (parts.hostname or "").rstrip(".")
        return f"{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS[parts.scheme]}"

    def sends(
        self,
        tool: RegisteredTool,
        arguments: JsonObject,
        cursors: Cursors,
        principal_id: str,
    ) -> JsonObject | None:
        definition = tool.definition
        sent = ListCursors(cursors, principal_id).with_position(definition, arguments)
        return make_request(definition, sent).shown

    def run(self, run: ToolRun) -> Coroutine[Any, Any, Outcome]:
        if run.tool.definition.streaming:
            return relay_request(run)
        return run_request(
            run.tool.definition,
            run.arguments,
            run.limits,
            run.part(Outgoing).upstreams,
            run.redactor,
            run.traceparent,
            ListCursors(run.cursors, run.domain.principal_id),
        )


async def run_request(
    tool: ToolDefinition,
    arguments: JsonObject,
    limits: Limits,
    upstreams: Upstreams,
    redactor: Redactor,
    traceparent: str,
    cursors: ListCursors,
) -> Outcome:
    """Send the request of one call of `tool`, and return the outcome.

    `traceparent` is the value of the request's header with this name. `cursors` converts the cursor
    in `arguments` to the service's own position in a list, and makes the cursor of the next page.
    """

    async def read(answer: UpstreamAnswer, values: SecretValues) -> Read:
        def parse() -> JsonObject:
            if tool.response is None:
                return _data(answer, values, redactor)
            document = _document(answer, values, redactor)
            return mapped(tool, arguments, document, values, redactor, cursors)

        data = await anyio.to_thread.run_sync(parse) if is_long(answer.body) else parse()
        is_file = tool.response is None and not is_json(answer)
        return data, _CONTENTS if is_file else frozenset()

    def make() -> UpstreamRequest:
        return make_request(tool, cursors.with_position(tool, arguments), traceparent)

    return await perform(tool, make, read, limits, upstreams, redactor)


Read = tuple[JsonObject, frozenset[str]]
"""What was read from a service's answer: the result of the tool, and the names of those fields in
it that are never shortened.
"""


async def perform(
    tool: ToolDefinition,
    make: Callable[[], UpstreamRequest],
    read: Callable[[UpstreamAnswer, SecretValues], Awaitable[Read]],
    limits: Limits,
    upstreams: Upstreams,
    redactor: Redactor,
) -> Outcome:
    """Send the request that `make` returns, and read a successful answer with `read`. Return the
    outcome.

    If `make` or `read` raises an EngineError, or the request fails, the outcome contains the error.
    """
    attempt, values, started = Attempt(), SecretValues(), time.monotonic()
    outcome = Outcome(EndedBy.OK, "none")
    try:
        answer = await _ask(make(), tool, limits, upstreams, redactor, attempt, values)
        outcome = replace(outcome, output_bytes=len(answer.body))
        data, whole_fields = await read(answer, values)
        outcome = replace(outcome, data=data, whole_fields=whole_fields)
    except EngineError as error:
        outcome = concluded(outcome, error, attempt, tool)
    network_ms = (time.monotonic() - started) * 1e3
    return replace(outcome, network_ms=network_ms, redacted=values.count)


async def _ask(
    request: UpstreamRequest,
    tool: ToolDefinition,
    limits: Limits,
    upstreams: Upstreams,
    redactor: Redactor,
    attempt: Attempt,
    values: SecretValues,
    relayed: RelayedText | None = None,
) -> UpstreamAnswer:
    """Send the request with its secrets, and return the service's answer, whose status always means
    success.

    `attempt` records whether anything was sent. The values of the secrets are added to `values`, so
    that the caller can replace them in the answer. If `relayed` is given, it receives the body of
    the answer, and the returned answer has an empty body.

    Raises:
        EngineError: the request failed, or the status of the answer does not mean success.
    """
    timeout_s = limits.wall_s if tool.timeout is None else min(limits.wall_s, tool.timeout / 1e3)
    try:
        with anyio.fail_after(timeout_s):
            secrets = await upstreams.read_secrets(tool, redactor)
            values.add(secrets.values())
            filled = fill_secrets(request, secrets)
            most = limits.output_bytes if relayed is None else upstreams.stream_bytes
            relay = None if relayed is None else relayed.feed
            answer = await upstreams.ask(filled, most, attempt, values, relay)
    except TimeoutError:
        raise UpstreamTimeout(
            f"The tool's service did not answer in {timeout_s:g} s."
            if attempt.was_sent
            else f"The tool's service could not be reached in {timeout_s:g} s. Nothing was sent. "
            "Repeat the call later.",
            details={"ended_by": "wall_time", "limit": {"timeout_seconds": timeout_s}},
        ) from None
    except BodyTooLarge:
        raise OutputLimitExceeded(
            f"The answer of the tool's service is over {most} bytes. Ask for less.",
            details={"ended_by": "output", "limit": {"output_bytes": most}},
        ) from None
    if not 200 <= answer.status < 300:
        raise _error(answer, values, redactor)
    return answer


# -- answers in parts ----------------------------------------------------------------------


class RelayedText:
    """The body of an answer as text. The text is passed to the listener of the call while it
    arrives, and is also kept for the result.

    A long text is written to disk, so little memory is needed. Therefore, `feed` may wait for the
    disk.
    """

    def __init__(self, run: ToolRun, values: SecretValues) -> None:
        self.content_type: str | None = None
        self.size = 0
        """Number of bytes of the body that have been received so far."""
        self._values = values
        self._kept = KeptStreams(
            run.blobs, run.domain.principal_id, run.part(Outgoing).upstreams.stream_bytes,
            run.redactor, run.handle.output, run.domain.session_id,
        )  # fmt: skip
        self._pieces = Pieces(partial(self._kept.hear, "stdout"))
        self._drains = (run.blobs.room.drained, run.handle.drained)
        self._undrained = 0
        self._decoder = getincrementaldecoder(strict_json.UTF_8)("replace")
        self._secrets: SecretStream | None = None

    @property
    def redacted(self) -> int:
        """Number of matches of the redaction rules that have been replaced."""
        return self._kept.redacted

    async def feed(self, piece: bytes, content_type: str) -> None:
        """Add the next bytes of the body. Wait if the disk or the listener is too slow.
        `content_type` is that of the answer.
        """
        if self._secrets is None:  # by now the values of all secrets are known
            self._secrets = self._values.stream()
            self.content_type = self._values.text(content_type) or None
        self.size += len(piece)
        self._pieces.add(self._secrets.feed(self._decoder.decode(piece)))
        self._undrained += len(piece)
        if self._undrained > DRAINED_BYTES:
            self._undrained = 0
            for drain in filter(None, self._drains):
                await drain()

    async def finish(self) -> tuple[JsonObject, tuple[CutText, ...]]:
        """End the text, and return a pair. The first element contains the fields `text` and
        `content_type` of the result. The second element is empty, or, if `text` was shortened
        because it is too long, one `CutText` that describes the whole text.

        This method waits only for the disk.
        """
        if self._secrets is not None:
            rest = self._secrets.feed(self._decoder.decode(b"", True)) + self._secrets.finish()
            self._pieces.add(rest)
            self._pieces.flush()
        kept = (await self._kept.finish()).get("stdout", KeptText(""))
        cuts = () if kept.cut is None else (replace(kept.cut, field="text"),)
        return {"text": kept.text, "content_type": self.content_type}, cuts

    def discard(self) -> None:
        self._kept.discard()


async def relay_request(run: ToolRun) -> Outcome:
    """Send the request of one call, pass the answer on to the listener while it arrives, and return
    the outcome.

    If the request fails in the middle of the answer, the `details` of the error contain the text
    that has arrived.
    """
    tool, attempt, values = run.tool.definition, Attempt(), SecretValues()
    text, started = RelayedText(run, values), time.monotonic()
    outcome = Outcome(EndedBy.OK, "none")
    try:
        try:
            request = make_request(tool, run.arguments, run.traceparent)
            upstreams = run.part(Outgoing).upstreams
            answer = await _ask(
                request, tool, run.limits, upstreams, run.redactor, attempt, values, text
            )
            outcome = replace(outcome, data={"status": answer.status})
        except EngineError as error:
            outcome = concluded(outcome, error, attempt, tool)
    except BaseException:
        if run.handle.is_cancelled:
            with anyio.CancelScope(shield=True):
                outcome = await _with_text(Outcome.cancelled("none"), text)
            run.handle.partial = replace(outcome, redacted=values.count + text.redacted)
        else:
            text.discard()
        raise
    with anyio.CancelScope(shield=True):  # bounded: it waits for the disk, not for the service
        outcome = await _with_text(outcome, text)
    network_ms = (time.monotonic() - started) * 1e3
    return replace(outcome, network_ms=network_ms, redacted=values.count + text.redacted)


async def _with_text(outcome: Outcome, text: RelayedText) -> Outcome:
    """Add the received text to the data of an outcome or, if it has an error, to the error's
    details. Return the outcome.
    """
    fields, cuts = await text.finish()
    if not text.size:
        return outcome
    outcome = replace(outcome, cuts=cuts, output_bytes=text.size)
    if outcome.error is None:
        return replace(outcome, data=fields, max_data_bytes=MAX_DATA_BYTES)
    outcome.error.details = {**(outcome.error.details or {}), **fields}
    return outcome


# -- the request ---------------------------------------------------------------------------


def make_request(
    tool: ToolDefinition, arguments: JsonObject, traceparent: str | None = None
) -> UpstreamRequest:
    """Return the request of one call. It contains references to secrets, but no values of secrets.

    If `traceparent` is None, the request has the header `traceparent` only if the definition sets
    it.

    Raises:
        ArgumentsRefused: an argument cannot be put into the path, the query or a header, or the URL
            is too long.
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
    if traceparent is not None:
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
    """Return the request with each reference to a secret replaced by the secret's value. `secrets`
    maps the names of secrets to their values. In the URL, values are percent-encoded.
    """
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
    """Return `head`, the endpoint up to its path, with its placeholders replaced by arguments.

    Raises:
        ArgumentsRefused: an argument cannot be put into the path, for example because it contains
            `..` as a step to another path.
    """
    if "{" not in head:
        return head
    segments = []
    for segment in head.split("/"):
        names = PLACEHOLDER.findall(segment)
        texts = {name: _path_text(name, arguments.get(name)) for name in names}
        plain = _filled(segment, texts)
        # Some services decode `%2F` and then resolve dots, so an argument such as `..%2Fadmin`
        # could lead to another path. Therefore, the decoded forms are checked too.
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
    """Return `query`, the query in the tool's endpoint, with its placeholders replaced by
    arguments. Raises ArgumentsRefused if an argument cannot be put into the query.
    """
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
    """Return arguments as the query of a URL. A list becomes several pairs with the same name, and
    null values are left out. `own` is the query that the tool's endpoint already contains.

    Raises:
        ArgumentsRefused: an argument has the name of a pair in `own`, or cannot be put into the
            query.
    """
    taken = {name for name, _ in parse_qsl(own, keep_blank_values=True)}
    pairs = []
    for name, value in arguments.items():
        if name in taken:
            raise _refused(name, "is a part of the endpoint's own query")
        pairs += [f"{quote(name, safe='')}={text}" for text in _texts(name, value)]
    return "&".join(pairs)


def _texts(name: str, value: Any) -> Iterator[str]:
    """Yield the values of one argument for a query, percent-encoded. `name` is the name of the
    argument.
    """
    for element in value if isinstance(value, list) else [value]:
        if isinstance(element, dict | list):
            raise _refused(name, "stands in the query and cannot be an object or nested list")
        if element is not None:
            yield quote(_text(element), safe="")


def _fill_headers(
    given: Mapping[str, str], arguments: JsonObject
) -> tuple[dict[str, str], set[str]]:
    """Replace the placeholders in the headers `given` by arguments. Return the new headers, and the
    names of all arguments that have a placeholder in a header.

    If an argument is missing, the header with its placeholder is left out. Raises ArgumentsRefused
    if an argument cannot be put into a header.
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


# -- the answer ----------------------------------------------------------------------------


def _data(answer: UpstreamAnswer, values: SecretValues, redactor: Redactor) -> JsonObject:
    """Return the result of the tool, with the values of secrets replaced.

    A JSON object is the result itself. Any other JSON value is returned in the field `value`, text
    in the field `text`, and other bytes in the field `content_base64`. If the body is empty, the
    result contains only `status`.

    Raises:
        ExecutionError: the content type is JSON, but the body is not.
    """
    if not answer.body:
        return {"status": answer.status}
    if is_json(answer):
        value = values.value(_document(answer, values, redactor))
        return value if isinstance(value, dict) else {"value": value}
    kind = values.text(answer.headers.get("content-type", "")) or None
    try:
        return {"text": values.text(strict_json.decoded(answer.body)), "content_type": kind}
    except UnicodeDecodeError:
        encoded = base64.b64encode(values.data(answer.body)).decode()
        return {"content_base64": encoded, "content_type": kind}


def _document(answer: UpstreamAnswer, values: SecretValues, redactor: Redactor) -> Any:
    """Return the body of an answer, parsed as JSON. The values of secrets in it are not replaced.

    Raises:
        ExecutionError: the body is not JSON. In the error, the secrets in `values` are replaced,
            and `redactor` redacts the details.
    """
    try:
        return strict_json.loads(answer.body)
    except strict_json.StrictJsonError as error:
        raise ExecutionError(
            f"The tool's service answered with invalid JSON: {values.text(str(error))}. Do not "
            "retry.",
            details=_details(answer, values, redactor),
        ) from None


def is_json(answer: UpstreamAnswer) -> bool:
    """Whether the content type of the answer is JSON."""
    return answer.content_type == "application/json" or answer.content_type.endswith("+json")


def _error(answer: UpstreamAnswer, values: SecretValues, redactor: Redactor) -> EngineError:
    """Return the error for an answer whose status does not mean success."""
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
    """Return the details of an error: the status, the content type, and the beginning of the body.
    The values of secrets are replaced.
    """
    kind = values.text(answer.headers.get("content-type", ""))
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
    # Redaction comes before the cut, because a secret that was cut in half would not be found.
    body = strict_json.unmarked(answer.body).decode("utf-8", "replace")
    text, count = redactor.text(values.text(body))
    values.count += count
    if answer.is_cut:  # the body may end in the middle of a secret
        text = text[: max(0, len(text) - values.longest)]
    return {**details, "body": text[:MAX_BODY_SHOWN]}


# -- mapped answers -------------------------------------------------------------------------

MAX_OBJECTS = 10_000
"""Maximum number of items for which objects are made from `fields`. To make more would delay other
calls, and one megabyte of small items would become hundreds of megabytes of objects.
"""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class ListCursors:
    """Makes and reads cursors, with which a principal gets the next page of a list from a REST
    tool. A cursor contains the position of this page in the form that the service uses.
    """

    cursors: Cursors
    principal_id: str

    def position(self, tool: ToolDefinition, arguments: JsonObject) -> Any:
        """Return the position that the cursor among `arguments` contains, in the form that the
        service uses. Return None for the first page, that is, if there is no cursor.

        Raises:
            InvalidParams: the cursor is invalid, or belongs to another list.
        """
        cursor = arguments.get(CURSOR)
        if cursor is None or tool.response is None or tool.response.cursor_parameter is None:
            return None
        text = self.cursors.read(str(cursor), _listing(tool, arguments), self.principal_id)
        return strict_json.loads(text.encode())

    def with_position(self, tool: ToolDefinition, arguments: JsonObject) -> JsonObject:
        """Return the arguments in the form that is sent to the service. If `arguments` contain a
        cursor, replace it by the parameter with which the service selects a page.

        Raises:
            InvalidParams: the cursor is invalid, or belongs to another list.
        """
        mapping = tool.response
        if mapping is None or mapping.cursor_parameter is None:
            return arguments
        position = self.position(tool, arguments)
        others = {name: value for name, value in arguments.items() if name != CURSOR}
        return others if position is None else {**others, mapping.cursor_parameter: position}

    def make(self, tool: ToolDefinition, arguments: JsonObject, position: bytes) -> str:
        """Return the cursor of the next page. `position` is the service's own position of this
        page, as JSON.
        """
        return self.cursors.make(_listing(tool, arguments), self.principal_id, position.decode())


def _listing(tool: ToolDefinition, arguments: JsonObject) -> str:
    """Return a text that identifies the list to which a cursor belongs. Lists are different if the
    tool, the endpoint or any argument except the cursor is different.
    """
    others = {name: value for name, value in sorted(arguments.items()) if name != CURSOR}
    return "rest" + strict_json.dumps([tool.name, tool.endpoint, others]).decode()


def mapped(
    tool: ToolDefinition,
    arguments: JsonObject,
    document: Any,
    values: SecretValues,
    redactor: Redactor,
    cursors: ListCursors,
) -> JsonObject:
    """Make the result of a tool from the service's JSON document, as the field `response` of the
    tool's definition says. The values of secrets are replaced.

    Raises:
        ExecutionError: the list of items is missing, or the position of the next page is invalid or
            contains a secret.
        OutputLimitExceeded: there are more than `MAX_OBJECTS` items.
    """
    mapping = tool.response
    assert mapping is not None
    clean = values.value(document)
    if mapping.items is None:
        return _object(clean, mapping.fields or {})
    items = _at(clean, mapping.items)
    if items is None:  # some services write null for an empty list
        items = []
    if not isinstance(items, list):
        raise ExecutionError(
            f"The tool's service answered without a list at {mapping.items!r}. Do not retry."
        )
    if mapping.fields is not None and len(items) > MAX_OBJECTS:
        raise OutputLimitExceeded(
            f"The tool's service answered with {len(items)} items, {MAX_OBJECTS} are allowed. Ask "
            "for less."
        )
    position = _next_position(mapping, cursors.position(tool, arguments), document, len(items))
    cursor = None
    if position is not None:
        text = str(position)
        if values.finds(text) or redactor.text(text)[1]:
            # A cursor is signed but not encrypted, so its caller could read the secret.
            raise ExecutionError(
                "The tool's service names its next page with a secret, which is not handed out. Do "
                "not retry."
            )
        cursor = cursors.make(tool, arguments, strict_json.dumps(position))
    total = _at(clean, mapping.total_count) if mapping.total_count is not None else None
    is_count = isinstance(total, int) and not isinstance(total, bool) and total >= 0
    fields = mapping.fields
    return {
        "items": items if fields is None else [_object(item, fields) for item in items],
        "pagination": {
            "has_more": cursor is not None,
            "next_cursor": cursor,
            "total_count": total if is_count else None,
        },
    }


def _next_position(
    mapping: ResponseMapping, position: Any, document: Any, count: int
) -> str | int | None:
    """Return the position of the next page in the service's own form, such as a cursor or a page
    number. Return None if there is no next page.

    `position` is the position of the current page, or None for the first page. `document` is the
    service's answer with the current page, and `count` is the number of items in this page.

    Raises:
        ExecutionError: the position in the answer is invalid.
    """
    if mapping.counts is not None:
        first = mapping.first if mapping.first is not None else int(mapping.counts == "pages")
        now = position if isinstance(position, int) else first
        return now + (1 if mapping.counts == "pages" else count) if count else None
    place = mapping.next_cursor if mapping.next_url is None else mapping.next_url
    if place is None:
        return None
    found = _at(document, place)
    if found is _MISSING or found is None or found is False or found == "":
        return None
    if not isinstance(found, str | int) or found is True:
        raise _not_understood(place)
    return found if mapping.next_url is None else _of_url(str(found), mapping, place)


def _of_url(url: str, mapping: ResponseMapping, place: str) -> str:
    """Return the position of the next page from `url`, the address of this page in the service's
    answer. The position is the query parameter that `mapping.cursor_parameter` names.

    Raises:
        ExecutionError: `url` has no such parameter. The message contains `place`, the JSON pointer
            to `url` in the service's answer.
    """
    try:
        query = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    except ValueError:
        query = {}
    found = query.get(mapping.cursor_parameter or "")
    if not found:
        raise _not_understood(place)
    return found


def _not_understood(place: str) -> ExecutionError:
    return ExecutionError(
        f"The tool's service names its next page at {place!r} in a form that is not understood. "
        "Do not retry."
    )


def _object(value: Any, fields: Mapping[str, str]) -> JsonObject:
    """Return an object with the fields in `fields`, which maps each name to a JSON pointer into
    `value`. Missing values become null.
    """
    found = {name: _at(value, place) for name, place in fields.items()}
    return {name: None if each is _MISSING else each for name, each in found.items()}


def _at(value: Any, pointer: str) -> Any:
    """Return the value to which a JSON pointer leads, or `_MISSING` if there is none."""
    # *Source*: RFC 6901, section 4.
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key, _MISSING)
        elif isinstance(value, list) and key.isascii() and key.isdigit() and len(key) < 7:
            value = value[int(key)] if int(key) < len(value) else _MISSING
        else:
            return _MISSING
    return value
