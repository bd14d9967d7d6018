"""`fumehood run --project`: runs a command in a copy of a directory, then asks a human to approve
its changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fumehood.cli.call import options_of, say_how_to_approve
from fumehood.cli.exits import ExitCode, document_of, exit_code_of, say
from fumehood.cli.options import local
from fumehood.cli.reach import caller_token, calling, find_socket, telling_what_waits
from fumehood.cli.run import show_program
from fumehood.cli.show import show_envelope
from fumehood.client import Client
from fumehood.core.errors import ApprovalDenied
from fumehood.core.json_types import JsonObject
from fumehood.projects.show import file_line, notes, write_diff


def run_on_project(
    directory: Path, command: Sequence[str], wishes: JsonObject, timeout_s: float | None,
    socket: Path | None, *, as_json: bool,
) -> int:  # fmt: skip
    """Run a command in a new session that has a copy of `directory`, and return the exit code.

    Show the changes that the command made, and ask for approval to write them back. Then end the
    session, unless it may still contain changes that were not written back. `wishes` are the
    options for creating the session.
    """
    with calling(socket, as_json=as_json, is_payload=True) as client:
        with local(directory):
            session = client.create_session_from(directory, **wishes).id
        say(f"session: {session}", to_stderr=True)
        options = options_of(session_id=session, agent_id=wishes["agent_id"])
        is_done, denied = False, False
        try:
            asked, is_done = _ran_on_project(
                client, options, command, timeout_s, socket, as_json=as_json
            )
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


def _ran_on_project(
    client: Client, options: dict[str, Any], command: Sequence[str], timeout_s: float | None,
    socket: Path | None, *, as_json: bool,
) -> tuple[JsonObject, bool]:  # fmt: skip
    """Run the command in the session. If it succeeds and changes files, ask for approval to write
    the changes back. `options` are the call options, which name the session.

    Return a pair: the last envelope, which determines the exit code, and whether the session can be
    ended.
    """
    limits = options_of(timeout_seconds=timeout_s, cancel_on_disconnect=True)
    arguments = {"argv": list(command)}
    path, token, given = find_socket(socket), caller_token(), {**limits, **options}
    with telling_what_waits(path, token, "run_shell", arguments, given) as traced:
        ran = document_of(client.call("run_shell", arguments, **traced))
    if as_json:
        show_envelope(ran, as_json=True)
    else:
        show_program(ran, client.download_blob, with_files=False, with_output=True)
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
