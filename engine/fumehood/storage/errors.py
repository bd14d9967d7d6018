"""What can go wrong with the state itself.

    StoreError
    ├── NewerState, ForeignState, DamagedState,
    │   AuditKeyLost                              at the start, in words for the operator
    └── WriteFailed, ReadFailed                   while the engine runs, fit for an envelope

Texts of SQLite's stand in them; they name tables and columns, never values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fumehood.core.errors import FumehoodError, InternalError


class StoreError(FumehoodError):
    """The state cannot be read or written. The message says what to do."""


class NewerState(StoreError):
    """A newer engine wrote this database; an older one would not keep its promises."""


class ForeignState(StoreError):
    """The database is somebody else's. It is left exactly as it was found."""


class DamagedState(StoreError):
    """The database is not readable as one. It is left exactly as it was found."""


class AuditKeyLost(StoreError):
    """The audit chain cannot be gone on with: its key is not there, or not usable."""


class WriteFailed(StoreError, InternalError):
    """The disk is full, read-only or failing. Nothing of this write is promised.

    Nothing of it is seen by this engine either. Only where the disk refused the very last
    step, the flush, what was written may be found there at the next start.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The state could not be written ({reason}), so nothing is promised. Do not retry "
            "before the engine's owner has mended it."
        )
        self.reason = reason


class ReadFailed(StoreError, InternalError):
    """What is kept could not be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The state could not be read ({reason}). Do not retry before the engine's owner "
            "has mended it."
        )
        self.reason = reason


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Around what makes values of the rows that a start reads.

    Raises:
        DamagedState: a row holds what no engine wrote there.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError) as fault:  # JSON, times, scopes, whole models
        raise DamagedState(
            f"The state holds {what} that cannot be read ({type(fault).__name__}). It was left as "
            "it is. Restore a copy of it, or use another FUMEHOOD_HOME."
        ) from None
