"""Changes of a session's state that the table of transitions lacks: an error in every test."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from fumehood.sandbox.session import Session
from fumehood.sandbox.session_states import ImpossibleChange
from fumehood.sandbox.sessions import SessionKeeper

LOG_IMPOSSIBLE_CHANGE = SessionKeeper._refuse
"""What an engine outside of tests does."""


def raise_impossible_changes(patch: Callable[[object, str, object], None]) -> None:
    """Raise impossible changes instead of logging them."""
    patch(SessionKeeper, "_refuse", _raise)


def _raise(keeper: SessionKeeper, session: Session, error: ImpossibleChange) -> NoReturn:
    raise error
