"""An engine with a dangerous tool, a caller and an approver."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from fumehood import Config, Engine, tool
from fumehood.approvals.model import (
    OPEN_STATES,
    Approval,
    ApprovalQuery,
    ApprovalSettings,
    ApprovalState,
    NewDecision,
)
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal, Scope
from fumehood.pipeline.incoming import parse_own_call
from fumehood.storage.database import Database, open_database
from fumehood.testing import FakeWall, ManualClock
from support.wait import DEADLINE_S

CALLER = Principal("uid:1000", frozenset({Scope.CALL}))
OTHER_CALLER = Principal("uid:1001", frozenset({Scope.CALL}))
ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
BOB = Principal("approver:bob", frozenset({Scope.APPROVE}))
YES = NewDecision(decision="approve")
OVER = set(ApprovalState) - OPEN_STATES
NO = NewDecision(decision="deny", reason="It is needed tomorrow.")


async def add_approvers(engine: Engine, *names: str) -> None:
    """Add these approvers, or Alice."""
    admin = Principal("approver:root", frozenset({Scope.ADMIN}))
    for name in names or ("alice",):
        await engine.approvers.add(name, [Scope.APPROVE], by=admin, now=engine.now())


async def reaches(engine: Engine, approval_id: str, *states: ApprovalState) -> Approval:
    """Wait for the approval to reach one of these states, or to end, and return it."""
    desk, seen = engine.approvals, 0
    with anyio.fail_after(120):
        while (approval := await desk.show(approval_id)).state not in (states or OVER):
            seen = await desk.next_change(seen, within_s=1)
    return approval


async def approve(engine: Engine, approval_id: str, *states: ApprovalState) -> Approval:
    """Approve as Alice, and wait for one of these states or for the end."""
    await engine.approvals.decide(approval_id, YES, ALICE, channel="test")
    return await reaches(engine, approval_id, *states)


@dataclass
class Deeds:
    """The tool's recorded runs. `gate` blocks it once it has begun."""

    done: list[str] = field(default_factory=list)
    begun: anyio.Event = field(default_factory=anyio.Event)
    gate: anyio.Event | None = None


@dataclass
class Asking:
    """A running engine and the recorded runs of its tool."""

    engine: Engine
    deeds: Deeds
    clock: ManualClock

    async def ask(self, what: str = "a", *, by: Principal = CALLER, **options: Any) -> Envelope:
        """Call the tool."""
        name, body = parse_own_call("erase", {"what": what}, options)
        return await self.engine.run(name, body, by)

    async def parked(self, what: str = "a", *, by: Principal = CALLER, **options: Any) -> str:
        """Call the tool and return the id of its pending approval."""
        answer = await self.ask(what, by=by, **options)
        assert answer.error.code == "REQUIRES_HUMAN_APPROVAL", answer.error
        assert answer.error.approval_id is not None
        return answer.error.approval_id

    async def decide(
        self, approval_id: str, decision: NewDecision = YES, by: Principal = ALICE, **more: Any
    ) -> Approval:
        """Approve or deny."""
        return await self.engine.approvals.decide(approval_id, decision, by, channel="test", **more)

    async def state(self, approval_id: str, *states: ApprovalState) -> Approval:
        """Wait for the approval to reach one of these states and return it."""
        return await reaches(self.engine, approval_id, *states)

    async def waiting(self, count: int = 1) -> Sequence[Approval]:
        """Wait until so many approvals are listed; the newest first."""
        with anyio.fail_after(DEADLINE_S):
            while len(found := (await self.engine.approvals.list(ApprovalQuery())).items) < count:
                await anyio.sleep(0.01)
        return found

    async def looked_round(self) -> None:
        """Look at all waiting calls once, as the scheduler does every few seconds."""
        await self.engine.approvals.scheduler.catch_up()

    async def ended(self, approval_id: str) -> Envelope:
        """Wait for the answer of a call that needed approval."""
        approval = await self.state(approval_id)
        principal = Principal(approval.principal_id, frozenset({Scope.CALL}))
        answer = await self.engine.approvals.answer_of(approval.call_id, principal)
        assert answer is not None
        return answer


@asynccontextmanager
async def asking(
    state: Path | None = None,
    *,
    deeds: Deeds | None = None,
    clock: ManualClock | None = None,
    dangerous: bool = True,
    description: str = "Erase something.",
    database: Database | None = None,
    approver: bool = True,
    prepare: Callable[[Engine], None] = lambda engine: None,
    container: FakeWall | None = None,
    **config: Any,
) -> AsyncIterator[Asking]:
    """An engine on the database in `state`, or on a new one."""
    deeds, clock = deeds or Deeds(), clock or ManualClock()
    rules = config.pop("approvals", ApprovalSettings())

    async def erase(what: str) -> dict[str, str]:
        deeds.begun.set()
        if deeds.gate is not None:
            await deeds.gate.wait()
        deeds.done.append(what)
        return {"erased": what}

    erase.__doc__ = description
    declared = tool(dangerous=dangerous, sandboxed=False)(erase)
    if database is None and state is not None:
        database = open_database(state / "state.db")
    try:
        engine = Engine(
            tools=[declared], clock=clock, interpreter=FakeWall(), container=container or FakeWall(),
            config=Config(approvals=rules, **config), database=database,
        )  # fmt: skip
        prepare(engine)
        async with engine:
            if approver and not engine.approvers.current():
                await add_approvers(engine, "alice", "bob")
            yield Asking(engine, deeds, clock)
    finally:
        if database is not None:
            database.close()


def change_request(state: Path, edit: Callable[[dict[str, Any]], object], **columns: str) -> None:
    """Change the stored request, and columns, of the only approval."""
    with sqlite3.connect(state / "state.db") as connection:
        (text,) = connection.execute("SELECT document FROM approvals").fetchone()
        document = json.loads(text)
        edit(document["request"])
        for name, value in {"document": json.dumps(document), **columns}.items():
            connection.execute(f"UPDATE approvals SET {name} = ?", (value,))
    connection.close()
