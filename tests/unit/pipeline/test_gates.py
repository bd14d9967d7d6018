"""Gates can only make a call stricter, whatever they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood import Engine, call_options, tool
from fumehood.core.call import CallBody
from fumehood.core.errors import EngineError, InternalError, PermissionDenied, RateLimited
from fumehood.core.part import CallOption
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.gate import Ended, Excess, Gate, Hold, KnownAnswer
from fumehood.pipeline.part import CallParts
from fumehood.pipeline.pass_gates import answer_of_gates
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.model import Verdict
from support.recording import bench

FORGED = b'{"forged": true}'


def refused(kind: str) -> EngineError:
    return {
        "limit": RateLimited("Too often.", retry_after_ms=1),
        "denied": PermissionDenied("No."),
    }[kind]


class Hostile(Gate):
    """Does one thing at each place, and notes the calls that it sees."""

    name = "hostile"

    def __init__(self, excess: str, answer: str, hold: str, end: str) -> None:
        self._excess, self._answer, self._hold, self._end = excess, answer, hold, end
        self.key = "over_budget" if excess == "let-pass" else None
        self.refuses_at_begin = False
        self.asked: list[Verdict] = []
        self.ended: list[str] = []

    def excess(self, validated: ValidatedCall) -> Excess | None:
        if self._excess == "none":
            return None
        return Excess(refused("limit"), {"forged": True}, {"forged": True}, "Let it pass.")

    async def answer(
        self, permitted: PermittedCall, limit_s: Callable[[], float]
    ) -> KnownAnswer | Hold | None:
        self.asked.append(permitted.decision.verdict)
        if self._answer == "forge":
            return KnownAnswer(FORGED, (), {})
        if self._answer == "change":
            permitted.decision = None  # type: ignore[misc, assignment]
        return Held(self) if self._answer == "hold" else None

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold | None:
        if self._hold in ("limit", "denied"):
            raise refused(self._hold)
        return Held(self) if self._hold == "hold" else None

    def note(self, what: str) -> None:
        self.ended.append(what)
        if self._end == "raise":
            raise RuntimeError("swallow it")


class Held(Hold):
    def __init__(self, gate: Hostile) -> None:
        self._gate = gate

    def begin(self) -> None:
        if self._gate.refuses_at_begin:
            raise refused("denied")

    def settle(self, ended: Ended) -> None:
        self._gate.note("settle")

    def release(self) -> None:
        self._gate.note("release")

    def close(self) -> None:
        self._gate.note("close")


async def outcome(
    decision: str, *gates: Hostile, options: Any = None
) -> tuple[str, int, dict[str, Any]]:
    """The code of a call, how often its tool ran, and its data."""
    ran = 0

    @tool(sandboxed=False, description="Act.")
    async def act() -> dict[str, bool]:
        nonlocal ran
        ran += 1
        return {"ran": True}

    with TemporaryDirectory() as home:
        file = Path(home) / "policy.toml"
        file.write_text(f'[[rules]]\nid = "r"\ndecision = "{decision}"\ntools = ["act"]\n')
        async with bench(Path(home), [act], policy_file=file) as made:
            engine: Engine = made.engine
            parts = engine._made.services.parts
            object.__setattr__(parts, "gates", (*gates, *parts.gates))
            body = CallBody() if options is None else CallBody(options=options)
            envelope = await engine.run("act", body, engine.owner)
    return envelope.error.code if envelope.error is not None else "OK", ran, dict(envelope.data)


PLACES = st.tuples(
    st.sampled_from(["none", "refuse", "let-pass"]),
    st.sampled_from(["none", "forge", "hold", "change"]),
    st.sampled_from(["none", "hold", "limit", "denied"]),
    st.sampled_from(["none", "raise"]),
)


@pytest.mark.row("P2", "A1")
@settings(deadline=None)
@given(st.sampled_from(["ask", "deny"]), PLACES)
def test_gate_cannot_open_or_answer_a_call_that_the_policy_does_not_allow(
    decision: str, places: tuple[str, str, str, str]
) -> None:
    gate = Hostile(*places)
    code, ran, data = anyio.run(outcome, decision, gate)
    expected = {"deny": {"PERMISSION_DENIED"}, "ask": {"REQUIRES_HUMAN_APPROVAL", "RATE_LIMITED"}}
    assert (code in expected[decision], ran, data) == (True, 0, {})
    assert gate.asked == []


@settings(deadline=None)
@given(PLACES)
def test_allowed_call_runs_at_most_once_and_what_is_held_ends(
    places: tuple[str, str, str, str],
) -> None:
    gate = Hostile(*places)
    _, answer, hold, _ = places
    code, ran, data = anyio.run(outcome, "allow", gate)
    refusals = {"limit": "RATE_LIMITED", "denied": "PERMISSION_DENIED"}
    if answer == "change":  # what a gate gets cannot be changed
        assert (code, ran, gate.ended) == (InternalError.code, 0, [])
    elif answer == "forge":
        assert (code, ran, data) == ("OK", 0, {"forged": True})
    elif hold in refusals:
        held = ["release", "close"] if answer == "hold" else []
        assert (code, ran, gate.ended) == (refusals[hold], 0, held)
    else:
        holds = (answer, hold).count("hold")
        ended = ["settle"] * holds + ["close"] * holds
        assert (code, ran, gate.ended) == ("OK", 1, ended)


@pytest.mark.parametrize(
    ("decision", "code", "ran"),
    [("allow", "OK", 1), ("ask", "REQUIRES_HUMAN_APPROVAL", 0), ("deny", "PERMISSION_DENIED", 0)],
)
def test_control_call_without_such_a_gate(decision: str, code: str, ran: int) -> None:
    assert anyio.run(outcome, decision)[:2] == (code, ran)


@pytest.mark.anyio
@pytest.mark.parametrize(("held", "seen"), [(None, 1), (object(), 0)])
async def test_gate_is_not_asked_for_the_answer_of_a_held_action(held: Any, seen: int) -> None:
    gate = Hostile("none", "none", "none", "none")
    permitted: Any = SimpleNamespace(
        decision=SimpleNamespace(verdict=Verdict.ALLOW), request=SimpleNamespace(held=held)
    )
    services: Any = SimpleNamespace(parts=CallParts(gates=(gate,)))
    unused: Any = None
    assert await answer_of_gates(permitted, unused, services) is None
    assert len(gate.asked) == seen


# -- options of parts ---------------------------------------------------------------------------


def change(permitted: PermittedCall, plan: Plan) -> None:
    permitted.decision = None  # type: ignore[misc, assignment]


def refuse(permitted: PermittedCall, plan: Plan) -> None:
    raise refused("denied")


def fail(permitted: PermittedCall, plan: Plan) -> None:
    raise LookupError("a bug of the part")


CHECKS = [None, lambda permitted, plan: None, change, refuse, fail]
KINDS: list[tuple[Any, Any, Any]] = [
    (bool, False, True), (bool, True, False), (int, 0, 7), (str | None, None, "allow"),
    (dict[str, Any], {}, {"decision": "allow"}),
]  # fmt: skip

OPTION = st.builds(
    lambda kind, name, decides, inherited, check: (
        CallOption(
            name=name, type=kind[0], default=kind[1], decides=decides, inherited=inherited,
            check=check,
        ),
        kind[2],
    ),
    st.sampled_from(KINDS),
    st.sampled_from(["approved", "decision", "wait", "verdict", "held", "principal"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(CHECKS),
)  # fmt: skip
"""An option of a part, and a value that a caller gives."""


@pytest.mark.row("P2", "A1")
@settings(deadline=None)
@given(
    st.sampled_from(["allow", "ask", "deny"]),
    st.lists(OPTION, min_size=1, max_size=3, unique_by=lambda one: one[0].name),
    st.booleans(),
)
def test_option_of_a_part_can_only_make_a_call_stricter(
    decision: str, options: list[tuple[CallOption[Any], Any]], is_given: bool
) -> None:
    added = {option.name: option for option, _ in options}
    chosen = {option.name: value for option, value in options} if is_given else {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(call_options, "OF_PARTS", added)
        code, ran, _ = anyio.run(
            partial(outcome, decision, options=call_options.with_options(added)(**chosen))
        )
    checks = [option.check for option, _ in options] if is_given else []
    stricter = {change: "INTERNAL_ERROR", fail: "INTERNAL_ERROR", refuse: "PERMISSION_DENIED"}
    allowed = {
        "allow": "OK", "ask": "REQUIRES_HUMAN_APPROVAL", "deny": "PERMISSION_DENIED",
    }[decision]  # fmt: skip
    expected = [stricter[check] for check in checks if check in stricter]
    if decision == "deny" or not expected:
        assert (code, ran) == (allowed, int(decision == "allow"))
    else:
        assert (code, ran) == (expected[0], 0)


def test_call_that_a_hold_ends_before_it_begins_uses_nothing() -> None:
    gate, other = Hostile("none", "none", "hold", "none"), Hostile("none", "none", "hold", "none")
    gate.refuses_at_begin = True
    assert anyio.run(outcome, "allow", gate, other)[:2] == ("PERMISSION_DENIED", 0)
    assert (gate.ended, other.ended) == (["release", "close"], ["release", "close"])


def test_what_earlier_gates_hold_is_released_if_a_later_one_answers() -> None:
    holds, answers = (
        Hostile("none", "hold", "none", "none"),
        Hostile("none", "forge", "none", "none"),
    )
    assert anyio.run(outcome, "allow", holds, answers) == ("OK", 0, {"forged": True})
    assert holds.ended == ["release", "close"]
