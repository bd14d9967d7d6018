"""The commands for projects: `fumehood sessions diff`, `sessions apply`, and `sessions new
--from`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fumehood.cli.call import say_how_to_approve
from fumehood.cli.exits import exit_code_of, say
from fumehood.cli.options import AsJson, SocketPath, local
from fumehood.cli.reach import call_once, calling
from fumehood.cli.sessions import SessionId, options_in
from fumehood.cli.show import show_envelope, show_json, wants_json
from fumehood.client import Client
from fumehood.core.session import SessionRecord
from fumehood.projects.show import file_line, notes, write_diff


def session_from(
    directory: Path, everything: bool, client: Client, wishes: dict[str, Any]
) -> SessionRecord:
    """Create a session with a copy of `directory`, and return its record. If the directory cannot
    be used, end the command with a message.

    If `everything` is True, files that `.gitignore` files exclude are copied too. `wishes` are the
    other arguments of `Client.create_session_from`.
    """
    with local(directory):
        return client.create_session_from(directory, everything=everything, **wishes)


def show_diff(
    session: SessionId,
    stat: Annotated[bool, typer.Option("--stat", help="List the files only.")] = False,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show what has changed in a session since its project was copied in, as git diff does."""
    with calling(socket, as_json=as_json) as client:
        found = client.session_diff(session)
    if as_json:
        show_json(found.model_dump(mode="json"))
        return
    if stat:
        for one in found.files:
            say(file_line(one.model_dump()))
    else:
        write_diff(found.diff)
    for line in notes(found, as_list=stat):
        say(line, to_stderr=True)


def apply_changes(
    session: SessionId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the approval.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole envelope as JSON.")] = False,
    socket: SocketPath = None,
) -> None:
    """Ask for a session's changes to be written into the project. An approver sees the diff.

    Exit status: 0 written, 1 not written, 3 waiting for approval, 4 engine unavailable.
    """
    options = options_in(session, socket, as_json=as_json)
    if wait:
        options["wait_for_approval"] = True
    answer = call_once("apply_workspace", {}, options, socket, as_json=as_json)
    if wants_json(as_json) or not answer["success"]:
        show_envelope(answer, as_json=wants_json(as_json))
    else:
        for one in answer["data"]["files"]:
            say(file_line(one))
    say_how_to_approve(answer)
    raise typer.Exit(exit_code_of(answer))
