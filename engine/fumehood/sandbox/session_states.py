"""The transitions of a session: every change of its state that is possible.

Each change of a state in `sessions.py` is one row of the table `TRANSITIONS`. An attempt to make
any other change is a bug. Such an attempt is logged, and the session's state, files and stored row
stay as they are. A model-based test covers the table. The table in `docs/explanation/sessions.md`
is generated from it.
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
    """A change of a session's state is not in `TRANSITIONS`. This is always a bug."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One row of the table `TRANSITIONS`: a possible change of a session's state."""

    name: str
    leaves: frozenset[SessionStatus]
    """The states before the change. Empty if the change creates the session."""
    to: SessionStatus
    by: str
    """Who makes the change, in words for the documentation."""
    when: str
    """When the change is made, in words for the documentation."""
    needs: frozenset[Keeps] = frozenset()
    """The places of which at least one must keep the session's files. Empty if the change needs
    none.
    """
    is_seen: bool = False
    """Whether the container changes first, and the session's state is then adjusted to that of the
    container.
    """

    def fits(self, state: SessionStatus, keeps: frozenset[Keeps]) -> bool:
        """Whether the change is possible for a session in the state `state`. `keeps` are the places
        outside the container that keep the session's files.
        """
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
        "its disk is copied from another session's, and its row is stored",
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
        "it is used: a new container gets its disk",
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
"""Name of a transition → its row. The order is that of the changes in a session's life."""


def next_state(
    name: str, state: SessionStatus, keeps: frozenset[Keeps] = frozenset()
) -> SessionStatus:
    """Return the state after the transition `name` of a session in the state `state`. `keeps` are
    the places that keep the session's files. Raises ImpossibleChange if this transition is not
    possible in this state.
    """
    row = TRANSITIONS[name]
    if not row.fits(state, keeps):
        raise ImpossibleChange(f"No transition {name!r} from {_in_words(state, keeps)}.")
    return row.to


def seen_change(state: SessionStatus, now: SessionStatus, keeps: frozenset[Keeps]) -> str:
    """Return the name of the transition that changes a session from the state `state` to `now`, the
    state of its container. `keeps` are the places that keep the session's files. Raises
    ImpossibleChange if there is no such transition.
    """
    for row in TRANSITIONS.values():
        if row.is_seen and row.to is now and row.fits(state, keeps):
            return row.name
    raise ImpossibleChange(
        f"No transition of the container from {_in_words(state, keeps)} to {now}."
    )


def _in_words(state: SessionStatus, keeps: frozenset[Keeps]) -> str:
    return f"{state} (with {' and '.join(sorted(keeps))})" if keeps else str(state)
