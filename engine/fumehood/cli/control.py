"""What the commands that change authority share: the control socket and its credential.

The credential is typed on the terminal, or comes through standard input from a password
manager; it is never read from the environment, an argument or a file (DESIGN, "Identity").
"""

from __future__ import annotations

import getpass
import sys
from typing import Annotated, Any
from urllib.parse import quote

import typer

from fumehood.cli.exits import ExitCode, exit_code_of, fail
from fumehood.cli.settings import read_config
from fumehood.model.envelope import Envelope
from fumehood.model.json_types import JsonObject

CredentialStdin = Annotated[
    bool,
    typer.Option("--credential-stdin", help="Read the credential's line from standard input."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def ask_control(
    method: str, path: str, body: JsonObject | None = None, *, credential_stdin: bool
) -> JsonObject:
    """The data of one answer of the control socket; ends the command where it is refused."""
    from fumehood.cli.show import show_envelope, wants_json
    from fumehood.client import Client, DaemonUnavailable
    from fumehood.config import ConfigError

    try:
        socket_path = read_config().control_socket_path
    except ConfigError as error:
        fail(str(error), ExitCode.USAGE)
    credential = read_credential(from_stdin=credential_stdin)
    try:
        with Client(socket_path, credential=credential) as client:
            envelope: Envelope = client.request(method, path, body)
    except DaemonUnavailable as error:
        fail(str(error), ExitCode.UNAVAILABLE)
    if envelope.error is not None:
        show_envelope(envelope, as_json=wants_json(asked=False))
        raise typer.Exit(exit_code_of(envelope))
    return envelope.data


def read_credential(*, from_stdin: bool) -> str:
    """The credential of whoever sits there."""
    if from_stdin:
        credential = sys.stdin.readline().strip()
    elif sys.stdin.isatty():
        credential = getpass.getpass("Credential: ").strip()
    else:
        fail(
            "This needs a credential with admin. Type it on a terminal, or pipe it in with "
            "--credential-stdin.",
            ExitCode.USAGE,
        )
    if not credential.isascii() or not credential.isprintable() or not credential:
        fail("That is no credential.", ExitCode.USAGE)
    return credential


def show_rows(rows: list[JsonObject], columns: dict[str, str], *, as_json: bool) -> None:
    """Rows as a table, or all of them as JSON."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fumehood.cli.show import show_json, wants_json

    if wants_json(as_json):
        show_json(rows)
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(escape(_cell(row.get(key))) for key in columns.values()))
    Console().print(table)


def show_secret(secret: str, what: str) -> None:
    """A secret on stdout, once, with a word about it on stderr."""
    print(f"This {what} is shown only now. Keep it where no caller can read it.", file=sys.stderr)
    print(secret)


def part(text: str) -> str:
    """One part of an address."""
    return quote(text, safe="@")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
