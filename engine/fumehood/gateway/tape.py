"""Tapes: what may follow the requests of one program, or answer them in place of their hosts.

Host side, in the event loop. Another part offers a tape for a run (`Given.offer`). Invariants: a
tape sees what the program sees, so no value of a secret; while a tape answers, nothing is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fumehood.gateway.request import ProgramRequest

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class TapedAnswer:
    """An answer that a tape gives in place of a host."""

    status: int
    headers: Headers
    body: bytes
    digest: str | None
    """SHA-256 of the request's body, or None if it was not read."""


class Following(Protocol):
    """Follows one answer."""

    def add(self, piece: bytes) -> None:
        """Take the next bytes of the body."""

    def finish(self, digest: str | None) -> None:
        """End it. `digest` is the SHA-256 of the request's body, or None if it was not read."""


class Tape(ABC):
    """What follows the requests of one program."""

    answers: bool = False
    """Whether it answers all requests, so that nothing is sent."""

    @abstractmethod
    def begin(self, request: ProgramRequest, status: int, headers: Headers) -> Following | None:
        """Begin to follow an answer. It counts as broken off unless it is finished."""

    @abstractmethod
    def skip(self) -> None:
        """Note a connection that passes unopened."""

    @abstractmethod
    def take(self, request: ProgramRequest, digest: str) -> TapedAnswer:
        """Return the answer to a request with this body. Raises Refusal if it is missing."""
