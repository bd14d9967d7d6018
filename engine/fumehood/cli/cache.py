"""`fumehood cache show|clear`: the result cache of the running engine."""

from __future__ import annotations

import typer

from fumehood.cli.options import AsJson, ControlSocketPath, CredentialStdin
from fumehood.cli.reach import controlling

cache = typer.Typer(help="The result cache of the running engine.", no_args_is_help=True)


@cache.command("show")
def show(
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Show its size, hits and misses. Needs a credential with admin."""
    from fumehood.cli.show import show_fields, show_json, wants_json

    with controlling(socket, credential_stdin=credential_stdin, as_json=as_json) as client:
        status = client.cache.show().model_dump(mode="json")
    if wants_json(as_json):
        show_json(status)
    else:
        show_fields(status)


@cache.command("clear")
def clear(
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Drop every cached answer, of all principals. Needs a credential with admin."""
    from fumehood.cli.show import show_json, wants_json

    with controlling(socket, credential_stdin=credential_stdin, as_json=as_json) as client:
        done = client.cache.clear()
    if wants_json(as_json):
        show_json(done.model_dump(mode="json"))
    else:
        print(f"{done.cleared} answers were dropped.")
