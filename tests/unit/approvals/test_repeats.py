"""A repeated call is the call that waits, or whose answer nobody has fetched: asked and done once."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fumehood.approvals.model import (
    ApprovalQuery,
    ApprovalState,
    NewDecision,
    RememberWish,
    Resolution,
)
from fumehood.approvals.settings import ApprovalSettings
from fumehood.core.call import BatchOptions, RawBatch
from fumehood.executors.handle import CallHandle
from fumehood.pipeline.claim import repeat_key_of
from fumehood.pipeline.incoming import parse_own_call
from support.asking import ALICE, CALLER, NO, OTHER_CALLER, YES, Asking, Deeds, asking
from support.keyed import permitted
from support.policies import policy_of, rule

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A5")]


async def waiting(desk: Asking) -> int:
    return len((await desk.engine.approvals.list(ApprovalQuery())).items)


async def done(desk: Asking, approval_id: str) -> None:
    """Until the call has its answer, which nobody fetches."""
    await desk.state(approval_id, ApprovalState.DONE, ApprovalState.FAILED, ApprovalState.DENIED)


async def followed(desk: Asking, approval_id: str, count: int) -> None:
    """Until so many callers wait for the call's answer."""
    with anyio.fail_after(10):
        while len(desk.engine.approvals.requests.runs.followers(approval_id)) != count:
            await anyio.sleep(0.01)


async def test_repeat_of_a_call_that_waits_is_that_call() -> None:
    async with asking() as desk:
        first = await desk.ask("a")
        again = await desk.ask("a")
        assert first.error is not None
        assert again.error is not None
        assert again.error.approval_id == first.error.approval_id
        assert again.metadata.call_id == first.metadata.call_id
        assert await waiting(desk) == 1


async def test_repeat_of_a_decided_call_gets_its_answer_once_and_then_asks_anew() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        await done(desk, approval_id)
        answer = await desk.ask("a")
        assert answer.success
        assert answer.metadata.idempotent_replay is True
        assert desk.deeds.done == ["a"]
        assert await desk.parked("a") != approval_id
        assert desk.deeds.done == ["a"]


async def test_caller_that_waited_and_got_its_answer_has_fetched_it() -> None:
    async with asking() as desk:
        async with anyio.create_task_group() as group:

            async def call() -> None:
                answer = await desk.ask("a", wait_for_approval=10)
                assert answer.success
                assert answer.metadata.idempotent_replay is not True

            group.start_soon(call)
            with anyio.fail_after(10):
                while not (page := await desk.engine.approvals.list(ApprovalQuery())).items:
                    await anyio.sleep(0.01)
            await desk.decide(page.items[0].id)
        await desk.parked("a")
        assert await waiting(desk) == 2


async def test_answer_looked_up_by_the_call_id_is_fetched() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        assert (await desk.ended(approval_id)).success
        assert await desk.parked("a") != approval_id


async def test_of_equal_calls_at_once_one_asks_and_all_wait_for_it() -> None:
    async with asking() as desk:
        ids: list[str] = []

        async def ask() -> None:
            ids.append(await desk.parked("a"))

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(ask)
        assert len(set(ids)) == 1
        assert await waiting(desk) == 1


async def test_equal_members_of_a_batch_are_one_call_also_one_after_the_other() -> None:
    async with asking() as desk:
        member = {"tool": "erase", "arguments": {"what": "a"}, "options": {"wait_for_approval": 10}}
        twin = {**member, "arguments": {"what": "b"}}
        body = RawBatch(
            calls=[member, member, twin], options=BatchOptions(parallel_tool_calls=False)
        )
        answers: list[Any] = []
        async with anyio.create_task_group() as group:

            async def run() -> None:
                answers.extend(await desk.engine.open_batch(body, CALLER).run())

            group.start_soon(run)
            for count in (1, 2):
                with anyio.fail_after(10):
                    while (
                        len((page := await desk.engine.approvals.list(ApprovalQuery())).items)
                        < count
                    ):
                        await anyio.sleep(0.01)
                await desk.decide(page.items[0].id)
        assert [one.success for one in answers] == [True] * 3
        assert desk.deeds.done == ["a", "b"]
        assert [one.metadata.idempotent_replay for one in answers[:2]] == [False, True]
        await desk.parked("a")  # the batch has fetched them


async def test_batch_whose_caller_has_left_has_fetched_nothing() -> None:
    async with asking() as desk:
        members = [
            {"tool": "erase", "arguments": {"what": what}, "options": {"wait_for_approval": 10}}
            for what in ("a", "b")
        ]
        batch = desk.engine.open_batch(RawBatch(calls=members), CALLER)
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run)
            with anyio.fail_after(10):
                while len((page := await desk.engine.approvals.list(ApprovalQuery())).items) < 2:
                    await anyio.sleep(0.01)
            (first,) = [one.id for one in page.items if one.arguments == {"what": "a"}]
            await desk.decide(first)
            await done(desk, first)
            batch.cancel()
        answer = await desk.ask("a")
        assert answer.success
        assert answer.metadata.idempotent_replay is True
        assert desk.deeds.done == ["a"]


@pytest.mark.parametrize(
    "other",
    [
        {"what": "b"},
        {"by": OTHER_CALLER},
        {"new_call": True},
        {"idempotency_key": "k"},
        {"timeout_seconds": 3.0},
    ],
)
async def test_another_call_asks_by_itself(other: dict[str, Any]) -> None:
    async with asking() as desk:
        first = await desk.parked("a")
        assert await desk.parked(**{"what": "a", **other}) != first
        assert await desk.parked("a", trace_id="other", max_length=9) == first  # only its form


async def test_call_with_a_key_or_a_new_call_is_not_what_a_later_one_repeats() -> None:
    async with asking() as desk:
        keyed = await desk.parked("a", idempotency_key="k")
        new = await desk.parked("a", new_call=True)
        plain = await desk.parked("a")
        assert len({keyed, new, plain}) == 3
        assert await desk.parked("a", idempotency_key="k") == keyed


async def test_dry_run_repeats_nothing_and_fetches_nothing() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        await done(desk, approval_id)
        assert "approval" in (await desk.ask("a", dry_run=True)).data
        assert (await desk.ask("a")).data == {"erased": "a"}


async def test_denial_reaches_the_repeat_with_its_reason_and_nothing_is_asked_again() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, NO)
        for _ in range(2):
            answer = await desk.ask("a")
            assert answer.error is not None
            assert answer.error.code == "APPROVAL_DENIED"
            assert "needed tomorrow" in answer.error.message
        assert await waiting(desk) == 1
        desk.clock.advance(25 * 3600)
        await desk.parked("a")


@pytest.mark.parametrize("ending", ["expired", "cancelled"])
async def test_call_that_nobody_decided_is_asked_anew(ending: str) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        if ending == "expired":
            desk.clock.advance(2 * 3600)
            desk.engine.approvals.requests.new_call.set()
            await desk.state(approval_id, ApprovalState.EXPIRED)
        else:
            await desk.engine.approvals.cancel(approval_id, CALLER)
        assert await desk.parked("a") != approval_id


async def test_answer_is_for_a_repeat_for_a_time_only() -> None:
    async with asking(approvals=ApprovalSettings(repeat_seconds=60)) as desk:
        for pause_s, is_repeat in ((59, True), (61, False)):
            approval_id = await desk.parked("a")
            await desk.decide(approval_id)
            await done(desk, approval_id)
            desk.clock.advance(pause_s)
            assert (await desk.ask("a")).success is is_repeat
        assert desk.deeds.done == ["a", "a"]


async def test_repeat_of_an_edited_call_gets_the_answer_of_what_was_done() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, NewDecision(decision="approve", arguments={"what": "b"}))
        await done(desk, approval_id)
        answer = await desk.ask("a")
        assert answer.data == {"erased": "b"}
        assert answer.metadata.warnings
        assert desk.deeds.done == ["b"]


async def test_repeat_comes_before_a_remembered_rule() -> None:
    async with asking(dangerous=False) as desk:
        desk.engine.policy.gate.replace(policy_of(rule("ask", id="anybody")))
        approval_id = await desk.parked("a")
        other = await desk.parked("b")
        until = desk.clock.now() + timedelta(hours=1)
        wish = RememberWish(scope="until", until=until, arguments=())
        await desk.decide(other, NewDecision(decision="approve", remember=wish))
        await done(desk, other)
        assert await desk.parked("a") == approval_id  # it still waits
        assert (await desk.ask("c")).success
        assert desk.deeds.done == ["b", "c"]


async def test_repeat_while_it_runs_is_told_so() -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        await desk.deeds.begun.wait()
        answer = await desk.ask("a")
        assert answer.error is not None
        assert (answer.error.code, answer.error.approval_id) == ("CALL_IN_PROGRESS", approval_id)
        assert deeds.gate is not None
        deeds.gate.set()
        await done(desk, approval_id)
        assert (await desk.ask("a")).success
        assert deeds.done == ["a"]


async def test_repeat_that_may_wait_gets_the_answer_of_the_call_that_runs() -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        await desk.deeds.begun.wait()
        bounded = await desk.ask("a", wait_for_approval=0.01)
        assert bounded.error is not None
        assert bounded.error.code == "CALL_IN_PROGRESS"
        answers: list[Any] = []
        async with anyio.create_task_group() as group:

            async def call() -> None:
                answers.append(await desk.ask("a", wait_for_approval=10))

            group.start_soon(call)
            group.start_soon(call)
            await followed(desk, approval_id, 2)
            assert deeds.gate is not None
            deeds.gate.set()
        assert [one.data for one in answers] == [{"erased": "a"}] * 2
        assert [one.metadata.idempotent_replay for one in answers] == [True] * 2
        assert deeds.done == ["a"]
        assert await waiting(desk) == 1


@pytest.mark.parametrize("is_running", [False, True])
async def test_caller_that_gives_up_does_not_take_back_a_call_that_another_one_waits_for(
    is_running: bool,
) -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        handles = [CallHandle(), CallHandle()]
        answers: list[Any] = []
        async with anyio.create_task_group() as group:

            async def call(handle: CallHandle) -> None:
                name, body = parse_own_call("erase", {"what": "a"}, {"wait_for_approval": 10})
                answers.append(await desk.engine.run(name, body, CALLER, handle))

            for handle in handles:
                group.start_soon(call, handle)
            await followed(desk, approval_id, 2)
            if is_running:
                await desk.decide(approval_id)
                await desk.deeds.begun.wait()
            handles[0].cancel()
            await followed(desk, approval_id, 1)
            await handles[0].over.wait()
            if not is_running:
                await desk.decide(approval_id)
            assert deeds.gate is not None
            deeds.gate.set()
        assert [one.success for one in answers] == [False, True]
        assert deeds.done == ["a"]


async def test_last_caller_that_gives_up_takes_the_call_back() -> None:
    """The control."""
    async with asking() as desk:
        handles = [CallHandle(), CallHandle()]
        async with anyio.create_task_group() as group:

            async def call(handle: CallHandle) -> None:
                name, body = parse_own_call("erase", {"what": "a"}, {"wait_for_approval": 10})
                await desk.engine.run(name, body, CALLER, handle)

            for handle in handles:
                group.start_soon(call, handle)
            with anyio.fail_after(10):
                while not (page := await desk.engine.approvals.list(ApprovalQuery())).items:
                    await anyio.sleep(0.01)
            (approval,) = page.items
            await followed(desk, approval.id, 2)
            for handle in handles:
                handle.cancel()
                await handle.over.wait()
        assert (await desk.engine.approvals.show(approval.id)).state is ApprovalState.CANCELLED


async def test_next_engine_knows_the_call_that_waits_and_the_answer_nobody_fetched(
    tmp_path: Path,
) -> None:
    deeds = Deeds()
    async with asking(tmp_path, deeds=deeds) as desk:
        waits = await desk.parked("a")
        ended = await desk.parked("b")
        await desk.decide(ended)
        await done(desk, ended)
    async with asking(tmp_path, deeds=deeds) as desk:
        assert await desk.parked("a") == waits
        assert (await desk.ask("b")).data == {"erased": "b"}
        await desk.decide(waits, YES)
        await done(desk, waits)
    async with asking(tmp_path, deeds=deeds) as desk:
        assert (await desk.ask("a")).data == {"erased": "a"}
        assert deeds.done == ["b", "a"]


async def test_repeat_of_an_interrupted_call_is_unknown_until_a_human_has_resolved_it(
    tmp_path: Path,
) -> None:
    async with asking(tmp_path) as desk:
        approval_id = await desk.parked("a")
        desk.engine.drain()
        await desk.decide(approval_id)
        requests = desk.engine.approvals.requests
        await requests.begin(await requests.table.get(approval_id))
    async with asking(tmp_path) as desk:
        await desk.state(approval_id, ApprovalState.INTERRUPTED)
        for _ in range(2):
            answer = await desk.ask("a")
            assert answer.error is not None
            assert answer.error.code == "OUTCOME_UNKNOWN"
        await desk.engine.approvals.resolve(approval_id, Resolution(outcome="done"), ALICE)
        assert (await desk.ask("a")).data["resolution"]["outcome"] == "done"
        assert await desk.parked("a") != approval_id
        assert desk.deeds.done == []


async def test_stream_that_ended_before_its_last_event_was_read_fetched_nothing() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        name, body = parse_own_call("erase", {"what": "a"}, {"wait_for_approval": 10})
        call = desk.engine.open_stream(name, body, CALLER)
        assert await call.begun() is None
        call.reader().close()
        await desk.decide(approval_id)
        await done(desk, approval_id)
        answer = await desk.ask("a")
        assert answer.success
        assert answer.metadata.idempotent_replay is True
        assert desk.deeds.done == ["a"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    one=st.dictionaries(st.text(max_size=3), JSON), other=st.dictionaries(st.text(max_size=3), JSON)
)
def test_only_equal_arguments_have_the_same_key(one: Any, other: Any) -> None:
    async def keys_of(*given: Any) -> list[str | None]:
        return [await repeat_key_of(permitted(arguments)) for arguments in given]

    key, again, others = anyio.run(keys_of, one, dict(reversed(one.items())), other)
    assert key == again
    same = repr(sorted(map(repr, one.items()))) == repr(sorted(map(repr, other.items())))
    assert (key == others) is same or one == other
