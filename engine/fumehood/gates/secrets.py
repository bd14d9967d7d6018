"""Credentials: how they are written, told apart and kept. Used by `tokens` and `approvers`.

Host side. Invariant: a secret is shown once, when it is made; what is kept of it cannot be
used to answer for it, and comparing takes the same time whatever is wrong.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

SECRET_BYTES = 32
_FORM = re.compile(r"(fht|fha)_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)

SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**14, 8, 1
"""About 40 ms and 16 MB a guess. *Source*: RFC 7914 and OWASP's minimum for interactive use."""


@dataclass(frozen=True, slots=True)
class Presented:
    """A credential as somebody gave it."""

    kind: str
    id: str
    secret: str


def make_credential(kind: str) -> tuple[str, str, str]:
    """A new one: its id, its secret, and the text that is shown once."""
    identifier, secret = secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)
    return identifier, secret, f"{kind}_{identifier}_{secret}"


def parse_credential(text: str) -> Presented | None:
    """The parts of a credential; None where it has no such form."""
    match = _FORM.fullmatch(text)
    return Presented(*match.groups()) if match else None


def quick_hash(secret: str) -> bytes:
    """Of a token: 256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode()).digest()


def slow_hash(secret: str, salt: bytes) -> bytes:
    """Of an approver's secret, which a person may come to keep in bad places."""
    return hashlib.scrypt(
        secret.encode(), salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P, maxmem=64 << 20
    )
