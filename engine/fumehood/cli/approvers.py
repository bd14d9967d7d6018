"""`fumehood approvers`: the people whose credentials give authority."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import ControlSocketPath, CredentialStdin
from fumehood.cli.plain import Column, as_table, plain
from fumehood.cli.reach import controlling, show_secret
from fumehood.cli.settings import read_config

approvers = typer.Typer(help="People who may approve calls or administer.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name for the approver.")]


@approvers.command("init")
def init(name: Name = "owner") -> None:
    """Create the first approver, while no engine runs. Its credential is shown once."""
    from fumehood.core.errors import EngineError
    from fumehood.identity.approvers import make_first_approver
    from fumehood.storage.database import FILE_NAME, open_database
    from fumehood.storage.directory import InUse, hold_lock, private_directory
    from fumehood.storage.errors import StoreError

    state = read_config().state_directory
    try:
        with hold_lock(private_directory(state) / "engine.lock", "this state directory"):
            database = open_database(state / FILE_NAME)
            try:
                make_first_approver(database, name, datetime.now(UTC), _show)
            finally:
                database.close()
    except EngineError as refusal:
        fail(refusal.message, ExitCode.TOOL_FAILED)
    except InUse:
        fail(f"An engine uses this state directory. {_cure(state)}", ExitCode.UNAVAILABLE)
    except StoreError as error:
        fail(str(error), ExitCode.UNAVAILABLE)


def _cure(state: Path) -> str:
    """Say how to get an approver while an engine runs."""
    from fumehood.identity import store as identities
    from fumehood.identity.approvers import ADD
    from fumehood.storage.database import reading
    from fumehood.storage.errors import StoreError

    with suppress(StoreError), reading(state) as connection:
        if identities.all_approvers(connection):
            return f"It already has had a first approver. To add another: {ADD}."
    return "Stop it, run `fumehood approvers init` again, and start it."


def _show(credential: str) -> None:
    show_secret(credential, "credential")


@approvers.command("add")
def add(
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="May also administer.")] = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Add an approver. Needs a credential with admin."""
    scopes = ["approve", "admin"] if admin else ["approve"]
    with controlling(socket, credential_stdin=credential_stdin) as client:
        made = client.approvers.add(name, scopes=scopes)
    show_secret(made.secret, "credential")


plain(
    approvers,
    "approvers.list",
    "List the current approvers.",
    as_table(
        Column("name", lambda one: one.name),
        Column("scopes", lambda one: ", ".join(one.scopes)),
        Column("since (UTC)", lambda one: f"{one.created_at:%Y-%m-%d %H:%M}", drop=1),
        Column("by", lambda one: one.created_by, drop=2),
    ),
)


plain(approvers, "approvers.remove", "Remove an approver immediately.", arguments={"name": Name})
