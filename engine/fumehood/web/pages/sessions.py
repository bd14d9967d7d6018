"""The sessions of all principals with their processes and, for administrators, the files in them
and what the processes print.

Files, their names and output are untrusted: they are shown as text, and files are downloaded as
plain text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from fumehood.answers import SessionFileList, SessionProcess
from fumehood.client.api_request import Refused
from fumehood.core.pages import MAX_PAGE
from fumehood.web.text import MAX_SHOWN
from fumehood.web.view import Page, Problem, View, get, in_words, post

MAX_DOWNLOAD_BYTES = 64 * 1024 * 1024
"""Maximum size of a download in bytes, because the file is held in memory. `fumehood sessions get`
downloads larger ones."""


class _TooLarge(Exception):
    """More bytes of a file have arrived than are needed, so reading stops."""


async def show(view: View) -> Response:
    """Show every session."""
    return view.render("sessions.html", sessions=await view.control.sessions.list())


async def show_one(view: View) -> Response:
    """Show one session with its calls and files, and the file that is chosen."""
    session = await view.control.sessions.show(view.path["session_id"])
    calls = await view.control.calls.list(session=session.id, limit=20)
    folder, name = view.query.get("folder"), view.query.get("file")
    running = {} if session.state.is_over else await _processes(view, session.id)
    files: SessionFileList | None = None
    problem, preview, is_cut = "", None, False
    may_look = view.login.can_administer and not session.state.is_over
    if may_look:
        try:
            files = await view.control.sessions.files(session.id, folder, limit=MAX_PAGE)
            if name:
                content = await _content(view, session.id, name, MAX_SHOWN)
                is_cut = len(content) > MAX_SHOWN
                preview = _text_of(content[:MAX_SHOWN])
        except (Refused, ValueError) as refused:
            problem = in_words(refused)
    return view.render(
        "session.html", session=session, calls=calls.items, files=files, problem=problem,
        folder=folder, name=name, preview=preview, is_cut=is_cut, query=_query, **running,
    )  # fmt: skip


async def show_processes(view: View) -> Response:
    """Show the list of a session's processes alone, if it has changed."""
    values = await _processes(view, view.path["session_id"], has_output=False)
    if values["mark"] == view.query.get("mark"):
        return view.unchanged()
    return view.render("session_processes.html", query=_query, **values)


async def show_output(view: View) -> Response:
    """Show the end of what a process has printed alone, if it has changed."""
    session_id, process = view.path["session_id"], view.query.get("process")
    output = await _output(view, session_id, process)
    if output.mark == view.query.get("mark"):
        return view.unchanged()
    return view.render(
        "session_output.html", session_id=session_id, process=process, output=output, query=_query
    )


async def stop_process(view: View) -> Response:
    """Stop a process of a session."""
    session_id, process = view.path["session_id"], view.form.get("process")
    try:
        await view.control.sessions.stop_process(session_id, process)
    except ValueError:
        raise Problem("There is no such process.", 404) from None
    return view.go(f"/sessions/{session_id}?{_query(process=process)}#output")


async def download(view: View) -> Response:
    """Send one file as a download."""
    name = view.query.get("file")
    try:
        content = await _content(view, view.path["session_id"], name, MAX_DOWNLOAD_BYTES)
    except ValueError:
        raise Problem("There is no such file.", 404) from None
    if len(content) > MAX_DOWNLOAD_BYTES:
        raise Problem("This file is too large for a browser: use fumehood sessions get.", 413)
    return view.download(content, name.rpartition("/")[2])


async def end(view: View) -> Response:
    """End a session with its files."""
    ended = await view.control.sessions.end(view.path["session_id"])
    return view.go(f"/sessions/{ended.id}")


@dataclass(frozen=True, slots=True)
class _Output:
    """The end of what a process has printed, or why it cannot be shown."""

    text: str = ""
    skipped: int = 0
    """Bytes that it printed before."""
    mark: str = ""
    """Differs if the output does."""
    problem: str = ""


async def _processes(view: View, session_id: str, *, has_output: bool = True) -> dict[str, Any]:
    """Return a session's processes and the chosen one, with its output for administrators. If none
    is chosen, it is the newest."""
    processes: Sequence[SessionProcess] = ()
    fault = ""
    try:
        processes = await view.control.sessions.processes(session_id)
    except Refused as refused:
        fault = in_words(refused)
    processes = sorted(processes, key=lambda one: one.started_at, reverse=True)
    newest = next((one.name for one in processes), "")
    process = view.query.get("process") or newest
    output = None
    if has_output and process and view.login.can_administer:
        output = await _output(view, session_id, process)
    state = f"{process} {fault} {processes}".encode("utf-8", "replace")
    return {
        "session_id": session_id, "processes": processes, "process": process, "fault": fault,
        "output": output, "mark": hashlib.sha256(state).hexdigest()[:16],
    }  # fmt: skip


async def _output(view: View, session_id: str, process: str) -> _Output:
    try:
        found = await view.control.sessions.process_output(session_id, process)
    except (Refused, ValueError) as refused:
        return _Output(problem=in_words(refused), mark="refused")
    return _Output(found.text, found.skipped, f"{found.offset}-{found.ended}")


async def _content(view: View, session_id: str, name: str, most: int) -> bytes:
    """Return a file. If it is longer than `most` bytes, return a beginning longer than `most`."""
    content = bytearray()

    def take(piece: bytes) -> None:
        content.extend(piece)
        if len(content) > most:
            raise _TooLarge

    with suppress(_TooLarge):
        await view.control.sessions.download_file(session_id, name, take)
    return bytes(content)


def _text_of(content: bytes) -> str | None:
    """Decode a text, or return None for a binary file."""
    if b"\x00" in content:
        return None
    try:
        return content.decode("utf-8", "replace" if len(content) >= MAX_SHOWN else "strict")
    except UnicodeDecodeError:
        return None


def _query(**parts: str) -> str:
    return "&".join(f"{key}={quote(value, safe='')}" for key, value in parts.items() if value)


PAGE = Page(
    "Sessions",
    "/sessions",
    (
        get("/sessions", show),
        get("/sessions/{session_id}", show_one),
        get("/sessions/{session_id}/download", download),
        get("/sessions/{session_id}/processes", show_processes),
        get("/sessions/{session_id}/output", show_output),
        post("/sessions/{session_id}/stop", stop_process),
        post("/sessions/{session_id}/end", end),
    ),
)
