"""Local files that a client sends to an engine or makes from its answers.

Client side. Invariants: a file that is opened by its path is a regular file, so a client never
waits for a pipe or reads a device without end. A file that is created here is complete or absent,
is not written through a link, and replaces an existing file only on request.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from fumehood.core.json_types import JsonObject
from fumehood.core.workspace_path import path_fault

if TYPE_CHECKING:
    pass


CHUNK_BYTES = 256 * 1024

Source = bytes | Path | BinaryIO
"""The content of a file, the path of a file, or an open binary file. An open file is sent from its
current position."""


@contextmanager
def opened(source: Source) -> Iterator[bytes | BinaryIO]:
    """Yield the bytes to read from `source`: `source` itself if it is bytes or an open file, or a
    newly opened file if it is a path. The newly opened file is closed at the end of the context.

    Raises:
        ValueError: `source` has another type, or its path is not a regular file.
        OSError: the file cannot be opened.
    """
    if isinstance(source, bytes):
        yield source
    elif isinstance(source, Path):
        with plain_file(source) as file:
            yield file
    elif hasattr(source, "read"):
        yield source
    else:
        raise ValueError(  # like every error that prevents a request from being sent
            "Bytes, a Path or a binary file are needed: a text could be a path or a content."
        )


@contextmanager
def plain_file(path: Path, *, follow: bool = True) -> Iterator[BinaryIO]:
    """Open a regular file for reading, and yield it. If `follow` is False, a link is refused
    (OSError, ELOOP).

    Raises:
        ValueError: the path is a directory, pipe, socket or device.
        OSError: the file cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{str(path)[:200]!r} is not a regular file.")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def size_of(source: bytes | BinaryIO) -> int | None:
    """Return the number of bytes to send, or None if the number is unknown."""
    if isinstance(source, bytes):
        return len(source)
    try:
        found = os.fstat(source.fileno())
        return found.st_size - source.tell() if stat.S_ISREG(found.st_mode) else None
    except (OSError, ValueError, AttributeError):
        return None


def chunks_of(source: bytes | BinaryIO, size: int | None) -> Iterator[bytes]:
    """Yield the bytes of `source` in pieces. If `source` is a file and `size` is not None, exactly
    `size` bytes are read.

    Raises:
        ValueError: the file became shorter while it was read.
    """
    if isinstance(source, bytes):
        yield source
        return
    left = size
    while left is None or left > 0:
        chunk = source.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
        if not chunk:
            break
        if left is not None:
            left -= len(chunk)
        yield chunk
    if left:
        raise ValueError("The file became shorter while it was sent.")


async def chunks_of_async(source: bytes | BinaryIO, size: int | None) -> AsyncIterator[bytes]:
    """Yield the same pieces as `chunks_of`, and raise the same errors. A thread reads the pieces,
    so that the event loop is not blocked.
    """
    import anyio.to_thread  # not needed by commands, which are synchronous

    chunks = chunks_of(source, size)
    while (chunk := await anyio.to_thread.run_sync(next, chunks, None)) is not None:
        yield chunk


@contextmanager
def new_file(
    path: Path, *, replace: bool = False, mode: int = 0o666, directory: int | None = None
) -> Iterator[BinaryIO]:
    """Create a file with the permissions `mode` (less the umask), and yield the file for writing.
    If the body of the `with` statement raises, the file is removed.

    If `replace` is True, an existing file or link (not its target) is replaced atomically at the
    end. If `directory` is not None, it is a directory's descriptor, and a relative `path` is
    relative to that directory.

    Raises:
        FileExistsError: the path exists, and `replace` is False.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    made = path.with_name(f".fumehood-{secrets.token_hex(8)}") if replace else path
    descriptor = os.open(made, flags, mode, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        if replace:
            os.replace(made, path, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(made, dir_fd=directory)
        raise


def resolved(directory: Path | str) -> Path:
    """Return the absolute path of a directory, with all links resolved."""
    return Path(directory).resolve()


@contextmanager
def proof(directory: Path, name: str) -> Iterator[None]:
    """Create an empty file as proof that this program can write to a directory.

    The file is removed at the end of the context.

    Raises:
        OSError: the file cannot be created.
    """
    path = directory / name
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


# -- files of an answer ----------------------------------------------------------------------

Write = Callable[[bytes], object]
Download = Callable[[str, Write], None]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SaveFailed(Exception):
    """A file could not be written. The message says why."""


class Saving:
    """Saves files of an answer below a directory, which is created if needed."""

    def __init__(self, directory: Path, *, force: bool) -> None:
        self._path = directory
        self._force = force
        self._root = -1

    def __enter__(self) -> Self:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SaveFailed(f"{self._path} cannot be used: {error.strerror}.") from None
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._root)

    def save(self, entry: JsonObject, download: Download) -> None:
        """Write one file of an answer. `entry` describes the file, and `download` fetches its
        content. If the file cannot be written, no incomplete file is left.

        Raises:
            SaveFailed: the file cannot be written. Exceptions of `download` are passed on.
        """
        name: str = entry["filename"]
        fault = path_fault(name)
        if fault is not None or not name.isprintable():
            raise SaveFailed(f"its name {fault or 'cannot be printed'}.")
        if "not_kept" in entry:
            raise SaveFailed(f"{entry['not_kept']}.")
        *above, last = name.split("/")
        try:
            with ExitStack() as stack:
                parent = self._root
                for part in above:
                    parent = _below(parent, part)
                    stack.callback(os.close, parent)
                made = new_file(Path(last), replace=self._force, directory=parent)
                with made as file:
                    if "url" in entry:
                        download(entry["url"], file.write)
                    else:
                        file.write(base64.b64decode(entry["content_base64"], validate=True))
        except FileExistsError:
            raise SaveFailed("it already exists (--force replaces it).") from None
        except OSError as error:
            raise SaveFailed(f"{error.strerror}.") from None
        except (KeyError, binascii.Error):
            raise SaveFailed("the answer does not hold its content.") from None


def _below(parent: int, name: str) -> int:
    """Open the subdirectory `name` of the directory with the descriptor `parent`, and return its
    descriptor.

    The subdirectory is created if it does not exist. Raises OSError for a link.
    """
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)
