"""`fumehood approvers`: the people whose credential gives authority."""

from __future__ import annotations

from datetime import UTC, datetime
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
from fumehood.cli.settings import read_config

approvers = typer.Typer(help="Who may approve and administer.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name for the approver.")]


@approvers.command("init")
def init(name: Name = "owner") -> None:
    """Make the first approver, before the first `fumehood serve`. Its credential is shown once."""
    from fumehood.gates.approvers import make_first_approver
    from fumehood.model.errors import EngineError
    from fumehood.store.database import FILE_NAME, open_database
    from fumehood.store.directory import hold_lock, private_directory
    from fumehood.store.errors import StoreError

    state = read_config().state_directory
    try:
        with hold_lock(private_directory(state) / "engine.lock", "this state directory"):
            database = open_database(state / FILE_NAME)
            try:
                secret = make_first_approver(database, name, datetime.now(UTC))
            finally:
                database.close()
    except EngineError as refusal:
        fail(refusal.message, ExitCode.TOOL_FAILED)
    except StoreError as error:
        fail(str(error), ExitCode.UNAVAILABLE)
    show_secret(secret, "credential")


@approvers.command("add")
def add(
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="May change authority, too.")] = False,
    credential_stdin: CredentialStdin = False,
) -> None:
    """Add an approver. Needs a credential with admin."""
    scopes = ["approve", "admin"] if admin else ["approve"]
    data = ask_control(
        "POST",
        "/v1/approvers",
        {"name": name, "scopes": scopes},
        credential_stdin=credential_stdin,
    )
    show_secret(data["secret"], "credential")


@approvers.command("list")
def list_approvers(as_json: AsJson = False, credential_stdin: CredentialStdin = False) -> None:
    """List those who have authority now."""
    data = ask_control("GET", "/v1/approvers", credential_stdin=credential_stdin)
    columns = {"name": "name", "scopes": "scopes", "since": "created_at", "by": "created_by"}
    show_rows(data["items"], columns, as_json=as_json)


@approvers.command("remove")
def remove(name: Name, credential_stdin: CredentialStdin = False) -> None:
    """Take an approver's authority back at once."""
    ask_control("DELETE", f"/v1/approvers/{part(name)}", credential_stdin=credential_stdin)
