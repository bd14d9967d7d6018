"""The transitions of a session: every way in which its state can change.

Each change in `sessions.py` uses one row of this table. A change that the table lacks is a bug: the
session's state, files and stored row stay as they are, and the log names the change. The table in
`docs/explanation/sessions.md` is generated from the table here, and a model-based test covers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fumehood.core.session import SessionStatus

ACTIVE, PAUSED, STOPPED = SessionStatus.ACTIVE, SessionStatus.PAUSED, SessionStatus.STOPPED
_LIVE = frozenset({ACTIVE, PAUSED, STOPPED})


class Keeps(StrEnum):
    """A place outside the container that keeps a session's files."""

    DISK = "a disk"
    COPY = "a saved copy"


class ImpossibleChange(Exception):
    """The table has no row for a change of a session's state, which is a bug."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table: a change of the state."""

    name: str
    leaves: frozenset[SessionStatus]
    """The states before the change. Empty if the session did not exist."""
    to: SessionStatus
    by: str
    """Who makes the change, as text for the documentation."""
    when: str
    """When the change is made, as text for the documentation."""
    needs: frozenset[Keeps] = frozenset()
    """The session must have at least one of these, unless this is empty."""
    is_seen: bool = False
    """Whether the session's container makes the change, and the session's state follows it."""

    def fits(self, state: SessionStatus, keeps: frozenset[Keeps]) -> bool:
        """Whether a session in this state, which keeps its files in `keeps`, can change so."""
        return state in self.leaves and (not self.needs or bool(self.needs & keeps))


def _rows(*rows: Transition) -> dict[str, Transition]:
    return {row.name: row for row in rows}


TRANSITIONS = _rows(
    Transition(
        "create", frozenset(), ACTIVE, "its owner",
        "its container runs, and its row is stored",
    ),
    Transition(
        "fork", frozenset(), STOPPED, "its owner",
        "the copy of another session's disk is its disk, and its row is stored",
    ),
    Transition(
        "pause", frozenset({ACTIVE}), PAUSED, "its owner, or the engine",
        "its owner asks for it, or it was not used for `sessions.pause_seconds`", is_seen=True,
    ),
    Transition(
        "thaw", frozenset({PAUSED}), ACTIVE, "the engine",
        "it is used; or the next engine finds that its container is not frozen", is_seen=True,
    ),
    Transition(
        "stop", frozenset({ACTIVE, PAUSED}), STOPPED,
        "its owner, the engine, or the end of its container",
        "its container is gone; or, with a disk, its owner asks for it, its idle time is over, or "
        "another session needs its place",
        needs=frozenset(Keeps), is_seen=True,
    ),
    Transition(
        "start", frozenset({STOPPED}), ACTIVE, "the engine",
        "it is used: a new container has its disk",
        needs=frozenset({Keeps.DISK}), is_seen=True,
    ),
    Transition(
        "restore", _LIVE, ACTIVE, "the engine",
        "it is used, and its container, disk or node is lost: a new container gets the files of "
        "the copy",
        needs=frozenset({Keeps.COPY}),
    ),
    Transition(
        "end", _LIVE, SessionStatus.ENDED, "its owner, or the engine",
        "its owner asks for it; its lifetime is over, or without a disk its idle time; or the "
        "engine stops and keeps no sessions",
    ),
    Transition(
        "lose", _LIVE, SessionStatus.LOST, "the engine, or the next one",
        "its container is gone, and neither a disk nor a complete copy has its files",
    ),
)  # fmt: skip
"""Name → row, in the order of a session's life."""


def next_state(
    name: str, state: SessionStatus, keeps: frozenset[Keeps] = frozenset()
) -> SessionStatus:
    """Return the state after the change with this name. Raises ImpossibleChange."""
    row = TRANSITIONS[name]
    if not row.fits(state, keeps):
        raise ImpossibleChange(f"A session that is {_in_words(state, keeps)} cannot {name}.")
    return row.to


def seen_change(state: SessionStatus, now: SessionStatus, keeps: frozenset[Keeps]) -> str:
    """Return the name of the change that a container has made. Raises ImpossibleChange."""
    for row in TRANSITIONS.values():
        if row.is_seen and row.to is now and row.fits(state, keeps):
            return row.name
    raise ImpossibleChange(
        f"The container of a session that is {_in_words(state, keeps)} cannot be {now}."
    )


def _in_words(state: SessionStatus, keeps: frozenset[Keeps]) -> str:
    return f"{state}, with {' and '.join(sorted(keeps))}" if keeps else str(state)
