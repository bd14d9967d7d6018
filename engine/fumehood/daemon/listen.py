"""The daemon's socket: private from its first moment.

Host side, before anything listens. Invariant: the socket is never open to anybody but its
owner, not even for the moment between `bind` and `chmod`.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fumehood.store.directory import PRIVATE_FILE, StateError

BACKLOG = 2048


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
