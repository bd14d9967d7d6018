"""The daemon's own files: a private directory, one lock, one socket.

Host side, before anything listens. Invariants: one engine a state directory, held by a
lock that dies with the process; the socket is never open to anybody but its owner, not
even for the moment between `bind` and `chmod`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600
BACKLOG = 2048


class StateError(Exception):
    """The daemon cannot start here. The message says why and what to do."""


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
        StateError: another process holds it.
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
            raise StateError(
                f"Another engine uses {what} already. Stop it, or choose another place with "
                "FUMEHOOD_HOME or FUMEHOOD_SOCKET."
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def private_socket(path: Path) -> Iterator[socket.socket]:
    """A listening socket for its owner only; a stale one in its place is replaced.

    The caller holds the locks on state directory and socket, so whatever stands at the
    path without an answer is left over from an engine that died.

    Raises:
        StateError: something else stands there, or somebody answers.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            raise StateError(f"The socket {path} cannot be bound: {error.strerror}.") from None
        finally:
            os.umask(before)
        inode = path.lstat()
        if stat.S_IMODE(inode.st_mode) != PRIVATE_FILE:
            raise StateError(f"The socket {path} did not get mode 0600; this file system is unfit.")
        listener.listen(BACKLOG)
        yield listener
        _remove_own(path, inode)
    finally:
        listener.close()


def _remove_stale(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise StateError(f"{path} exists and is no socket. Remove it or choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink()
                return
            raise StateError(f"The socket {path} cannot be checked: {error.strerror}.") from None
    raise StateError(f"Another process listens on {path}. Stop it, or set FUMEHOOD_SOCKET.")


def _remove_own(path: Path, ours: os.stat_result) -> None:
    """Remove the socket, unless somebody has put another in its place."""
    try:
        found = path.lstat()
        if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
            path.unlink()
    except FileNotFoundError:
        pass
