"""Keys against a model of them: whatever happens in whatever order, nothing acts twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fumehood.core.idempotency import KEY_LIFETIME, KeyedCall, KeyState
from fumehood.storage import idempotency as rows
from fumehood.storage.database import open_database
from support.keyed import NOW, keyed

KEYS = st.sampled_from([("uid:1", "k"), ("uid:1", "l"), ("uid:2", "k")])


@dataclass(frozen=True)
class Known:
    """What the model knows of a key."""

    call: KeyedCall
    state: KeyState
    until: timedelta
    answer: str | None = None


class KeysAndModel(RuleBasedStateMachine):
    """Every rule does one thing to the rows and to the model, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.database = open_database(None)
        self.known: dict[tuple[str, str], Known] = {}
        self.held: set[str] = set()
        self.passed = timedelta()
        self.number = 0

    def teardown(self) -> None:
        self.database.close()

    @initialize()
    def begin(self) -> None:
        """An empty table."""

    @rule(where=KEYS, fingerprint=st.sampled_from("fg"), may_repeat=st.booleans())
    def claim(self, where: tuple[str, str], fingerprint: str, may_repeat: bool) -> None:
        self.number += 1
        call = keyed(
            f"call_{self.number}", principal_id=where[0], key=where[1], fingerprint=fingerprint,
            may_repeat=may_repeat,
        )  # fmt: skip
        self.held.add(call.call_id)
        found = self.database.write_now(
            lambda c: rows.take(c, call, NOW + self.passed, self.held.__contains__)
        )
        known = self._expected(where)
        if known is None:
            assert found is None
            self.known[where] = Known(call, KeyState.RUNNING, self.passed + KEY_LIFETIME)
            return
        self.held.discard(call.call_id)
        assert found is not None
        assert (found.call, found.state, found.answer) == (known.call, known.state, known.answer)
        self.known[where] = known

    def _expected(self, where: tuple[str, str]) -> Known | None:
        """What should be there, once the lost and the old are gone."""
        known = self.known.pop(where, None)
        if known is None:
            return None
        if known.state is KeyState.RUNNING and known.call.call_id not in self.held:
            known = self._lost(known)
            if known is None:
                return None
        is_over = known.state in (KeyState.DONE, KeyState.UNKNOWN)
        return None if is_over and known.until <= self.passed else known

    def _lost(self, known: Known) -> Known | None:
        if known.call.may_repeat:
            return None
        return replace(known, state=KeyState.UNKNOWN, until=self.passed + KEY_LIFETIME)

    def _in(self, state: KeyState) -> list[tuple[str, str]]:
        return sorted(where for where, known in self.known.items() if known.state is state)

    def _running(self) -> list[tuple[str, str]]:
        return [
            where
            for where in self._in(KeyState.RUNNING)
            if self.known[where].call.call_id in self.held
        ]

    @precondition(lambda self: self._running())
    @rule(data=st.data(), ending=st.sampled_from(["finish", "release", "lose", "hand over"]))
    def end(self, data: st.DataObject, ending: str) -> None:
        where = data.draw(st.sampled_from(self._running()))
        known = self.known.pop(where)
        call = known.call
        if ending == "finish":
            self.database.write_now(lambda c: rows.finish(c, call, call.call_id))
            known = replace(known, state=KeyState.DONE, answer=call.call_id)
        elif ending == "hand over":
            self.database.write_now(lambda c: rows.hand_over(c, *where, "apr_1"))
            known = replace(known, state=KeyState.WAITING)
        elif ending == "lose":
            self.database.write_now(lambda c: rows.lose(c, call))
            known = replace(known, state=KeyState.UNKNOWN)
        else:
            self.database.write_now(lambda c: rows.release(c, call))
        self.held.discard(call.call_id)
        if ending != "release" and not (ending == "lose" and call.may_repeat):
            self.known[where] = known

    @precondition(lambda self: self._in(KeyState.WAITING))
    @rule(data=st.data(), is_answered=st.booleans())
    def decide(self, data: st.DataObject, is_answered: bool) -> None:
        where = data.draw(st.sampled_from(self._in(KeyState.WAITING)))
        known = self.known.pop(where)
        now = NOW + self.passed
        if not is_answered:
            self.database.write_now(lambda c: rows.free(c, *where))
            return
        self.database.write_now(lambda c: rows.complete(c, *where, "decided", now))
        self.known[where] = replace(
            known, state=KeyState.DONE, answer="decided", until=self.passed + KEY_LIFETIME
        )

    @rule()
    def crash(self) -> None:
        """The engine is gone; the next one begins with what is on the disk."""
        self.held.clear()
        unknown = self.database.write_now(lambda c: rows.recover(c, NOW + self.passed))
        running = self._in(KeyState.RUNNING)
        lost = {where: self._lost(self.known.pop(where)) for where in running}
        self.known |= {where: known for where, known in lost.items() if known is not None}
        assert unknown == sum(known is not None for known in lost.values())

    @rule(hours=st.integers(1, 30))
    def wait(self, hours: int) -> None:
        self.passed += timedelta(hours=hours)

    @rule()
    def prune(self) -> None:
        self.database.write_now(lambda c: rows.forget_old(c, NOW + self.passed))
        over = (KeyState.DONE, KeyState.UNKNOWN)
        self.known = {
            where: known
            for where, known in self.known.items()
            if known.state not in over or known.until > self.passed
        }

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        kept = self.database.read_now(
            lambda c: {
                (row.principal_id, row.key): (row.call_id, row.state, row.answer)
                for row in c.exec_driver_sql("SELECT * FROM idempotency")
            }
        )
        assert kept == {
            where: (known.call.call_id, known.state.value, known.answer)
            for where, known in self.known.items()
        }


TestKeysAndModel = pytest.mark.row("P3")(KeysAndModel.TestCase)
TestKeysAndModel.settings = settings(max_examples=25, stateful_step_count=30)
