"""Access to a session's workspace by descriptors, one name at a time, without following links.

Guest side, in the child that carries out file operations. No program of the session runs at the
same time, but earlier programs may have left anything in the workspace: links, pipes, device names,
directories without permissions.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fumehood.guest.container.places import WORKSPACE
from fumehood.guest.core.pipes import held

MAX_PATH_BYTES = 4096 - len(f"{WORKSPACE}/") - 1
"""Maximum number of bytes of a path below the workspace. The host has the same limit. Programs can
create longer paths step by step, but the host cannot name these.
"""

MAX_ANSWER_BYTES = 200 * 1024
"""Maximum size in bytes of the entries in one answer."""

UPLOAD_PREFIX = ".fumehood-upload-"
"""Prefix of the name of an unfinished file. No listing shows such a file."""

WRITE_PREFIX = f"{UPLOAD_PREFIX}new-"
"""Prefix of the name of an unfinished file that a single request writes. An upload takes several
requests, and its file has the prefix `UPLOAD_PREFIX`.
"""

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """A file operation is refused. `kind` is the reason as a fixed word, such as `not_found`, and
    the message is one sentence.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextmanager
def directory_at(path: str, *, make: bool = False, named: str = "") -> Iterator[int]:
    """Open the directory `path` of the workspace without following links, and yield its descriptor.
    An empty path means the workspace itself. If `make` is True, create missing directories.

    Raises Refused for the same reasons as `enter`. The error message shows the path `named`, or
    `path` if `named` is empty.
    """
    directory = os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.split("/") if path else ():
            inner = enter(name, directory, named or path, make=make)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)


def enter(name: str, directory: int, path: str, *, make: bool = False) -> int:
    """Open the directory `name` in the open directory `directory`, and return its descriptor. If
    `make` is True, first create the directory if it is missing. `path` is the whole path, for
    messages.

    Raises:
        Refused: the directory is missing, is a link, is not a directory, or may not be entered by
            this user. Also raised if `name` is not a plain name, such as `..`.
    """
    if name in ("", ".", ".."):
        raise Refused("invalid", "The path is not made of plain names.")
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=directory)
    status = status_of(name, directory, path)
    if stat.S_ISLNK(status.st_mode):
        raise Refused("link", f"{path} leads over a symbolic link, which is not followed.")
    if not stat.S_ISDIR(status.st_mode):
        raise Refused("not_found", f"There is no {path} in the workspace.")
    try:
        inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
    except OSError as error:
        raise Refused("no_right", f"{path} cannot be reached: {error.strerror}.") from None
    if not os.access(".", os.X_OK, dir_fd=inner):
        os.close(inner)
        raise Refused("no_right", f"{path} cannot be reached.")
    return inner


@contextmanager
def parent_of(path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the parent directory of a path. Yield its descriptor and the last name of the path. If
    `make` is True, create missing directories.
    """
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
    """Open the plain file `name` in the open directory `directory`, and return its descriptor.
    Opening never blocks. `path` is the whole path, for messages, and `flags` are those of
    `os.open`.

    Raises Refused if `name` is missing, is a link, or is not a plain file. Raises OSError if the
    file cannot be opened.
    """
    status = status_of(name, directory, path)
    if stat.S_ISLNK(status.st_mode):
        raise Refused("link", f"{path} is a symbolic link, which is not followed.")
    if not stat.S_ISREG(status.st_mode):
        raise Refused("not_a_file", f"{path} is not a plain file.")
    # No program of the session runs now, so the file cannot be replaced in between.
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)


@contextmanager
def new_file(directory: int, mode: int = 0o644) -> Iterator[tuple[int, str]]:
    """Create a file in the open directory `directory`. Yield the file's descriptor and its
    temporary name, which no program can predict. The block must rename the file when it is
    complete, because listings do not show such names. If the block raises an exception, the file is
    removed.
    """
    name = f"{WRITE_PREFIX}{os.urandom(16).hex()}"
    with held(os.open(name, NEW_FLAGS, mode, dir_fd=directory)) as descriptor:
        try:
            yield descriptor, name
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            raise


def empty(directory: int) -> None:
    """Remove everything in the open directory `directory`, however deep the nesting is."""
    while names := os.listdir(directory):
        for name in names:
            if not is_directory(name, directory):
                os.unlink(name, dir_fd=directory)
                continue
            os.chmod(name, 0o700, dir_fd=directory)
            with held(os.open(name, DIRECTORY_FLAGS, dir_fd=directory)) as inner:
                for below in os.listdir(inner):
                    # Moved up, so that few descriptors are enough for any depth.
                    if is_directory(below, inner):
                        os.chmod(below, 0o700, dir_fd=inner)
                        # A name that a program could not predict and use.
                        name_at_top = os.urandom(12).hex()
                        os.rename(below, name_at_top, src_dir_fd=inner, dst_dir_fd=directory)
                    else:
                        os.unlink(below, dir_fd=inner)
            os.rmdir(name, dir_fd=directory)


def is_directory(name: str, directory: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


def is_nameable(path: str) -> bool:
    """Whether the host can name a path. For this, the path must be UTF-8 and not too long."""
    try:
        return len(path.encode("utf-8")) <= MAX_PATH_BYTES
    except UnicodeEncodeError:
        return False
