"""Credentials: how they are written, told apart and kept. Used by `tokens` and `approvers`.

Host side. Invariant: a secret is shown once, when it is made; what is kept of it cannot be
used to answer for it, and comparing takes the same time whatever is wrong.
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
"""About 40 ms and 16 MB a guess. *Source*: RFC 7914 and OWASP's minimum for interactive use."""

RECENT_S = 60.0
MOST_RECENT = 64


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


class CredentialCache:
    """Credentials that were right a moment ago, so that people do not pay for each request.

    In memory only, as keyed hashes under a key of this process. Who guesses is never in it.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._until: dict[bytes, float] = {}

    def add(self, text: str) -> None:
        """This one has just been found to be right."""
        if len(self._until) >= MOST_RECENT:
            del self._until[next(iter(self._until))]
        self._until[self._mark(text)] = time.monotonic() + RECENT_S

    def has(self, text: str) -> bool:
        """Whether exactly this text was right, less than a minute ago."""
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
