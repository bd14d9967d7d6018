"""Tapes record one program's requests and answers, or answer the requests instead of the hosts.

Host side, in the event loop. Another part offers a tape for a run (`Given.offer`). Invariants: a
tape sees only what the program sees, so it never sees the value of a secret; if a tape answers the
requests, nothing is sent to hosts.
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
    """An answer that a tape gives instead of the host."""

    status: int
    headers: Headers
    body: bytes
    digest: str | None
    """SHA-256 of the request's body, or None if that body was not read."""


class Following(Protocol):
    """Receives one answer as the program receives it."""

    def add(self, piece: bytes) -> None:
        """Add the next bytes of the answer's body."""

    def finish(self, digest: str | None) -> None:
        """Mark the answer as complete. `digest` is the SHA-256 of the request's body, or None if
        that body was not read."""


class Tape(ABC):
    """Records the requests of one program, or answers them."""

    answers: bool = False
    """Whether the tape answers all requests, so that nothing is sent to hosts."""

    @abstractmethod
    def begin(self, request: ProgramRequest, status: int, headers: Headers) -> Following | None:
        """Return the object that receives this answer, or None if the tape does not record it.

        The recorded answer counts as incomplete unless `finish` is called."""

    @abstractmethod
    def skip(self) -> None:
        """Record that a TLS connection is passed through without decryption."""

    @abstractmethod
    def take(self, request: ProgramRequest, digest: str) -> TapedAnswer:
        """Return the taped answer to a request whose body has the SHA-256 `digest`.

        Raises:
            Refusal: the tape has no answer to the request.
        """
