"""`fumehood calls` and `usage`: the engine's call log, and usage totals computed from the log.

The name of a requested tool is untrusted text from the caller. Invariant: this name can neither
move the terminal's cursor nor become a formula in a spreadsheet.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from fumehood.answers import CallAnswer
from fumehood.cli.exits import ExitCode, exit_code_of, fail, say
from fumehood.cli.options import (
    AsJson,
    CallId,
    CredentialStdin,
    Limit,
    OfAgent,
    OfTool,
    SocketPath,
    Until,
    moment,
    newest,
)
from fumehood.cli.reach import calling, controlling
from fumehood.cli.show import (
    Column,
    as_text,
    show_call_line,
    show_calls,
    show_envelope,
    show_fields,
    show_json,
    show_table,
    wants_json,
)
from fumehood.client import Client, DaemonUnavailable
from fumehood.core.call_log import CallRecord
from fumehood.core.escaping import json_lines, visible
from fumehood.core.json_types import JsonObject
from fumehood.core.pages import DEFAULT_PAGE, MAX_ITEMS
from fumehood.core.usage_table import GROUPS, MAX_ROWS, BudgetStanding, UsageRow, UsageTable

calls = typer.Typer(help="The call log of the running engine.", no_args_is_help=True)

POLL_S = 0.5

Since = Annotated[
    str | None,
    typer.Option(help="From this age (30s, 10m, 1h, 7d) or time (2026-01-31T09:30) on."),
]
Code = Annotated[str | None, typer.Option(help="Calls with this result: OK, or an error code.")]
Text = Annotated[
    str | None,
    typer.Option(metavar="WORDS", help="Calls with all of these words in arguments or answer."),
]


@calls.command("list")
def list_calls(
    since: Since = None,
    agent: OfAgent = None,
    tool: OfTool = None,
    code: Code = None,
    text: Text = None,
    running: Annotated[
        bool, typer.Option("--running", help="Calls that run now, oldest first.")
    ] = False,
    limit: Limit = DEFAULT_PAGE,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """List your calls, newest first."""
    filters = _filters(since, agent, tool, code, text)
    filters |= {"state": "running"} if running else {}
    with calling(socket, as_json=as_json) as client:
        records, has_more = newest(partial(client.calls, **filters), limit)
    show_calls(records, as_json)
    if has_more and not wants_json(as_json):
        print(f"There are more: --limit takes up to {MAX_ITEMS}.", file=sys.stderr)


@calls.command("show")
def show_call(call_id: CallId, as_json: AsJson = False, socket: SocketPath = None) -> None:
    """Show one call of yours: what it was given and what it answered, where that is kept."""
    with calling(socket, as_json=as_json) as client:
        found = client.call_state(call_id)
    if wants_json(as_json):
        show_json(_whole(found))
        return
    show_fields(found.call.model_dump(mode="json"))
    _show_record(found)


def _whole(found: CallAnswer) -> JsonObject:
    """Return a call as one object, with its record in the log, its arguments and its envelope."""
    kept = found.model_dump(mode="json", include={"arguments", "envelope"})
    return found.call.model_dump(mode="json") | kept


def _show_record(found: CallAnswer) -> None:
    if found.arguments is not None:
        show_fields({"arguments": json_lines(found.arguments)})
    if found.envelope is not None:
        show_envelope(found.envelope, as_json=False)
    elif found.call.running is None:
        say("Its answer is not kept (`[record]` in the configuration).", to_stderr=True)


@calls.command("answer")
def show_answer(
    call_id: CallId,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show the answer of a call of yours again; as JSON its state while it waits for approval.

    Exit status: that of the call; 3 while it waits.
    """
    with calling(socket, as_json=as_json) as client:
        found = client.call_state(call_id)
    if found.envelope is not None:
        show_envelope(found.envelope, as_json=wants_json(as_json))
        raise typer.Exit(exit_code_of(found.envelope))
    if wants_json(as_json):
        show_json(found.model_dump(mode="json", exclude_none=True))
    if found.approval is None:
        fail("The answer of this call is not kept.", ExitCode.TOOL_FAILED)
    state = found.approval.state.value
    say(f"There is no answer yet: {found.approval.id} is {state}.", to_stderr=True)
    raise typer.Exit(ExitCode.WAITING_FOR_APPROVAL)


@calls.command("cancel")
def cancel_call(
    call_id: CallId,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Cancel a running call of yours. Its program has ended when the command returns."""
    with calling(socket, as_json=as_json) as client:
        client.cancel(call_id)
    if wants_json(as_json):
        show_json({"call_id": call_id, "cancelled": True})
    else:
        print(f"{call_id} was cancelled.")


@calls.command("tail")
def tail_calls(
    since: Since = None,
    agent: OfAgent = None,
    tool: OfTool = None,
    code: Code = None,
    text: Text = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also what each was given and what it answered.")
    ] = False,
    limit: Annotated[
        int, typer.Option(min=0, max=MAX_ITEMS, help="Maximum number of earlier calls to show.")
    ] = DEFAULT_PAGE,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show your calls as they end, oldest first, until Ctrl-C. One line per call."""
    filters = _filters(since, agent, tool, code, text)
    try:
        with calling(socket, as_json=as_json) as client:
            for record in _followed(client, filters, limit, lambda: time.sleep(POLL_S)):
                if full:
                    _show_full(client, record, as_json=wants_json(as_json))
                else:
                    show_call_line(record, as_json=wants_json(as_json))
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.SUCCESS) from None


def _show_full(client: Client, record: CallRecord, *, as_json: bool) -> None:
    found = client.call_state(record.call_id)
    if as_json:
        print(json.dumps(_whole(found)), flush=True)
        return
    show_call_line(record, as_json=False)
    _show_record(found)
    print(flush=True)


def _filters(
    since: str | None, agent: str | None, tool: str | None, code: str | None, text: str | None
) -> dict[str, Any]:
    then = moment(since, datetime.now(UTC))
    return {"since": then, "agent": agent, "tool": tool, "code": code, "text": text}


def _followed(
    client: Client, filters: dict[str, Any], limit: int, pause: Callable[[], None]
) -> Iterator[CallRecord]:
    """Yield the last `limit` records that match `filters`, oldest first. Then, for ever, yield new
    matching records as they arrive.

    `pause` is called before each search for new records, and returns when the search is due. New
    records are detected by their ids, because clocks can go backwards. If the engine stops later,
    this function waits until an engine runs again.
    """
    fetch = partial(client.calls, **filters)
    before, _ = newest(fetch, max(limit, 1))
    last = before[0].call_id if before else None
    yield from reversed(before[:limit])
    is_waiting = False
    while True:
        pause()
        try:
            fresh, _ = newest(fetch, sys.maxsize, known=last)
        except DaemonUnavailable as away:
            if not is_waiting:
                say(f"{away} Waiting for it.", to_stderr=True)
            is_waiting = True
            continue
        is_waiting = False
        if fresh:
            last = fresh[0].call_id
            yield from reversed(fresh)


FORMULA_BEGINS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "|", "%")
"""Characters that can begin a formula in a spreadsheet. Some programs also accept the full-width
forms.

*Source*: OWASP, CSV injection."""

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
    else:
        show_usage(table, as_json)
    if table.has_more and (as_csv or not wants_json(as_json)):
        print(
            f"Only the first {MAX_ROWS} groups are shown. Group by less, or give "
            "--since, --agent or --tool.",
            file=sys.stderr,
        )


def _groups(given: list[str]) -> str | None:
    """Join the values of `--by` as the engine expects them. End the command if a group is unknown
    or repeated.
    """
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in GROUPS:
            fail(f"--by {name[:80]!r} is not one of {', '.join(GROUPS)}.", ExitCode.USAGE)
    if len(set(names)) != len(names):
        fail("--by names the same group twice.", ExitCode.USAGE)
    return ",".join(names) or None


@as_text
def show_usage(table: UsageTable) -> None:
    """Print a table of groups with a total, and a table of budgets if there are any."""
    heads = [Column(name) for name in table.by]
    heads += [
        Column("calls", whole=True), Column("errors", drop=4), Column("tokens in", drop=3),
        Column("tokens out", drop=2), Column("used", drop=1), Column("cost"),
    ]  # fmt: skip
    rows = [_cells(table, row) for row in table.items]
    total = _cells(table, table.total)
    if table.by:
        total[0] = "total"
    show_table(heads, [*rows, total])
    if table.budgets:
        fields = (
            Column("budget"), Column("of", drop=1), Column("what", whole=True),
            Column("limit", drop=3), Column("spent", drop=4), Column("left", whole=True),
            Column("resets at (UTC)", drop=2),
        )  # fmt: skip
        show_table(fields, [_standing(one, table.currency) for one in table.budgets])


def write_csv(table: UsageTable, file: TextIO) -> None:
    """Write a usage table as CSV. Each group has one line for each currency, so that each cell has
    an amount in only one currency. The sums of a group cover all currencies, and are only on its
    first line.
    """
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n")
    writer.writerow([*table.by, *_SUMS, "cost", "currency"])
    for row in table.items:
        names = [as_cell(row.group[name] or "") for name in table.by]
        sums = [getattr(row, name) for name in _SUMS]
        for number, (currency, cost) in enumerate(row.cost.items()):
            # The sums cover all currencies of the group, so only its first line has them.
            writer.writerow([*names, *(sums if number == 0 else [0] * len(sums)), cost, currency])


def as_cell(text: str) -> str:
    """Escape a text so that a spreadsheet displays the text instead of evaluating it."""
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
