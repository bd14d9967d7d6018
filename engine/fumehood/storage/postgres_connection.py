"""Connections to PostgreSQL that give up on a server that accepts bytes and never answers.

Host side, used by `storage/postgres`, which imports it with psycopg only if the state is there.
Timeouts of the network do not notice such a server: a stopped process, or a proxy that keeps what
it receives. Invariant: a statement, including a commit, fails after `ANSWER_S` of silence, and its
connection is then closed.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg.abc import RV, PQGen
from psycopg.errors import ConnectionTimeout

ANSWER_S = 5.0
"""Seconds of silence after which a statement fails. Longer than the server waits for a lock."""

REST_S = 1.0
"""Seconds after a connection got no answer in which further ones are refused at once, so that those
who wait in line do not each wait as long."""

LOOK_S = 0.1
"""Seconds between looks whether the time is over. *Source*: psycopg's own default."""


class PatientConnection(psycopg.Connection[Any]):
    """A connection whose statements fail if the server is silent."""

    answer_s = ANSWER_S

    def wait(self, gen: PQGen[RV], interval: float = LOOK_S, *others: Any, **more: Any) -> RV:
        """Run psycopg's steps of a statement, each of which waits for the server."""
        return super().wait(self._limited(gen), interval, *others, **more)

    def _limited(self, steps: PQGen[RV]) -> PQGen[RV]:
        give_up = time.monotonic() + self.answer_s
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if ready:
                    give_up = time.monotonic() + self.answer_s
                elif time.monotonic() > give_up:
                    self.close()
                    raise psycopg.OperationalError(f"no answer within {self.answer_s:g} s")
                wanted = steps.send(ready)
        except StopIteration as ended:
            result: RV = ended.value
            return result


class Connector:
    """Opens the connections of one pool."""

    def __init__(self) -> None:
        self._rests_until = 0.0

    def connect(
        self, _dialect: Any, _record: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> PatientConnection:
        """Connect, as SQLAlchemy's event `do_connect`."""
        if time.monotonic() < self._rests_until:
            raise ConnectionTimeout("no answer to the last attempt to connect")
        try:
            return PatientConnection.connect(*arguments, **options)
        except ConnectionTimeout:
            self._rests_until = time.monotonic() + REST_S
            raise
