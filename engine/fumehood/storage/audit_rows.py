"""The rows of an audit chain, and how each row depends on the row before it.

This module deliberately needs only Python's standard library: it becomes a part of the program that
checks an export without an engine (`audit/verify.py`).

A row's mac is an HMAC-SHA-256 with the chain's key. It covers the mac of the row before it (32 zero
bytes for the first row), the row's number (8 bytes, big endian) and the bytes of the row's body. A
key's id is the beginning of the SHA-256 over the text `fumehood audit key`, a zero byte and the
key. The last row under a key has the kind `audit.rotated` and names the next key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass, field

GENESIS = bytes(32)
"""The mac that counts as the previous row's mac for the first row."""

SECRET_BYTES = 32
"""Length of a key in bytes."""

KEY_ID_DIGITS = 16
"""Number of hexadecimal digits of a key's id."""

ROTATED = "audit.rotated"
"""The kind of a row that announces the next key."""

ROTATED_BODY = f'{{"kind":"{ROTATED}",'.encode()
"""The first bytes of the body of each row with the kind `audit.rotated`."""


@dataclass(frozen=True, slots=True)
class AuditKey:
    """A key with which some rows of an audit chain are written. These rows refer to the key by its
    `id`.
    """

    id: str
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> AuditKey:
        """Return the key with this secret. The key's id is derived from the secret."""
        return cls(commitment_to(secret)[:KEY_ID_DIGITS], secret)


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One row of an audit chain. `before` is the mac of the previous row, as it is stored or
    exported, or None if that mac is unknown.
    """

    seq: int
    key_id: str
    body: bytes
    mac: bytes
    before: bytes | None = None


class Unreadable(ValueError):
    """A file has the wrong format. The message says where."""


def commitment_to(secret: bytes) -> str:
    """Return a hash that identifies the key with this secret without revealing the secret."""
    return hashlib.sha256(b"fumehood audit key\0" + secret).hexdigest()


def mac_of(secret: bytes, before: bytes, seq: int, body: bytes) -> bytes:
    """Return the mac (an HMAC-SHA-256) of the row with the number `seq` and the body `body`.
    `secret` is the key's secret, and `before` is the previous row's mac.
    """
    return hmac.digest(secret, before + seq.to_bytes(8, "big") + body, "sha256")


def next_key_of(body: bytes) -> tuple[str, str] | None:
    """Return the id and the commitment of the next key from the body of a row that announces one.
    If the body announces none, return None.

    The commitment is a hash of the key (`commitment_to`).
    """
    if not body.startswith(ROTATED_BODY):
        return None
    try:
        said = json.loads(body)
        return str(said["next_key_id"]), str(said["commitment"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_key(text: str) -> AuditKey:
    """Parse the text of a key file. Raises Unreadable if the text is not a key."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise Unreadable("this is not a key of an audit chain")
    return AuditKey.of(secret)
