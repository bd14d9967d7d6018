"""Values for snapshots and forks: request bodies, limits and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from fumehood.core.call import Id
from fumehood.core.envelope import Envelope
from fumehood.core.session import SESSION_NAME, SessionRecord
from fumehood.core.value import StrictValue

SnapshotName = Annotated[str, Field(min_length=1, max_length=63, pattern=SESSION_NAME)]

MAX_SNAPSHOTS = 50
"""Maximum number of snapshots of one session."""

MAX_FORKS = 50
"""Maximum number of forks that one request creates."""


class NewSnapshot(StrictValue):
    """The body of `POST /v1/sessions/{session_id}/snapshots`."""

    name: SnapshotName | None = Field(
        default=None, description="A name for the snapshot, which can be used instead of its id."
    )


class Restoration(StrictValue):
    """The body of `POST /v1/sessions/{session_id}/restore`."""

    snapshot_id: Id = Field(description="The snapshot's id, `snap_…`, or its name.")


class ForkWish(StrictValue):
    """The body of `POST /v1/sessions/{session_id}/fork`."""

    snapshot_id: Id | None = Field(
        default=None,
        description="The id or name of a snapshot. By default, the session's current files are "
        "used.",
    )
    name: SnapshotName | None = Field(
        default=None,
        max_length=60,
        description="A name for the fork. Several forks are numbered: NAME-1, NAME-2.",
    )
    count: int = Field(default=1, ge=1, le=MAX_FORKS)


@dataclass(frozen=True, slots=True)
class ForkedCalls:
    """The result of calls in forks of one session."""

    answers: tuple[Envelope, ...]
    """One answer for each input, in the order of the inputs."""
    best: int | None
    """The index of the best answer, or None if `best` was not given or no call succeeded."""
    session: SessionRecord | None
    """The fork with the best answer, which was kept, or None."""
