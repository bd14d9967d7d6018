"""`fumehood run --project`: a command in a copy of a project, and its changes back after a yes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fumehood.cli.call import say_how_to_approve
from fumehood.cli.exits import ExitCode, document_of, exit_code_of, fail, say, write
from fumehood.cli.project_view import file_line, notes, write_diff
from fumehood.cli.reach import calling
from fumehood.cli.show import for_people, show_envelope
from fumehood.core.errors import ApprovalDenied
from fumehood.core.escaping import printable

if TYPE_CHECKING:
    from fumehood.client import Client
    from fumehood.core.json_types import JsonObject


IN_DETAILS = " Its output is in details.stdout and details.stderr."
"""The part of an error's message that is not true here: the output is printed."""


def run_on_project(
    directory: Path, command: Sequence[str], wishes: JsonObject, timeout_s: float | None,
    socket: Path | None, *, as_json: bool,
) -> int:  # fmt: skip
    """Run a command in a new session with a copy of a directory, show what it changed, and ask for
    that to be applied. Return the exit code. The session ends, unless its changes are still wanted.
    """
    with calling(socket, as_json=as_json, is_payload=True) as client:
        try:
            session = client.create_session_from(directory, **wishes).id
        except OSError as error:
            fail(f"{printable(str(directory))} cannot be used: {error.strerror}.", ExitCode.USAGE)
        say(f"session: {session}", to_stderr=True)
        options: dict[str, Any] = {"session_id": session}
        if (agent := wishes.get("agent_id")) is not None:
            options["agent_id"] = agent
        is_done, denied = False, False
        try:
            asked, is_done = _run(client, options, command, timeout_s, as_json=as_json)
            denied = asked["error"] is not None and asked["error"]["code"] == ApprovalDenied.code
        finally:  # also after Ctrl-C
            if is_done:
                client.end_session(session)
            else:
                apply = "" if denied else f"Apply its changes: fumehood sessions apply {session}; "
                say(
                    f"The session stays. {apply}End it: fumehood sessions end {session}",
                    to_stderr=True,
                )
        return exit_code_of(asked)


def _run(
    client: Client, options: dict[str, Any], command: Sequence[str], timeout_s: float | None, *,
    as_json: bool,
) -> tuple[JsonObject, bool]:  # fmt: skip
    """Return the answer that decides, and whether nobody needs the session any more."""
    limits: dict[str, Any] = {} if timeout_s is None else {"timeout_seconds": timeout_s}
    limits["cancel_on_disconnect"] = True
    ran = document_of(client.call("run_shell", {"argv": list(command)}, **limits, **options))
    if as_json:
        show_envelope(ran, as_json=True)
    else:
        _show(ran)
    found = client.session_diff(options["session_id"])
    if not as_json:
        write_diff(found.diff)
    for line in notes(found):
        say(line, to_stderr=True)
    if not found.files or not ran["success"]:
        return ran, not found.files
    asked = document_of(client.call("apply_workspace", {}, **options))
    if exit_code_of(asked) == ExitCode.WAITING_FOR_APPROVAL:
        say_how_to_approve(asked)
        say("Waiting for it. After Ctrl-C, the request stays.", to_stderr=True)
        asked = document_of(client.call("apply_workspace", {}, wait_for_approval=True, **options))
    if as_json or not asked["success"]:
        show_envelope(asked, as_json=as_json)
    else:
        for one in asked["data"]["files"]:
            say(f"applied: {file_line(one)}", to_stderr=True)
    return asked, asked["success"]


def _show(ran: JsonObject) -> None:
    """Write what the command printed."""
    error = ran["error"]
    fields = ran["data"] if error is None else error.get("details") or {}
    write(sys.stdout, fields.get("stdout") or "")
    write(sys.stderr, fields.get("stderr") or "")
    if error is not None:
        message = for_people(error["message"]).replace(IN_DETAILS, "")
        write(sys.stderr, f"{error['code']}: {message}\n")
