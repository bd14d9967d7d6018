"""Claim: make sure that this call is nobody else's, already running or already answered.

Fourth stage, a lease. Takes a `PermittedCall`, yields a `ClaimedCall`. Idempotency keys and
the cache are refused by this version before they get here, so every call is a new one.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from fumehood.call.authorise import PermittedCall


@dataclass(frozen=True, slots=True)
class ClaimedCall:
    """A call that nobody else is carrying out."""

    permitted: PermittedCall


def claim(permitted: PermittedCall) -> nullcontext[ClaimedCall]:
    """Claim the call for as long as the lease is held."""
    return nullcontext(ClaimedCall(permitted))
