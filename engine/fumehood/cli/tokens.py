"""`fumehood tokens`: credentials of principals that are not Unix users."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import ControlSocketPath, CredentialStdin, deadline
from fumehood.cli.plain import Column, as_table, plain
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


plain(
    tokens,
    "tokens.list",
    "List all tokens, without their secrets.",
    as_table(
        Column("id", lambda token: token.id, whole=True),
        Column("name", lambda token: token.name),
        Column("principal", lambda token: token.principal_id, drop=1),
        Column("scopes", lambda token: ", ".join(token.scopes), drop=3),
        Column("agents", lambda token: ", ".join(token.agents), drop=4),
        Column("expires (UTC)", lambda token: _minute(token.expires_at), drop=2),
        Column("valid", lambda token: str(token.is_valid)),
    ),
)


def _minute(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"


def _require_id(token_id: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{1,64}", token_id):
        fail(
            "That is not a token's id. `fumehood tokens list` shows the ids; in a token, it is the "
            "part between the first two underscores.",
            ExitCode.USAGE,
        )


TokenId = Annotated[str, typer.Argument(help="The token's id, as shown by `tokens list`.")]
plain(
    tokens,
    "tokens.revoke",
    "Revoke a token immediately.",
    arguments={"token_id": TokenId},
    check=_require_id,
)
