"""The calls of all principals: a live list with filters and search, and a page for each call.

The answer to a call is untrusted. The content type of a picture is determined here from the first
bytes. Everything else is shown as text or downloaded.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from fumehood.answers import CallDetails, SessionProcess
from fumehood.client.api_request import Refused
from fumehood.core.call_log import CallRecord
from fumehood.core.envelope import Envelope
from fumehood.core.escaping import json_lines
from fumehood.core.session import SessionStatus
from fumehood.web.figures import time_line
from fumehood.web.guard import SANDBOX
from fumehood.web.view import (
    Page,
    Problem,
    View,
    get,
    in_words,
    is_name,
    mark_of,
    post,
    query_of,
)

PAGE_SIZE = 50
"""Number of calls on one page of the list."""

PERIODS = {"": "any time", "1": "last hour", "24": "last day", "168": "last 7 days"}
FILTERS = (
    "q", "text", "tool", "agent", "code", "principal", "session", "trace", "hours", "since",
    "until", "cursor",
)  # fmt: skip

MAX_ROWS, MAX_COLUMNS = 50, 12
"""Maximum number of rows and columns that are shown of a table in an answer."""

PICTURES = {
    b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif", b"GIF89a": "image/gif",
}  # fmt: skip
"""Maps the first bytes of a picture to its content type. SVG is excluded, because it may contain
scripts."""


async def show(view: View) -> Response:
    """Show the page with the list of calls. A search for a call id redirects to that call's
    page.
    """
    wanted = view.query.get("q").strip()
    if wanted.startswith("call_") and is_name(wanted):
        return view.go(f"/calls/{wanted}")
    values = await _list(view)
    running = await _running(view) if values["is_live"] else {}
    return view.render("calls.html", **values, **running)


async def show_now(view: View) -> Response:
    """Send only the list of running calls, or nothing if the page already shows this list."""
    return view.part("calls_now.html", **await _running(view))


async def show_list(view: View) -> Response:
    """Send only the list of calls, or nothing if the page already shows this list."""
    values = await _list(view)
    newest = values["calls"][0].call_id if values["calls"] else ""
    return view.part("calls_list.html", newest, **values)


async def show_one(view: View) -> Response:
    """Show the page of one call, with everything that the engine has stored about the call."""
    details = await view.control.calls.show(view.path["call_id"])
    call, answer, approval = details.call, details.envelope, details.approval
    given = details.arguments
    if given is None and approval is not None:
        given = approval.arguments
    session, processes = await _session_of(view, call.session_id)
    return view.render(
        "call.html",
        one=details,
        call=call,
        given=given,
        bars=time_line(details.stages_ms),
        answer=parts_of(answer) if answer else None,
        tree=_tree(call.call_id, details.children),
        session_name=session,
        processes=processes,
        mark=mark_of(call.running),
        query=query_of,
    )


async def show_running(view: View) -> Response:
    """Send a running call's progress, or nothing if the page already shows it. If the call has
    ended, the page is loaded again. Never waits for a change.
    """
    # Waiting for a change would keep a connection, and browsers allow only few of them.
    call = (await view.control.calls.show(view.path["call_id"])).call
    if call.running is None:  # the call has ended, and its page is now another one
        return Response(status_code=204, headers={"hx-refresh": "true"})
    return view.part("call_running.html", mark_of(call.running), call=call, query=query_of)


async def cancel(view: View) -> Response:
    """Cancel a running call."""
    call_id = view.path["call_id"]
    await view.control.calls.cancel(call_id)
    return view.go(f"/calls/{call_id}")


async def file(view: View) -> Response:
    """Send one file of a call's answer as a download."""
    details = await view.control.calls.show(view.path["call_id"])
    entry = _entry(view, details, "files")
    return view.download(await _content(view, details, entry), str(entry.get("filename", "file")))


async def picture(view: View) -> Response:
    """Send one picture of a call's answer. A picture in a format that is not in `PICTURES` is sent
    as a download.
    """
    details = await view.control.calls.show(view.path["call_id"])
    entry = _entry(view, details, "images")
    content = await _content(view, details, entry)
    kind = next((kind for start, kind in PICTURES.items() if content.startswith(start)), None)
    if kind is None:
        return view.download(content, str(entry.get("filename", "figure")))
    return Response(content, media_type=kind, headers={"content-security-policy": SANDBOX})


async def raw(view: View) -> Response:
    """Send a call's whole envelope, or one field of its answer in full, as a download."""
    details = await view.control.calls.show(view.path["call_id"])
    if details.envelope is None:
        raise Problem("The answer of this call is not shown.", 404)
    part = view.query.get("part")
    content: Any = details.envelope.model_dump(mode="json")
    if part:
        content = _output(details.envelope).get(part)
    text = content if isinstance(content, str) else json_lines(content)
    return view.download(text, f"{details.call.call_id}-{part or 'envelope'}.txt")


async def repeat(view: View) -> Response:
    """Repeat a call as a dry run, and show the plan that the dry run returns."""
    answer = await view.control.calls.dry_run(view.path["call_id"])
    return view.render("call_dry_run.html", answer=answer)


async def _list(view: View) -> dict[str, Any]:
    given = {name: view.query.get(name).strip() for name in FILTERS}
    query = _query_of(view, given)
    error = ""
    try:
        page = await view.control.calls.list(limit=PAGE_SIZE, **query)
        calls, cursor = page.items, page.next_cursor
    except Refused as refused:
        if refused.code not in ("INVALID_PARAMS", "RESOURCE_NOT_FOUND"):
            raise
        calls, cursor, error = (), None, in_words(refused)
    kept = {name: value for name, value in given.items() if value and name != "cursor"}
    return {
        "calls": calls, "given": given, "error": error, "periods": PERIODS,
        "address": urlencode({**kept, **({"cursor": given["cursor"]} if given["cursor"] else {})}),
        "older": urlencode({**kept, "cursor": cursor}) if cursor else "",
        "is_live": not given["cursor"], "is_filtered": bool(kept),
    }  # fmt: skip


async def _running(view: View) -> dict[str, Any]:
    found = await view.control.calls.list(state="running")
    seen = [(one.call_id, one.running) for one in found.items]
    return {"running": found.items, "mark": mark_of(seen)}


def _query_of(view: View, given: dict[str, str]) -> dict[str, Any]:
    """Convert the filters of the page to the arguments of the engine's list of calls. `given` maps
    the name of each filter to its text, which may be empty.

    The filter `q` may contain a session id, a trace id, a principal, a result code or the name of a
    tool. The form of its text determines which of these it is.
    """
    names = (
        "text", "tool", "agent", "principal", "session", "trace", "since", "until", "cursor",
    )  # fmt: skip
    query: dict[str, Any] = {name: given[name] for name in names if given[name]}
    if given["code"]:
        query["code"] = given["code"].upper()
    if given["hours"] in PERIODS and given["hours"]:
        query["since"] = view.now - timedelta(hours=int(given["hours"]))
    wanted = given["q"]
    if wanted.startswith("sess_"):
        query["session"] = wanted
    elif wanted.startswith("trace_"):
        query["trace"] = wanted
    elif ":" in wanted and not wanted.startswith("external:"):
        query["principal"] = wanted
    elif wanted.isupper():
        query["code"] = wanted
    elif wanted:
        query["tool"] = wanted
    return query


def _output(envelope: Envelope) -> dict[str, Any]:
    """Return the tool's output: the answer's data or, if the tool failed, the details of the
    error.
    """
    details = envelope.error.details if envelope.error is not None else None
    return envelope.data or details or {}


def _entries(envelope: Envelope, name: str) -> list[dict[str, Any]]:
    found = _output(envelope).get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _entry(view: View, details: CallDetails, name: str) -> dict[str, Any]:
    """Return one file or image of an answer. The page's address contains its number.

    `name` is `files` or `images`. Raises Problem if the answer has no entry with this number.
    """
    entries = _entries(details.envelope, name) if details.envelope is not None else []
    for number, entry in enumerate(entries):
        if str(number) == view.path["number"]:
            return entry
    raise Problem("There is no such file in the answer.", 404)


async def _content(view: View, details: CallDetails, entry: dict[str, Any]) -> bytes:
    """Return the bytes of a file in an answer. Raises Problem if the file is no longer kept."""
    try:
        if isinstance(entry.get("content_base64"), str):
            return base64.b64decode(entry["content_base64"], validate=True)
        return await view.control.calls.blob(details.call.call_id, str(entry.get("url")))
    except ValueError:
        raise Problem("This file is not kept.", 404) from None


async def _session_of(view: View, session_id: str | None) -> tuple[str, list[SessionProcess]]:
    """Return a session's name and its processes.

    The list of processes is empty if the engine cannot list them now.
    """
    if session_id is None:
        return "", []
    try:
        session = await view.control.sessions.show(session_id)
        name = session.name or session_id
        if session.state is not SessionStatus.ACTIVE or session.is_busy:
            return name, []
        return name, list(await view.control.sessions.processes(session_id))
    except Refused:  # the session has ended, or is unavailable now
        return session_id, []


def _tree(root: str, calls: Sequence[CallRecord]) -> list[Any]:
    """Return the calls below the call with the id `root`, as a tree.

    Each node is a pair of a call and the list of the nodes below it. Older calls come first.
    """
    below: dict[str, list[CallRecord]] = {}
    for call in reversed(calls):
        below.setdefault(call.parent_id or "", []).append(call)

    def pairs(parent: str) -> list[Any]:
        return [(call, pairs(call.call_id)) for call in below.pop(parent, [])]

    return pairs(root)


def parts_of(envelope: Envelope) -> dict[str, Any]:
    """Split an answer into pictures, files, a traceback, tables, texts and the rest.

    Return a dictionary from the name of each of these kinds to its content.
    """
    tables: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    output = _output(envelope)
    shown_elsewhere = {"images", "files", "exception"}
    exception = output.get("exception")
    traceback = exception.get("traceback") if isinstance(exception, dict) else None
    if isinstance(traceback, str) and output.get("stderr") == traceback:
        shown_elsewhere.add("stderr")
    if output.get("value") is not None:
        shown_elsewhere.add("value_repr")
    for name, value in output.items():
        if name in shown_elsewhere or value in (None, "", [], {}):
            continue
        if (found := _table(value)) is not None:
            tables[name] = found
        elif isinstance(value, dict | list) or _is_long(value):
            texts[name] = value
        else:
            rest[name] = value
    return {
        "pictures": _entries(envelope, "images"), "files": _entries(envelope, "files"),
        "traceback": traceback if isinstance(traceback, str) else "",
        "tables": tables, "texts": texts, "rest": rest,
    }  # fmt: skip


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and ("\n" in value or len(value) > 200)


def _table(value: Any) -> dict[str, Any] | None:
    """Return a list of flat objects as a table, cut to a maximum size. Return None if the value is
    not such a list.
    """
    if not isinstance(value, list) or len(value) < 1:
        return None
    if not all(isinstance(row, dict) and row for row in value):
        return None
    if any(isinstance(cell, dict | list) for row in value for cell in row.values()):
        return None
    names = list(dict.fromkeys(name for row in value[:MAX_ROWS] for name in row))
    return {
        "names": names[:MAX_COLUMNS],
        "rows": [[row.get(name) for name in names[:MAX_COLUMNS]] for row in value[:MAX_ROWS]],
        "cut": len(value) > MAX_ROWS or len(names) > MAX_COLUMNS, "length": len(value),
    }  # fmt: skip


PAGE = Page(
    "Calls",
    "/calls",
    (
        get("/calls", show),
        get("/calls/list", show_list),
        get("/calls/now", show_now),
        get("/calls/{call_id}", show_one),
        get("/calls/{call_id}/running", show_running),
        get("/calls/{call_id}/figures/{number}", picture),
        get("/calls/{call_id}/files/{number}", file),
        get("/calls/{call_id}/raw", raw),
        post("/calls/{call_id}/dry-run", repeat),
        post("/calls/{call_id}/cancel", cancel),
    ),
)
