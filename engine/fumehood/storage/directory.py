"""The state directory: private, and one engine's at a time.

Host side. Invariant: one engine a state directory, held by a lock that dies with the
process.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fumehood.storage.errors import StoreError

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600


class StateError(StoreError):
    """The engine cannot start here. The message says why and what to do."""


class InUse(StateError):
    """Another process holds the lock."""


def private_directory(path: Path) -> Path:
    """Make the directory, or check that it is ours and nobody else's.

    Raises:
        StateError: it cannot be made, belongs to somebody else, or is open to others.
    """
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise StateError(f"The directory {path} cannot be made: {error.strerror}.") from None
    if found.st_uid != os.geteuid():
        raise StateError(f"The directory {path} belongs to another user. Choose another one.")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise StateError(
            f"The directory {path} is open to other users. Choose one of your own with "
            "FUMEHOOD_HOME (or FUMEHOOD_SOCKET)"
            + ("." if found.st_mode & stat.S_ISVTX else f"; if it is yours alone: chmod 700 {path}")
        )
    return path


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock on a file for as long as the context lasts.

    The file stays behind when the lock is released: removing it would let two processes
    each lock a file of their own.

    Raises:
        InUse: another process holds it.
        StateError: it cannot be opened or locked.
    """
    try:
        descriptor = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE
        )
    except OSError as error:
        raise StateError(f"The lock {path} cannot be opened: {error.strerror}.") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                f"Another engine uses {what} already. Stop it, or choose another place with "
                "FUMEHOOD_HOME or FUMEHOOD_SOCKET."
            ) from None
        except OSError as error:  # a file system without locks
            raise StateError(f"{path} cannot be locked: {error.strerror}.") from None
        yield
    finally:
        os.close(descriptor)
