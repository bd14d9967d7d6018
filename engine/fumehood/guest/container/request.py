"""Reads a child's request, and sets up what the program needs: files, standard input, arguments,
environment variables and working directory.

Guest side, in the child. The child already runs as the programs' user, so it reads and writes files
with only that user's rights.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

from fumehood.guest.container.places import TEMPORARY, WORKSPACE
from fumehood.guest.container.walk import Refused, directory_at, new_file
from fumehood.guest.core.pipes import CHUNK_BYTES, REQUEST_FD, held, write_all
from fumehood.protocol import framing


class SetUpFailed(Exception):
    """The child cannot set up what its request needs, such as a file or the working directory.
    Raised before the program starts.
    """


def read_request() -> dict[str, Any]:
    """Read and return this child's request. If the supervisor is gone, end the process."""
    header = _read_exactly(framing.HEADER.size)
    (length,) = framing.HEADER.unpack(header)
    return framing.parse_body(_read_exactly(length))


def read_row() -> list[Any] | None:
    """Return the next row that the host sends to this child after a request, or None after the last
    row. A row describes one item, for example by its path and size. If the supervisor is gone, end
    this process.
    """
    row: list[Any] | None = read_request()["row"]
    return row


def fed_pieces(size: int) -> Iterator[bytes]:
    """Read the next `size` bytes that the host sends to this child, and yield them in pieces. If
    the supervisor is gone, end this process.
    """
    while size:
        piece = os.read(REQUEST_FD, min(size, CHUNK_BYTES))
        if not piece:
            os._exit(0)  # the supervisor is gone
        size -= len(piece)
        yield piece


def set_up(arguments: dict[str, Any]) -> Callable[[], None]:
    """Prepare everything that the program of a call needs before it starts. Write the caller's
    files into the workspace. Set standard input, program arguments, environment and working
    directory. `arguments` are the arguments of the call.

    Return a function that restores the earlier program arguments, environment and working
    directory. Only sessions call the returned function, because their process outlives the call.

    Raises:
        SetUpFailed: a file cannot be written, or the working directory cannot be entered.
    """
    for file in arguments.get("files") or []:
        _put(file)
    given = (arguments.get("stdin") or "").encode("utf-8")
    given = given or base64.b64decode(arguments.get("stdin_base64") or "")
    # Without content, standard input is the null device, which ends at once.
    stdin = memory_file("stdin", given) if given else os.open("/dev/null", os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    return surround(arguments)


def surround(arguments: dict[str, Any]) -> Callable[[], None]:
    """Set the program's arguments, environment and working directory from the call's `arguments`.
    Return a function that restores the earlier ones.

    Raises SetUpFailed if the working directory cannot be entered.
    """
    restoring = ExitStack()
    path, argv = arguments.get("working_directory"), arguments.get("argv")
    if path is not None:
        earlier = _enter(path)
        restoring.callback(os.close, earlier)
        restoring.callback(os.fchdir, earlier)
    if argv is not None:
        restoring.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [*sys.argv[:1], *argv]
    for one in arguments.get("env") or []:
        restoring.callback(_set_variable, one["name"], os.environ.get(one["name"]))
        os.environ[one["name"]] = one["value"]

    def restore() -> None:
        with suppress(Exception):  # the program may have replaced these objects
            restoring.close()

    return restore


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _enter(path: str) -> int:
    """Enter the directory `path` of the workspace. Return a descriptor of the previous
    directory.
    """
    earlier = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        with directory_at(path) as directory:
            os.fchdir(directory)
    except (Refused, OSError) as fault:
        os.close(earlier)
        raise SetUpFailed(f"the working directory cannot be entered: {fault}") from None
    return earlier


def memory_file(name: str, content: bytes) -> int:
    """Create a file without a path that has this content. Return its descriptor, positioned at the
    beginning of the file.
    """
    try:
        descriptor = os.memfd_create(name, 0)
    except OSError:  # refused if memory is watched, because only files in directories are counted
        descriptor = os.open(TEMPORARY, os.O_TMPFILE | os.O_RDWR, 0o600)
    write_all(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _put(file: dict[str, Any]) -> None:
    """Write one of the caller's files into the workspace. `file` has its path and content. The host
    has already checked the path.
    """
    path = os.path.join(WORKSPACE, file["path"])
    try:
        if "content_base64" in file:
            content = base64.b64decode(file["content_base64"])
        else:
            content = file["content"].encode("utf-8")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write_new(path, content)
    except (OSError, ValueError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else str(fault)
        raise SetUpFailed(f"the file {file['path']} could not be written: {reason}") from None


def _write_new(path: str, content: bytes) -> None:
    """Write `content` to the file `path`. If an earlier run has left a file, link or pipe there, it
    is replaced, and never written through.

    Raises OSError if this fails, for example because `path` is a directory.
    """
    above, name = os.path.split(path)
    with (
        held(os.open(above, os.O_RDONLY | os.O_DIRECTORY)) as directory,
        new_file(directory) as (target, beside),  # the whole path may be too long
    ):
        write_all(target, content)
        os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)


def _read_exactly(count: int) -> bytes:
    return b"".join(fed_pieces(count))
