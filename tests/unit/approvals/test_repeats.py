"""A repeat is the same call while it is pending or its answer unfetched: approved and run once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood.approvals.model import (
    ApprovalQuery,
    ApprovalSettings,
    ApprovalState,
    Resolution,
)
from fumehood.batches.model import BatchOptions, RawBatch
from fumehood.core.envelope import Envelope
from fumehood.executors.base import CallHandle
from fumehood.pipeline.incoming import parse_own_call
from fumehood.projects.writing import Journals, Recovered
from support.asking import ALICE, CALLER, OTHER_CALLER, Asking, Deeds, asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A5")]


async def waiting(desk: Asking) -> int:
    return len((await desk.engine.approvals.list(ApprovalQuery())).items)


async def done(desk: Asking, approval_id: str) -> None:
    """Wait until the call has its answer, without fetching it."""
    await desk.state(approval_id, ApprovalState.DONE, ApprovalState.FAILED, ApprovalState.DENIED)


async def followed(desk: Asking, approval_id: str, count: int) -> None:
    """Wait until this number of callers wait for the call's answer."""
    with anyio.fail_after(120):
        while len(desk.engine.approvals.requests.runs.followers(approval_id)) != count:
            await anyio.sleep(0.01)


async def test_concurrent_equal_calls_share_one_approval() -> None:
    async with asking() as desk:
        ids: list[str] = []

        async def ask() -> None:
            ids.append(await desk.parked("a"))

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(ask)
        assert len(set(ids)) == 1
        assert await waiting(desk) == 1


async def test_equal_sequential_batch_members_run_once() -> None:
    async with asking() as desk:
        member = {"tool": "erase", "arguments": {"what": "a"}, "options": {"wait_for_approval": 10}}
        twin = {**member, "arguments": {"what": "b"}}
        body = RawBatch(
            calls=[member, member, twin], options=BatchOptions(parallel_tool_calls=False)
        )
        batch = asyncio.create_task(desk.engine.open_batch(body, CALLER).run())
        for count in (1, 2):
            await desk.decide((await desk.waiting(count))[0].id)
        answers = await batch
        assert [one.success for one in answers] == [True] * 3
        assert desk.deeds.done == ["a", "b"]
        assert [one.metadata.idempotent_replay for one in answers[:2]] == [False, True]
        await desk.parked("a")  # the batch has fetched them


async def test_cancelled_batch_leaves_its_answers_unfetched() -> None:
    async with asking() as desk:
        members = [
            {"tool": "erase", "arguments": {"what": what}, "options": {"wait_for_approval": 10}}
            for what in ("a", "b")
        ]
        batch = desk.engine.open_batch(RawBatch(calls=members), CALLER)
        async with anyio.create_task_group() as group:
            group.start_soon(batch.run)
            (first,) = [one.id for one in await desk.waiting(2) if one.arguments == {"what": "a"}]
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
async def test_different_call_needs_its_own_approval(other: dict[str, Any]) -> None:
    async with asking() as desk:
        first = await desk.parked("a")
        assert await desk.parked(**{"what": "a", **other}) != first
        assert await desk.parked("a", trace_id="other", max_length=9) == first  # only its form


async def test_dry_run_does_not_fetch_the_answer() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        await done(desk, approval_id)
        assert "approval" in (await desk.ask("a", dry_run=True)).data
        assert (await desk.ask("a")).data == {"erased": "a"}


async def test_repeat_of_cancelled_call_needs_new_approval() -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.engine.approvals.cancel(approval_id, CALLER)
        assert await desk.parked("a") != approval_id


async def test_unfetched_answer_is_replayed_only_within_repeat_seconds() -> None:
    async with asking(approvals=ApprovalSettings(repeat_seconds=60)) as desk:
        for pause_s, is_repeat in ((59, True), (61, False)):
            approval_id = await desk.parked("a")
            await desk.decide(approval_id)
            await done(desk, approval_id)
            desk.clock.advance(pause_s)
            assert (await desk.ask("a")).success is is_repeat
        assert desk.deeds.done == ["a", "a"]


async def test_waiting_repeat_of_running_call_gets_its_answer() -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        await desk.deeds.begun.wait()
        bounded = await desk.ask("a", wait_for_approval=0.01)
        assert bounded.error.code == "CALL_IN_PROGRESS"
        calls = [asyncio.create_task(desk.ask("a", wait_for_approval=True)) for _ in range(2)]
        await followed(desk, approval_id, 2)
        deeds.gate.set()
        answers = await asyncio.gather(*calls)
        assert [one.data for one in answers] == [{"erased": "a"}] * 2
        assert [one.metadata.idempotent_replay for one in answers] == [True] * 2
        assert deeds.done == ["a"]
        assert await waiting(desk) == 1


def waiting_call(desk: Asking, handle: CallHandle) -> asyncio.Task[Envelope]:
    """Begin a call that waits for its approval."""
    name, body = parse_own_call("erase", {"what": "a"}, {"wait_for_approval": 10})
    return asyncio.create_task(desk.engine.run(name, body, CALLER, handle))


@pytest.mark.parametrize("is_running", [False, True])
async def test_cancelled_caller_does_not_cancel_a_call_with_another_follower(
    is_running: bool,
) -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        handles = [CallHandle(), CallHandle()]
        calls = [waiting_call(desk, handle) for handle in handles]
        await followed(desk, approval_id, 2)
        if is_running:
            await desk.decide(approval_id)
            await desk.deeds.begun.wait()
        handles[0].cancel()
        assert not (await calls[0]).success
        if not is_running:
            await desk.decide(approval_id)
        deeds.gate.set()
        assert (await calls[1]).success
        assert deeds.done == ["a"]


async def test_control_last_cancelled_caller_cancels_the_call() -> None:
    async with asking() as desk:
        handles = [CallHandle(), CallHandle()]
        calls = [waiting_call(desk, handle) for handle in handles]
        (approval,) = await desk.waiting()
        await followed(desk, approval.id, 2)
        for handle, call in zip(handles, calls, strict=True):
            handle.cancel()
            await call
        assert (await desk.engine.approvals.show(approval.id)).state is ApprovalState.CANCELLED


async def test_repeat_of_interrupted_call_is_outcome_unknown_until_resolved(
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
            assert answer.error.code == "OUTCOME_UNKNOWN"
        await desk.engine.approvals.resolve(approval_id, Resolution(outcome="done"), ALICE)
        answer = await desk.ask("a")
        assert answer.data["resolution"]["outcome"] == "done"
        with anyio.fail_after(120):  # until the fetch of the answer is on the disk
            while answer.success:
                answer = await desk.ask("a")
        assert answer.error.code == "REQUIRES_HUMAN_APPROVAL"
        assert answer.error.approval_id != approval_id
        assert desk.deeds.done == []


@pytest.mark.parametrize("has_acted", [False, True])
async def test_interrupted_call_whose_outcome_is_known_needs_nobody_to_resolve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_acted: bool
) -> None:
    """Twin: one whose outcome is not known, above."""
    async with asking(tmp_path) as desk:
        approval_id = await desk.parked("a")
        desk.engine.drain()
        await desk.decide(approval_id)
        requests = desk.engine.approvals.requests
        stored = await requests.table.get(approval_id)
        await requests.begin(stored)
    recovered = Recovered([], {stored.approval.call_id: has_acted, "call_other": not has_acted})
    monkeypatch.setattr(Journals, "recover", lambda _: recovered)
    async with asking(tmp_path) as desk:
        to = ApprovalState.DONE if has_acted else ApprovalState.FAILED
        await desk.state(approval_id, to)
        answer = await desk.ask("a")
        assert answer.success is has_acted
        if has_acted:
            assert answer.data["resolution"]["by"] == "engine"
        else:
            assert (answer.error.code, answer.error.retryable) == ("STATE_UNAVAILABLE", True)
            assert "nothing was written" in answer.error.message
        with anyio.fail_after(120):  # until the fetch of the answer is on the disk
            while answer.success or answer.error.code == "STATE_UNAVAILABLE":
                answer = await desk.ask("a")
        assert answer.error.code == "REQUIRES_HUMAN_APPROVAL"
