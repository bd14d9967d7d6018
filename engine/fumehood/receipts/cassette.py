"""Cassettes: the part of a receipt that contains a program's requests and the answers to them. This
module records cassettes and replays them.

Host side, in the event loop. Invariants: a cassette contains only what the program itself sent or
received, so it contains no values of secrets; while a cassette is replayed, no request is sent.
"""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from dataclasses import dataclass, field

from fumehood.gateway.request import ProgramRequest, Refusal
from fumehood.gateway.tape import Headers, Tape, TapedAnswer
from fumehood.receipts.receipt import MAX_EXCHANGES, MAX_RECORDED_BYTES, Cassette, Exchange

HEADER_BYTES = 32
"""Number of bytes that each header counts in addition to its name and value. *Source*: RFC 9113,
6.5.2.
"""


class Recorder:
    """Records the exchanges of one call, which are the requests of its program with the answers.
    `room` is the number of bytes that may still be recorded. `left_out` is the number of exchanges
    that are not recorded.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.exchanges: list[Exchange] = []
        self.room = MAX_RECORDED_BYTES

    def begin(self, request: ProgramRequest, status: int, headers: Headers) -> Recording:
        """Begin to record the answer to `request`, and return an object that records the answer's
        body. `status` and `headers` are those of the answer.

        Until `Recording.finish` is called, the request counts as not recorded (`left_out`).
        """
        self.left_out += 1
        self.room -= len(request.url) + sum(
            HEADER_BYTES + len(name) + len(value) for name, value in headers
        )
        return Recording(self, request, status, headers)

    @property
    def cassette(self) -> Cassette:
        """The cassette with everything that has been recorded so far."""
        return Cassette(exchanges=self.exchanges, left_out=self.left_out)


@dataclass
class Recording:
    """An answer that is being recorded while the program receives it."""

    recorder: Recorder
    request: ProgramRequest
    status: int
    headers: Headers
    body: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> None:
        """Record the next bytes of the answer's body, unless the recorder has no more room."""
        self.recorder.room -= len(piece)
        if self.recorder.room >= 0:
            self.body += piece

    def finish(self, digest: str | None) -> None:
        """Add the request and its complete answer to the recorder. If the recorder has no more
        room, add nothing, so that the request still counts as not recorded.

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
    """Answers requests from a cassette, which contains recorded requests and their answers.

    Each recorded answer is used for only one request. Identical requests get their answers in the
    recorded order.
    """

    def __init__(self, cassette: Cassette) -> None:
        self._left_out = cassette.left_out
        self._waiting: defaultdict[tuple[str, str, str | None], deque[Exchange]] = defaultdict(
            deque
        )
        for one in cassette.exchanges:
            self._waiting[one.method, one.url, one.body_sha256].append(one)

    def take(self, request: ProgramRequest, digest: str) -> Exchange:
        """Return the next exchange for `request`. `digest` is the SHA-256 of the request's body.

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
    """Records the requests and answers of one run if `recorder` is given. Answers the requests from
    recorded answers if `player` is given. If both are given, it does both.
    """

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
