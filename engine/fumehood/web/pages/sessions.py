"""The sessions of all principals and their processes. Administrators also see the files of sessions
and the output of processes.

File contents, file names and output are untrusted. They are shown as text, and files are downloaded
as plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from fumehood.answers import SessionFileList, SessionProcess
from fumehood.client.api_request import Refused
from fumehood.core.pages import MAX_PAGE
from fumehood.core.session import SessionStatus
from fumehood.web.ports import TooManyPorts
from fumehood.web.text import MAX_SHOWN, Branch, tree_of
from fumehood.web.view import Page, Problem, View, get, in_words, mark_of, post, query_of

MAX_DOWNLOAD_BYTES = 64 * 1024 * 1024
"""Maximum size of a download in bytes, because the console holds the file in memory. `fumehood
sessions get` can download larger files."""


class _TooLarge(Exception):
    """Raised to stop a download when more bytes of a file have arrived than are needed."""


async def show(view: View) -> Response:
    """Show every session."""
    return view.render("sessions.html", sessions=await view.control.sessions.list())


async def show_one(view: View) -> Response:
    """Show the page of one session, with its calls and files, and the content of the chosen
    file.
    """
    session = await view.control.sessions.show(view.path["session_id"])
    calls = await view.control.calls.list(session=session.id, limit=20)
    folder, name = view.query.get("folder"), view.query.get("file")
    running = {} if session.state.is_over else await _processes(view, session.id)
    files: SessionFileList | None = None
    problem, preview, is_cut = "", None, False
    may_look = view.login.can_administer and not session.state.is_over
    wakes = any(view.query.get(key) for key in ("wake", "folder", "file"))
    is_asleep = session.state in (SessionStatus.PAUSED, SessionStatus.STOPPED) and not wakes
    if may_look and not is_asleep:
        try:
            list_files = view.control.sessions.files
            files = await list_files(session.id, folder, recursive=True, limit=MAX_PAGE)
            if files.pagination.has_more:  # too many for a tree, so show one directory
                files = await list_files(session.id, folder, limit=MAX_PAGE)
            if name:
                content = await _content(view, session.id, name, MAX_SHOWN)
                is_cut = len(content) > MAX_SHOWN
                preview = _text_of(content[:MAX_SHOWN])
        except (Refused, ValueError) as refused:
            problem = in_words(refused)
    waiting = await view.control.approvals.list(state="pending") if view.login.can_approve else None
    return view.render(
        "session.html", session=session, calls=calls.items, files=files, problem=problem,
        tree=_tree(files, folder) if files else (), folder=folder, name=name,
        preview=preview, is_cut=is_cut,
        is_asleep=is_asleep, query=query_of, ports=view.console.ports.of(view.login, session.id),
        waiting=[one for one in waiting.items if one.session_id == session.id] if waiting else [],
        **running,
    )  # fmt: skip


async def show_diff(view: View) -> Response:
    """Show what has changed in a session's project since the project was copied in."""
    try:
        found = await view.control.sessions.diff(view.path["session_id"])
    except Refused as refused:
        return view.render("session_diff.html", problem=in_words(refused), found=None)
    return view.render("session_diff.html", problem="", found=found)


async def open_port(view: View) -> Response:
    """Make a port of a session reachable under a separate origin, and return to the session's
    page.
    """
    session_id, port = view.path["session_id"], view.form.number("port", 0)
    if not await view.may_administer():
        raise Problem("Ports of other people's sessions are for administrators.", 403)
    if not 0 < port < 65_536:
        raise Problem("A port is a number from 1 to 65535.")
    try:
        await view.console.ports.open(view.login, session_id, port)
    except TooManyPorts:
        raise Problem("Too many ports are open. They close after an hour.", 429) from None
    except OSError as error:
        raise Problem(f"The port cannot be opened: {error}.", 503) from None
    return view.go(f"/sessions/{session_id}#ports")


async def show_processes(view: View) -> Response:
    """Send only the list of a session's processes, or nothing if the page already shows this
    list.
    """
    values = await _processes(view, view.path["session_id"], has_output=False)
    return view.part("session_processes.html", query=query_of, **values)


async def show_output(view: View) -> Response:
    """Send the end of a process's output, or nothing if the page already shows it."""
    session_id, process = view.path["session_id"], view.query.get("process")
    output = await _output(view, session_id, process)
    return view.part(
        "session_output.html", output["mark"], session_id=session_id, process=process,
        output=output, query=query_of,
    )  # fmt: skip


async def stop_process(view: View) -> Response:
    """Stop a process of a session."""
    session_id, process = view.path["session_id"], view.form.get("process")
    try:
        await view.control.sessions.stop_process(session_id, process)
    except ValueError:
        raise Problem("There is no such process.", 404) from None
    return view.go(f"/sessions/{session_id}?{query_of(process=process)}#output")


async def download(view: View) -> Response:
    """Send one file of a session as a download."""
    name = view.query.get("file")
    try:
        content = await _content(view, view.path["session_id"], name, MAX_DOWNLOAD_BYTES)
    except ValueError:
        raise Problem("There is no such file.", 404) from None
    if len(content) > MAX_DOWNLOAD_BYTES:
        raise Problem("This file is too large for a browser: use fumehood sessions get.", 413)
    return view.download(content, name.rpartition("/")[2])


async def end(view: View) -> Response:
    """End a session and delete its files."""
    ended = await view.control.sessions.end(view.path["session_id"])
    return view.go(f"/sessions/{ended.id}")


def _tree(files: SessionFileList, folder: str) -> Sequence[Branch]:
    above = f"{folder}/" if folder else ""
    return tree_of((one.path.removeprefix(above), one) for one in files.items)


async def _processes(view: View, session_id: str, *, has_output: bool = True) -> dict[str, Any]:
    """Return the values for the template of a session's processes: the processes, and the chosen
    process.

    By default, the newest process is chosen. If `has_output` is True and the user is an
    administrator, the values include the end of the chosen process's output.
    """
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
    return {
        "session_id": session_id, "processes": processes, "process": process, "fault": fault,
        "output": output, "mark": mark_of((process, fault, processes)),
    }  # fmt: skip


async def _output(view: View, session_id: str, process: str) -> dict[str, Any]:
    """Return the end of a process's output, or the reason why it cannot be shown.

    The value `mark` in the result is a text that changes whenever the output changes.
    """
    try:
        found = await view.control.sessions.process_output(session_id, process)
    except (Refused, ValueError) as refused:
        return {"problem": in_words(refused), "mark": "refused"}
    mark = f"{found.offset}-{found.ended}"
    return {"problem": "", "text": found.text, "skipped": found.skipped, "mark": mark}


async def _content(view: View, session_id: str, name: str, most: int) -> bytes:
    """Return the content of the file `name` in a session's workspace.

    If the file is longer than `most` bytes, the download stops as soon as more than `most` bytes
    have arrived. The result is then incomplete, which the caller sees from its length.
    """
    content = bytearray()

    def take(piece: bytes) -> None:
        content.extend(piece)
        if len(content) > most:
            raise _TooLarge

    with suppress(_TooLarge):
        await view.control.sessions.download_file(session_id, name, take)
    return bytes(content)


def _text_of(content: bytes) -> str | None:
    """Return the content of a file as text, or None if the file is binary."""
    return None if b"\x00" in content else content.decode("utf-8", "replace")


PAGE = Page(
    "Sessions",
    "/sessions",
    (
        get("/sessions", show),
        get("/sessions/{session_id}", show_one),
        get("/sessions/{session_id}/download", download),
        get("/sessions/{session_id}/diff", show_diff),
        get("/sessions/{session_id}/processes", show_processes),
        get("/sessions/{session_id}/output", show_output),
        post("/sessions/{session_id}/stop", stop_process),
        post("/sessions/{session_id}/ports", open_port),
        post("/sessions/{session_id}/end", end),
    ),
)
