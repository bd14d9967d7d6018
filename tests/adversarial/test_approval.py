"""Attacks on the approval gate: only what the required approvers agreed to may run.

Each has a harmless twin, so that a gate that refuses everything does not look safe.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood.approvals.model import (
    ApprovalQuery,
    ApprovalState,
    NewDecision,
    RememberWish,
    Resolution,
)
from fumehood.approvals.store import ApprovalTable
from fumehood.approvals.stored_calls import StoredCalls
from fumehood.core.errors import EngineError, PermissionDenied
from fumehood.executors.base import CallHandle
from fumehood.pipeline.incoming import parse_own_call
from fumehood.sandbox.host import Host
from support.asking import ALICE, BOB, CALLER, NO, OTHER_CALLER, YES, Asking, Deeds, asking
from support.policies import policy_of, rule
from support.wait import DEADLINE_S

pytestmark = pytest.mark.anyio

ANY_TWO: dict[str, Any] = rule(
    "ask", id="two", quorum=2, when=[{"argument": "/what", "equals": "vault"}]
)
NAMED: dict[str, Any] = rule(
    "ask", id="named", approvers=["bob"], when=[{"argument": "/what", "equals": "vault"}]
)
ANYBODY: dict[str, Any] = rule("ask", id="anybody")
EDITED = NewDecision(decision="approve", arguments={"what": "vault"})


@pytest.mark.row("A3")
async def test_edited_call_needs_the_quorum_of_the_rule_it_now_matches() -> None:
    async with asking() as desk:
        desk.engine.policy.gate.replace(policy_of(ANYBODY, ANY_TWO))
        approval_id = await desk.parked("a")
        approval = await desk.decide(approval_id, EDITED, ALICE)
        assert (approval.state, approval.quorum) == (ApprovalState.PENDING, 2)
        assert approval.asked_by == ("anybody", "two")
        assert desk.deeds.done == []
        assert (await desk.decide(approval_id, YES, BOB)).state is ApprovalState.APPROVED
        assert (await desk.ended(approval_id)).data == {"erased": "vault"}


@pytest.mark.row("A3")
async def test_edited_call_needs_the_approvers_of_the_rule_it_now_matches() -> None:
    async with asking() as desk:
        desk.engine.policy.gate.replace(policy_of(ANYBODY, NAMED))
        approval_id = await desk.parked("a")
        with pytest.raises(PermissionDenied, match="bob"):
            await desk.decide(approval_id, EDITED, ALICE)
        assert (await desk.decide(approval_id, EDITED, BOB)).approvers == ("bob",)
        assert (await desk.ended(approval_id)).success


@pytest.mark.row("A3")
async def test_edited_call_keeps_the_quorum_of_the_original_call() -> None:
    async with asking() as desk:
        desk.engine.policy.gate.replace(policy_of(ANYBODY, ANY_TWO))
        approval_id = await desk.parked("vault")
        harmless = NewDecision(decision="approve", arguments={"what": "a"})
        approval = await desk.decide(approval_id, harmless, ALICE)
        assert (approval.state, approval.quorum) == (ApprovalState.PENDING, 2)


@pytest.mark.row("A3")
@pytest.mark.parametrize("stricter", [ANY_TWO, NAMED], ids=["quorum", "approvers"])
@pytest.mark.parametrize("name", ["other", "anybody"], ids=["additional-rule", "replacing-rule"])
async def test_remembered_approval_does_not_satisfy_a_stricter_ask_rule(
    stricter: dict[str, Any], name: str
) -> None:
    async with asking(dangerous=False) as desk:
        gate = desk.engine.policy.gate
        gate.replace(policy_of(ANYBODY))
        until = desk.clock.now() + timedelta(hours=1)
        wish = RememberWish(scope="until", until=until, arguments=())
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, NewDecision(decision="approve", remember=wish))
        await desk.ended(approval_id)
        assert (await desk.ask("vault")).success  # the control: nothing stricter, nobody is asked
        rules = [{**stricter, "id": name}]
        gate.replace(policy_of(*([ANYBODY] if name == "other" else []), *rules))
        await desk.parked("vault")
        assert desk.deeds.done == ["a", "vault"]


@pytest.mark.row("A2", "A5")
@pytest.mark.parametrize("waits", [False, 5.0], ids=["not-waiting", "waiting"])
async def test_call_cancelled_at_any_moment_cannot_be_approved_later(
    waits: float,
) -> None:
    kept = 0
    async with asking() as desk:
        for step in range(60):
            what = f"step {step}"
            options = {"idempotency_key": what, "wait_for_approval": waits}
            live = CallHandle()
            call = asyncio.create_task(
                desk.engine.run(*parse_own_call("erase", {"what": what}, options), CALLER, live)
            )
            for _ in range(step):
                await asyncio.sleep(0)
            live.cancel()
            with anyio.fail_after(DEADLINE_S):
                answer = (await asyncio.gather(call, return_exceptions=True))[0]
            newest = (await desk.engine.approvals.list(ApprovalQuery(limit=1))).items
            if not newest or newest[0].arguments["what"] != what:
                continue
            kept += 1
            if isinstance(answer, BaseException) or answer.error.code == "CANCELLED":
                assert newest[0].state is ApprovalState.CANCELLED
                with pytest.raises(EngineError):
                    await desk.decide(newest[0].id)
        assert desk.deeds.done == []
    assert kept


@pytest.mark.row("A1", "A2")
@pytest.mark.parametrize("is_denied", [True, False], ids=["attack", "twin"])
async def test_deny_rule_added_while_approved_call_waits_for_lease_refuses_it(
    monkeypatch: pytest.MonkeyPatch, is_denied: bool
) -> None:
    waits, goes_on = anyio.Event(), anyio.Event()
    at_once = Host.lease

    @contextlib.asynccontextmanager
    async def lease(self: Host, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        waits.set()
        await goes_on.wait()
        async with at_once(self, *arguments, **options) as place:
            yield place

    monkeypatch.setattr(Host, "lease", lease)
    async with asking() as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        with anyio.fail_after(DEADLINE_S):
            await waits.wait()
        if is_denied:
            desk.engine.policy.gate.replace(policy_of(rule("deny", id="never", tools=["erase"])))
        goes_on.set()
        answer = await desk.ended(approval_id)
        assert answer.success is not is_denied
        assert desk.deeds.done == ([] if is_denied else ["a"])
        if answer.error is not None:
            assert answer.error.code == "PERMISSION_DENIED"


@pytest.mark.row("A5")
async def test_damaged_approval_does_not_block_other_approvals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = StoredCalls.context_of

    def broken(self: StoredCalls, stored: Any, handle: Any = None) -> Any:
        if stored.approval.arguments == {"what": "damaged"}:
            raise KeyError("damaged")
        return whole(self, stored, handle)

    monkeypatch.setattr(StoredCalls, "context_of", broken)
    async with asking() as desk:
        await desk.decide(await desk.parked("damaged"))
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        assert (await desk.ended(approval_id)).success
        assert desk.deeds.done == ["a"]


@pytest.mark.row("A5")
async def test_waiting_caller_is_notified_although_approver_request_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = ApprovalTable.change
    deciding: list[asyncio.Task[Any]] = []

    async def change(self: ApprovalTable, steps: Any) -> Any:
        after = await at_once(self, steps)
        for task in deciding:
            task.cancel()
        await asyncio.sleep(0)  # it is on the disk, and nobody was told yet
        return after

    monkeypatch.setattr(ApprovalTable, "change", change)
    async with asking() as desk:
        waiting = asyncio.create_task(_outcome(desk))
        with anyio.fail_after(DEADLINE_S):
            while not (found := (await desk.engine.approvals.list(ApprovalQuery())).items):
                await anyio.sleep(0.005)
        deciding.append(asyncio.create_task(desk.decide(found[0].id, NO)))
        with anyio.fail_after(DEADLINE_S):
            assert await waiting == "APPROVAL_DENIED"
        with pytest.raises(asyncio.CancelledError):
            await deciding[0]


async def _outcome(desk: Asking) -> str:
    answer = await desk.ask("a", wait_for_approval=True)
    return answer.error.code


@pytest.mark.row("A4")
async def test_caller_cannot_resolve_its_own_interrupted_call(tmp_path: Path) -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(tmp_path, deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        with anyio.fail_after(DEADLINE_S):
            await deeds.begun.wait()
    async with asking(tmp_path, deeds=deeds) as desk:
        said, resolve = Resolution(outcome="failed"), desk.engine.approvals.resolve
        with pytest.raises(PermissionDenied):
            await resolve(approval_id, said, ALICE, peer=CALLER.id)
        approval = await resolve(approval_id, said, ALICE, peer=OTHER_CALLER.id)
        assert approval.state is ApprovalState.FAILED


@pytest.mark.row("A6")
async def test_large_pending_calls_are_listed_in_pages() -> None:
    large = "x" * 1_000_000
    async with asking() as desk:
        for number in range(5):
            await desk.parked(f"{number}{large}")
        page = await desk.engine.approvals.list(ApprovalQuery())
        assert page.has_more
        seen = [item.arguments["what"][:1] for item in page.items]
        while page.has_more:
            page = await desk.engine.approvals.list(ApprovalQuery(cursor=page.next_cursor))
            seen += [item.arguments["what"][:1] for item in page.items]
        assert seen == ["4", "3", "2", "1", "0"]
