"""The keys of the audit chain: files next to the database, never in it.

Host side. `audit.key` contains the current key. Earlier keys are kept as `audit-<id>.key`, because
they are needed to verify earlier rows. Invariants: a key is on disk before the first row is written
with it; once a chain has rows, it changes to a new key only after a row has announced the new key.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fumehood.storage.audit_rows import (
    KEY_ID_DIGITS,
    SECRET_BYTES,
    AuditKey,
    Unreadable,
    read_key,
)
from fumehood.storage.directory import write_private
from fumehood.storage.errors import AuditKeyLost

CURRENT = "audit.key"
"""The file name of the current key."""

KEPT = re.compile(rf"audit-([0-9a-f]{{{KEY_ID_DIGITS}}})\.key")


def new_key() -> AuditKey:
    return AuditKey.of(secrets.token_bytes(SECRET_BYTES))


def open_key(state: Path, wanted: str | None) -> AuditKey:
    """Return the key for the chain's next row from the state directory `state`.

    `wanted` is the id that the key must have. It is None if the chain is empty. In this case,
    return the current key, or create one if there is none.

    If the wanted key is not the current key but is kept in a file of its own, make it the current
    key.

    Raises:
        AuditKeyLost: the key is missing or unusable. It is not replaced by a new key.
    """
    with _in_words(state):
        current = _read(state / CURRENT)
        if wanted is None:
            if current is None:
                current = new_key()
                make_current(state, current)
            return current
        if current is not None and current.id == wanted:
            return current
        kept = _read(state / kept_name(wanted)) if KEPT.fullmatch(kept_name(wanted)) else None
        if kept is None or kept.id != wanted:
            raise AuditKeyLost(
                f"The audit chain continues with the key {wanted[:40]!r}, which is neither "
                f"{CURRENT} nor kept beside it in {state}. Restore the key from a copy; it belongs "
                f"to the database as it was copied. {_ANEW.format(state)}"
            )
        make_current(state, kept)  # for example after a crash during a rotation
        return kept


def all_keys(state: Path) -> dict[str, bytes]:
    """Read all key files in the state directory. Return the secrets of the keys, by key id.

    Raises:
        AuditKeyLost: a file cannot be read.
    """
    with _in_words(state, "cannot be read"):
        names = [CURRENT, *sorted(p.name for p in state.iterdir() if KEPT.fullmatch(p.name))]
        found = [key for name in names if (key := _read(state / name)) is not None]
    return {key.id: key.secret for key in found}


def keep_key(state: Path, key: AuditKey) -> None:
    """Write a key to a file of its own in the state directory. If that file already exists, do
    nothing. The file is on disk when this function returns.

    Raises OSError if the file cannot be written.
    """
    path = state / kept_name(key.id)
    if not path.exists():
        _write(path, key)


def make_current(state: Path, key: AuditKey) -> None:
    """Make a key the current key of the state directory. The previous current key is kept in a file
    of its own.

    Raises AuditKeyLost if the file of the previous key is not a private file with a valid key.
    Raises OSError if a file cannot be read or written.
    """
    before = _read(state / CURRENT)
    if before is not None:
        keep_key(state, before)
    _write(state / CURRENT, key)


def kept_name(key_id: str) -> str:
    """Return the name of the file that keeps the key with this id while it is not the current
    key.
    """
    return f"audit-{key_id}.key"


def _write(path: Path, key: AuditKey) -> None:
    write_private(path, f"{key.secret.hex()}\n".encode())


def _read(path: Path) -> AuditKey | None:
    """Return the key in a file, or None if the file is missing. Raises AuditKeyLost if the file is
    not a private file with a valid key, or OSError if it cannot be read.
    """
    try:
        # Non-blocking, because the path may be a pipe, on which opening would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise AuditKeyLost(f"{path} is not a file. Put the audit key back in its place.")
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (os.geteuid(), 0):
            raise AuditKeyLost(
                f"The audit key {path} is open to other users. If nobody else has read it: "
                f"chmod 600 {path}. Else do that, start, and then: fumehood audit rotate"
            )
        text = os.read(descriptor, found.st_size).decode("ascii", "replace")
    finally:
        os.close(descriptor)
    try:
        return read_key(text)
    except Unreadable:
        raise AuditKeyLost(
            f"The audit key {path} is damaged. Restore it from a copy. {_ANEW.format(path.parent)}"
        ) from None


@contextmanager
def _in_words(state: Path, fault: str = "can be neither read nor made") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AuditKeyLost(f"The audit key in {state} {fault}: {error.strerror}.") from None


_ANEW = (
    "To begin a new chain instead, move the whole directory {} away: without its key the old "
    "chain cannot be continued."
)
