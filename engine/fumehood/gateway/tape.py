"""A tape records one program's requests and answers, or answers the requests itself.

Host side, in the event loop. Another part offers a tape for a run (`Given.offer`). Invariants: a
tape receives only what the program sees, so it never receives the value of a secret; if a tape
answers the requests, nothing is sent to hosts.
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
    """An answer that the program gets from a tape instead of from the host."""

    status: int
    headers: Headers
    body: bytes
    digest: str | None
    """SHA-256 of the request's body, or None if that body was not read."""


class Following(Protocol):
    """Records one answer while the program receives it."""

    def add(self, piece: bytes) -> None:
        """Record the next bytes of the answer's body."""

    def finish(self, digest: str | None) -> None:
        """Record that the answer is complete. `digest` is the SHA-256 of the request's body, or
        None if that body was not read.
        """


class Tape(ABC):
    """Records the requests of one program, or answers them."""

    answers: bool = False
    """Whether the tape answers all requests, so that nothing is sent to hosts."""

    @abstractmethod
    def begin(self, request: ProgramRequest, status: int, headers: Headers) -> Following | None:
        """Return the object that records the answer to a request, or None if the tape does not
        record it.

        The recorded answer counts as incomplete unless `finish` of this object is called.
        """

    @abstractmethod
    def skip(self) -> None:
        """Record that a TLS connection is passed through without decryption."""

    @abstractmethod
    def take(self, request: ProgramRequest, digest: str) -> TapedAnswer:
        """Return the tape's answer to a request whose body has the SHA-256 `digest`.

        Raises:
            Refusal: the tape has no answer to the request.
        """
