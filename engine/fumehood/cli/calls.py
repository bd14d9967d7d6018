"""`fumehood calls` and `fumehood cache`: call log and result cache of the running engine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import typer

from fumehood.answers import CallAnswer
from fumehood.cache.model import ClearedCache
from fumehood.cli.exits import ExitCode, exit_code_of, fail, say
from fumehood.cli.options import (
    AsJson,
    CallId,
    Limit,
    OfAgent,
    OfTool,
    SocketPath,
    moment,
    newest,
)
from fumehood.cli.plain import as_fields, as_text, plain
from fumehood.cli.reach import calling
from fumehood.cli.show import (
    show_call_line,
    show_calls,
    show_envelope,
    show_fields,
    show_json,
    wants_json,
)
from fumehood.client import Client, DaemonUnavailable
from fumehood.core.call_log import CallRecord
from fumehood.core.escaping import json_lines
from fumehood.core.json_types import JsonObject
from fumehood.core.pages import DEFAULT_PAGE, MAX_ITEMS

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
    show_calls(records, as_json=wants_json(as_json))
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
    """Return a call as one document: its row in the log, and its record."""
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
    """Yield records as they arrive, oldest first. New ones are found by id: clocks can go back.

    Once it has begun, an engine that ends is waited for.
    """
    fetch = partial(client.calls, **filters)
    before, _ = newest(fetch, max(limit, 1))
    last = before[0].call_id if before else None
    yield from reversed(before[:limit])
    is_away = False
    while True:
        pause()
        try:
            fresh, _ = newest(fetch, sys.maxsize, known=last)
        except DaemonUnavailable as away:
            if not is_away:
                say(f"{away} Waiting for it.", to_stderr=True)
            is_away = True
            continue
        is_away = False
        if fresh:
            last = fresh[0].call_id
            yield from reversed(fresh)


cache = typer.Typer(help="The result cache of the running engine.", no_args_is_help=True)


plain(
    cache, "cache.show", "Show its size, hits and misses. Needs a credential with admin.", as_fields
)


@as_text
def _dropped(done: ClearedCache) -> None:
    print(f"{done.cleared} answers were dropped.")


plain(
    cache,
    "cache.clear",
    "Drop every cached answer, of all principals. Needs a credential with admin.",
    _dropped,
)
