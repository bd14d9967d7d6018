"""The sessions of all principals and, for administrators, the files in them.

Files and their names are untrusted: they are shown as text, and downloaded as plain text.
"""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import quote

from starlette.responses import Response

from fumehood.answers import SessionFileList
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
        folder=folder, name=name, preview=preview, is_cut=is_cut, query=_query,
    )  # fmt: skip


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
        post("/sessions/{session_id}/end", end),
    ),
)
