"""Ways into a session's workspace: by descriptors, one name at a time, without following links.

Guest side, in the child that carries out file operations; used by `files`. No program of the
session runs at the same time, but whatever it left lies there: links, pipes, devices' names,
directories without rights.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

WORKSPACE = "/workspace"

_BLOCKED = {errno.ELOOP: "link", errno.ENOTDIR: "not_found", errno.ENOENT: "not_found"}

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """It cannot be done; `kind` is one of a few words, the text one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextmanager
def directory_at(path: str, *, make: bool = False, named: str = "") -> Iterator[int]:
    """A directory of the workspace, open, reached name by name; `named` is what was asked for."""
    directory = os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.split("/") if path else ():
            inner = _enter(name, directory, named or path, make=make)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)


def _enter(name: str, directory: int, path: str, *, make: bool) -> int:
    if name in ("", ".", ".."):
        raise Refused("invalid", "The path is not made of plain names.")
    if make:
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
        except FileExistsError:
            pass
    try:
        return os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
    except OSError as error:
        is_link = os.path.lexists(f"/proc/self/fd/{directory}/{name}") and stat.S_ISLNK(
            os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        )
        kind = "link" if is_link else _BLOCKED.get(error.errno or 0, "invalid")
        if kind == "link":
            message = f"{path} leads over a symbolic link, which is not followed."
        elif kind == "not_found":
            message = f"There is no {path} in the workspace."
        else:
            message = f"{path} cannot be reached: {error.strerror}."
        raise Refused(kind, message) from None


@contextmanager
def parent_of(path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the parent directory of a path. Returns its descriptor and the last name."""
    above, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise Refused("invalid", "The path is not made of plain names.")
    with directory_at(above, make=make, named=path) as directory:
        yield directory, name


def status_of(name: str, directory: int, path: str) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        raise Refused("not_found", f"There is no {path} in the workspace.") from None


def open_plain(name: str, directory: int, path: str, flags: int = os.O_RDONLY) -> int:
    """Open a plain file. Anything else is refused without waiting or following."""
    status = status_of(name, directory, path)
    if stat.S_ISLNK(status.st_mode):
        raise Refused("link", f"{path} is a symbolic link, which is not followed.")
    if not stat.S_ISREG(status.st_mode):
        raise Refused("not_a_file", f"{path} is not a plain file.")
    # No program of the session runs now that could put something else in its place.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
