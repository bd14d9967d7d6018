"""Save a program's files locally: below one directory, without overwriting.

The names are untrusted. Every step opens one name relative to a directory descriptor and follows
no link, so that nothing in the directory, even if created meanwhile, leads out of it.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

from fumehood.core.json_types import JsonObject
from fumehood.core.workspace_path import path_fault

Write = Callable[[bytes], object]
Download = Callable[[str, Write], None]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class SaveFailed(Exception):
    """A file, or any file, could not be written. The message says why."""


class Saving:
    """A target directory for files, created if needed."""

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
        """Write one file of an answer. On failure nothing of it is left.

        Raises:
            SaveFailed: with the reason; also whatever `download` raises.
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
                with self._new_file(parent, last) as write:
                    if "url" in entry:
                        download(entry["url"], write)
                    else:
                        write(base64.b64decode(entry["content_base64"], validate=True))
        except FileExistsError:
            raise SaveFailed("it already exists (--force replaces it).") from None
        except OSError as error:
            raise SaveFailed(f"{error.strerror}.") from None
        except (KeyError, binascii.Error):
            raise SaveFailed("the answer does not hold its content.") from None

    @contextmanager
    def _new_file(self, parent: int, name: str) -> Iterator[Write]:
        made = f".fumehood-{secrets.token_hex(8)}" if self._force else name
        descriptor = os.open(made, _NEW, 0o666, dir_fd=parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file.write
            if self._force:  # replaces the name itself, not a link's target
                os.replace(made, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(made, dir_fd=parent)
            raise


def _below(parent: int, name: str) -> int:
    """Open a subdirectory, created if needed; links are refused."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)
