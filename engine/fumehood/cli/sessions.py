"""`fumehood sessions …`: sessions and their files.

Names and bytes in a session are untrusted. Files are saved in the same way as by `fumehood run`
(see `Saving`). Without `--force`, no existing file is replaced. Only regular files are sent, never
the targets of links.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import (
    AsJson,
    Env,
    Network,
    Packages,
    SocketPath,
    age,
    directory,
    pairs_of,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import calling
from fumehood.cli.show import (
    Column,
    as_fields,
    as_table,
    show_json,
)
from fumehood.client import Client
from fumehood.client.wording import ago
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade
from fumehood.core.session import SessionRecord, SessionStatus

sessions = typer.Typer(
    help="Sessions: files and variables that persist between calls.", no_args_is_help=True
)

SessionId = Annotated[
    str, typer.Argument(metavar="SESSION", help="The session's id, sess_…, or its name.")
]
SESSION = {"session": SessionId}


def reference(session: SessionRecord) -> str:
    """Return the name by which a user refers to a session. For a session without a name, and for an
    ended session, this is the session's id.
    """
    # The name of an ended session is free again.
    has_ended = session.state is SessionStatus.ENDED
    return session.id if has_ended else session.name or session.id


def _age(session: SessionRecord) -> str:
    return age(session.created_at, datetime.now(UTC))


plain(
    sessions,
    "sessions",
    "List your sessions, newest first, including those that ended in the last day.",
    as_table(
        Column("session", reference, whole=True),
        Column("state", lambda session: "busy" if session.is_busy else session.state),
        Column("image", lambda session: session.image),
        Column("project", lambda session: session.project or "", drop=6),
        Column("agent", lambda session: session.agent_id or "", drop=4),
        Column("calls", lambda session: str(session.calls), drop=3),
        Column("MB", lambda session: str(session.memory_mb), drop=5),
        Column("age", _age, drop=1),
        Column(
            "ends",
            lambda one: ago(one.expires_at, datetime.now(UTC)),
            drop=2,
        ),
    ),
    scope=None,
    name="list",
)


@sessions.command("new")
def new_session(
    name: Annotated[str | None, typer.Option(help="A name, which can stand for its id.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A preset of the configuration, for what other options leave out."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Its image; default: by configuration.")] = None,
    memory: Annotated[int | None, typer.Option(help="MB of memory, files included.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Processors for its programs.")] = None,
    disk: Annotated[int | None, typer.Option(help="MB of a disk for its files.")] = None,
    least_grade: Annotated[
        Grade | None, typer.Option(help="The weakest grade of a container for it.")
    ] = None,
    package: Packages = None,
    network: Network = None,
    env: Env = None,
    durable: Annotated[
        bool, typer.Option("--durable", help="Save its files after each call.")
    ] = False,
    idle: Annotated[
        float | None,
        typer.Option(help="Seconds without use until it ends, or stops."),
    ] = (None),
    lifetime: Annotated[float | None, typer.Option(help="Maximum lifetime in seconds.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent whose calls run in it.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Copy a project in, without what git ignores.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="With --from: also copy what .gitignore leaves out.")
    ] = False,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Make a session. Its id goes to standard output, for --session of call and run."""
    if everything and source is None:
        fail("--all goes with --from DIR.", ExitCode.USAGE)
    top = directory(source)
    wishes: dict[str, Any] = {
        "name": name, "preset": preset, "image": image, "agent_id": agent, "memory_mb": memory,
        "cpus": cpus, "disk_mb": disk, "least_grade": least_grade, "packages": package,
        "network": network, "env": pairs_of(env) if env else None, "durable": durable or None,
        "idle_seconds": idle, "lifetime_seconds": lifetime,
    }  # fmt: skip
    made = _maker(top, everything=everything)
    with calling(socket, as_json=as_json, is_payload=True) as client:
        record = made(client, wishes)
    if as_json:
        show_json(record.model_dump(mode="json"))
    else:
        say(record.id)
        if sys.stdout.isatty():
            say(
                f"Its image, {record.image}, runs {', '.join(record.languages)}. Make calls in it "
                f"with --session {record.name or record.id}; end it with: "
                f"fumehood sessions end {record.name or record.id}",
                to_stderr=True,
            )


def _maker(
    top: Path | None, *, everything: bool
) -> Callable[[Client, dict[str, Any]], SessionRecord]:
    """Return a function that creates a session. The function takes a client and the session's
    options, and returns the new session.

    If `top` is given, the function also copies the directory `top` into the session. If
    `everything` is True, it also copies files that `.gitignore` excludes.

    If `top` is given and the part that copies directories is missing, end the command.
    """
    if top is None:
        return lambda client, wishes: client.create_session(**wishes)
    try:
        from fumehood.projects.command import session_from
    except ModuleNotFoundError:
        fail("--from needs the part projects, which is not installed.", ExitCode.USAGE)
    return partial(session_from, top, everything)


plain(
    sessions,
    "session",
    "Show one session of yours.",
    as_fields,
    arguments=SESSION,
    scope=None,
    name="show",
)
plain(
    sessions,
    "pause_session",
    "Freeze a session after its calls, until its next use. It keeps its memory, but uses no CPU.",
    as_fields,
    arguments=SESSION,
    scope=None,
    name="pause",
)
plain(
    sessions,
    "stop_session",
    "End all in a session but its disk, after its calls, until its next use.",
    as_fields,
    arguments=SESSION,
    scope=None,
    name="stop",
)
plain(
    sessions,
    "resume_session",
    "Let a paused or stopped session continue, as the next call in it does.",
    as_fields,
    arguments=SESSION,
    scope=None,
    name="resume",
)
plain(
    sessions,
    "end_session",
    "End a session and everything that runs in it. Its files and variables are deleted.",
    as_fields,
    arguments=SESSION,
    scope=None,
    name="end",
)


def options_in(session: str, socket: Path | None, *, as_json: bool) -> JsonObject:
    """Return the options for a call in a session: its id, and the agent whose calls run in it."""
    with calling(socket, as_json=as_json, is_call=True) as client:
        found = client.session(session)
    options: JsonObject = {"session_id": found.id}
    if found.agent_id is not None:
        options["agent_id"] = found.agent_id
    return options
