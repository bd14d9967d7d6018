"""Cassettes: record a program's requests and the answers for a receipt, or replay them from a
receipt.

Host side, in the event loop. Invariants: a recording contains only data that the program itself
sent or received, so it contains no secret values; while a receipt is replayed, no request is sent.
"""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from dataclasses import dataclass, field

from fumehood.gateway.request import ProgramRequest, Refusal
from fumehood.gateway.tape import Headers, Tape, TapedAnswer
from fumehood.receipts.receipt import MAX_EXCHANGES, MAX_RECORDED_BYTES, Cassette, Exchange

HEADER_BYTES = 32
"""Number of bytes that count for each header in addition to its name and value. *Source*: RFC 9113,
6.5.2."""


class Recorder:
    """Records the requests and answers of one call, up to a maximum size."""

    def __init__(self) -> None:
        self.left_out = 0
        self.exchanges: list[Exchange] = []
        self.room = MAX_RECORDED_BYTES

    def begin(self, request: ProgramRequest, status: int, headers: Headers) -> Recording:
        """Begin to record the answer to a request. Until `Recording.finish` is called, the exchange
        counts as left out.
        """
        self.left_out += 1
        self.room -= len(request.url) + sum(
            HEADER_BYTES + len(name) + len(value) for name, value in headers
        )
        return Recording(self, request, status, headers)

    @property
    def cassette(self) -> Cassette:
        """The cassette with the exchanges that have been recorded so far."""
        return Cassette(exchanges=self.exchanges, left_out=self.left_out)


@dataclass
class Recording:
    """An answer that is being recorded."""

    recorder: Recorder
    request: ProgramRequest
    status: int
    headers: Headers
    body: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> None:
        """Record the next bytes of the answer's body, up to the maximum size."""
        self.recorder.room -= len(piece)
        if self.recorder.room >= 0:
            self.body += piece

    def finish(self, digest: str | None) -> None:
        """Add the finished exchange to the recorder. If the recorder would become too large, the
        exchange is left out.

        `digest` is the SHA-256 of the request's body, or None if the gateway did not read this
        body.
        """
        recorder = self.recorder
        if recorder.room < 0 or len(recorder.exchanges) >= MAX_EXCHANGES:
            return
        recorder.left_out -= 1
        recorder.exchanges.append(
            Exchange(
                method=self.request.method,
                url=self.request.url,
                body_sha256=digest,
                status=self.status,
                headers=[
                    [name.decode("latin-1"), value.decode("latin-1")]
                    for name, value in self.headers
                ],
                body_base64=base64.b64encode(self.body).decode("ascii"),
            )
        )


class Player:
    """Answers requests from a cassette.

    Each exchange is used only once. Identical requests get the answers in the recorded order.
    """

    def __init__(self, cassette: Cassette) -> None:
        self._left_out = cassette.left_out
        self._waiting: defaultdict[tuple[str, str, str | None], deque[Exchange]] = defaultdict(
            deque
        )
        for one in cassette.exchanges:
            self._waiting[one.method, one.url, one.body_sha256].append(one)

    def take(self, request: ProgramRequest, digest: str) -> Exchange:
        """Return the next exchange for a request whose body has the SHA-256 `digest`.

        Raises:
            Refusal: the cassette has no further answer to this request.
        """
        for known in (digest, None):
            waiting = self._waiting.get((request.method, request.url, known))
            if waiting:
                return waiting.popleft()
        why = "the receipt has no answer to it"
        if self._left_out:
            why += f", and lacks {self._left_out} that could not be recorded"
        raise Refusal(502, "NETWORK_ERROR", f"Nothing is sent while a receipt is replayed: {why}.")


class CassetteTape(Tape):
    """Records the requests of one run, answers them from a cassette, or both."""

    def __init__(self, recorder: Recorder | None, player: Player | None) -> None:
        self._recorder = recorder
        self._player = player
        self.answers = player is not None

    def begin(self, request: ProgramRequest, status: int, headers: Headers) -> Recording | None:
        if self._recorder is None:
            return None
        return self._recorder.begin(request, status, headers)

    def skip(self) -> None:
        if self._recorder is not None:
            self._recorder.left_out += 1

    def take(self, request: ProgramRequest, digest: str) -> TapedAnswer:
        assert self._player is not None
        found = self._player.take(request, digest)
        return TapedAnswer(
            found.status,
            [(name.encode("latin-1"), value.encode("latin-1")) for name, value in found.headers],
            base64.b64decode(found.body_base64),
            found.body_sha256,
        )
