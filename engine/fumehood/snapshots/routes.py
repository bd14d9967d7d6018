"""HTTP routes of snapshots and forks of a caller's own sessions."""

from __future__ import annotations

from typing import Annotated

from fumehood.core.errors import InternalError, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.session import MAKING_S, TURN_S, SessionRecord, Snapshot
from fumehood.engine import Engine
from fumehood.http.endpoint import As, Needs, endpoint
from fumehood.http.routes.sessions import (
    COPY_ERRORS,
    SessionAnswer,
    SessionId,
    refuse_while_draining,
)
from fumehood.snapshots.in_engine import SnapshotsPart
from fumehood.snapshots.model import ForkWish, NewSnapshot, Restoration
from fumehood.snapshots.service import Snapshots

SnapshotAnswer = Annotated[
    Snapshot, As("snapshot", "SnapshotAnswer", "A snapshot: a copy of a session's files.")
]


def _snapshots(engine: Engine) -> Snapshots:
    return engine.part(SnapshotsPart).snapshots


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/snapshots",
    Needs.CALLER,
    errors=[ResourceNotFound],
    client="snapshots",
)
async def list_snapshots(
    engine: Engine, caller: Principal, session_id: SessionId
) -> Annotated[
    tuple[Snapshot, ...], As("items", "SnapshotList", "A session's snapshots, oldest first.")
]:
    """List the snapshots of one of the caller's own sessions, oldest first."""
    return engine.sessions.find(caller, session_id).snapshots


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/snapshots",
    Needs.CALLER,
    errors=COPY_ERRORS,
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def snapshot_session(
    engine: Engine, body: NewSnapshot, caller: Principal, session_id: SessionId
) -> SnapshotAnswer:
    """Copy the files of one of the caller's own sessions to a snapshot.

    The session must have a disk. The copy is made once the session's running and waiting calls have
    finished. It is kept until it is deleted or the session ends.
    """
    return await _snapshots(engine).take(caller, session_id, body.name)


@endpoint(
    "DELETE",
    "/v1/sessions/{session_id}/snapshots/{snapshot_id}",
    Needs.CALLER,
    errors=[ResourceNotFound, InternalError],
    work_s=TURN_S,
)
async def delete_snapshot(
    engine: Engine,
    caller: Principal,
    session_id: SessionId,
    snapshot_id: Annotated[str, "The snapshot's id, `snap_…`, or its name."],
) -> SnapshotAnswer:
    """Delete a snapshot of one of the caller's own sessions."""
    return await _snapshots(engine).delete(caller, session_id, snapshot_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/restore",
    Needs.CALLER,
    errors=COPY_ERRORS,
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def restore_session(
    engine: Engine, body: Restoration, caller: Principal, session_id: SessionId
) -> SessionAnswer:
    """Restore the files of one of the caller's own sessions from one of its snapshots.

    The restore waits for the session's running and waiting calls to finish, and then ends
    everything else that runs in the session. The next use starts the session again, without its
    variables.
    """
    return await _snapshots(engine).restore(caller, session_id, body.snapshot_id)


@endpoint(
    "POST",
    "/v1/sessions/{session_id}/fork",
    Needs.CALLER,
    errors=COPY_ERRORS,
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def fork_session(
    engine: Engine, body: ForkWish, caller: Principal, session_id: SessionId
) -> Annotated[tuple[SessionRecord, ...], As("items", "ForkList", "The new sessions.")]:
    """Create sessions with the files of one of the caller's own sessions or of its snapshots.

    The new sessions are stopped until their first use. Variables are not copied. The snapshots of a
    lost session can be forked for a day.
    """
    return tuple(await _snapshots(engine).fork(caller, session_id, **body.model_dump()))


OPERATIONS = [list_snapshots, snapshot_session, delete_snapshot, restore_session, fork_session]
