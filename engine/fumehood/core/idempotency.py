"""Idempotency keys: the record of a call that may be sent twice. Values only.

`storage/idempotency` keeps the rows, `pipeline/claim` claims and settles them. A key belongs to its
principal; the same text from another principal is another key.

    (no row) → running → done | unknown | (no row)      running → waiting → done | (no row)

`done` has an answer, which repeated calls get; `unknown` has none, and may have had effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from fumehood.core.limits import MB

AUTO = "auto"
"""The option's value that asks for a key made from the call itself."""

PARAMETER = "idempotency_key"
"""A tool's own parameter of this name is also the key."""

MAX_KEY_CHARACTERS = 255

KEY_LIFETIME = timedelta(hours=24)
"""How long a key is known (mission P3). One that is running or waiting is known until it ends."""

MAX_ANSWER_BYTES = MB
"""Size limit of a stored answer as JSON; a longer one is stored without its data."""


class KeyState(StrEnum):
    """What became of the call that a key was first used for."""

    RUNNING = "running"
    WAITING = "waiting"
    """Waiting for approval; the approval owns the key."""
    DONE = "done"
    UNKNOWN = "unknown"
    """It may have taken effect, and its answer is lost."""


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """A call and the key that it came with."""

    principal_id: str
    key: str
    fingerprint: str
    call_id: str
    may_repeat: bool
    """Whether running it twice does no harm: its tool is `idempotent` or `read_only`."""


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key as it is kept."""

    call: KeyedCall
    state: KeyState
    approval_id: str | None
    answer: str | None
    """The envelope as JSON, where it is done."""


__all__ = ["KeptKey", "KeyState", "KeyedCall"]
