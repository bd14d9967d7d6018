"""`fumehood approvers`: the people whose credentials give authority."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import AsJson, ControlSocketPath, CredentialStdin
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


@approvers.command("list")
def list_approvers(
    as_json: AsJson = False,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """List the current approvers."""
    from fumehood.cli.show import show_json, wants_json
    from fumehood.cli.tables import Field, show_table

    with controlling(socket, credential_stdin=credential_stdin, as_json=as_json) as client:
        found = client.approvers.list()
    if wants_json(as_json):
        show_json([approver.model_dump(mode="json") for approver in found])
        return
    fields = (Field("name"), Field("scopes"), Field("since (UTC)", drop=1), Field("by", drop=2))
    rows = [
        (a.name, ", ".join(a.scopes), f"{a.created_at:%Y-%m-%d %H:%M}", a.created_by) for a in found
    ]
    show_table(fields, rows)


@approvers.command("remove")
def remove(
    name: Name,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Remove an approver immediately."""
    with controlling(socket, credential_stdin=credential_stdin) as client:
        client.approvers.remove(name)
