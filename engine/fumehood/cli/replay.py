"""`fumehood replay`: run a program again as its receipt says, offline, and show what differs."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from fumehood.cli.exits import ExitCode, exit_code_of, fail, say
from fumehood.cli.options import SocketPath, json_object, read_bytes
from fumehood.cli.reach import call_once
from fumehood.cli.run import downloading
from fumehood.cli.show import show_envelope
from fumehood.core.escaping import json_document, visible
from fumehood.core.json_types import JsonObject
from fumehood.core.receipt import Receipt, differences


def replay(
    receipt: Annotated[str, typer.Argument(metavar="RECEIPT", help="The file, or - for stdin.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="The differences and the new receipt as JSON.")
    ] = False,
    socket: SocketPath = None,
) -> None:
    """Run a program again as its receipt says, and show what differs.

    The program gets the arguments of then, and its requests get the answers of then: nothing is
    sent.

    Exit status: 0 nothing differs, 1 something does, 2 wrong usage, 3 waiting for approval,
    4 engine or sandbox unavailable.
    """
    before = _read(json_object(read_bytes(receipt, "The receipt"), "The receipt"))
    options = before.options | {"receipt": True, "replay": before.network.model_dump(mode="json")}
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
    after = _read(json_object(bytes(raw), "The new receipt"))
    found = differences(before, after)
    if as_json:
        print(json_document({"differences": found, "receipt": after.model_dump(mode="json")}))
    elif not found:
        count = len(after.network.exchanges)
        requests = f", nor do its {count} requests" if count else ""
        say(f"Nothing differs from {before.call_id}{requests}.")
    else:
        say(f"What differs from {before.call_id}:")
        for line in found:
            say("  " + visible(line))
    raise typer.Exit(ExitCode.TOOL_FAILED if found else ExitCode.SUCCESS)


def _read(document: JsonObject) -> Receipt:
    try:
        return Receipt.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        fail(f"This is no receipt: {where}: {first['msg']}.", ExitCode.USAGE)
