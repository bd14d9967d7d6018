"""Commands for snapshots and forks: `fumehood sessions snapshot`, `restore`, `fork` and others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from fumehood.cli.exits import say
from fumehood.cli.options import age
from fumehood.cli.plain import plain_command
from fumehood.cli.sessions import SESSION, reference
from fumehood.cli.show import Column, as_fields, as_table, as_text
from fumehood.snapshots.model import MAX_FORKS

SNAPSHOT = SESSION | {
    "snapshot": Annotated[str, typer.Argument(help="The snapshot's id, snap_…, or its name.")]
}

take = plain_command(
    "snapshot_session",
    as_fields,
    arguments=SESSION
    | {"name": (Annotated[str | None, typer.Option(help="A name for the snapshot.")], None)},
    scope=None,
)
show = plain_command(
    "snapshots",
    as_table(
        Column("snapshot", lambda snapshot: snapshot.name or snapshot.id, whole=True),
        Column("MB", lambda snapshot: f"{snapshot.bytes / 1e6:.1f}"),
        Column("age", lambda snapshot: age(snapshot.created_at, datetime.now(UTC)), drop=1),
    ),
    arguments=SESSION,
    scope=None,
)
delete = plain_command("delete_snapshot", as_fields, arguments=SNAPSHOT, scope=None)
restore = plain_command("restore_session", as_fields, arguments=SNAPSHOT, scope=None)
fork = plain_command(
    "fork_session",
    as_text(lambda forks: say("\n".join(map(reference, forks)))),
    arguments=SESSION
    | {
        "snapshot_id": (
            Annotated[
                str | None,
                typer.Option(
                    "--snapshot", help="A snapshot. Default: the session's current files."
                ),
            ],
            None,
        ),
        "name": (
            Annotated[str | None, typer.Option(help="A name. Several forks are numbered: NAME-1.")],
            None,
        ),
        "count": (Annotated[int, typer.Option(min=1, max=MAX_FORKS, help="Number of forks.")], 1),
    },
    scope=None,
)
