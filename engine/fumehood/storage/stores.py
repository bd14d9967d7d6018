"""The stores of one engine: its database, its places for files, and the data that is kept in both.

Host side, created by `compose` and used by the pipeline. Creating the stores opens no files.
`compose` later opens, prunes and closes the stores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fumehood.core.limits import MB
from fumehood.storage.blobs import BlobStore
from fumehood.storage.calls import CallLog
from fumehood.storage.database import Database, open_database
from fumehood.storage.files import FilePlaces
from fumehood.storage.sessions import SessionTable
from fumehood.storage.settings import FileSettings, RecordSettings


@dataclass(frozen=True, slots=True)
class Stores:
    """The objects with which one engine stores its data. If `is_own` is True, the engine created
    `database` itself and must close it at the end.
    """

    database: Database
    is_own: bool
    files: FilePlaces
    calls: CallLog
    blobs: BlobStore
    sessions: SessionTable


def make_stores(
    given: Database | None,
    settings: FileSettings,
    record: RecordSettings,
    *,
    recorded: Literal["all", "failed", "none"],
    calls_kept: int,
    calls_kept_days: int,
    blobs_kept_mb: int,
    blobs_kept_hours: float,
    now: Callable[[], datetime],
) -> Stores:
    """Create the stores of one engine.

    `given` is the database to use. If it is None, a new database is created in memory. `settings`
    says where files are kept.

    `recorded` says which calls get a record (arguments and answer). `record` limits the age and the
    total size of records. `calls_kept` is the maximum number of calls of each principal, and
    `calls_kept_days` their maximum age. `blobs_kept_mb` is the maximum total size of blobs, and
    `blobs_kept_hours` their lifetime.

    Raises:
        StoreError: the optional dependencies for the remote place are not installed.
    """
    database = given if given is not None else open_database(None)
    own = database.directory
    # Without a state it is opened as well: a standby needs its extra before it is active.
    remote = settings.remote()
    files = FilePlaces() if own is None else FilePlaces(settings.directory or own, remote)
    blobs = BlobStore(
        database,
        files.directory,
        max_bytes=blobs_kept_mb * MB,
        lifetime_s=max(1, int(blobs_kept_hours * 3600)),
        now=now,
        remote=files.remote,
    )
    return Stores(
        database,
        given is None,
        files,
        CallLog(
            database,
            kept_days=calls_kept_days,
            kept=calls_kept,
            recorded=recorded,
            record=record,
        ),
        blobs,
        SessionTable(database, blobs.overdue.set),
    )
