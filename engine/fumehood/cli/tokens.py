"""`fumehood tokens`: credentials of principals that are not Unix users."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import AsJson, ControlSocketPath, CredentialStdin, deadline
from fumehood.cli.reach import controlling, show_secret

tokens = typer.Typer(help="Tokens: principals with scopes and agents.", no_args_is_help=True)


@tokens.command("new")
def new(
    name: Annotated[str, typer.Argument(help="A name that says what the token is for.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="call (the default), approve or admin; repeatable.")
    ] = None,
    agent: Annotated[
        list[str] | None, typer.Option(help="An agent it may act for; repeatable.")
    ] = None,
    principal: Annotated[
        str | None, typer.Option(help="The principal it authenticates; default: token:NAME.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            help="When it expires: a duration (90m, 12h, 30d) or a time (2026-01-31T09:30)."
        ),
    ] = None,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Create a token; it is shown once. Needs a credential with admin."""
    expires_at = deadline(expires, datetime.now(UTC), "--expires") if expires is not None else None
    with controlling(socket, credential_stdin=credential_stdin) as client:
        made = client.tokens.new(
            name,
            principal_id=principal,
            scopes=scope or ["call"],
            agents=agent or [],
            expires_at=expires_at,
        )
    show_secret(made.secret, "token")


@tokens.command("list")
def list_tokens(
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """List all tokens, without their secrets."""
    from fumehood.cli.show import show_json, wants_json
    from fumehood.cli.tables import Field, show_table

    with controlling(socket, credential_stdin=credential_stdin, as_json=as_json) as client:
        found = client.tokens.list()
    if wants_json(as_json):
        show_json([token.model_dump(mode="json") for token in found])
        return
    fields = (
        Field("id", whole=True), Field("name"), Field("principal", drop=1), Field("scopes", drop=3),
        Field("agents", drop=4), Field("expires (UTC)", drop=2), Field("valid"),
    )  # fmt: skip
    rows = [
        (
            token.id,
            token.name,
            token.principal_id,
            ", ".join(token.scopes),
            ", ".join(token.agents),
            f"{token.expires_at:%Y-%m-%d %H:%M}" if token.expires_at is not None else "",
            str(token.is_valid),
        )
        for token in found
    ]
    show_table(fields, rows)


@tokens.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(help="The token's id, as shown by `tokens list`.")],
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Revoke a token immediately."""
    if not re.fullmatch(r"[0-9a-f]{1,64}", token_id):
        fail(
            "That is not a token's id. `fumehood tokens list` shows the ids; in a token, it is the "
            "part between the first two underscores.",
            ExitCode.USAGE,
        )
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.tokens.revoke(token_id)
