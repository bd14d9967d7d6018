"""`fumehood tokens`: principals that are not a Unix user."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from fumehood.cli.control import (
    AsJson,
    CredentialStdin,
    ask_control,
    part,
    show_rows,
    show_secret,
)
from fumehood.cli.exits import ExitCode, fail
from fumehood.model.json_types import JsonObject

tokens = typer.Typer(help="Tokens: principals with scopes and agents.", no_args_is_help=True)

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


@tokens.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What the token is for.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="call (the default), approve or admin; repeatable.")
    ] = None,
    agent: Annotated[
        list[str] | None, typer.Option(help="An agent it may speak for; repeatable.")
    ] = None,
    principal: Annotated[
        str | None, typer.Option(help="Whom it stands for; default: token:NAME.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="When it ends: 90m, 12h, 30d, or a time in ISO 8601.")
    ] = None,
    credential_stdin: CredentialStdin = False,
) -> None:
    """Make a token; it is shown once. Needs a credential with admin."""
    body: JsonObject = {"name": name, "scopes": scope or ["call"], "agents": agent or []}
    if principal is not None:
        body["principal_id"] = principal
    if expires is not None:
        body["expires_at"] = _moment(expires).isoformat()
    data = ask_control("POST", "/v1/tokens", body, credential_stdin=credential_stdin)
    show_secret(data["secret"], "token")


@tokens.command("list")
def list_tokens(as_json: AsJson = False, credential_stdin: CredentialStdin = False) -> None:
    """List every token without its secret."""
    data = ask_control("GET", "/v1/tokens", credential_stdin=credential_stdin)
    columns = {
        "id": "id", "name": "name", "principal": "principal_id", "scopes": "scopes",
        "agents": "agents", "expires": "expires_at", "valid": "is_valid",
    }  # fmt: skip
    show_rows(data["items"], columns, as_json=as_json)


@tokens.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(help="The token's id, as `tokens list` shows it.")],
    credential_stdin: CredentialStdin = False,
) -> None:
    """End a token at once."""
    ask_control("DELETE", f"/v1/tokens/{part(token_id)}", credential_stdin=credential_stdin)


def _moment(text: str) -> datetime:
    span = re.fullmatch(r"(\d{1,6})([mhd])", text)
    if span is not None:
        return datetime.now(UTC) + timedelta(**{_UNITS[span.group(2)]: int(span.group(1))})
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        fail("--expires takes 90m, 12h, 30d, or a time in ISO 8601.", ExitCode.USAGE)
