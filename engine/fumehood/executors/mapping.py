"""Results of REST tools whose definitions say which values of a service's JSON to return.

Host side, used by `rest`. A page's `next_cursor` is the engine's own: it contains the service's
position of the next page, signed for the tool, its other arguments and the principal. Invariants: a
position is sent as the value of one parameter, and nowhere else; the engine never requests a URL of
a next page that a service returns; a cursor carries no secret to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fumehood.core.errors import ExecutionError, OutputLimitExceeded
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import CURSOR, ResponseMapping, ToolDefinition
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.redaction.secret_values import SecretValues

MAX_POSITION = 4000
"""Maximum size of the upstream's page position as JSON, in bytes, so that it fits into a cursor."""

MAX_OBJECTS = 10_000
"""Maximum number of items from which `fields` builds objects. More would block other calls, and one
megabyte of small items would become hundreds of megabytes of objects."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class ListCursors:
    """Makes and reads a principal's cursors for the pages of REST tools."""

    cursors: Cursors
    principal_id: str

    def position(self, tool: ToolDefinition, arguments: JsonObject) -> Any:
        """Return the service's position in the cursor, or None for the first page.

        Raises:
            InvalidParams: the cursor is invalid, or belongs to another list.
        """
        cursor = arguments.get(CURSOR)
        if cursor is None or tool.response is None or tool.response.cursor_parameter is None:
            return None
        text = self.cursors.read(str(cursor), _listing(tool, arguments), self.principal_id)
        return strict_json.loads(text.encode())

    def with_position(self, tool: ToolDefinition, arguments: JsonObject) -> JsonObject:
        """Return the arguments for the service: its own page parameter replaces the cursor.

        Raises:
            InvalidParams: as `position`.
        """
        mapping = tool.response
        if mapping is None or mapping.cursor_parameter is None:
            return arguments
        position = self.position(tool, arguments)
        others = {name: value for name, value in arguments.items() if name != CURSOR}
        return others if position is None else {**others, mapping.cursor_parameter: position}

    def make(self, tool: ToolDefinition, arguments: JsonObject, position: bytes) -> str:
        """Return the cursor of the next page. `position` is the service's position as JSON."""
        return self.cursors.make(_listing(tool, arguments), self.principal_id, position.decode())


def _listing(tool: ToolDefinition, arguments: JsonObject) -> str:
    """Name the list that a cursor belongs to. Another endpoint or argument is another list."""
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
    """Build a tool's result from a service's JSON document, without the values of secrets.

    Raises:
        ExecutionError: the list of items is missing, or the position of the next page is invalid
            or contains a secret.
        OutputLimitExceeded: more than `MAX_OBJECTS` items.
    """
    mapping = tool.response
    if mapping is None:
        raise ValueError("the tool has no mapping")
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
        encoded = strict_json.dumps(position)
        _check_position(encoded, str(position), values, redactor)
        cursor = cursors.make(tool, arguments, encoded)
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


def _check_position(encoded: bytes, text: str, values: SecretValues, redactor: Redactor) -> None:
    """Raise ExecutionError for a position that is too long or contains a secret.

    A cursor is signed but not encrypted, so its caller could read the secret.
    """
    if values.finds(text) or redactor.text(text)[1]:
        raise ExecutionError(
            "The tool's service names its next page with a secret, which is not handed out. Do "
            "not retry."
        )
    if len(encoded) > MAX_POSITION:
        raise ExecutionError(
            f"The tool's service names its next page with more than {MAX_POSITION} bytes. Do not "
            "retry."
        )


def _next_position(
    mapping: ResponseMapping, position: Any, document: Any, count: int
) -> str | int | None:
    """Return the service's position of the next page, or None after the last page."""
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
    """Return the value of the page parameter in a URL. Nothing else of the URL is used."""
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
    """Return an object of the values at the JSON pointers in `fields`. Missing values are null."""
    found = {name: _at(value, place) for name, place in fields.items()}
    return {name: None if each is _MISSING else each for name, each in found.items()}


def _at(value: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer, or `_MISSING`."""
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
