"""The rows of an audit chain, and how each follows from the row before it.

This module needs only Python's standard library, on purpose: it becomes a part of the program that
checks an export without an engine (`audit/verify.py`).

A row's mac is an HMAC-SHA-256 with the chain's key over the mac of the row before it (32 zero bytes
for the first row), the row's number (8 bytes, big endian) and the bytes of the row's body. A key's
id is the beginning of the SHA-256 over `fumehood audit key`, a zero byte and the key. The last row
under a key has the kind `audit.rotated` and names the next key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass, field

GENESIS = bytes(32)
"""The mac before the first row."""

SECRET_BYTES = 32
"""Length of a key in bytes."""

KEY_ID_DIGITS = 16
"""Number of hexadecimal digits of a key's id."""

ROTATED = "audit.rotated"
"""The kind of a row that announces the next key."""

ROTATED_BODY = f'{{"kind":"{ROTATED}",'.encode()
"""The beginning of the body of such a row."""


@dataclass(frozen=True, slots=True)
class AuditKey:
    """The key of a part of a chain. Rows name it by its `id`."""

    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> AuditKey:
        """Return the key with this secret, from which its id is derived."""
        return cls(commitment_to(secret)[:KEY_ID_DIGITS], secret)


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row. `before` is the mac of the previous row, as stored or exported, or None if that mac
    is unknown.
    """

    seq: int
    key_id: str
    body: bytes
    mac: bytes
    before: bytes | None = None


class Unreadable(ValueError):
    """A file has the wrong format. The message says where."""


def commitment_to(secret: bytes) -> str:
    """Return a hash that identifies a key without revealing it."""
    return hashlib.sha256(b"fumehood audit key\0" + secret).hexdigest()


def mac_of(secret: bytes, before: bytes, seq: int, body: bytes) -> bytes:
    """Return the mac of a row, given the mac of the row before it."""
    return hmac.digest(secret, before + seq.to_bytes(8, "big") + body, "sha256")


def next_key_of(body: bytes) -> tuple[str, str] | None:
    """Return the id and the commitment of the next key if a row's body announces a key, otherwise
    None.
    """
    if not body.startswith(ROTATED_BODY):
        return None
    try:
        said = json.loads(body)
        return str(said["next_key_id"]), str(said["commitment"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_key(text: str) -> AuditKey:
    """Parse the text of a key file. Raises Unreadable if it is not a key."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise Unreadable("this is not a key of an audit chain")
    return AuditKey.of(secret)
