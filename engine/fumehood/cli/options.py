"""Options shared by several commands, and parsing and formatting of times and counts."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
CredentialStdin = Annotated[
    bool,
    typer.Option("--credential-stdin", help="Read the credential from a line of standard input."),
]
SocketPath = Annotated[
    Path | None,
    typer.Option("--socket", help="The engine's socket; default: by configuration."),
]
ControlSocketPath = Annotated[
    Path | None,
    typer.Option(
        "--socket", help="The control socket; default: by configuration, beside the callers' one."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="Call with the token in this file, which only you can read. Default: the variable "
        "FUMEHOOD_TOKEN, if it is set.",
    ),
]
ToolName = Annotated[str, typer.Argument(help="name or name@version")]
CallId = Annotated[str, typer.Argument(help="The call's id, call_….")]
OfAgent = Annotated[str | None, typer.Option("--agent", help="Calls made as this agent.")]
OfTool = Annotated[
    str | None, typer.Option("--tool", help="Calls of this tool: name or name@version.")
]
Until = Annotated[str | None, typer.Option("--until", help="Before this age or time.")]

SPAN = re.compile(r"^(\d{1,6})([smhd])$")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def age(then: datetime, now: datetime) -> str:
    """Format an age in its largest unit, as `moment` reads it."""
    seconds = max(0, int((now - then).total_seconds()))
    unit = next((unit for unit in "dhm" if seconds >= UNITS_S[unit]), "s")
    return f"{seconds // UNITS_S[unit]}{unit}"


def counted(count: int, noun: str) -> str:
    """Format a number of things: `1 rule`, `2 rules`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def moment(text: str, now: datetime, option: str = "--since") -> datetime:
    """Parse an age before `now`, or a time; without a zone the time is local."""
    found = _parse(text, now, -1)
    if found is None:
        fail(
            f"{option} {text[:80]!r} is neither an age (30s, 10m, 1h, 7d) nor a time "
            "(2026-01-31T09:30).",
            ExitCode.USAGE,
        )
    return found


def deadline(text: str, now: datetime, option: str) -> datetime:
    """Parse a duration after `now`, or a time; without a zone the time is local."""
    found = _parse(text, now, 1)
    if found is None:
        fail(
            f"{option} takes a duration (30m, 2h, 1d) or a time (2026-01-31T09:30).",
            ExitCode.USAGE,
        )
    return found


def _parse(text: str, now: datetime, direction: int) -> datetime | None:
    span = SPAN.match(text)
    try:
        if span is not None:
            return now + direction * timedelta(seconds=int(span[1]) * UNITS_S[span[2]])
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
