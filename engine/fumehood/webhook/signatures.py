"""Webhook signatures: what goes out is signed, and what comes back is believed only if it is.

Host side, pure. `engine_webhook` signs with it, the daemon's callback asks it. Invariants: what
is signed are the bytes themselves; nothing of a body is looked at before its signature holds;
a signature holds once.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Sequence
from datetime import datetime

from fumehood.core.errors import RateLimited, Unauthorized

HEADER = "fumehood-signature"
MAX_SEEN = 100_000
"""Signatures that are remembered; they are 32 bytes each, and only good ones are."""

_FORM = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})", re.ASCII)


def sign(secret: bytes, body: bytes, at: datetime) -> str:
    """The value of the header for these bytes."""
    seconds = str(int(at.timestamp()))
    return f"t={seconds},v1={_mac(secret, seconds, body).hex()}"


class Callbacks:
    """Judges what comes back. Holds the signatures of the last while in memory."""

    def __init__(self, secret: bytes, *, window_s: float) -> None:
        self._secret = secret
        self._window_s = window_s
        self._seen: dict[bytes, float] = {}
        """Signature → when it is too old by itself."""
        self._latest = -math.inf

    def check(self, headers: Sequence[str], body: bytes, now: datetime) -> None:
        """Pass on what bears one good signature of its bytes, made just now, for the first time.

        Raises:
            Unauthorized: none, several, or one that is wrong, too old, of the future, or used.
            RateLimited: more good ones in the window than are remembered.
        """
        if len(headers) != 1:
            raise Unauthorized(f"Sign the body, with one header `{HEADER}`.")
        match = _FORM.fullmatch(headers[0])
        if match is None:
            raise Unauthorized(f"`{HEADER}` must be `t=UNIX,v1=HEX`, with 64 digits.")
        seconds, given = match[1], bytes.fromhex(match[2])
        if not hmac.compare_digest(_mac(self._secret, seconds, body), given):
            raise Unauthorized("The signature is wrong. Do not retry.")
        self._require_fresh(int(seconds), now.timestamp())
        self._require_first(given, int(seconds))

    def _require_fresh(self, signed_at: int, now: float) -> None:
        # A clock that is set back would make what was forgotten good again.
        self._latest = max(self._latest, now)
        if signed_at < self._latest - self._window_s or signed_at > now + self._window_s:
            raise Unauthorized(
                f"The signature's time is more than {self._window_s:g} s from this engine's. "
                "Sign anew."
            )

    def _require_first(self, signature: bytes, signed_at: int) -> None:
        if len(self._seen) >= MAX_SEEN:
            self._seen = {s: end for s, end in self._seen.items() if end >= self._latest}
        if signature in self._seen:
            raise Unauthorized("This signature was used before. Sign anew.")
        if len(self._seen) >= MAX_SEEN:
            raise RateLimited(
                "Too many callbacks in this time.", retry_after_ms=int(self._window_s * 1000)
            )
        self._seen[signature] = signed_at + self._window_s


def _mac(secret: bytes, seconds: str, body: bytes) -> bytes:
    return hmac.digest(secret, f"{seconds}.".encode() + body, hashlib.sha256)
