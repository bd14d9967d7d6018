"""The desk: calls that wait for humans, in an engine of memory only."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood.approvals.model import (
    ApprovalQuery,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberWish,
    Resolution,
)
from fumehood.approvals.settings import ApprovalSettings
from fumehood.budgets.settings import BudgetRule
from fumehood.core.call_log import CallQuery
from fumehood.core.errors import (
    ApprovalExpired,
    EngineError,
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    ResourceNotFound,
)
from fumehood.core.identity import Principal, Scope
from fumehood.policy.model import CallFacts, Decision, Verdict
from support.asking import (
    ALICE,
    BOB,
    CALLER,
    NO,
    OTHER_CALLER,
    YES,
    Asking,
    Deeds,
    asking,
)

pytestmark = pytest.mark.anyio


@pytest.mark.row("A1", "A2")
async def test_dangerous_call_waits_and_nothing_is_done() -> None:
    async with asking() as desk:
        approval = await desk.engine.approvals.show(await desk.parked("a"))
        assert approval.state is ApprovalState.PENDING
        assert approval.arguments == {"what": "a"}
        assert desk.deeds.done == []


@pytest.mark.row("A1")
async def test_harmless_call_of_the_same_tool_asks_nobody() -> None:
    async with asking(dangerous=False) as desk:
        assert (await desk.ask("a")).success
        assert desk.deeds.done == ["a"]


@pytest.mark.row("A5")
async def test_after_the_yes_the_engine_carries_the_call_out_once_and_keeps_its_answer() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        answer = await desk.ended(approval_id)
        assert answer.data == {"erased": "a"}
        assert desk.deeds.done == ["a"]
        approval = await desk.engine.approvals.show(approval_id)
        assert (approval.state, approval.code) == (ApprovalState.DONE, "OK")
        assert answer.metadata.call_id == approval.call_id
        rows = await desk.engine.call_log.page(CALLER.id, CallQuery())
        assert [row.code for row in rows.items] == ["OK"]


@pytest.mark.row("A3")
async def test_denied_call_never_runs_and_the_model_hears_the_reason() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, NO)
        answer = await desk.ended(approval_id)
        assert answer.error is not None
        assert answer.error.code == "APPROVAL_DENIED"
        assert "It is needed tomorrow." in answer.error.message
        assert "Do not retry" in answer.error.message
        assert desk.deeds.done == []


@pytest.mark.row("A3")
async def test_the_same_call_is_answered_at_once_for_a_day_after_a_no() -> None:
    async with asking() as desk:
        await desk.decide(await desk.parked("a"), NO)
        again = await desk.ask("a")
        assert again.error is not None
        assert again.error.code == "APPROVAL_DENIED"
        # The harmless twins: another argument, another caller, and the next day.
        await desk.parked("b")
        await desk.parked("a", by=OTHER_CALLER)
        desk.clock.advance(timedelta(hours=24).total_seconds() + 1)
        await desk.parked("a")


@pytest.mark.row("A2")
@pytest.mark.parametrize("first", [YES, NO], ids=["approved", "denied"])
@pytest.mark.parametrize("second", [YES, NO], ids=["approve", "deny"])
async def test_nobody_decides_what_is_decided(first: NewDecision, second: NewDecision) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, first)
        await desk.ended(approval_id)
        with pytest.raises(IdempotencyConflict) as caught:
            await desk.decide(approval_id, second, BOB)
        assert caught.value.details is not None
        assert caught.value.details["state"] in ("done", "denied")
        assert desk.deeds.done == (["a"] if first is YES else [])


@pytest.mark.row("A2")
async def test_of_two_who_decide_at_once_the_first_one_wins() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        refused: list[EngineError] = []

        async def decide(decision: NewDecision, by: Principal) -> None:
            try:
                await desk.decide(approval_id, decision, by, version=1)
            except IdempotencyConflict as conflict:
                refused.append(conflict)

        async with anyio.create_task_group() as group:
            group.start_soon(decide, YES, ALICE)
            group.start_soon(decide, NO, BOB)
        assert len(refused) == 1
        approval = await desk.state(approval_id, ApprovalState.DONE, ApprovalState.DENIED)
        assert desk.deeds.done == (["a"] if approval.state is ApprovalState.DONE else [])


@pytest.mark.row("A2")
async def test_whoever_saw_an_older_version_is_told_so() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        with pytest.raises(IdempotencyConflict):
            await desk.decide(approval_id, YES, version=2)
        assert (await desk.decide(approval_id, YES, version=1)).state is ApprovalState.APPROVED


@pytest.mark.row("A2")
async def test_expired_is_no_denial_and_cannot_be_approved_any_more() -> None:
    rules = ApprovalSettings(expire_seconds=60, warn_seconds=0)
    async with asking(approvals=rules) as desk:
        approval_id = await desk.parked("a")
        desk.clock.advance(61)
        with pytest.raises(ApprovalExpired):
            await desk.decide(approval_id)
        await desk.parked("b")  # the desk looks round
        answer = await desk.ended(approval_id)
        assert answer.error is not None
        assert answer.error.code == "APPROVAL_EXPIRED"
        assert "was not denied" in answer.error.message
        assert desk.deeds.done == []
        await desk.parked("a")  # asking again is allowed


@pytest.mark.row("A2")
async def test_a_clock_that_is_set_back_gives_no_approval_its_life_again() -> None:
    async with asking(approvals=ApprovalSettings(expire_seconds=60)) as desk:
        approval_id = await desk.parked("a")
        desk.clock.advance(61)
        assert (
            desk.engine.approvals.requests.now()
            > (await desk.engine.approvals.show(approval_id)).expires_at
        )
        desk.clock.advance(-3600)
        with pytest.raises(ApprovalExpired):
            await desk.decide(approval_id)


@pytest.mark.row("A2")
async def test_a_warning_goes_out_once_before_the_end() -> None:
    rules = ApprovalSettings(expire_seconds=600, warn_seconds=60)
    async with asking(approvals=rules) as desk:
        approval_id = await desk.parked("a")
        assert (await desk.engine.approvals.show(approval_id)).version == 1
        desk.clock.advance(550)
        for what in ("b", "c"):
            await desk.parked(what)
        await _until_warned_of(desk, approval_id)
        for what in ("d", "e"):
            await desk.parked(what)
        approval = await desk.engine.approvals.show(approval_id)
        assert approval.state is ApprovalState.PENDING
        assert await _warned_of(desk, approval_id) == 1


@pytest.mark.row("A2")
@pytest.mark.parametrize("damage", ["document = '{}'", "document = '{'", "expires_at = '2'"])
async def test_one_that_cannot_be_understood_ends_neither_the_keeper_nor_the_engine(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.approvals.scheduler.LOOK_S", 0.01)
    rules = ApprovalSettings(expire_seconds=600, warn_seconds=60)
    async with asking(tmp_path, approvals=rules) as desk:
        damaged, sound = await desk.parked("a"), await desk.parked("b")
        with sqlite3.connect(tmp_path / "state.db") as connection:
            connection.execute(f"UPDATE approvals SET {damage} WHERE id = ?", (damaged,))
        connection.close()
        desk.clock.advance(550)
        last = await desk.parked("c")  # the desk looks round
        await _until_warned_of(desk, sound)
        desk.clock.advance(60)
        await desk.state(sound, ApprovalState.EXPIRED)
        await desk.decide(last)
        assert (await desk.ended(last)).success


@pytest.mark.row("A2")
async def test_whoever_was_shown_it_before_the_warning_decides_on_the_same_after_it() -> None:
    rules = ApprovalSettings(expire_seconds=600, warn_seconds=60)
    async with asking(approvals=rules) as desk:
        approval_id = await desk.parked("a")
        shown = await desk.engine.approvals.show(approval_id)
        desk.clock.advance(550)
        await desk.parked("b")  # the desk looks round
        await _until_warned_of(desk, approval_id)
        assert await desk.engine.approvals.show(approval_id) == shown
        decided = await desk.decide(approval_id, YES, version=shown.version)
        assert decided.state is ApprovalState.APPROVED
        # The control: an edit is news to whoever was shown the call before it.
        other = await desk.parked("c")
        shown = await desk.engine.approvals.show(other)
        await desk.decide(other, NewDecision(decision="approve", arguments={"what": "d"}), ALICE)
        with pytest.raises(IdempotencyConflict):
            await desk.decide(other, YES, BOB, version=shown.version)


@pytest.mark.row("A4")
@pytest.mark.parametrize(
    ("by", "peer"),
    [
        (Principal(CALLER.id, frozenset({Scope.APPROVE})), None),
        (ALICE, CALLER.id),
        (CALLER, None),
        (Principal("approver:x", frozenset({Scope.ADMIN})), None),
    ],
    ids=["itself", "at its own socket", "without the scope", "admin only"],
)
async def test_nobody_approves_its_own_call_and_the_attempt_is_recorded(
    by: Principal, peer: str | None
) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        for decision in (YES, NO):
            with pytest.raises(PermissionDenied):
                await desk.decide(approval_id, decision, by, peer=peer)
        assert (await desk.engine.approvals.show(approval_id)).version == 1
        assert desk.deeds.done == []
        kinds = [row.kind for row in await _audited(desk)]
        assert kinds.count("approval.refused") == 2


@pytest.mark.row("A4")
async def test_self_approval_is_the_operators_named_choice_and_recorded_as_such() -> None:
    async with asking(approvals=ApprovalSettings(allow_self_approval=True)) as desk:
        approval_id = await desk.parked("a")
        itself = Principal(CALLER.id, frozenset({Scope.APPROVE}))
        approval = await desk.decide(approval_id, YES, itself)
        assert [one.is_self_approval for one in approval.decisions] == [True]


@pytest.mark.row("A3")
async def test_edited_call_runs_as_edited() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        edited = NewDecision(decision="approve", arguments={"what": "b"})
        approval = await desk.decide(approval_id, edited)
        assert approval.arguments == {"what": "b"}
        assert approval.decisions[0].edited
        assert (await desk.ended(approval_id)).data == {"erased": "b"}
        assert desk.deeds.done == ["b"]


EDITED = "approval: a human changed the arguments before this call ran: changed /what"


@pytest.mark.row("A3")
async def test_the_caller_of_an_edited_call_is_told_so_in_every_answer() -> None:
    async with asking() as desk:
        answers = []

        async def wait() -> None:
            answers.append(await desk.ask("a", wait_for_approval=5, idempotency_key="k"))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            with anyio.fail_after(10):
                while not (found := await desk.engine.approvals.list(ApprovalQuery())).items:
                    await anyio.sleep(0.01)
            approval_id = found.items[0].id
            edited = NewDecision(decision="approve", arguments={"what": "b"})
            await desk.decide(approval_id, edited)
        answers.append(await desk.ended(approval_id))
        answers.append(await desk.ask("a", idempotency_key="k"))
        assert [answer.metadata.warnings for answer in answers] == [(EDITED,)] * 3
        own = await desk.engine.approvals.show(approval_id, principal=CALLER)
        assert (own.arguments, own.asked_arguments) == ({"what": "b"}, {"what": "a"})
        # The harmless twin: an edit that changes nothing, and no edit.
        for decision in (YES, NewDecision(decision="approve", arguments={"what": "c"})):
            twin = await desk.parked("c")
            await desk.decide(twin, decision)
            assert (await desk.ended(twin)).metadata.warnings == ()
            assert (await desk.engine.approvals.show(twin)).asked_arguments is None


@pytest.mark.row("A3")
async def test_the_second_approver_sees_what_was_asked_and_what_it_was_edited_to() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        for what in ("b", "c"):
            edited = NewDecision(decision="approve", arguments={"what": what})
            await desk.decide(approval_id, edited, ALICE)
        shown = await desk.engine.approvals.show(approval_id)
        assert (shown.arguments, shown.asked_arguments) == ({"what": "c"}, {"what": "a"})
        back = await desk.decide(
            approval_id, NewDecision(decision="approve", arguments={"what": "a"}), ALICE
        )
        assert back.asked_arguments is None  # it is what was asked for again
        rows = [row.body for row in await _audited(desk) if row.kind == "approval.approved"]
        assert rows[-1]["action_digest"] == back.action_digest


@pytest.mark.row("A3")
async def test_the_warning_of_an_edit_survives_a_crash_in_the_middle(tmp_path: Path) -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(tmp_path, deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, NewDecision(decision="approve", arguments={"what": "b"}))
        with anyio.fail_after(10):
            await deeds.begun.wait()
    async with asking(tmp_path, deeds=deeds) as desk:
        assert (await desk.ended(approval_id)).metadata.warnings == (EDITED,)


@pytest.mark.row("A3")
async def test_an_edit_is_looked_at_before_the_yes_and_nothing_of_it_is_kept() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        before, rows = await desk.engine.approvals.show(approval_id), await _audited(desk)
        shown = await desk.engine.approvals.preview_edit(approval_id, {"what": "b"}, ALICE)
        assert (shown.arguments, shown.asked_arguments) == ({"what": "b"}, {"what": "a"})
        assert shown.action_digest != before.action_digest
        assert await desk.engine.approvals.show(approval_id) == before
        assert len(await _audited(desk)) == len(rows)
        edited = NewDecision(
            decision="approve", arguments={"what": "b"}, action_digest=shown.action_digest
        )
        decided = await desk.decide(approval_id, edited, version=shown.version)
        unstable = {"state", "version", "decisions", "decided_at", "expires_at", "counted"}
        assert decided.model_dump(exclude=unstable) == shown.model_dump(exclude=unstable)
        assert (await desk.ended(approval_id)).data == {"erased": "b"}


@pytest.mark.row("A3")
async def test_a_yes_to_what_was_shown_is_no_yes_to_something_else() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        shown = await desk.engine.approvals.preview_edit(approval_id, {"what": "b"}, ALICE)
        for arguments in ({"what": "c"}, None):
            other = NewDecision(
                decision="approve", arguments=arguments, action_digest=shown.action_digest
            )
            with pytest.raises(IdempotencyConflict):
                await desk.decide(approval_id, other)
        assert (await desk.engine.approvals.show(approval_id)).state is ApprovalState.PENDING
        assert desk.deeds.done == []
        # The control: without it, whatever the arguments make of it by then is decided on.
        await desk.decide(approval_id, NewDecision(decision="approve", arguments={"what": "c"}))
        assert (await desk.ended(approval_id)).data == {"erased": "c"}


@pytest.mark.row("A3")
async def test_an_edit_that_would_be_refused_is_refused_when_it_is_looked_at() -> None:
    carol = Principal("approver:carol", frozenset({Scope.APPROVE}))
    itself = Principal(CALLER.id, frozenset({Scope.APPROVE}))

    def prepare(engine: Any) -> None:
        def decide(facts: CallFacts) -> Decision:
            what = facts.arguments["what"]
            if what == "never":
                return Decision(Verdict.DENY, "never")
            names = {"carols": ("carol",), "bobs": ("bob",)}.get(what, ("alice", "bob"))
            return Decision(Verdict.ASK, "named", approvers=names)

        engine.policy.gate.decide = decide

    async with asking(prepare=prepare) as desk:
        approval_id = await desk.parked("a")
        look = desk.engine.approvals.preview_edit
        for arguments, by, error in (
            ({"what": 5}, ALICE, InvalidParams),
            ({"what": "never"}, ALICE, PermissionDenied),
            ({"what": "carols"}, ALICE, PermissionDenied),  # nobody whom both calls want
            ({"what": "bobs"}, ALICE, PermissionDenied),
            ({"what": "b"}, carol, PermissionDenied),
            ({"what": "b"}, itself, PermissionDenied),
        ):
            with pytest.raises(error):
                await look(approval_id, arguments, by)
        with pytest.raises(ResourceNotFound):
            await look("apr_0", {"what": "b"}, ALICE)
        assert (await look(approval_id, {"what": "bobs"}, BOB)).approvers == ("bob",)
        await desk.decide(approval_id, NO)
        with pytest.raises(IdempotencyConflict):
            await look(approval_id, {"what": "b"}, ALICE)


@pytest.mark.row("A3")
@pytest.mark.parametrize("arguments", [{}, {"what": 5}], ids=["missing", "of another type"])
async def test_what_is_edited_into_something_invalid_is_refused_with_its_fields(
    arguments: dict[str, object],
) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        with pytest.raises(InvalidParams) as caught:
            await desk.decide(approval_id, NewDecision(decision="approve", arguments=arguments))
        assert "what" in " ".join(caught.value.fields)
        assert (await desk.engine.approvals.show(approval_id)).state is ApprovalState.PENDING
        assert desk.deeds.done == []


@pytest.mark.row("A3")
async def test_several_are_decided_all_or_none() -> None:
    async with asking() as desk:
        first, second = await desk.parked("a"), await desk.parked("b")
        items = [OneOfSeveral(approval_id=one, decision=YES) for one in (first, second)]
        stale = OneOfSeveral(approval_id=second, version=9, decision=YES)
        with pytest.raises(IdempotencyConflict):
            await desk.engine.approvals.decide_all([items[0], stale], ALICE, channel="test")
        assert (await desk.engine.approvals.show(first)).state is ApprovalState.PENDING
        with pytest.raises(InvalidParams):
            await desk.engine.approvals.decide_all([items[0], items[0]], ALICE, channel="test")
        await desk.engine.approvals.decide_all(items, ALICE, channel="test")
        for one in (first, second):
            assert (await desk.ended(one)).success
        assert sorted(desk.deeds.done) == ["a", "b"]


@pytest.mark.row("A3")
async def test_of_several_the_one_that_is_not_there_is_named_and_none_is_decided() -> None:
    async with asking() as desk:
        first = await desk.parked("a")
        with pytest.raises(ResourceNotFound):
            await desk.decide("a" * 200)
        for unknown, shown in (("apr_0", "apr_0"), ("\x1b[2J\n\u202e", "\\x1b[2J\\n\\u202e")):
            items = [OneOfSeveral(approval_id=one, decision=YES) for one in (first, unknown)]
            with pytest.raises(ResourceNotFound) as caught:
                await desk.engine.approvals.decide_all(items, ALICE, channel="test")
            assert f"'{shown}'" in caught.value.message
            assert caught.value.details == {"approval_id": shown}
        assert (await desk.engine.approvals.show(first)).state is ApprovalState.PENDING


@pytest.mark.row("A3", "E4")
@pytest.mark.parametrize("period", ["day", "total"])
async def test_who_is_asked_to_exceed_a_budget_sees_which_whose_how_much_and_until_when(
    period: Any,
) -> None:
    def prepare(engine: Any) -> None:
        def decide(facts: CallFacts) -> Decision:
            if not facts.is_over_budget():
                return Decision(Verdict.ALLOW, "within")
            return Decision(Verdict.ASK, "more", "It is used up.", may_exceed_budget=True)

        engine.policy.gate.decide = decide

    budget = BudgetRule(name="daily", per=("principal",), period=period, calls=1)
    async with asking(prepare=prepare, budgets=(budget,)) as desk:
        assert (await desk.ask("a")).success
        approval_id = await desk.parked("b")
        shown = await desk.engine.approvals.show(approval_id)
        resets_at = "2026-01-02T00:00:00Z" if period == "day" else None
        assert shown.budget == {
            "budget": "daily", "unit": "calls", "limit": 1, "left": 0, "needed": 1,
            "resets_at": resets_at, "subject": {"principal": CALLER.id},
        }  # fmt: skip
        when = f"resets at {resets_at}" if resets_at else "does not reset"
        assert shown.reason == (
            f"It is used up. Over budget: daily of principal {CALLER.id} had 0 of 1 calls left "
            f"when this was asked, the call needs 1, and it {when}."
        )
        edited = await desk.engine.approvals.preview_edit(approval_id, {"what": "c"}, ALICE)
        assert (edited.reason, edited.budget) == (shown.reason, shown.budget)
        await desk.decide(approval_id)
        assert (await desk.ended(approval_id)).success
        # The harmless twin: somebody else's budget has room, and nobody is asked.
        assert (await desk.ask("d", by=OTHER_CALLER)).success


@pytest.mark.row("A2")
async def test_the_callers_own_cancelling_takes_a_waiting_call_back() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        with pytest.raises(ResourceNotFound):
            await desk.engine.approvals.cancel(approval_id, OTHER_CALLER)
        approval = await desk.engine.approvals.cancel(approval_id, CALLER)
        assert approval.state is ApprovalState.CANCELLED
        with pytest.raises(IdempotencyConflict):
            await desk.decide(approval_id)
        answer = await desk.ended(approval_id)
        assert answer.error is not None
        assert answer.error.code == "CANCELLED"
        assert desk.deeds.done == []


async def test_cancelling_by_call_id_reaches_a_call_that_runs_after_its_yes() -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        with anyio.fail_after(10):
            await deeds.begun.wait()
        call_id = (await desk.engine.approvals.show(approval_id)).call_id
        await desk.engine.cancel_call(call_id, CALLER)
        answer = await desk.ended(approval_id)
        assert answer.error is not None
        assert answer.error.code == "CANCELLED"
        assert deeds.done == []


@pytest.mark.row("A5")
async def test_a_caller_that_cancels_while_it_waits_takes_the_call_back() -> None:
    async with asking() as desk:
        answers = []

        async def wait() -> None:
            answers.append(await desk.ask("a", wait_for_approval=5))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            with anyio.fail_after(10):
                while not (found := await desk.engine.approvals.list(ApprovalQuery())).items:
                    await anyio.sleep(0.01)
            await desk.engine.cancel_call(found.items[0].call_id, CALLER)
        assert [answer.error.code for answer in answers] == ["CANCELLED"]
        approval = await desk.engine.approvals.show(found.items[0].id)
        assert approval.state is ApprovalState.CANCELLED
        assert desk.deeds.done == []


@pytest.mark.row("A5")
async def test_a_caller_that_waits_gets_the_calls_own_answer() -> None:
    async with asking() as desk:
        answers = []

        async def wait() -> None:
            answers.append(await desk.ask("a", wait_for_approval=5))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            with anyio.fail_after(10):
                while not (found := await desk.engine.approvals.list(ApprovalQuery())).items:
                    await anyio.sleep(0.01)
            await desk.decide(found.items[0].id)
        assert answers[0].data == {"erased": "a"}
        assert answers[0].metadata.call_id == found.items[0].call_id
        assert desk.deeds.done == ["a"]


@pytest.mark.row("A5")
async def test_a_caller_whose_patience_ends_hears_that_the_call_still_waits() -> None:
    async with asking() as desk:
        answer = await desk.ask("a", wait_for_approval=0.05)
        assert answer.error is not None
        assert answer.error.code == "REQUIRES_HUMAN_APPROVAL"
        assert answer.error.approval_id is not None
        await desk.decide(answer.error.approval_id)
        assert (await desk.ended(answer.error.approval_id)).success


@pytest.mark.row("A5", "P3")
async def test_the_same_key_finds_the_waiting_call_and_then_its_answer() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a", idempotency_key="k")
        assert await desk.parked("a", idempotency_key="k") == approval_id
        await desk.decide(approval_id)
        first = await desk.ended(approval_id)
        again = await desk.ask("a", idempotency_key="k")
        assert again.data == first.data
        assert again.metadata.idempotent_replay
        assert desk.deeds.done == ["a"]


@pytest.mark.row("A5", "P3")
async def test_the_same_key_hears_the_no() -> None:
    async with asking() as desk:
        await desk.decide(await desk.parked("a", idempotency_key="k"), NO)
        again = await desk.ask("a", idempotency_key="k")
        assert again.error is not None
        assert again.error.code == "APPROVAL_DENIED"


@pytest.mark.row("A3")
async def test_two_of_two_have_to_say_yes_and_one_no_ends_it() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        assert (await desk.decide(approval_id, YES, ALICE)).state is ApprovalState.PENDING
        with pytest.raises(IdempotencyConflict):
            await desk.decide(approval_id, YES, ALICE)  # one voice is one voice
        assert desk.deeds.done == []
        assert (await desk.decide(approval_id, YES, BOB)).state is ApprovalState.APPROVED
        assert (await desk.ended(approval_id)).success
        other = await desk.parked("b")
        await desk.decide(other, YES, ALICE)
        assert (await desk.decide(other, NO, BOB)).state is ApprovalState.DENIED
        assert desk.deeds.done == ["a"]


@pytest.mark.row("A3")
async def test_a_yes_to_something_else_does_not_count_for_the_edited_call() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, YES, ALICE)
        edited = NewDecision(decision="approve", arguments={"what": "b"})
        assert (await desk.decide(approval_id, edited, BOB)).state is ApprovalState.PENDING
        assert desk.deeds.done == []
        assert (await desk.decide(approval_id, YES, ALICE)).state is ApprovalState.APPROVED
        assert (await desk.ended(approval_id)).data == {"erased": "b"}


@pytest.mark.row("A3")
async def test_who_has_edited_a_call_since_says_yes_to_the_edited_one_only() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, YES, ALICE)
        edited = NewDecision(decision="approve", arguments={"what": "b"})
        assert (await desk.decide(approval_id, edited, ALICE)).counted == (ALICE.id,)
        back = NewDecision(decision="approve", arguments={"what": "a"})
        after = await desk.decide(approval_id, back, BOB)
        assert (after.state, after.counted) == (ApprovalState.PENDING, (BOB.id,))
        assert desk.deeds.done == []
        # The twin: said once more, it counts again.
        assert (await desk.decide(approval_id, YES, ALICE)).state is ApprovalState.APPROVED
        assert (await desk.ended(approval_id)).data == {"erased": "a"}


@pytest.mark.row("A3")
async def test_the_yes_of_somebody_who_may_not_approve_any_more_does_not_count() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, YES, ALICE)
        await _remove(desk, "alice")
        assert (await desk.decide(approval_id, YES, BOB)).state is ApprovalState.PENDING
        assert desk.deeds.done == []


@pytest.mark.row("A3")
async def test_what_nobody_can_complete_any_more_says_so_until_it_can_be_again() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, YES, ALICE)
        shown = await desk.engine.approvals.show(approval_id)
        assert (shown.counted, shown.stuck) == ((ALICE.id,), None)
        await _remove(desk, "alice")
        decided = await desk.decide(approval_id, YES, BOB)
        for shown in (
            decided,
            await desk.engine.approvals.show(approval_id),
            (await desk.engine.approvals.list(ApprovalQuery())).items[0],
        ):
            assert shown.counted == (BOB.id,)
            assert shown.stuck is not None
            assert "cannot be completed" in shown.stuck
            assert "alice cannot approve" in shown.stuck
        own = await desk.engine.approvals.show(approval_id, principal=CALLER)
        assert (own.counted, own.stuck) == ((), None)  # who may approve is not its caller's
        _approve_now(desk, ALICE, BOB)  # as a webhook may that was switched off for a time
        shown = await desk.engine.approvals.show(approval_id)
        assert (shown.counted, shown.stuck) == ((ALICE.id, BOB.id), None)
        assert desk.deeds.done == []
        await desk.decide(approval_id, YES, BOB)  # the same word, and now it is enough
        assert (await desk.ended(approval_id)).success
        _approve_now(desk, BOB)
        after = await desk.engine.approvals.show(approval_id)
        assert (after.counted, after.stuck) == ((ALICE.id, BOB.id), None)  # what was, was


@pytest.mark.row("A3")
async def test_a_call_that_would_wait_for_approvers_who_are_none_is_refused_at_once() -> None:
    async with asking(prepare=_ask_two) as desk:
        await desk.parked("a")
        await _remove(desk, "alice")
        answer = await desk.ask("b")
        assert answer.error is not None
        assert answer.error.code == "REQUIRES_HUMAN_APPROVAL"
        assert answer.error.approval_id is None
        assert "alice cannot approve" in answer.error.message
        assert len((await desk.engine.approvals.list(ApprovalQuery())).items) == 1
        _approve_now(desk, ALICE, BOB)
        await desk.parked("b")


@pytest.mark.row("A3")
@pytest.mark.parametrize("quorum", [1, 2, 3])
async def test_a_quorum_larger_than_all_approvers_is_refused_and_one_as_large_waits(
    quorum: int,
) -> None:
    def prepare(engine: Any) -> None:
        engine.policy.gate.decide = lambda facts: Decision(Verdict.ASK, "many", quorum=quorum)

    async with asking(prepare=prepare) as desk:
        if quorum <= 2:
            await desk.parked("a")
            return
        answer = await desk.ask("a")
        assert answer.error is not None
        assert (answer.error.code, answer.error.approval_id) == ("REQUIRES_HUMAN_APPROVAL", None)
        assert "needs 3 approvals, but only 2 can approve" in answer.error.message


@pytest.mark.row("A3")
async def test_a_remembered_rule_ends_with_its_authors_authority() -> None:
    async with asking() as desk:
        until = desk.clock.now() + timedelta(hours=1)
        wish = RememberWish(scope="until", until=until)
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, NewDecision(decision="approve", remember=wish))
        await desk.ended(approval_id)
        assert (await desk.ask("a")).success
        await _remove(desk, "alice")
        await desk.parked("a")


@pytest.mark.row("A2")
async def test_one_callers_large_calls_do_not_fill_the_disk() -> None:
    rules = ApprovalSettings(max_pending_mb_per_principal=1)
    async with asking(approvals=rules) as desk:
        first = await desk.parked("a" * 200_000)
        refused = await desk.ask("b" * 200_000)
        assert refused.error is not None
        assert refused.error.code == "RATE_LIMITED"
        await desk.parked("b" * 200_000, by=OTHER_CALLER)
        await desk.decide(first, NO)
        await desk.parked("b" * 200_000)


def _approve_now(desk: Asking, *who: Principal) -> None:
    desk.engine.approvals.requests.eligibility.approver_ids = lambda: frozenset(
        one.id for one in who
    )


async def _remove(desk: Asking, name: str) -> None:
    admin, approvers = Principal("approver:root", frozenset({Scope.ADMIN})), desk.engine.approvers
    await approvers.add("root", [Scope.ADMIN], by=admin, now=desk.engine.now())
    await approvers.remove(name, by=admin, now=desk.engine.now())


@pytest.mark.row("A3")
async def test_only_named_approvers_decide() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        carol = Principal("approver:carol", frozenset({Scope.APPROVE}))
        for decision in (YES, NO):
            with pytest.raises(PermissionDenied, match="alice, bob"):
                await desk.decide(approval_id, decision, carol)


@pytest.mark.row("A3")
async def test_remembered_for_a_time_lets_the_like_of_it_through_so_often() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        until = desk.clock.now() + timedelta(hours=1)
        wish = RememberWish(scope="until", until=until, uses=2)
        shown = await desk.engine.approvals.preview_remember(approval_id, wish)
        assert (shown.arguments, shown.uses_left) == ({"what": "a"}, 2)
        assert await desk.engine.approvals.remembered() == []
        await desk.decide(approval_id, NewDecision(decision="approve", remember=wish))
        await desk.ended(approval_id)
        await desk.parked("b")  # another argument
        await desk.parked("a", by=OTHER_CALLER)
        for _ in range(2):
            assert (await desk.ask("a")).success
        await desk.parked("a")  # used up
        assert desk.deeds.done == ["a", "a", "a"]


@pytest.mark.row("A3")
async def test_remembered_ends_with_its_time_or_when_it_is_taken_back() -> None:
    async with asking() as desk:
        until = desk.clock.now() + timedelta(hours=1)
        wish = RememberWish(scope="until", until=until)
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, NewDecision(decision="approve", remember=wish))
        await desk.ended(approval_id)
        assert (await desk.ask("a")).success
        (rule,) = await desk.engine.approvals.remembered()
        assert rule.created_by == ALICE.id
        await desk.engine.approvals.forget(rule.id, ALICE)
        await desk.parked("a")
        with pytest.raises(ResourceNotFound):
            await desk.engine.approvals.forget(rule.id, ALICE)


@pytest.mark.row("A3")
async def test_what_cannot_be_remembered_is_refused_and_nothing_decided() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        past = desk.clock.now() - timedelta(seconds=1)
        for wish in (
            RememberWish(scope="session"),
            RememberWish(scope="until", until=past),
            RememberWish(scope="until", until=past + timedelta(days=1), arguments=("other",)),
            RememberWish(scope="until", until=past + timedelta(days=1), arguments=()),
        ):
            with pytest.raises(InvalidParams):
                await desk.decide(approval_id, NewDecision(decision="approve", remember=wish))
        assert (await desk.engine.approvals.show(approval_id)).state is ApprovalState.PENDING


@pytest.mark.row("A1")
async def test_with_nobody_to_ask_the_call_is_refused_and_nothing_is_kept() -> None:
    async with asking(approver=False) as desk:
        answer = await desk.ask("a")
        assert answer.error is not None
        assert answer.error.code == "REQUIRES_HUMAN_APPROVAL"
        assert answer.error.approval_id is None
        assert "`fumehood approvers init`, while no engine runs" in answer.error.message
        assert (await desk.engine.approvals.list(ApprovalQuery())).items == ()


@pytest.mark.row("A2")
async def test_one_callers_waiting_calls_take_no_room_from_anothers() -> None:
    rules = ApprovalSettings(max_pending=3, max_pending_per_principal=2)
    async with asking(approvals=rules) as desk:
        first = await desk.parked("a")
        await desk.parked("b")
        refused = await desk.ask("c")
        assert refused.error is not None
        assert refused.error.code == "RATE_LIMITED"
        await desk.parked("c", by=OTHER_CALLER)
        await desk.decide(first, NO)
        await desk.parked("c")


@pytest.mark.row("D4")
async def test_a_caller_sees_its_own_approvals_only_and_not_how_they_are_bound() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        own = await desk.engine.approvals.show(approval_id, principal=CALLER)
        assert (own.binding, own.approvers, own.arguments) == (None, (), {"what": "a"})
        with pytest.raises(ResourceNotFound):
            await desk.engine.approvals.show(approval_id, principal=OTHER_CALLER)
        seen = await desk.engine.approvals.list(ApprovalQuery(), principal=OTHER_CALLER)
        assert seen.items == ()
        with pytest.raises(ResourceNotFound):
            await desk.engine.approvals.list(
                ApprovalQuery(cursor=approval_id), principal=OTHER_CALLER
            )


async def test_lists_go_from_the_newest_to_the_oldest_page_by_page() -> None:
    async with asking() as desk:
        made = [await desk.parked(str(number)) for number in range(5)]
        page = await desk.engine.approvals.list(ApprovalQuery(limit=2))
        seen = [one.id for one in page.items]
        while page.has_more:
            query = ApprovalQuery(limit=2, cursor=page.next_cursor)
            page = await desk.engine.approvals.list(query)
            seen += [one.id for one in page.items]
        assert seen == made[::-1]
        pending = ApprovalQuery(state=ApprovalState.DENIED)
        assert (await desk.engine.approvals.list(pending)).items == ()


async def test_only_what_was_interrupted_can_be_resolved() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        with pytest.raises(IdempotencyConflict):
            await desk.engine.approvals.resolve(approval_id, Resolution(outcome="done"), ALICE)


async def _audited(desk: Asking) -> list[_Row]:
    from sqlalchemy import select

    from fumehood.protocol import strict_json
    from fumehood.storage.schema import AUDIT

    await desk.engine.database.flush()
    bodies = await desk.engine.database.read(
        lambda c: c.execute(select(AUDIT.c.body).order_by(AUDIT.c.seq)).scalars().all()
    )
    return [_Row(strict_json.loads(body.encode())) for body in bodies]


class _Row:
    def __init__(self, body: dict[str, Any]) -> None:
        self.kind: str = body["kind"]
        self.body = body


async def _until_warned_of(desk: Asking, approval_id: str) -> None:
    with anyio.fail_after(10):
        while not await _warned_of(desk, approval_id):
            await anyio.sleep(0.01)


async def _warned_of(desk: Asking, approval_id: str) -> int:
    """How often people were told that its end is near."""
    return sum(
        row.kind == "approval.expiring" and approval_id in str(row.body)
        for row in await _audited(desk)
    )


def _ask_two(engine: object) -> None:
    """A policy that wants two named people."""
    from fumehood.policy.service import PolicyGate

    def decide(self: PolicyGate, facts: CallFacts) -> Decision:
        return Decision(Verdict.ASK, "two", approvers=("alice", "bob"), quorum=2)

    engine.policy.gate.decide = decide.__get__(engine.policy.gate)  # type: ignore[attr-defined]
