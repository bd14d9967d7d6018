"""Commands for background processes: `fumehood sessions start`, `ps`, `logs` and `stop-process`.

The output of a process is untrusted.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from fumehood.cli.call import say_how_to_approve
from fumehood.cli.exits import exit_code_of, say, write
from fumehood.cli.options import Env, SocketPath, age, pairs_of
from fumehood.cli.plain import plain_command
from fumehood.cli.reach import call_once, calling
from fumehood.cli.sessions import SESSION, SessionId, options_in
from fumehood.cli.show import Column, as_fields, as_table, show_envelope, wants_json
from fumehood.core.json_types import JsonObject

FOLLOW_S = 20.0
"""Seconds that one request waits for more output."""


def start_process(
    session: SessionId,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments.")
    ],
    name: Annotated[str, typer.Option(help="A name for it.")] = "main",
    env: Env = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart it whenever the session is restarted.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole envelope as JSON.")] = False,
    socket: SocketPath = None,
) -> None:
    """Start a background process in a session, with the tool start_process."""
    arguments: JsonObject = {"name": name, "argv": command}
    if env:
        pairs = pairs_of(env).items()
        arguments["env"] = [{"name": key, "value": value} for key, value in pairs]
    if restart:
        arguments["restart"] = True
    options = options_in(session, socket, as_json=as_json)
    answer = call_once("start_process", arguments, options, socket, as_json=as_json)
    if wants_json(as_json) or not answer["success"]:
        show_envelope(answer, as_json=wants_json(as_json))
    elif sys.stdout.isatty():
        say(f"{name} runs. Its output: fumehood sessions logs {session} {name}", to_stderr=True)
    say_how_to_approve(answer)
    raise typer.Exit(exit_code_of(answer))


list_processes = plain_command(
    "processes",
    as_table(
        Column("process", lambda process: process.name, whole=True),
        Column("state", lambda process: process.state),
        Column("ended by", lambda process: process.ended_by),
        Column("age", lambda process: age(process.started_at, datetime.now(UTC)), drop=1),
    ),
    arguments=SESSION,
    scope=None,
)


def show_output(
    session: SessionId,
    process: Annotated[str, typer.Argument(metavar="NAME", help="The process's name.")] = "main",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until it ends, or Ctrl-C.")
    ] = False,
    socket: SocketPath = None,
) -> None:
    """Show the output of a session's process, of which the last megabyte is kept."""
    after = 0
    with calling(socket, is_payload=True) as client:
        while True:
            wait_s = FOLLOW_S if follow and after else 0
            piece = client.process_output(session, process, after=after, wait_seconds=wait_s)
            if piece.skipped and piece.text:
                say(f"… {piece.skipped} earlier bytes are not kept", to_stderr=True)
            write(sys.stdout, piece.text)
            sys.stdout.flush()
            is_over = piece.ended if follow else not piece.text
            if is_over and not piece.text:
                return
            after = piece.offset or after


stop_process = plain_command(
    "stop_process",
    as_fields,
    arguments=SESSION
    | {"process": Annotated[str, typer.Argument(metavar="NAME", help="The process's name.")]},
    scope=None,
)
