"""The approval service: calls that wait for approval, in an engine with in-memory state."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import select

from fumehood.approvals import scheduler
from fumehood.approvals.model import (
    ApprovalQuery,
    ApprovalSettings,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberWish,
)
from fumehood.budgets.settings import BudgetRule
from fumehood.core.errors import (
    ApprovalExpired,
    CircuitOpen,
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    QuotaExceeded,
    ResourceNotFound,
    ShuttingDown,
)
from fumehood.core.identity import Principal, Scope
from fumehood.policy.model import CallFacts, Decision, Verdict
from fumehood.protocol import strict_json
from fumehood.sandbox.settings import SessionSettings
from fumehood.storage.schema import AUDIT
from fumehood.testing import CONTAINER_LIMITS, FakeWall, ManualClock
from support.answers import code_of
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
    change_request,
)

pytestmark = pytest.mark.anyio


@pytest.mark.row("A3")
async def test_repeat_of_denied_call_is_refused_for_a_day() -> None:
    async with asking() as desk:
        await desk.decide(await desk.parked("a"), NO)
        again = await desk.ask("a")
        assert again.error.code == "APPROVAL_DENIED"
        # The harmless twins: another argument, another caller, and the next day.
        await desk.parked("b")
        await desk.parked("a", by=OTHER_CALLER)
        desk.clock.advance(timedelta(hours=24).total_seconds() + 1)
        await desk.parked("a")


@pytest.mark.row("A2")
async def test_clock_set_back_does_not_revive_expired_approval() -> None:
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
async def test_approval_stays_valid_after_a_passing_refusal() -> None:
    """A budget that is used up is final; a place and a service are awaited."""
    for passing in (
        CircuitOpen("The service fails.", retry_after_ms=30_000),
        ShuttingDown("The engine stops."),
    ):
        assert scheduler._passes(passing)
    assert scheduler._passes(QuotaExceeded("All sessions are busy.", retryable=True))
    assert not scheduler._passes(QuotaExceeded("The budget is used up."))


@pytest.mark.sqlite
@pytest.mark.row("A2")
@pytest.mark.parametrize("damage", ["document = '{}'", "document = '{'", "expires_at = '2'"])
async def test_damaged_approval_row_does_not_stop_scheduler_or_engine(
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
async def test_expiry_warning_is_sent_once_and_does_not_change_the_approval_version() -> None:
    rules = ApprovalSettings(expire_seconds=600, warn_seconds=60)
    async with asking(approvals=rules) as desk:
        approval_id = await desk.parked("a")
        shown = await desk.engine.approvals.show(approval_id)
        desk.clock.advance(550)
        await desk.parked("b")  # the desk looks round
        await _until_warned_of(desk, approval_id)
        await desk.parked("e")
        assert await _warned_of(desk, approval_id) == 1
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
    ids=[
        "caller-as-approver",
        "approver-from-callers-uid",
        "without-approve-scope",
        "admin-scope-only",
    ],
)
async def test_self_approval_is_refused_and_audited(by: Principal, peer: str | None) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        for decision in (YES, NO):
            with pytest.raises(PermissionDenied):
                await desk.decide(approval_id, decision, by, peer=peer)
        assert (await desk.engine.approvals.show(approval_id)).version == 1
        assert desk.deeds.done == []
        kinds = [row["kind"] for row in await _audited(desk)]
        assert kinds.count("approval.refused") == 2


@pytest.mark.row("A4")
async def test_self_approval_is_recorded_if_allowed_by_configuration() -> None:
    async with asking(approvals=ApprovalSettings(allow_self_approval=True)) as desk:
        approval_id = await desk.parked("a")
        itself = Principal(CALLER.id, frozenset({Scope.APPROVE}))
        approval = await desk.decide(approval_id, YES, itself)
        assert [one.is_self_approval for one in approval.decisions] == [True]


EDITED = "approval: a human changed the arguments before this call ran: changed /what"


@pytest.mark.row("A3")
async def test_every_answer_to_an_edited_call_has_an_edit_warning() -> None:
    async with asking() as desk:
        call = asyncio.create_task(desk.ask("a", wait_for_approval=True, idempotency_key="k"))
        approval_id = (await desk.waiting())[0].id
        await desk.decide(approval_id, NewDecision(decision="approve", arguments={"what": "b"}))
        answers = [await call, await desk.ended(approval_id)]
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
async def test_edit_preview_matches_the_decision_and_stores_nothing() -> None:
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
async def test_decision_with_stale_action_digest_is_refused() -> None:
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
async def test_edit_preview_refuses_what_the_decision_would_refuse() -> None:
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
async def test_batch_with_unknown_or_repeated_id_decides_none() -> None:
    async with asking() as desk:
        first = await desk.parked("a")
        with pytest.raises(ResourceNotFound):
            await desk.decide("a" * 200)
        twice = [OneOfSeveral(approval_id=first, decision=YES)] * 2
        with pytest.raises(InvalidParams):
            await desk.engine.approvals.decide_all(twice, ALICE, channel="test")
        for unknown, shown in (("apr_0", "apr_0"), ("\x1b[2J\n\u202e", "\\x1b[2J\\n\\u202e")):
            items = [OneOfSeveral(approval_id=one, decision=YES) for one in (first, unknown)]
            with pytest.raises(ResourceNotFound) as caught:
                await desk.engine.approvals.decide_all(items, ALICE, channel="test")
            assert f"'{shown}'" in caught.value.message
            assert caught.value.details == {"approval_id": shown}
        assert (await desk.engine.approvals.show(first)).state is ApprovalState.PENDING


@pytest.mark.row("A3", "E4")
@pytest.mark.parametrize("period", ["day", "total"])
async def test_over_budget_approval_shows_budget_subject_and_reset_time(
    period: Any,
) -> None:
    def prepare(engine: Any) -> None:
        def decide(facts: CallFacts) -> Decision:
            if not facts.exceeds("over_budget"):
                return Decision(Verdict.ALLOW, "within")
            return Decision(Verdict.ASK, "more", "It is used up.", may_exceed=("over_budget",))

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


@pytest.mark.sqlite
@pytest.mark.row("A3", "E4")
@pytest.mark.parametrize("fields", [{}, {"may_exceed_budget": True}, {"may_exceed_budget": False}])
async def test_yes_to_exceed_a_budget_that_an_earlier_version_stored_still_holds(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """`{}` is as this version stores it."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[[rules]]\nid = "r"\ndecision = "ask"\nover_budget = true\n')
    config: dict[str, Any] = {
        "budgets": (BudgetRule(name="b", period="total", calls=1),),
        "policy_file": policy, "dangerous": False, "deeds": Deeds(),
    }  # fmt: skip
    async with asking(tmp_path, **config) as desk:
        assert (await desk.ask("a")).success
        approval_id = await desk.parked("b")

    def as_before(request: dict[str, Any]) -> None:
        if fields:
            del request["may_exceed"]
            request.update(fields)

    change_request(tmp_path, as_before)
    async with asking(tmp_path, **config) as desk:
        await desk.decide(approval_id)
        answer = await desk.ended(approval_id)
    is_let_pass = fields.get("may_exceed_budget", True)
    assert code_of(answer) == ("OK" if is_let_pass else "QUOTA_EXCEEDED")
    assert config["deeds"].done == (["a", "b"] if is_let_pass else ["a"])


async def test_cancel_by_call_id_stops_running_approved_call() -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        with anyio.fail_after(120):
            await deeds.begun.wait()
        call_id = (await desk.engine.approvals.show(approval_id)).call_id
        await desk.engine.cancel_call(call_id, CALLER)
        answer = await desk.ended(approval_id)
        assert answer.error.code == "CANCELLED"
        assert deeds.done == []


@pytest.mark.row("A3")
async def test_approval_before_an_edit_does_not_count_for_the_edited_call() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, YES, ALICE)
        edited = NewDecision(decision="approve", arguments={"what": "b"})
        assert (await desk.decide(approval_id, edited, BOB)).state is ApprovalState.PENDING
        assert desk.deeds.done == []
        assert (await desk.decide(approval_id, YES, ALICE)).state is ApprovalState.APPROVED
        assert (await desk.ended(approval_id)).data == {"erased": "b"}


@pytest.mark.row("A3")
async def test_approvers_own_later_edit_replaces_its_earlier_approval() -> None:
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
async def test_approval_is_shown_as_stuck_until_there_are_enough_approvers_again() -> None:
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


@pytest.mark.row("A3")
@pytest.mark.parametrize("quorum", [1, 2, 3])
async def test_quorum_larger_than_number_of_approvers_is_refused(
    quorum: int,
) -> None:
    def prepare(engine: Any) -> None:
        engine.policy.gate.decide = lambda facts: Decision(Verdict.ASK, "many", quorum=quorum)

    async with asking(prepare=prepare) as desk:
        if quorum <= 2:
            await desk.parked("a")
            return
        answer = await desk.ask("a")
        assert (answer.error.code, answer.error.approval_id) == ("REQUIRES_HUMAN_APPROVAL", None)
        assert "needs 3 approvals, but only 2 can approve" in answer.error.message


@pytest.mark.row("A3")
async def test_expired_token_does_not_approve_again_if_the_clock_is_set_back() -> None:
    async with asking() as desk:
        clock, engine = desk.clock, desk.engine
        hour = timedelta(hours=1)
        await engine.tokens.new(
            "t", principal_id="uid:9", scopes=[Scope.APPROVE], agents=(),
            expires_at=clock.now() + hour, by=ALICE, now=clock.now(),
        )  # fmt: skip
        eligibility = engine.approvals.requests.eligibility
        assert eligibility.counts("uid:9")
        clock.advance(2 * hour.total_seconds())
        assert not eligibility.counts("uid:9")
        clock.advance(-2 * hour.total_seconds())
        assert not eligibility.counts("uid:9")


@pytest.mark.row("A3")
async def test_remembered_rule_ends_if_its_author_is_removed() -> None:
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
@pytest.mark.parametrize(
    ("limit", "length"),
    [({"max_pending_per_principal": 1}, 1), ({"max_pending_mb_per_principal": 1}, 200_000)],
    ids=["number", "size"],
)
async def test_pending_calls_are_limited_per_principal(limit: dict[str, int], length: int) -> None:
    async with asking(approvals=ApprovalSettings(**limit)) as desk:
        first = await desk.parked("a" * length)
        refused = await desk.ask("b" * length)
        assert refused.error.code == "RATE_LIMITED"
        await desk.parked("b" * length, by=OTHER_CALLER)
        await desk.decide(first, NO)
        await desk.parked("b" * length)


def _approve_now(desk: Asking, *who: Principal) -> None:
    desk.engine.approvals.requests.eligibility.approver_ids = lambda: frozenset(
        one.id for one in who
    )


async def _remove(desk: Asking, name: str) -> None:
    admin, approvers = Principal("approver:root", frozenset({Scope.ADMIN})), desk.engine.approvers
    await approvers.add("root", [Scope.ADMIN], by=admin, now=desk.engine.now())
    await approvers.remove(name, by=admin, now=desk.engine.now())


@pytest.mark.row("A3")
async def test_decision_by_unnamed_approver_is_refused() -> None:
    async with asking(prepare=_ask_two) as desk:
        approval_id = await desk.parked("a")
        carol = Principal("approver:carol", frozenset({Scope.APPROVE}))
        for decision in (YES, NO):
            with pytest.raises(PermissionDenied, match="alice, bob"):
                await desk.decide(approval_id, decision, carol)


@pytest.mark.row("A3")
async def test_invalid_remember_wish_is_refused_without_a_decision() -> None:
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


@pytest.mark.row("D4")
async def test_caller_sees_only_its_own_approvals_without_binding() -> None:
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


async def _audited(desk: Asking) -> list[Any]:
    """The bodies of all audit rows."""
    await desk.engine.database.flush()
    bodies = await desk.engine.database.read(
        lambda c: c.execute(select(AUDIT.c.body).order_by(AUDIT.c.seq)).scalars().all()
    )
    return [strict_json.loads(body.encode()) for body in bodies]


async def _until_warned_of(desk: Asking, approval_id: str) -> None:
    with anyio.fail_after(120):
        while not await _warned_of(desk, approval_id):
            await anyio.sleep(0.01)


async def _warned_of(desk: Asking, approval_id: str) -> int:
    """The number of expiry warnings for an approval."""
    return sum(
        row["kind"] == "approval.expiring" and approval_id in str(row)
        for row in await _audited(desk)
    )


def _ask_two(engine: Any) -> None:
    """A policy that requires approval by two named approvers."""
    two = Decision(Verdict.ASK, "two", approvers=("alice", "bob"), quorum=2)
    engine.policy.gate.decide = lambda facts: two


@pytest.mark.row("A2", "S11")
async def test_session_does_not_end_unused_while_its_call_waits() -> None:
    async with asking(sessions=SessionSettings(idle_seconds=60)) as desk:
        keeper = desk.engine.sessions
        waits, unused = await keeper.create(CALLER), await keeper.create(CALLER)
        desk.clock.advance(59)
        approval_id = await desk.parked(session_id=waits.id)
        desk.clock.advance(59)
        keeper.tidy()
        assert not keeper.is_active(unused.id)  # the twin
        await desk.looked_round()
        desk.clock.advance(3000)
        keeper.tidy()
        record = keeper.find(CALLER, waits.id)
        assert record.expires_at == record.created_at + timedelta(hours=4)
        await desk.decide(approval_id)
        assert (await desk.ended(approval_id)).success
        await desk.looked_round()
        # Its idle time begins again when nothing waits any more.
        record = keeper.find(CALLER, waits.id)
        assert record.expires_at == record.last_used_at + timedelta(seconds=60)
        desk.clock.advance(59)
        keeper.tidy()
        assert keeper.is_active(waits.id)
        desk.clock.advance(1)
        keeper.tidy()
        assert not keeper.is_active(waits.id)


@pytest.mark.row("A2", "S11")
async def test_approval_expires_with_its_session_if_that_ends_first() -> None:
    async with asking(sessions=SessionSettings(lifetime_seconds=600)) as desk:
        session = await desk.engine.sessions.create(CALLER)
        desk.clock.advance(100)
        answer = await desk.ask(session_id=session.id)
        last_end = session.created_at + timedelta(seconds=600)
        approval = await desk.engine.approvals.show(str(answer.error.approval_id))
        assert approval.expires_at == last_end
        assert answer.error.details["expires_at"] == last_end.isoformat()
        desk.clock.advance(499)
        assert (await desk.engine.approvals.show(approval.id)).state is ApprovalState.PENDING
        desk.clock.advance(1)
        await desk.parked("another call")  # the desk looks round
        assert (await desk.state(approval.id)).state is ApprovalState.EXPIRED
        # The twin: a call without a session has the whole time.
        other = await desk.engine.approvals.show(await desk.parked("b"))
        assert other.expires_at == other.created_at + timedelta(seconds=3600)


@pytest.mark.row("A2", "S11")
async def test_session_whose_call_waits_is_there_after_a_long_time_without_an_engine(
    tmp_path: Path,
) -> None:
    clock, rules = ManualClock(), SessionSettings(idle_seconds=60)
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    async with asking(tmp_path, clock=clock, sessions=rules, container=wall) as desk:
        waits = await desk.engine.sessions.create(CALLER)
        unused = await desk.engine.sessions.create(CALLER)
        approval_id = await desk.parked(session_id=waits.id)
    clock.advance(1000)
    async with asking(tmp_path, clock=clock, sessions=rules, container=wall) as again:
        assert not again.engine.sessions.is_active(unused.id)  # the twin
        await again.decide(approval_id)
        assert (await again.ended(approval_id)).success
