"""`fumehood run --project`: a command in a copy of a project, and its changes back after a yes.

`fumehood sessions` shows changes by the same functions. File names and contents are untrusted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fumehood.cli.call import say_how_to_approve
from fumehood.cli.exits import ExitCode, document_of, exit_code_of, fail, say, write
from fumehood.cli.reach import calling
from fumehood.cli.show import for_people, show_envelope
from fumehood.core.errors import ApprovalDenied
from fumehood.core.escaping import printable, visible

if TYPE_CHECKING:
    from fumehood.answers import ProjectDiff
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


def file_line(one: JsonObject) -> str:
    """Return one changed file on one line."""
    source = f"{visible(one['old_path'])} → " if one.get("old_path") else ""
    conflict = f"  CONFLICT: {one['conflict']}" if one.get("conflict") else ""
    return f"{one['change']:<9} {source}{visible(one['path'])}{conflict}"


def write_diff(diff: str) -> None:
    """Write a diff: in colours on a terminal, where its text is escaped."""
    if not sys.stdout.isatty():
        sys.stdout.write(diff)
        return
    if not diff:
        return
    colours = {"+": "32", "-": "31", "@": "36", "d": "1"}
    # Only at "\n", as git does: after any other line end, content could imitate the diff itself.
    for line in printable(diff).removesuffix("\n").split("\n"):
        colour = colours.get(line[:1], "0")
        print(f"\x1b[{colour}m{line}\x1b[0m")


def notes(found: ProjectDiff, *, as_list: bool = False) -> Iterator[str]:
    """Yield what a diff, or a list of its files, does not say itself."""
    if not found.files:
        yield "Nothing has changed."
    for one in found.files:
        if one.conflict and not as_list:
            now = "" if one.change == "added" else "; the diff is against what it is now"
            yield f"{visible(one.path)}: CONFLICT: the host's file {one.conflict}{now}"
    for path in found.unseen:
        yield f"{visible(path)} is never applied: it is special, or a link out of the project"
    if found.truncated and not as_list:
        yield (
            "Not all content is shown: of binary and very large files only the names, which --stat "
            "lists. All of it is applied."
        )
