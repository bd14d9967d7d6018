"""The state directory: private, used by one engine at a time, and identified by an owner id.

Host side. Invariants: a lock ensures that only one engine uses a state directory until its process
ends; successive engines of one directory have the same owner id; engines that run at the same time
have different owner ids. The owner id labels the objects that an engine creates elsewhere, such as
containers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fumehood.storage.errors import StoreError

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600


def private(path: str, flags: int) -> int:
    """Open a file without following a symbolic link, and return its descriptor. A new file is
    accessible to this user only. Use this function as the `opener` argument of `open`.
    """
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)


class StateError(StoreError):
    """The engine cannot start with this state. The message explains why, and what the operator can
    do.
    """


class InUse(StateError):
    """Another process holds the lock on a file."""


def private_directory(path: Path) -> Path:
    """Create a directory if it is missing. If it exists, check that only this user can access it.
    Return the path.

    Raises:
        StateError: the directory cannot be created, belongs to another user, or is accessible to
            other users.
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
    """Hold an exclusive lock on a file during the block. The file remains afterwards.

    `what` names the locked object in the message of InUse, for example "this state directory".

    Raises:
        InUse: another process holds the lock.
        StateError: the file cannot be opened.
    """
    try:
        file = open(path, "ab", opener=private)  # noqa: SIM115
    except OSError as error:
        raise StateError(f"The lock {path} cannot be opened: {error.strerror}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                f"Another engine uses {what} already. Stop it, or choose another place with "
                "FUMEHOOD_HOME or FUMEHOOD_SOCKET."
            ) from None
        # If the file were removed afterwards, two processes could lock two files with this path.
        yield


# -- private files -------------------------------------------------------------------------


FILE_NAME = "owner"
RANDOM_BYTES = 16


def owner_id(state: Path) -> str:
    """Return the owner id of a state directory, 32 hexadecimal digits. All engines that use the
    directory have this id, and recognize their containers by it. The id is created on first use.

    The caller must hold the directory's lock.

    Raises:
        OSError: the file of the id can be neither read nor created, or is damaged.
    """
    found, inode = random_file(state / FILE_NAME, RANDOM_BYTES)
    # The inode is included so that a copy of the directory has another id.
    return hashlib.sha256(found + inode.to_bytes(8, "big")).hexdigest()[:32]


def random_file(path: Path, size: int) -> tuple[bytes, int]:
    """Return the random bytes in a private file, and the file's inode number. The file is created
    on first use, with `size` random bytes.

    Raises:
        OSError: the file can be neither read nor created, or is damaged.
    """
    if not path.is_symlink() and not path.exists():
        write_private(path, secrets.token_bytes(size))
    with open(path, "rb", opener=private) as file:
        found, inode = file.read(size + 1), os.fstat(file.fileno()).st_ino
    if len(found) != size:
        raise OSError(errno.EIO, f"{path.name} in the state directory is damaged")
    return found, inode


def write_private(path: Path, content: bytes, mode: int = PRIVATE_FILE) -> None:
    """Create or replace a file atomically. By default, only this user can access the file. The file
    is on disk when this function returns.

    Raises OSError if the file cannot be written.
    """
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with open(draft, "xb", opener=private) as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush the content of a file, or the list of names in a directory, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
