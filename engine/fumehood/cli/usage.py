"""`fumehood usage`: totals from the call log, and the remaining budgets.

Invariant: the name of a requested tool is the caller's own text. It can neither move the reader's
cursor nor become a formula in a spreadsheet.
"""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from fumehood.budgets.model import GROUPS, MAX_ROWS, BudgetStanding, UsageRow, UsageTable
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import AsJson, CredentialStdin, OfAgent, OfTool, Until, moment
from fumehood.cli.reach import calling, controlling
from fumehood.cli.show import Field, show_json, show_table, wants_json
from fumehood.core.escaping import visible

FORMULA_BEGINS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "|", "%")
"""*Source*: OWASP, CSV injection; with the full-width forms that some programs treat the same."""

_SUMS = ("calls", "errors", "input_tokens", "output_tokens", "tokens_used")


def usage(
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Group by principal, agent, session, tool (the default) or day (UTC); repeatable, "
            "or separated by commas."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="From this age (1h, 7d) or time (2026-01-31T09:30) on."),
    ] = None,
    until: Until = None,
    agent: OfAgent = None,
    session: Annotated[str | None, typer.Option(help="Calls made in this session.")] = None,
    tool: OfTool = None,
    all_principals: Annotated[
        bool,
        typer.Option("--all", help="All principals' calls; needs a credential with admin."),
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
    """Show usage: tokens and cost, summed from the call log; and budgets."""
    if as_csv and as_json:
        fail("Choose --csv or --json.", ExitCode.USAGE)
    if not all_principals and (principal is not None or credential_stdin):
        fail("--principal and --credential-stdin need --all.", ExitCode.USAGE)
    groups = _groups(by or [])
    now = datetime.now(UTC)
    query: dict[str, Any] = {
        "since": moment(since, now),
        "until": moment(until, now, "--until"),
        "agent": agent,
        "session": session,
        "tool": tool,
    }
    if all_principals:
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
            f"Only the first {MAX_ROWS} groups are shown. Group by less, or give "
            "--since, --agent or --tool.",
            file=sys.stderr,
        )


def _groups(given: list[str]) -> str | None:
    """Normalise the `--by` options for the engine: each group at most once."""
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in GROUPS:
            fail(f"--by {name[:80]!r} is not one of {', '.join(GROUPS)}.", ExitCode.USAGE)
    if len(set(names)) != len(names):
        fail("--by names the same group twice.", ExitCode.USAGE)
    return ",".join(names) or None


def show_usage(table: UsageTable) -> None:
    """Print a table of groups with a total, and one of budgets if there are any."""
    heads = [Field(name) for name in table.by]
    heads += [
        Field("calls", whole=True), Field("errors", drop=4), Field("tokens in", drop=3),
        Field("tokens out", drop=2), Field("used", drop=1), Field("cost"),
    ]  # fmt: skip
    rows = [_cells(table, row) for row in table.items]
    total = _cells(table, table.total)
    if table.by:
        total[0] = "total"
    show_table(heads, [*rows, total])
    if table.budgets:
        show_budgets(table)


def show_budgets(table: UsageTable) -> None:
    """Print a table of the remaining budgets."""
    fields = (
        Field("budget"), Field("of", drop=1), Field("what", whole=True), Field("limit", drop=3),
        Field("spent", drop=4), Field("left", whole=True), Field("resets at (UTC)", drop=2),
    )  # fmt: skip
    show_table(fields, [_standing(one, table.currency) for one in table.budgets])


def write_csv(table: UsageTable, file: TextIO) -> None:
    """Write one line per group and currency, so that no cell mixes currencies."""
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n")
    writer.writerow([*table.by, *_SUMS, "cost", "currency"])
    for row in table.items:
        names = [as_cell(row.group[name] or "") for name in table.by]
        sums = [getattr(row, name) for name in _SUMS]
        for number, (currency, cost) in enumerate(row.cost.items()):
            # The sums cover all currencies of the group, so only its first line has them.
            writer.writerow([*names, *(sums if number == 0 else [0] * len(sums)), cost, currency])


def as_cell(text: str) -> str:
    """Escape a text so that a spreadsheet shows it and does not evaluate it."""
    shown = visible(text)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA_BEGINS) else shown


def _cells(table: UsageTable, row: UsageRow) -> list[str]:
    names = [visible(row.group.get(name) or "–") for name in table.by]
    sums = [str(getattr(row, name)) for name in _SUMS]
    return [*names, *sums, ", ".join(f"{cost} {currency}" for currency, cost in row.cost.items())]


def _standing(one: BudgetStanding, currency: str) -> tuple[str, ...]:
    return (
        one.budget,
        ", ".join(f"{name} {value}" for name, value in one.subject.items()) or "all",
        one.unit_in(currency),
        str(one.limit),
        str(one.spent),
        str(one.left),
        "never" if one.resets_at is None else f"{one.resets_at:%Y-%m-%d %H:%M}",
    )
