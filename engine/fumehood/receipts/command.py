"""The command `fumehood replay`, which runs programs again from their receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fumehood.cli.exits import ExitCode, exit_code_of, fail, say
from fumehood.cli.options import SocketPath, json_object, read_bytes
from fumehood.cli.reach import call_once, calling
from fumehood.cli.run import downloading
from fumehood.cli.show import show_envelope
from fumehood.core.escaping import json_document, visible
from fumehood.core.json_types import JsonObject

if TYPE_CHECKING:
    from fumehood.receipts.receipt import Receipt


def replay(
    receipts: Annotated[
        list[str], typer.Argument(metavar="RECEIPT…", help="The files, or - for stdin.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="The differences and the new receipts as JSON.")
    ] = False,
    socket: SocketPath = None,
) -> None:
    """Run programs again as their receipts say, and show what differs.

    A program gets the arguments of then, and its requests get the answers of then: nothing is sent.
    Programs of one session run in a new one like it, in the order of their receipts here.

    Exit status: 0 nothing differs, 1 something does, 2 wrong usage, 3 waiting for approval,
    4 engine or sandbox unavailable.
    """
    from fumehood.receipts.receipt import differences

    before = [_read(json_object(read_bytes(one, "The receipt"), "The receipt")) for one in receipts]
    shown: list[JsonObject] = []
    with _sessions(socket, as_json=as_json) as session_of:
        for one in before:
            after = _repeated(one, session_of(one), socket, as_json=as_json)
            found = differences(one, after)
            shown.append({"differences": found, "receipt": after.model_dump(mode="json")})
            if not as_json:
                _say(one, after, found)
    if as_json:
        print(json_document({"replays": shown}))
    has_changed = any(one["differences"] for one in shown)
    raise typer.Exit(ExitCode.TOOL_FAILED if has_changed else ExitCode.SUCCESS)


@contextmanager
def _sessions(socket: Path | None, *, as_json: bool) -> Iterator[Callable[[Receipt], JsonObject]]:
    """Yield a function that creates the sessions in which calls are repeated. The function takes
    the receipt of a call, and returns the call options that name the session for repeating this
    call.

    Calls that ran in the same session are repeated in the same new session. The new sessions end
    when the `with` block ends. If a call ran without a session, the returned options are empty.
    """
    from fumehood.receipts.receipt import SESSION_WISHES

    made: dict[str, str] = {}

    def session_of(receipt: Receipt) -> JsonObject:
        if receipt.session is None:
            return {}
        own_id = str(receipt.session.get("id"))
        if own_id not in made:
            given = {name: receipt.session.get(name) or None for name in SESSION_WISHES}
            given["agent_id"] = receipt.options.get("agent_id")
            with calling(socket, as_json=as_json, is_payload=True) as client:
                made[own_id] = client.create_session(**given).id
        return {"session_id": made[own_id]}

    try:
        yield session_of
    finally:
        for session_id in made.values():
            with calling(socket, as_json=as_json, is_payload=True) as client:
                client.end_session(session_id)


def _repeated(
    before: Receipt, session: JsonObject, socket: Path | None, *, as_json: bool
) -> Receipt:
    """Run the program of the receipt `before` again, and return the new receipt. `session` contains
    the call options that name the session.

    If the new run has no receipt, show the answer and end the command.
    """
    from fumehood.receipts.receipt import REPEATED_OPTIONS

    replayed = {"receipt": True, "replay": before.network.model_dump(mode="json")}
    known = {*REPEATED_OPTIONS, "network"}  # the file is untrusted
    options = {name: one for name, one in before.options.items() if name in known}
    options |= session | replayed
    answer = call_once(before.tool, before.arguments, options, socket, as_json=as_json)
    link = answer["metadata"].get("receipt") or {}
    if "url" not in link:
        show_envelope(answer, as_json=as_json)
        if "not_kept" in link:
            say(f"What differs is not known: {link['not_kept']}.", to_stderr=True)
        raise typer.Exit(exit_code_of(answer) or ExitCode.TOOL_FAILED)
    raw = bytearray()
    with downloading(socket, as_json=as_json) as download:
        download(link["url"], raw.extend)
    return _read(json_object(bytes(raw), "The new receipt"))


def _say(before: Receipt, after: Receipt, found: list[str]) -> None:
    if not found:
        count = len(after.network.exchanges)
        requests = f", nor do its {count} requests" if count else ""
        say(f"Nothing differs from {before.call_id}{requests}.")
        return
    say(f"What differs from {before.call_id}:")
    for line in found:
        say("  " + visible(line))


def _read(document: JsonObject) -> Receipt:
    from pydantic import ValidationError

    from fumehood.receipts.receipt import Receipt

    try:
        return Receipt.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        fail(f"This is not a receipt: {where}: {first['msg']}.", ExitCode.USAGE)
