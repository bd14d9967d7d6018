"""Save a program's files locally: below one directory, without overwriting.

The names are untrusted. Every step opens one name relative to a directory descriptor and follows
no link, so that nothing in the directory can lead out of it, even if it is created meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from fumehood.client.files import new_file
from fumehood.core.json_types import JsonObject
from fumehood.core.workspace_path import path_fault

Write = Callable[[bytes], object]
Download = Callable[[str, Write], None]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SaveFailed(Exception):
    """A file could not be written. The message says why."""


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
    """Open a subdirectory, created if needed; links are refused."""
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, _DIRECTORY, dir_fd=parent)
