"""Credentials: their format and their hashes, for `tokens` and `approvers`.

Host side. Invariants: a secret is shown only once, when it is created; the stored hash of a secret
cannot be used as a credential; the check of a wrong credential always takes the same time,
whichever part of the credential is wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
import time
from dataclasses import dataclass

SECRET_BYTES = 32
"""Number of random bytes in a secret."""

_FORM = re.compile(r"(fht|fha)_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
"""The format of a credential: its kind, its id and its secret."""

SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**14, 8, 1
"""Parameters of scrypt. With these, each guess costs about 40 ms and 16 MB. *Source*: RFC 7914 and
OWASP's minimum for interactive use."""

RECENT_S = 60.0
"""Seconds for which a verified credential stays in the cache."""


@dataclass(frozen=True, slots=True)
class Presented:
    """The kind, id and secret in a credential that a caller has sent. Nothing of it is verified
    yet.
    """

    kind: str
    id: str
    secret: str


def make_credential(kind: str) -> tuple[str, str, str]:
    """Create a random credential with the prefix `kind`. Return its id, its secret, and the whole
    credential as text. The text must be shown to the user only once.
    """
    identifier, secret = secrets.token_hex(8), secrets.token_urlsafe(SECRET_BYTES)
    return identifier, secret, f"{kind}_{identifier}_{secret}"


def parse_credential(text: str) -> Presented | None:
    """Split a credential into its kind, id and secret. Return None if its format is wrong."""
    match = _FORM.fullmatch(text)
    return Presented(*match.groups()) if match else None


def quick_hash(secret: str) -> bytes:
    """Return the hash of a token's secret. A fast hash is enough, because the secret has 256 random
    bits.
    """
    return hashlib.sha256(secret.encode()).digest()


def slow_hash(secret: str, salt: bytes) -> bytes:
    """Return the hash of an approver's secret. The computation is slow, so that guessing the secret
    is expensive.
    """
    return hashlib.scrypt(
        secret.encode(), salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P, maxmem=64 << 20
    )


class CredentialCache:
    """Remembers recently verified credentials in memory, so that not every request computes the
    slow hash. It contains keyed hashes of the credentials instead of the credentials. The key is
    random.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._until: dict[bytes, float] = {}

    def add(self, text: str) -> None:
        """Add a credential that has just been verified."""
        self._until[self._mark(text)] = time.monotonic() + RECENT_S

    def has(self, text: str) -> bool:
        """Return whether exactly this credential was added within the last `RECENT_S` seconds."""
        mark = self._mark(text)
        if time.monotonic() < self._until.get(mark, -math.inf):
            return True
        self._until.pop(mark, None)
        return False

    def _mark(self, text: str) -> bytes:
        return hmac.digest(self._key, text.encode(errors="surrogatepass"), "sha256")
