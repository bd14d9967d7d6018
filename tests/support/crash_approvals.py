"""Calls that wait for approval, run by a real engine that is killed meanwhile.

Each script plays callers and approvers, who print what they are about to do and the answers they
receive. A tool's effect is a line in a ledger outside the database. `play` runs
one script up to a commit (`crash_points`), `play_until_killed` many at once up to a random
moment; `survive` opens what is left, twice, finishes the scripts as their users would, and
says everything that is not as it was promised.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

from fumehood import tool
from fumehood.approvals.model import (
    Approval,
    ApprovalQuery,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberWish,
    Resolution,
)
from fumehood.budgets.in_engine import Spending
from fumehood.budgets.ledger import BLOCKS
from fumehood.budgets.model import Amounts, Spender
from fumehood.budgets.settings import BudgetRule
from fumehood.config import Config
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal, Scope
from fumehood.engine import Engine
from fumehood.executors.base import CallHandle
from fumehood.storage.database import Database, open_database
from fumehood.testing import FakeWall, ManualClock

from .audit import look
from .crash_points import Hook, Run, Say
from .postgres import raw_connection

ADMIN = Principal("approver:admin", frozenset({Scope.ADMIN}))
ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
BOB = Principal("approver:bob", frozenset({Scope.APPROVE}))
CHANNEL = "control"

POLICY = """
[[rules]]
id = "two-of-us"
decision = "ask"
tools = ["act_of_two"]
approvers = ["alice", "bob"]
quorum = 2

[[rules]]
id = "again"
decision = "ask"
tools = ["act_again"]
"""

SETTINGS = Config()
"""Read once, because reading it would take half of each engine's start."""

CALLS = 40
"""A block of two, so that every other call raises a mark."""
PRICE = Decimal("0.01")
LATER_S = 2 * 3600.0
LIFE_S = (0.02, 0.6)
"""Lifetime range of a process that plays many scripts, from its engine's start, in seconds."""
WORKERS = 4
PATIENCE_S = 120.0
REPLAY_ENDS = ("OK", "APPROVAL_DENIED")
NOTHING_DONE = frozenset({
    "APPROVAL_DENIED", "APPROVAL_EXPIRED", "CANCELLED",
    "EXECUTION_ERROR",  # a human has found that it did not act
    "PERMISSION_DENIED",  # the last use of a remembered rule was another's
})  # fmt: skip


# ── the world that a script finds ────────────────────────────────────────────────────────────


def mark(home: Path, line: str) -> None:
    """Act: write a line that survives the process."""
    handle = os.open(home / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def marks(home: Path) -> Counter[str]:
    """The labels acted on so far, with their counts."""
    ledger = home / "ledger"
    return Counter(ledger.read_text().splitlines() if ledger.exists() else [])


_HOME: ContextVar[Path] = ContextVar("home")
"""Where the tools of the engine that runs here leave their marks: to declare them anew for each
engine would take longer than its start."""


async def _acted(label: str) -> dict[str, str]:
    mark(_HOME.get(), label)
    return {"label": label}


@tool(sandboxed=False, dangerous=True, cost_per_use="0.01")
async def act(label: str) -> dict[str, str]:
    """Act."""
    return await _acted(label)


@tool(sandboxed=False, dangerous=True, cost_per_use="0.01")
async def act_of_two(label: str) -> dict[str, str]:
    """Act, where two agree."""
    return await _acted(label)


@tool(sandboxed=False, cost_per_use="0.01")
async def act_again(label: str) -> dict[str, str]:
    """Act, also without asking where somebody allowed it."""
    return await _acted(label)


@tool(sandboxed=False, cost_per_use="0.01")
async def note(label: str) -> dict[str, str]:
    """Act where nobody is asked, and twice would be once too often."""
    return await _acted(label)


@tool(sandboxed=False, idempotent=True, cost_per_use="0.01")
async def fetch(label: str) -> dict[str, str]:
    """Act where twice does no harm."""
    return await _acted(label)


@tool(sandboxed=False, dangerous=True, cost_per_use="0.01")
async def act_replayed(label: str) -> dict[str, str]:
    """Act, for a framework that calls anew what it has no answer of."""
    return await _acted(label)


TOOLS = (act, act_of_two, act_again, act_replayed, note, fetch)


@asynccontextmanager
async def engine_in(
    home: Path,
    hook: Hook | None = None,
    *,
    later_s: float = 0.0,
    calls: int = CALLS,
) -> AsyncIterator[tuple[Engine, Database, ManualClock]]:
    """An engine on the state in `home`, with the tools above and nothing that packages offer: to
    look for those would take longer than all the rest."""
    _HOME.set(home)
    clock = ManualClock()
    clock.advance(later_s)
    database = open_database(home / "state.db", commit_hook=hook)
    budgets = (
        BudgetRule(name="calls", period="total", calls=calls),
        BudgetRule(name="money", money=PRICE * calls),
    )
    its_own = {"home": home, "policy_file": home / "policy.toml", "budgets": budgets}
    config = SETTINGS.model_copy(update=its_own)
    walls = {"interpreter": FakeWall(), "jail": FakeWall(), "container": FakeWall()}
    try:
        async with AsyncExitStack() as stack:
            with (
                patch("fumehood.registry.sources.discover", lambda *args, **options: []),
                patch("fumehood.compose.load_checkers", lambda names: []),
                # It writes whenever it comes to it: commits would have other numbers each time.
                patch("fumehood.compose.retention", lambda *args, **options: nullcontext()),
            ):
                engine = Engine(TOOLS, config=config, clock=clock, database=database, **walls)
                await stack.enter_async_context(engine)
            yield engine, database, clock
    finally:
        database.close()


def prepare(home: Path) -> None:
    """A state with a policy and two approvers."""
    policy = home / "policy.toml"
    policy.write_text(POLICY)
    policy.chmod(0o600)

    async def make() -> None:
        async with engine_in(home) as (engine, _, clock):
            for who in ("alice", "bob"):
                await engine.approvers.add(who, [Scope.APPROVE], by=ADMIN, now=clock.now())

    asyncio.run(make())


# ── what users do ────────────────────────────────────────────────────────────────────────────


class User:
    """Callers and approvers, who print the answers they receive as JSON lines."""

    def __init__(self, engine: Engine, clock: ManualClock, say: Say) -> None:
        self.engine = engine
        self.desk = engine.approvals
        self.clock = clock
        self._say = say

    def say(self, what: str, **values: Any) -> None:
        self._say(json.dumps({"what": what, **values}))

    async def ask(self, label: str, name: str = "act", key: str | None = None) -> str:
        """Call a tool; return its approval id, or an empty string if it has its answer."""
        self.say("asks", tool=name, label=label, key=key)
        options = {} if key is None else {"idempotency_key": key}
        envelope = await self.engine.call(name, {"label": label}, **options)
        return self.hear(label, envelope)

    def hear(self, label: str, envelope: Envelope) -> str:
        error = envelope.error
        approval_id = "" if error is None else error.approval_id or ""
        code = "OK" if error is None else error.code
        self.say("heard", label=label, code=code, approval_id=approval_id)
        return approval_id if code in ("REQUIRES_HUMAN_APPROVAL", "CALL_IN_PROGRESS") else ""

    async def end(self, label: str, approval_id: str) -> None:
        """Wait for the answer of a call that waited."""
        if approval_id:
            envelope = await self.desk.requests.wait(approval_id, PATIENCE_S, CallHandle())
            assert envelope is not None, f"{label} has no end"
            self.hear(label, envelope)

    async def decide(self, approval_id: str, by: Principal = ALICE, **decision: Any) -> None:
        """Approve, or decide as given."""
        if not approval_id:
            return
        word = NewDecision(**{"decision": "approve", **decision})
        after = await self.desk.decide(approval_id, word, by, channel=CHANNEL)
        self.say(
            "decided", approval_id=approval_id, by=by.id, word=word.decision, state=after.state
        )

    async def cancel(self, approval_id: str) -> None:
        after = await self.desk.cancel(approval_id, self.engine.owner)
        self.say("cancelled", approval_id=approval_id, state=after.state)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock and wake the approval desk, which checks it only periodically."""
        self.clock.advance(seconds)
        self.desk.requests.new_call.set()


Script = Callable[[User, str], Awaitable[None]]


async def as_meant(user: User, approval: Approval) -> None:
    """The decision on a pending call, which its label names."""
    label = approval.arguments["label"]
    if label.endswith(("-no", "-refused")):
        await user.decide(approval.id, decision="deny", reason="no")
    elif label.endswith("-back"):
        await user.cancel(approval.id)
    elif label.endswith("-never"):
        await user.decide(approval.id, arguments={"label": f"{label}-edited"})
    else:
        for by in (ALICE, BOB)[: approval.quorum]:
            if by.id not in approval.yes_votes:
                await user.decide(approval.id, by)


NEVER = ("-no", "-back", "-never")
"""Endings of labels of calls that must never act."""


async def yes(user: User, name: str) -> None:
    approval_id = await user.ask(f"{name}-a")
    await user.decide(approval_id)
    await user.end(f"{name}-a", approval_id)


async def no(user: User, name: str) -> None:
    approval_id = await user.ask(f"{name}-no")
    await user.decide(approval_id, decision="deny", reason="no")
    await user.end(f"{name}-no", approval_id)
    await user.ask(f"{name}-no")


async def edited(user: User, name: str) -> None:
    approval_id = await user.ask(f"{name}-never")
    await user.decide(approval_id, arguments={"label": f"{name}-never-edited"})
    await user.end(f"{name}-never-edited", approval_id)


async def late(user: User, name: str) -> None:
    """One call gets no decision, the other an approval that expires unused."""
    first, second = await user.ask(f"{name}-late-1"), await user.ask(f"{name}-late-2", key=name)
    user.engine.drain()
    await user.decide(second)
    user.pass_time(LATER_S)
    await user.end(f"{name}-late-1", first)
    await user.end(f"{name}-late-2", second)


async def keyed(user: User, name: str) -> None:
    approval_id = await user.ask(f"{name}-a", key=name)
    await user.ask(f"{name}-a", key=name)
    await user.decide(approval_id)
    await user.end(f"{name}-a", approval_id)
    await user.ask(f"{name}-a", key=name)


async def taken_back(user: User, name: str) -> None:
    approval_id = await user.ask(f"{name}-back", key=name)
    await user.cancel(approval_id)
    await user.end(f"{name}-back", approval_id)
    await user.ask(f"{name}-back", key=name)


async def harmless(user: User, name: str) -> None:
    for tool_name in ("note", "fetch"):
        for _ in range(2):
            await user.ask(f"{name}-{tool_name}", tool_name, key=f"{name}-{tool_name}")


async def spending(user: User, name: str) -> None:
    for number in range(4):
        await user.ask(f"{name}-{number}", "note")
    await yes(user, name)
    for number in range(4, 8):
        await user.ask(f"{name}-{number}", "note")


async def remembering(user: User, name: str) -> None:
    approval_id = await user.ask(f"{name}-a", "act_again")
    until = user.clock.now() + timedelta(hours=9)
    wish = RememberWish(scope="until", until=until, uses=2, arguments=())
    await user.decide(approval_id, remember=wish)
    await user.end(f"{name}-a", approval_id)
    for which in ("b", "c", "d-refused"):
        left = await user.ask(f"{name}-{which}", "act_again")
    if left:
        await user.decide(left, decision="deny")
        await user.end(f"{name}-d-refused", left)


async def of_two(user: User, name: str) -> None:
    approval_id = await user.ask(f"{name}-a", "act_of_two", key=name)
    await user.decide(approval_id, ALICE)
    await user.decide(approval_id, BOB)
    await user.end(f"{name}-a", approval_id)


async def several(user: User, name: str) -> None:
    labels = (f"{name}-a", f"{name}-no", f"{name}-c")
    ids = [await user.ask(label) for label in labels]
    items = [
        OneOfSeveral(
            approval_id=one,
            decision=NewDecision(decision="deny" if label.endswith("no") else "approve"),
        )
        for label, one in zip(labels, ids, strict=True)
    ]
    for after in await user.desk.decide_all(items, ALICE, channel=CHANNEL):
        word = "deny" if after.state is ApprovalState.DENIED else "approve"
        user.say("decided", approval_id=after.id, by=ALICE.id, word=word, state=after.state)
    for label, one in zip(labels, ids, strict=True):
        await user.end(label, one)


async def replayed(user: User, name: str) -> None:
    """The caller repeats its call, forgetting earlier attempts, and ends with its answer."""
    label = f"{name}-a"
    approval_id = await user.ask(label, "act_replayed")
    await user.ask(label, "act_replayed")
    await user.decide(approval_id)
    await settled(user, with_pending=False)
    await user.ask(label, "act_replayed")
    denied = await user.ask(f"{name}-no", "act_replayed")
    await user.decide(denied, decision="deny", reason="no")
    await user.ask(f"{name}-no", "act_replayed")


async def start(user: User, name: str) -> None:
    """Start with pending and interrupted calls already stored (`prepare_start`)."""
    await settled(user, with_pending=False)


def prepare_start(home: Path) -> None:
    """A state with one pending call, one approved, two started and one that ran with a key."""
    prepare(home)
    told: list[str] = []

    async def make() -> None:
        async with engine_in(home) as (engine, _, clock):
            user = User(engine, clock, told.append)
            await user.ask("start-a", key="start-a")
            has_yes = await user.ask("start-b", key="start-b")
            begun = [await user.ask(f"start-{n}", key=f"start-{n}") for n in ("c", "d")]
            spender = Spender(engine.owner.id, None, None, "act")
            for _ in begun:  # what is held when the engine ends counts as spent
                await engine.part(Spending).budgets.reserve(spender, Amounts(money=PRICE))
            engine.drain()
            for one in (has_yes, *begun):
                await user.decide(one)
            for one in begun:
                await user.desk.requests.begin(await user.desk.requests.table.get(one))
            mark(home, "start-d")  # of the two that had begun, one has acted

    asyncio.run(make())
    (home / "told").write_text("\n".join(told))


@dataclass(frozen=True)
class Scene:
    """A script, and its users' behaviour after a crash."""

    script: Script
    later_s: float = 0.0
    """Time between the crash and the next start, in seconds."""
    prepare: Callable[[Path], None] = prepare
    from_start: bool = False
    """Whether the commits of the engine's start count as well."""
    crashes: int = 1
    """Number of crashes, including those in `prepare`."""
    in_flight: int = 1
    """Number of concurrent calls."""
    least: int = 8
    """Minimum number of crash points."""
    shows: tuple[str, ...] = ()
    """Outcomes that must occur after some crash points."""


ALL_WAYS = ("pending", "resumed", "interrupted", "done")

SCENES = {
    "edited": Scene(edited, least=10, shows=ALL_WAYS),
    "late": Scene(late, later_s=LATER_S, least=10, shows=("expired",)),
    "keyed": Scene(keyed, least=14, shows=(*ALL_WAYS, "unknown")),
    "taken-back": Scene(taken_back, least=6, shows=("pending", "cancelled")),
    "harmless": Scene(harmless, least=12, shows=("unknown",)),
    "spending": Scene(spending, least=12, shows=ALL_WAYS),
    "remembering": Scene(remembering, least=16, shows=(*ALL_WAYS, "remembered")),
    "of-two": Scene(of_two, least=14, shows=(*ALL_WAYS, "unknown")),
    "several": Scene(several, in_flight=2, least=14, shows=(*ALL_WAYS, "denied")),
    "replayed": Scene(replayed, least=12, shows=(*ALL_WAYS, "denied", "replayed")),
    "start": Scene(
        start, prepare=prepare_start, from_start=True, crashes=3, least=12,
        shows=(*ALL_WAYS, "unknown"),
    ),
}  # fmt: skip


async def play(home: Path, hook: Hook, say: Say) -> None:
    """The scenario of `crash_points`: the script that a file in `home` names."""
    name = (home / "scene").read_text()
    scene = SCENES[name]
    begun = scene.from_start
    before = 0

    def counted(moment: str, number: int) -> None:
        nonlocal before
        if begun:
            hook(moment, number - before)
        else:
            before = number

    if name == "start":
        for line in (home / "told").read_text().splitlines():
            say(line)
    with weakened(home):
        async with engine_in(home, counted) as (engine, _, clock):
            begun = True
            await scene.script(User(engine, clock, say), name)


async def _nothing(*args: object) -> None:
    """Replaces a disabled guarantee."""


WEAKNESSES = {
    "approval not consumed": ("fumehood.approvals.requests.ApprovalRequests.begin", _nothing),
    "rule use not counted": ("fumehood.approvals.remembered.RememberedRules.use", _nothing),
    "budget mark not raised": ("fumehood.budgets.store.CounterTable.reserve", _nothing),
    "idempotency key not claimed": ("fumehood.storage.idempotency.take", lambda *args: None),
    "repeated call not recognized": ("fumehood.pipeline.run.repeat_key_of", _nothing),
    "decision not consumed": (
        "fumehood.approvals.requests.ApprovalRequests.use_decision",
        _nothing,
    ),
}
"""Guarantees to disable for the controls; a file in `home` names one."""


def weakened(home: Path) -> AbstractContextManager[Any]:
    """Disable one of the engine's guarantees, for controls."""
    chosen = home / "weakness"
    return patch(*WEAKNESSES[chosen.read_text()]) if chosen.exists() else nullcontext()


MIXED: tuple[Script, ...] = (
    yes, no, edited, keyed, taken_back, harmless, remembering, of_two, several, replayed,
)  # fmt: skip
MIXED_CALLS = 100_000


async def play_until_killed(home: Path, hook: Hook, say: Say) -> None:
    """Play random scripts concurrently until the process kills itself at a random moment."""
    seed = (home / "seed").read_text()
    chance = random.Random(seed)
    async with engine_in(home, calls=MIXED_CALLS) as (engine, _, clock):
        user = User(engine, clock, say)
        end = threading.Timer(chance.uniform(*LIFE_S), os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()

        async def work(worker: int) -> None:
            number = 0
            while True:
                number += 1
                await chance.choice(MIXED)(user, f"{seed}-{worker}-{number}")

        await asyncio.gather(*(work(worker) for worker in range(WORKERS)))


# ── what is left ─────────────────────────────────────────────────────────────────────────────


@dataclass
class Aftermath:
    """Faults found and outcomes observed after a crash."""

    faults: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def require(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)


@dataclass(frozen=True)
class Told:
    """The actions and answers that users have printed."""

    lines: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, said: Iterable[str]) -> Told:
        return cls(tuple(json.loads(line) for line in said))

    def all(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["what"] == what]


Rows = dict[str, list[tuple[Any, ...]]]
KEPT = ("approvals", "decisions", "idempotency", "counters", "remembered")


def rows_in(home: Path) -> Rows:
    """All rows that a start may change, read without repairing what a crash has left."""
    with raw_connection(home / "state.db") as connection:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4").fetchall()
            for table in KEPT
        }


async def settled(user: User, *, with_pending: bool) -> None:
    """Wait until no call is starting or running."""
    states = [ApprovalState.APPROVED, ApprovalState.STARTED]
    states += [ApprovalState.PENDING] if with_pending else []
    with anyio.fail_after(PATIENCE_S):
        while True:
            seen = await user.desk.next_change(-1)
            if not any([await in_state(user, state) for state in states]):
                return
            await user.desk.next_change(seen, within_s=1)


async def in_state(user: User, state: ApprovalState) -> list[Approval]:
    """All approvals in this state, oldest first."""
    found: list[Approval] = []
    cursor = None
    while True:
        page = await user.desk.list(ApprovalQuery(state=state, limit=100, cursor=cursor))
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found[::-1]


async def all_approvals(user: User) -> list[Approval]:
    return [one for state in ApprovalState for one in await in_state(user, state)]


async def survive(
    home: Path,
    said: Iterable[str],
    *,
    later_s: float = 0.0,
    calls: int = CALLS,
    crashes: int = 1,
    in_flight: int = 1,
    since: int = 0,
) -> tuple[Aftermath, tuple[str, ...]]:
    """Open the state after a crash, finish its calls and examine it; return the new lines as well.

    `said` is everything since the state was made, from `since` on by the life that has just
    ended; `crashes` is how many deaths that were.
    """
    found, lines = Aftermath(), list(said)
    rows, acts = rows_in(home), marks(home)
    for start in (1, 2):  # until a start changes nothing, which the second one must not
        async with engine_in(home, later_s=later_s, calls=calls) as (engine, _, clock):
            user = User(engine, clock, lines.append)
            await settled(user, with_pending=later_s > 0)
            for one in await all_approvals(user) if later_s else ():
                in_time = one.state is ApprovalState.EXPIRED
                found.require(in_time, f"{one.id} is {one.state} after its time")
            changed = [table for table, kept in rows_in(home).items() if kept != rows[table]]
            has_acted = marks(home) != acts
            if start == 2:
                found.require(not changed, f"the second start changed {changed}")
                found.require(not has_acted, "the second start has acted")
            if start == 2 or not (changed or has_acted):
                _examine_budgets(
                    engine, home, found, calls=calls, room=crashes, held=crashes * in_flight
                )
                await _finish(user, Told.of(lines[since:]), found, home)
                await settled(user, with_pending=True)
                approvals = await all_approvals(user)
                rules = await user.desk.remembered()
                break
        found.seen["resumed"] += sum((marks(home) - acts).values())
        rows, acts = rows_in(home), marks(home)
    _examine_calls(home, Told.of(lines), approvals, found, later_s=later_s)
    free = sum(
        marks(home)[line["label"]]
        for line in Told.of(lines).all("asks")
        if line["tool"] == "act_again"
        and line["label"] not in {one.arguments["label"] for one in approvals}
    )
    used = sum(rule.used for rule in rules)
    found.require(used >= free, f"{free} uses of remembered rules, {used} counted")
    found.require(all((r.uses_left or 0) >= 0 for r in rules), "a rule has less than no use left")
    found.seen["remembered"] += free
    verdict = look(home)
    found.require(verdict.is_intact, f"the audit chain is broken: {verdict.findings}")
    return found, tuple(lines)


def _examine_budgets(
    engine: Engine, home: Path, found: Aftermath, *, calls: int, room: int, held: int
) -> None:
    acts = sum(marks(home).values())
    for standing in engine.part(Spending).budgets.standings():
        price = PRICE if standing.budget == "money" else Decimal(1)
        spent = Decimal(standing.spent) / price
        most = acts + room * (calls // BLOCKS) + held
        found.require(spent >= acts, f"budget {standing.budget}: {acts} used, {spent} counted")
        found.require(spent <= most, f"budget {standing.budget}: {acts} used, {spent} counted")


async def _finish(user: User, told: Told, found: Aftermath, home: Path) -> None:
    """As users would: who was not answered repeats its call, if it has a key; approvers say
    their word of what waits; a human resolves what was interrupted."""
    before = marks(home)
    await _replay(user, told, found)
    interrupted = await in_state(user, ApprovalState.INTERRUPTED)
    found.seen["interrupted"] += len(interrupted)
    unknown = {one.arguments["label"] for one in interrupted}
    for approval in await in_state(user, ApprovalState.PENDING):
        found.seen["pending"] += 1
        await as_meant(user, approval)
        label = (await user.desk.show(approval.id)).arguments["label"]  # it may be edited
        await user.end(label, approval.id)
    keys = {line["key"]: line for line in told.all("asks") if line["key"] is not None}
    for is_resolved in (False, True):
        for key, line in keys.items():
            code, label = await _repeat(user, line), line["label"]
            found.seen["unknown"] += code == "OUTCOME_UNKNOWN"
            if label in unknown:
                known = "OK" if before[label] else "EXECUTION_ERROR"
                expected = known if is_resolved else "OUTCOME_UNKNOWN"
                found.require(code == expected, f"{key}, which was interrupted, answers {code}")
        for one in () if is_resolved else interrupted:
            outcome = "done" if before[one.arguments["label"]] else "failed"
            await user.desk.resolve(one.id, Resolution(outcome=outcome), ALICE)
            user.say("resolved", approval_id=one.id)
    for label in unknown:
        found.require(marks(home)[label] == before[label], f"{label}: interrupted, acted on")


async def _replay(user: User, told: Told, found: Aftermath) -> None:
    """Repeat unanswered calls without a key, as a framework does."""
    answered = {line["label"] for line in told.all("heard") if line["code"] in REPLAY_ENDS}
    labels = [line["label"] for line in told.all("asks") if line["tool"] == "act_replayed"]
    for label in dict.fromkeys(labels):
        if label not in answered:
            found.seen["replayed"] += 1
            await user.ask(label, "act_replayed")


async def _repeat(user: User, line: dict[str, Any]) -> str:
    approval_id = await user.ask(line["label"], line["tool"], key=line["key"])
    if approval_id:
        approval = await user.desk.show(approval_id)
        if approval.state is ApprovalState.PENDING:
            await as_meant(user, approval)
        await user.end(line["label"], approval_id)
    envelope = await user.engine.call(
        line["tool"], {"label": line["label"]}, idempotency_key=line["key"]
    )
    return "OK" if envelope.error is None else envelope.error.code


def _examine_calls(
    home: Path,
    told: Told,
    approvals: list[Approval],
    found: Aftermath,
    *,
    later_s: float,
) -> None:
    acts = marks(home)
    tools = {line["label"]: line["tool"] for line in told.all("asks")}
    for label, count in acts.items():
        twice_is_fine = tools.get(label) == "fetch"
        found.require(count == 1 or twice_is_fine, f"{label} acted {count} times")
        found.require(not label.endswith(NEVER), f"{label} has acted")
    by_id = {one.id: one for one in approvals}
    resolved = {line["approval_id"] for line in told.all("resolved")}
    for one in approvals:
        label = one.arguments["label"]
        found.seen[one.state.value] += 1
        if one.id in resolved:
            continue
        expected = {ApprovalState.DONE: 1, ApprovalState.FAILED: None}.get(one.state, 0)
        found.require(
            expected is None or acts[label] == expected,
            f"{label} is {one.state}, and acted {acts[label]} times",
        )
        found.require(one.state is not ApprovalState.FAILED, f"{label} failed with {one.code}")
    for line in told.all("heard"):
        label, code = line["label"], line["code"]
        found.seen[f"heard {code}"] += 1
        if code == "OK":
            found.require(acts[label] >= 1, f"{label} was told as done, and never acted")
        elif code in NOTHING_DONE:
            found.require(acts[label] == 0, f"{label} was told {code}, and acted")
        elif code == "REQUIRES_HUMAN_APPROVAL":
            found.require(line["approval_id"] in by_id, f"the approval of {label} is lost")
        else:
            found.require(code == "OUTCOME_UNKNOWN", f"{label} was told {code}")
    ends = {"approve": {ApprovalState.DONE}, "deny": {ApprovalState.DENIED}}
    if later_s:
        ends["approve"].add(ApprovalState.EXPIRED)
    for line in told.all("decided"):
        one = by_id[line["approval_id"]]
        words = {(word.approver, word.decision) for word in one.decisions}
        found.require((line["by"], line["word"]) in words, f"a word on {one.id} is lost")
        if one.id not in resolved:
            found.require(one.state in ends[line["word"]], f"{one.id} was decided, is {one.state}")
    for line in told.all("cancelled"):
        is_cancelled = by_id[line["approval_id"]].state is ApprovalState.CANCELLED
        found.require(is_cancelled, f"{line['approval_id']} was cancelled and is not")


def lives(kill: Run, home: Path, count: int, seed: int, after: int = 0) -> Aftermath:
    """Kill at random moments in one state, examine it each time, and collect all faults."""
    home.mkdir(mode=0o700)
    prepare(home)
    all_found, said = Aftermath(), list[str]()
    for life in range(after, after + count):
        (home / "seed").write_text(f"{seed}-{life}")
        (crash,) = kill(home)
        all_found.seen["deaths"] += crash.was_killed
        since = len(said)
        found, lines = asyncio.run(
            survive(
                home, [*said, *crash.said], since=since,
                calls=MIXED_CALLS, crashes=life - after + 1, in_flight=3 * WORKERS,
            )
        )  # fmt: skip
        said = list(lines)
        all_found.faults += [f"life {life}: {fault}" for fault in found.faults]
        all_found.seen += found.seen
    return all_found
