"""`fumehood usage`: what calls took together, and what budgets have left."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fumehood.budgets.usage import GROUPS, MAX_ROWS, UsageTable
from fumehood.cli.control import AsJson, CredentialStdin
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.moments import moment
from fumehood.cli.reach import calling, controlling


def usage(
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Group by principal, agent, session, tool (the default) or day (UTC); repeatable, "
            "or with commas between."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Not before: an age (1h, 7d) or a time (2026-01-31T09:30)."),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Before this age or time.")] = None,
    agent: Annotated[str | None, typer.Option(help="Calls made as this agent.")] = None,
    session: Annotated[str | None, typer.Option(help="Calls made in this session.")] = None,
    tool: Annotated[
        str | None, typer.Option(help="Calls of this tool: name or name@version.")
    ] = None,
    everybody: Annotated[
        bool,
        typer.Option("--all", help="Everybody's calls; needs a credential with admin."),
    ] = False,
    principal: Annotated[
        str | None, typer.Option(help="With --all: this principal's calls.")
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="As CSV: the groups, without total and budgets.")
    ] = False,
    credential_stdin: CredentialStdin = False,
    socket: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            help="The engine's socket, with --all the control socket; default: by configuration.",
        ),
    ] = None,
) -> None:
    """Show what calls took: tokens and money, added up from the call log; and budgets."""
    from fumehood.cli.show import show_json, wants_json
    from fumehood.cli.usage_view import show_usage, write_csv

    if as_csv and as_json:
        fail("--csv and --json are two forms: choose one.", ExitCode.USAGE)
    if not everybody and (principal is not None or credential_stdin):
        fail("--principal and --credential-stdin need --all.", ExitCode.USAGE)
    groups = _groups(by or [])
    now = datetime.now(UTC)
    query: dict[str, Any] = {
        "since": None if since is None else moment(since, now),
        "until": None if until is None else moment(until, now, "--until"),
        "agent": agent,
        "session": session,
        "tool": tool,
    }
    table: UsageTable
    if everybody:
        with controlling(socket, credential_stdin=credential_stdin, as_json=as_json) as control:
            table = control.usage(groups, **query, principal=principal)
    else:
        with calling(socket, as_json=as_json, is_payload=as_csv) as client:
            table = client.usage(groups, **query)
    if as_csv:
        write_csv(table, sys.stdout)
    elif wants_json(as_json):
        show_json(table.model_dump(mode="json"))
    else:
        show_usage(table)
    if table.has_more and (as_csv or not wants_json(as_json)):
        print(
            f"There are more than are shown (at most {MAX_ROWS} groups). Group by less, or give "
            "--since, --agent or --tool.",
            file=sys.stderr,
        )


def _groups(given: list[str]) -> str | None:
    """What to group by, as the engine wants it: each of its words at most once."""
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in GROUPS:
            fail(f"--by {name[:80]!r} is none of {', '.join(GROUPS)}.", ExitCode.USAGE)
    if len(set(names)) != len(names):
        fail("--by names one thing twice.", ExitCode.USAGE)
    return ",".join(names) or None
