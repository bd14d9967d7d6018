"""A tape records the requests of one program and their answers, or it answers the requests itself.

Host side. Another part of the engine offers a tape for a run (`Given.offer`). Invariants: a tape
receives only what the program sees, so it never receives the value of a secret; if a tape answers
the requests, nothing is sent to hosts.
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
    """A recorded answer that a program gets from a tape instead of from the host."""

    status: int
    headers: Headers
    body: bytes
    digest: str | None
    """SHA-256 of the body of the request, or None if the gateway did not read that body."""


class Following(Protocol):
    """Records one answer while the program receives it."""

    def add(self, piece: bytes) -> None:
        """Record `piece`, the next bytes of the answer's body."""

    def finish(self, digest: str | None) -> None:
        """Record that the answer is complete. `digest` is the SHA-256 of the request's body, or
        None if the gateway did not read that body.
        """


class Tape(ABC):
    """Either records the requests of one program and their answers, or answers the requests from
    such a recording, so that hosts get no requests.
    """

    answers: bool = False
    """Whether the tape answers all requests, so that nothing is sent to hosts."""

    @abstractmethod
    def begin(self, request: ProgramRequest, status: int, headers: Headers) -> Following | None:
        """Return an object that records the answer to `request`, or None if the tape does not
        record it.

        `status` and `headers` are those of the answer. Until `finish` of the returned object is
        called, the recorded answer counts as incomplete.
        """

    @abstractmethod
    def skip(self) -> None:
        """Record that a TLS connection is passed through without decryption. The tape cannot record
        more about such a connection.
        """

    @abstractmethod
    def take(self, request: ProgramRequest, digest: str) -> TapedAnswer:
        """Return the tape's answer to a request whose body has the SHA-256 `digest`.

        Raises:
            Refusal: the tape has no answer to the request.
        """
