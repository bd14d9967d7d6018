"""Credentials: their format and their hashes. Used by `tokens` and `approvers`.

Host side. Invariants: a secret is shown once, when it is made; the stored hash cannot be used in
its place; a comparison takes the same time whatever is wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass

SECRET_BYTES = 32
_FORM = re.compile(r"(fht|fha)_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)

SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**14, 8, 1
"""About 40 ms and 16 MB for each guess. *Source*: RFC 7914 and OWASP's minimum for interactive use.
"""

RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Presented:
    """A credential as presented by a caller."""

    kind: str
    id: str
    secret: str


def make_credential(kind: str) -> tuple[str, str, str]:
    """Make a credential: its id, its secret, and the text that is shown once."""
    identifier, secret = secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)
    return identifier, secret, f"{kind}_{identifier}_{secret}"


def parse_credential(text: str) -> Presented | None:
    """Split a credential, or return None if the format is wrong."""
    match = _FORM.fullmatch(text)
    return Presented(*match.groups()) if match else None


def quick_hash(secret: str) -> bytes:
    """The hash of a token: 256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode()).digest()


def slow_hash(secret: str, salt: bytes) -> bytes:
    """The hash of an approver's secret, which a person might store carelessly."""
    return hashlib.scrypt(
        secret.encode(), salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P, maxmem=64 << 20
    )


class CredentialCache:
    """Caches recently verified credentials, so that not every request pays for the slow hash.

    In memory only, as keyed hashes under a key of this process. Wrong credentials are never added.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._until: dict[bytes, float] = {}

    def add(self, text: str) -> None:
        """Remember a verified credential."""
        self._until[self._mark(text)] = time.monotonic() + RECENT_S

    def has(self, text: str) -> bool:
        """Whether exactly this text was verified less than a minute ago."""
        mark = self._mark(text)
        until = self._until.get(mark)
        if until is None:
            return False
        if time.monotonic() < until:
            return True
        del self._until[mark]
        return False

    def _mark(self, text: str) -> bytes:
        return hmac.digest(self._key, text.encode(errors="surrogatepass"), "sha256")
