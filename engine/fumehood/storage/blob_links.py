"""Links to blobs: addresses that only the engine can make, each for one owner and one time.

Host side, inside `blobs`. The key lies in the state directory beside the database, not in it.
Invariant: an address that `is_genuine` was made here for this blob, principal and end.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from fumehood.storage.directory import PRIVATE_FILE

KEY_BYTES = 32


class BlobLinks:
    """Makes and checks the addresses of blobs with one secret key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def make(self, blob_id: str, principal_id: str, expires_at: int) -> str:
        """The address, beneath the callers' socket."""
        signature = self._signature(blob_id, principal_id, expires_at)
        return f"/v1/blobs/{blob_id}?expires={expires_at}&signature={signature}"

    def is_genuine(self, blob_id: str, principal_id: str, expires_at: int, signature: str) -> bool:
        """Whether `make` made it so. Compared in constant time."""
        expected = self._signature(blob_id, principal_id, expires_at)
        return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))

    def _signature(self, *parts: str | int) -> str:
        # Each part with its length: no two lists of parts are signed alike.
        text = "blob:" + "".join(f"{len(str(part))}:{part}" for part in parts)
        return hmac.digest(self._key, text.encode(), hashlib.sha256).hex()


def load_key(path: Path) -> bytes:
    """The key in a file, which is made where there is none, or none that could be one.

    Raises:
        OSError: it can be neither read nor made.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _make_key(path)
    with os.fdopen(descriptor, "rb") as file:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE_FILE:
            os.fchmod(descriptor, PRIVATE_FILE)
        key = file.read(KEY_BYTES + 1)
    return key if len(key) == KEY_BYTES else _make_key(path)


def _make_key(path: Path) -> bytes:
    """A new key, in the file whole or not at all."""
    key = secrets.token_bytes(KEY_BYTES)
    made = path.with_name(f"{path.name}.new")
    made.unlink(missing_ok=True)
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(descriptor)
    made.replace(path)
    return key
