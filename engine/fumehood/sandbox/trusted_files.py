"""Open directories and files that no other user could have written.

Host side. Definitions, policies and recipes decide what agents may do, so files that another user
could have written are refused. Invariants: a directory's path is resolved first, and from then on
no symbolic link is followed; every check is made on the opened file, because its name may meanwhile
refer to another file; only regular files are opened.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_FILES = 1000
"""Maximum number of files in a directory, not counting ignored ones."""

MAX_FILE_BYTES = 1 << 20
"""Maximum size of a file in bytes."""

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


class Untrusted(Exception):
    """A directory or file is not trusted, so it is not read. The message tells the operator why."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The identity, owner, mode, size and times of a file.

    If a file changes, its signature changes.
    """

    device: int
    inode: int
    mode: int
    uid: int
    size: int
    modified_ns: int
    changed_ns: int


def signature_of(found: os.stat_result) -> Signature:
    """Return the signature of a file. `found` is the result of `stat` for the file."""
    return Signature(
        found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_size,
        found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip


def open_directory(path: Path, owners: frozenset[int]) -> int:
    """Open a directory and return its descriptor, which the caller must close.

    Only users in `owners` may be able to change the directory. So the directory and all directories
    above it must belong to such users, and nobody else may have write permission. If a directory
    above `path` has the sticky bit, as `/tmp` has, others may have write permission in it.

    Raises:
        Untrusted: the directory is missing, or another user could change its content.
    """
    descriptor = -1
    try:
        steps = Path(os.path.realpath(path, strict=True)).parts
        for depth, step in enumerate(steps):
            is_last = depth == len(steps) - 1
            # O_PATH needs only search permission; reading may be forbidden.
            flags = _OPEN | os.O_DIRECTORY if is_last else _OPEN | os.O_DIRECTORY | os.O_PATH
            above = descriptor
            descriptor = os.open(step, flags, dir_fd=None if above < 0 else above)
            if above >= 0:
                os.close(above)
            what = "the directory" if is_last else f"the directory {step[:80]!a} above it"
            _require_own(os.fstat(descriptor), owners, what, may_be_sticky=not is_last)
    except BaseException as error:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
        if isinstance(error, OSError):
            raise Untrusted(f"the directory cannot be opened: {error.strerror}") from None
        raise
    return descriptor


def list_files(directory: int) -> dict[str, Signature]:
    """Return a mapping from the name of each file in a directory to the file's current signature.
    `directory` is a descriptor from `open_directory`. Names that begin with a dot or end with a
    tilde are left out.

    Raises:
        Untrusted: the directory has too many files.
    """
    found: dict[str, Signature] = {}
    for name in os.listdir(directory):
        # Editors, and programs that replace files, leave such files behind.
        if name.startswith(".") or name.endswith("~"):
            continue
        if len(found) == MAX_FILES:
            raise Untrusted(f"the directory holds more than {MAX_FILES} files")
        with suppress(FileNotFoundError):  # removed after it was listed
            found[name] = signature_of(os.stat(name, dir_fd=directory, follow_symlinks=False))
    return found


def read_file(directory: int, name: str, owners: frozenset[int]) -> tuple[bytes, Signature]:
    """Read the file `name` in a directory, and return its bytes and its signature. `directory` is a
    descriptor from `open_directory`. The file must belong to a user in `owners`.

    The signature is taken after the reading. If an earlier `list_files` returned another signature,
    the file has changed since then.

    Raises:
        Untrusted: the file is not a regular file, is too large, or could have been written by
            another user.
        OSError: the file cannot be read.
    """
    # Check the file before opening: to open a device has side effects, to open a pipe may block.
    _check_file(os.stat(name, dir_fd=directory, follow_symlinks=False), owners)
    descriptor = os.open(name, _OPEN | os.O_NONBLOCK, dir_fd=directory)
    try:
        _check_file(os.fstat(descriptor), owners)
        data = bytearray()
        while chunk := os.read(descriptor, MAX_FILE_BYTES + 1 - len(data)):
            data += chunk
            if len(data) > MAX_FILE_BYTES:
                raise Untrusted(TOO_LARGE)
        after = os.fstat(descriptor)
        _check_file(after, owners)
        return bytes(data), signature_of(after)
    finally:
        os.close(descriptor)


def read_trusted(path: Path) -> tuple[bytes, Signature]:
    """Read a file that only root or the engine's user could have written. Return its bytes and its
    signature. Raises the same errors as `read_file`, and Untrusted if another user could change the
    file's directory.
    """
    owners = frozenset({0, os.geteuid()})
    directory = open_directory(path.parent, owners)
    try:
        return read_file(directory, path.name, owners)
    finally:
        os.close(directory)


def read_private(path: Path) -> bytes:
    """Read a file that only root or the engine's user could have written, and that only its owner
    can read. Return its bytes. Raises the same errors as `read_trusted`, and Untrusted if others
    can read the file.
    """
    data, signature = read_trusted(path)
    if stat.S_IMODE(signature.mode) & 0o077:
        raise Untrusted("it is open to other users; fix it with chmod 600")
    return data


TOO_LARGE = f"it is larger than {MAX_FILE_BYTES >> 20} MB"


def _check_file(found: os.stat_result, owners: frozenset[int]) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted("it is a symbolic link; links are not followed")
    if not stat.S_ISREG(found.st_mode):
        raise Untrusted("it is not a regular file")
    _require_own(found, owners, "it")
    if found.st_size > MAX_FILE_BYTES:
        raise Untrusted(TOO_LARGE)


def _require_own(
    found: os.stat_result, owners: frozenset[int], what: str, *, may_be_sticky: bool = False
) -> None:
    if found.st_uid not in owners:
        raise Untrusted(f"{what} belongs to another user (uid {found.st_uid})")
    # With the sticky bit, others can write in the directory, but cannot replace its entries.
    is_sticky = may_be_sticky and found.st_mode & stat.S_ISVTX
    if found.st_mode & _OTHERS_MAY_WRITE and not is_sticky:
        raise Untrusted(f"{what} can be written by others than its owner; fix it with chmod go-w")
