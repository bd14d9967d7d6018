"""The state directory's own name: what an engine puts on whatever it makes outside of it.

Host side. Two engines that follow each other in one state directory have the same one, so the
second finds what the first left behind. Invariant: a copy of the directory has another: two
engines that run at the same time never have the same.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from fumehood.storage.directory import PRIVATE_FILE

FILE_NAME = "owner"
RANDOM_BYTES = 16


def owner_id(state: Path) -> str:
    """32 hexadecimal digits, made when first asked for. Only for who holds the directory's lock.

    Raises:
        OSError: the file can be neither read nor made.
    """
    path = state / FILE_NAME
    with suppress(FileExistsError):
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.read(descriptor, RANDOM_BYTES + 1)
        # A copy of the file has the same bytes, but another inode.
        inode = os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)
    if len(found) != RANDOM_BYTES:
        raise OSError(f"{FILE_NAME} in the state directory is damaged")
    return hashlib.sha256(found + inode.to_bytes(8, "big")).hexdigest()[:32]


def _make(path: Path) -> None:
    """Whole or not at all: an engine that dies here leaves no half of it."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(
        draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE
    )
    try:
        os.write(descriptor, secrets.token_bytes(RANDOM_BYTES))
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)
    finally:
        draft.unlink()
