"""Nothing that an asker does lets a call run without a consent to this very call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.errors import EndedBy, InternalError, PermissionDenied
from fumehood.executors.base import CallHandle, HeldAction, Placement, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.pipeline import approve as stage
from fumehood.pipeline.approve import ApprovedCall, Consent
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import ClaimedCall
from fumehood.pipeline.context import CallContext, PipelineServices
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.run import run_call
from fumehood.policy.model import Verdict
from support.asking import CALLER, Asking, asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2")]


@dataclass
class Hostile:
    """An asker whose answer `answers` makes. It notes what it is asked, and each use."""

    answers: Callable[[PermittedCall, Hostile], object]
    repeats: Callable[[], str | None] = lambda: None
    asked: list[PermittedCall] = field(default_factory=list)
    used: list[Plan] = field(default_factory=list)

    async def ask(
        self, claimed: ClaimedCall, plan: Plan, call: CallContext, services: PipelineServices
    ) -> object:
        self.asked.append(claimed.permitted)
        return self.answers(claimed.permitted, self)

    async def same_call(self, repeat_key: str, tool: str) -> str | None:
        return self.repeats()

    async def wait_for(self, approval_id: str, call: CallContext) -> object:
        raise RuntimeError("broken")

    async def use(self, plan: Plan) -> None:
        self.used.append(plan)


def fails(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> object:
        raise error

    return fail


def consent(permitted: PermittedCall, asker: Hostile, **more: Any) -> Consent:
    return Consent(permitted, **({"use": asker.use} | more))


ATTACKS: dict[str, Callable[[PermittedCall, Hostile], object]] = {
    "raises": fails(RuntimeError("broken")),
    "refuses": fails(PermissionDenied("No.")),
    "nothing": lambda permitted, asker: None,
    "true": lambda permitted, asker: True,
    "yes": lambda permitted, asker: "yes",
    "verdict": lambda permitted, asker: Verdict.ALLOW,
    "the-call": lambda permitted, asker: permitted,
    "passed-stage": lambda permitted, asker: ApprovedCall(permitted),
    "look-alike": lambda permitted, asker: SimpleNamespace(
        permitted=permitted, use=asker.use, expected=None, may_exceed=frozenset()
    ),
    "type": lambda permitted, asker: Consent,
    "unawaited": lambda permitted, asker: _consenting(permitted, asker),
    "no-call": lambda permitted, asker: consent(cast("Any", None), asker),
    "equal-call": lambda permitted, asker: consent(replace(permitted), asker),
    "earlier-call": lambda permitted, asker: consent(asker.asked[0], asker),
    "other-arguments": lambda permitted, asker: consent(
        replace(permitted, validated=replace(permitted.validated, arguments={"what": "z"})), asker
    ),
    "use-fails": lambda permitted, asker: consent(permitted, asker, use=fails(RuntimeError("no"))),
    "use-refuses": lambda permitted, asker: consent(
        permitted, asker, use=fails(PermissionDenied("Used up."))
    ),
    "use-is-missing": lambda permitted, asker: consent(permitted, asker, use=None),
    "use-is-not-awaited": lambda permitted, asker: consent(permitted, asker, use=lambda plan: True),
}


async def _consenting(permitted: PermittedCall, asker: Hostile) -> Consent:
    return consent(permitted, asker)


async def outcome(desk: Asking, asker: object, *, count: int = 1) -> tuple[str, int]:
    """The code of the last of some different calls, and how often the tool ran for it."""
    object.__setattr__(desk.engine._made.services, "asker", asker)
    code = ""
    for number in range(count):
        desk.deeds.done.clear()
        answer = await desk.ask(f"{number}")
        code = answer.error.code if answer.error is not None else "OK"
    return code, len(desk.deeds.done)


REFUSED = {"refuses": PermissionDenied.code, "use-refuses": PermissionDenied.code}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_call_never_runs_without_a_consent_to_this_very_call(attack: str) -> None:
    asker = Hostile(ATTACKS[attack])
    async with asking() as desk:
        # The first of two calls has a consent, which is for no other call.
        count = 1
        if attack == "earlier-call":
            count = 2
        found = await outcome(desk, asker, count=count)
        if attack == "earlier-call":
            assert len(asker.used) == 1
    assert found == (REFUSED.get(attack, InternalError.code), 0)


async def test_call_never_runs_if_there_is_no_asker() -> None:
    async with asking() as desk:
        assert await outcome(desk, None) == (InternalError.code, 0)
        assert await outcome(desk, object()) == (InternalError.code, 0)


@pytest.mark.parametrize("repeats", [fails(RuntimeError("broken")), lambda: "apr_1"])
async def test_asker_that_fails_over_a_repeat_lets_nothing_run(
    repeats: Callable[[], str | None],
) -> None:
    async with asking() as desk:
        found = await outcome(desk, Hostile(consent, repeats=repeats))
    assert found == (InternalError.code, 0)


async def test_consent_to_this_call_is_used_once_and_lets_it_run_once() -> None:
    asker = Hostile(consent)
    async with asking() as desk:
        assert await outcome(desk, asker) == ("OK", 1)
    assert (len(asker.asked), len(asker.used)) == (1, 1)


@pytest.mark.parametrize("attack", ["passed-stage", "equal-call", "look-alike"])
async def test_control_without_the_check_such_answers_let_calls_run(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unchecked(permitted: PermittedCall, answer: Any) -> ApprovedCall:
        return answer if isinstance(answer, ApprovedCall) else ApprovedCall(permitted, answer)

    monkeypatch.setattr(stage, "with_consent", unchecked)
    if attack == "passed-stage":  # this one, `execute` finds as well
        monkeypatch.setattr(ApprovedCall, "needs_consent", False)
    async with asking() as desk:
        assert await outcome(desk, Hostile(ATTACKS[attack])) == ("OK", 1)


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["consent", *ATTACKS]), min_size=1, max_size=4), st.booleans())
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_tool_runs_exactly_as_often_as_there_are_consents(answers: list[str], asks: bool) -> None:
    ways = ATTACKS | {"consent": consent, "earlier-call": fails(RuntimeError("unused"))}
    askers = [Hostile(ways[name]) for name in answers]

    async def ran() -> list[int]:
        async with asking(dangerous=asks) as desk:
            return [(await outcome(desk, asker))[1] for asker in askers]

    assert anyio.run(ran) == [int(not asks or name == "consent") for name in answers]
    assert [len(asker.asked) for asker in askers] == [int(asks) for _ in askers]


# -- actions that always ask ---------------------------------------------------------------


class _Action(HeldAction):
    needs = "trial"
    gone = "It is gone."
    place = Placement("host", "host", "in a test")
    done = 0

    def __init__(self, *, always_asks: bool) -> None:
        super().__init__()
        self.always_asks = always_asks  # type: ignore[misc]

    async def carry_out(self, run: ToolRun) -> Outcome:
        self.done += 1
        return Outcome(EndedBy.OK, "none", data={})


@pytest.mark.parametrize(
    ("always_asks", "expected"), [(True, ("REQUIRES_HUMAN_APPROVAL", 0, 0)), (False, ("OK", 1, 1))]
)
async def test_remembered_rule_never_answers_for_an_action_that_always_asks(
    always_asks: bool, expected: tuple[str, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    async def use(rule_id: str) -> None:
        used.append(rule_id)

    action = _Action(always_asks=always_asks)
    async with asking() as desk:
        remembered = desk.engine.approvals.requests.remembered
        monkeypatch.setattr(remembered, "rule_for", lambda *_: "rul_1")
        monkeypatch.setattr(remembered, "use", use)
        request = CallRequest(
            "erase", {"what": "a"}, CallOptions(), CALLER, "call_1", "trace_1", held=action
        )
        answer = await run_call(request, desk.engine._made.services, CallHandle())
    code = answer.error.code if answer.error is not None else "OK"
    assert (code, action.done, len(used)) == expected
