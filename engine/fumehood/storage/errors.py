"""Errors of the database and the state directory.

    StoreError
    ├── NewerState, ForeignState, DamagedState,
    │   AuditKeyLost, Standby                     raised at the start, for the operator
    ├── Fenced                                    raised while the engine runs, which then stops
    └── WriteFailed, ReadFailed                   raised while the engine runs; the message may be
                                                  shown to a caller
        └── WriteUnavailable, ReadUnavailable     the same, and a retry may help
    FilesAway                                     raised while the engine runs: files in a remote
                                                  place cannot be used

Messages may quote the database's own messages. These name tables and columns, but never contain
stored values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fumehood.core.errors import EngineError, FumehoodError, InternalError, StateUnavailable

RETRY_AFTER_MS = 1000
"""Suggested delay in milliseconds before a retry while the database cannot be reached."""


class StoreError(FumehoodError):
    """The state cannot be read or written. The message explains what to do."""


class NewerState(StoreError):
    """A newer version of the engine wrote this database. An older version must not use it, because
    an older version could break guarantees of the newer version.
    """


class ForeignState(StoreError):
    """The database belongs to another program. The engine does not change it."""


class DamagedState(StoreError):
    """The database is damaged and cannot be read. The engine does not change it."""


class Standby(StoreError):
    """Another engine is already using this state, so this engine must wait or end."""

    def __init__(self) -> None:
        super().__init__("Another engine is active on this state.")


class AuditKeyLost(StoreError):
    """No row can be added to the audit chain (the table in which tampering can be detected),
    because the key of the chain is missing or unusable.
    """


class Fenced(StoreError):
    """Another engine has taken over the state, so this engine can no longer write."""


class WriteFailed(StoreError, InternalError):
    """The state could not be written, for example because the disk is full, read-only or failing.
    None of the changes is guaranteed to be stored.

    While this engine runs, it reads the state without the changes. If only the final flush to disk
    failed, the changes may exist after the next start.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The state could not be written ({reason}), so this change may be lost. Do not retry "
            "before the engine's owner has repaired it."
        )
        self.reason = reason


class ReadFailed(StoreError, InternalError):
    """The state could not be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The state could not be read ({reason}). Do not retry before the engine's owner "
            "has repaired it."
        )
        self.reason = reason


class _Away(StateUnavailable):
    def __init__(self, reason: str) -> None:
        EngineError.__init__(
            self,
            f"The engine's database cannot be used now ({reason}). Call again later, with the same "
            "key.",
            retry_after_ms=RETRY_AFTER_MS,
        )
        self.reason = reason


class WriteUnavailable(_Away, WriteFailed):
    """The state could not be written, because the database cannot be reached now or another engine
    has taken it over. If a commit was interrupted, its changes may have been stored.
    """


class ReadUnavailable(_Away, ReadFailed):
    """The state could not be read, because the database cannot be reached now."""


class FilesAway(StateUnavailable, OSError):
    """The remote place for the engine's files cannot be used now. This error is also an OSError, so
    that callers handle it like a disk error.
    """

    def __init__(self, reason: str) -> None:
        EngineError.__init__(
            self,
            f"The engine's files cannot be reached now ({reason}). Try again later.",
            retry_after_ms=RETRY_AFTER_MS,
        )
        self.reason = self.strerror = reason


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Raise DamagedState if the block, which parses rows, raises LookupError, TypeError or
    ValueError. Used at the engine's start.

    `what` names the rows in the error message, for example "approvers".

    Raises:
        DamagedState: a row contains a value that no engine would have written.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError) as fault:  # of JSON, times, scopes or models
        raise DamagedState(
            f"The state holds {what} that cannot be read ({type(fault).__name__}). It was left as "
            "it is. Restore a copy of it, or use another FUMEHOOD_HOME."
        ) from None
