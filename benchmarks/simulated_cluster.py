"""Simulated nodes for `simulate`: everything but the placing of calls, which is the engine's own.

A `Machine` is a node as it truly is. A `Cell` is an engine: it has a real `Placer`, and knows of its
nodes what their last reports said. Invariants are asserted while it runs: a call is granted one
slot at a time and only on a node with room as its engine knows it, no principal gets more than three
quarters of the slots, and a call that must not be repeated begins once.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import simpy

from fumehood.cluster.placing import PlacedNode, Placer, PlaceRequest
from fumehood.core.identity import TrustDomain
from fumehood.sandbox.container.pool import Kind

ENGINE_S = 0.0025
"""Processor time of the engine for one call. *Source*: measurements, `run_python`: 2 to 3 ms."""

OVERHEAD_S = 0.006
"""Time of a `run_python` in a warm container beside the program's own. *Source*: measurements."""

REMOTE_S = 0.0011
"""Median time of a call of a Ray actor on another node; its 99th percentile is 4.8 ms."""

REMOTE_SIGMA = math.log(4.8 / 1.1) / 2.33
"""Shape of the log-normal distribution with these two."""

RESET_S = 0.015
"""Time until the next program can begin in a container. *Source*: measurements, with pandas."""

CREATE_S = 0.5
"""Median time for a new container. *Source*: limitations of the container wall."""

NOTICED_S = 1.8
"""Time until the engine notices that a node was killed, measured with Ray."""

JOIN_S = 1.0
"""Time until an engine finds a node that has come: `LOOK_S` of the cluster's wall."""

REPORT_S = 1.0
"""Time between two reports of a node to one engine, and so the age of what it says of others."""

REPORT_TICKS = 20
"""Number of groups of nodes that report one after another in that time."""

QUEUE_S = 30.0
"""How long a call waits for a slot: `container.queue_seconds`."""

MAX_PROGRAM_S = 600.0
"""How long a program runs at most."""

COMMON, RARE = Kind("python-data", 512), Kind("solver", 512)
"""The image of nearly all calls, and one that few nodes have."""


@dataclass(frozen=True)
class Caller:
    """A principal of one cell."""

    name: str
    rate: float
    """Calls per second, on average."""
    burst: float = 1.0
    """Average number of calls that it makes at once."""
    agents: int = 4


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    machines: int
    slots: int
    cells: Sequence[Sequence[Caller]]
    """The callers of each cell."""
    seconds: float
    warm_up: float = 0.0
    """Seconds at the beginning of which no figures are taken."""
    engine_s: float = ENGINE_S
    program_s: float = 8.0
    """Median time of a program."""
    sigma: float = 1.6
    """Shape of its log-normal distribution: the higher, the longer the slowest ones take."""
    fresh: float = 0.1
    """Part of the calls that need a container of their own."""
    repeatable: float = 0.6
    """Part of the calls that may be repeated after they have begun."""
    rare: float = 0.0
    """Part of the calls that need the image that every tenth node has."""
    deaths: int = 0
    """Number of nodes that are killed, at random times."""
    down_s: float = 40.0
    """Seconds until such a node is back."""
    drains: int = 0
    """Number of nodes that are drained, each for `down_s`."""
    seed: int = 20261121


@dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    domain: TrustDomain
    kind: Kind
    fresh: bool
    repeatable: bool
    program_s: float
    arrived: float
    is_counted: bool


@dataclass
class Figures:
    """What came of it."""

    waits: dict[str, list[float]] = field(default_factory=dict)
    """Principal → seconds that its calls waited for a slot."""
    starts: list[float] = field(default_factory=list)
    """Seconds from each call's arrival to the beginning of its program."""
    ends: Counter[str] = field(default_factory=Counter)
    """How calls ended: done, lost, refused (too many waited), late (no slot in time)."""
    of_caller: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same by principal."""
    counts: Counter[str] = field(default_factory=Counter)
    """Calls that were repeated, containers by how a call got one, runs on overfull nodes."""
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Each second: the time, programs that run, calls that wait, slots of nodes that live."""
    shares: Counter[str] = field(default_factory=Counter)
    """Principal → the largest part of the slots that it had, in hundredths."""
    fullest: float = 0.0
    """The most that ran on a node at once, as a multiple of its slots."""
    placing_s: Counter[str] = field(default_factory=Counter)
    """Real seconds in the placing code: of calls, and of reports."""
    placed: Counter[str] = field(default_factory=Counter)
    """How many calls and reports these are."""

    @property
    def utilisation(self) -> float:
        """Programs that ran, as a part of the slots, on average."""
        return sum(one[1] for one in self.samples) / max(1, sum(one[3] for one in self.samples))

    def micros(self, what: str) -> float:
        """Real microseconds in the placing code for each call, or report."""
        return self.placing_s[what] / max(1, self.placed[what]) * 1e6

    def all_waits(self) -> list[float]:
        """The waits of all calls that got a slot."""
        return [one for waits in self.waits.values() for one in waits]


class Shelf:
    """One cell's containers on one machine: those that nobody uses."""

    def __init__(self) -> None:
        self.running = 0
        self.making = 0
        self.warm: Counter[Kind] = Counter({COMMON: 1})
        self.idle: OrderedDict[tuple[TrustDomain, Kind], int] = OrderedDict()
        """Containers by domain and kind, the least recently used first."""

    def take(self, request: PlaceRequest) -> str:
        """Take a container, and return where it came from."""
        key = (request.domain, request.kind)
        self.running += 1
        if not request.fresh and self.idle.get(key):
            self._remove(key)
            return "its own"
        if self.warm[request.kind]:
            self.warm[request.kind] -= 1
            return "warm"
        return "new"

    def keep(self, request: PlaceRequest, slots: int) -> None:
        """Keep the container of a call that has ended, and no more than there are slots."""
        key = (request.domain, request.kind)
        self.idle[key] = self.idle.get(key, 0) + 1
        self.idle.move_to_end(key)
        while self.running + sum(self.warm.values()) + sum(self.idle.values()) > slots:
            if not self.idle:
                break
            self._remove(next(iter(self.idle)))

    def _remove(self, key: tuple[TrustDomain, Kind]) -> None:
        self.idle[key] -= 1
        if not self.idle[key]:
            del self.idle[key]


@dataclass(eq=False)
class Machine:
    """A node as it truly is."""

    id: str
    slots: int
    images: dict[str, str]
    is_up: bool = True
    is_drained: bool = False
    noticed_at: float = 0.0
    """When the engines notice its last death."""
    running: dict[simpy.Process, None] = field(default_factory=dict)
    """The calls whose programs run there, in order, so that each simulation is the same."""
    shelves: dict[int, Shelf] = field(default_factory=dict)

    def shelf(self, cell: int) -> Shelf:
        """Return a cell's containers."""
        return self.shelves.setdefault(cell, Shelf())


class Cell:
    """An engine with its own state, queue and picture of the nodes."""

    def __init__(self, number: int, engines: int, figures: Figures) -> None:
        self.number = number
        self.engines = engines
        self.placer = Placer(random.Random(f"placer {number}"))
        self.figures = figures
        self.busy_until = 0.0
        self.shares: Counter[str] = Counter()
        self.open: dict[str, int] = {}
        """The slots of the machines that are open, by id."""
        self.slots = 0
        self._checking_s = 0.0

    def join(self, machine: Machine) -> None:
        """Begin to place calls on a machine."""
        node = PlacedNode(machine.id, machine.id, machine.slots, machine.images, is_open=False)
        self.placer.put(node)
        self.read_report(machine)

    def read_report(self, machine: Machine) -> None:
        """Take over what a machine reports."""
        node = self.placer.nodes[machine.id]
        shelf = machine.shelf(self.number)
        node.others = len(machine.running) - shelf.running
        node.engines = self.engines
        node.warm.clear()
        node.warm.update(shelf.warm)
        node.is_open = not machine.is_drained
        self._count(machine.id, machine.slots * node.is_open)
        self._timed("report", self.placer.put, node)
        self.figures.placed["report"] += 1

    def drop(self, machine: Machine) -> None:
        """Notice that a machine is dead."""
        self._count(machine.id, 0)
        self.placer.drop(machine.id)

    def ask(self, request: PlaceRequest) -> bool:
        """Let a call wait for a node."""
        self.figures.placed["call"] += 1
        return bool(self._timed("call", self.placer.ask, request))

    def give_back(self, request: PlaceRequest) -> None:
        """Free a slot."""
        self.shares[request.domain.principal_id] -= 1
        self._timed("call", self.placer.give_back, request)

    def _timed(self, what: str, place: Callable[[Any], Any], subject: Any) -> Any:
        """Time the placing code, but not the checks of what it grants."""
        self._checking_s, before = 0.0, perf_counter()
        result = place(subject)
        self.figures.placing_s[what] += perf_counter() - before - self._checking_s
        return result

    def _count(self, machine_id: str, slots: int) -> None:
        self.slots += slots - self.open.get(machine_id, 0)
        self.open[machine_id] = slots

    def on_grant(self, request: PlaceRequest, granted: simpy.Event) -> None:
        """Assert the invariants of a grant."""
        before = perf_counter()
        granted.succeed()  # raises if it was granted before
        node, who = request.node, request.domain.principal_id
        assert node is not None
        assert node.is_open
        assert request.kind.image in node.images
        assert 0 < node.used + node.others <= node.slots
        self.shares[who] += 1
        assert self.shares[who] <= max(1, self.slots - self.slots // 4)
        part = math.ceil(100 * self.shares[who] / self.slots)
        self.figures.shares[who] = max(self.figures.shares[who], part)
        self._checking_s += perf_counter() - before


class Simulation:
    """Machines, cells and callers for one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.figures = Figures()
        self.chance = random.Random(plan.seed)
        self.env = simpy.Environment()
        self.machines = [
            Machine(f"node-{number:04}", plan.slots, _images(number))
            for number in range(plan.machines)
        ]
        self.cells = [
            Cell(number, len(plan.cells), self.figures) for number in range(len(plan.cells))
        ]

    def run(self) -> Figures:
        """Simulate the plan."""
        for cell, callers in zip(self.cells, self.plan.cells, strict=True):
            for machine in self.machines:
                cell.join(machine)
            self.env.process(self._report(cell))
            for caller in callers:
                self.env.process(self._arrive(cell, caller))
        for lasts, number in ((self._die, self.plan.deaths), (self._drain, self.plan.drains)):
            for machine in self.chance.sample(self.machines, number):
                at = self.chance.uniform(self.plan.warm_up, self.plan.seconds)
                self.env.process(lasts(machine, at))
        self.env.process(self._sample())
        self.env.run(until=self.plan.seconds)
        return self.figures

    # -- callers -----------------------------------------------------------------------------

    def _arrive(self, cell: Cell, caller: Caller) -> Generator[simpy.Event]:
        """Make calls in bursts, of which many are small and few are large.

        All that is drawn is the caller's own, so another way of placing meets the same calls.
        """
        chance, plan = random.Random(f"{self.plan.seed} {caller.name}"), self.plan
        while True:
            yield self.env.timeout(chance.expovariate(caller.rate / caller.burst))
            for _ in range(_burst(chance, caller.burst)):
                call = Call(
                    TrustDomain(caller.name, f"agent-{chance.randrange(caller.agents)}"),
                    RARE if chance.random() < plan.rare else COMMON,
                    chance.random() < plan.fresh,
                    chance.random() < plan.repeatable,
                    _program_s(chance, plan),
                    self.env.now,
                    self.env.now >= plan.warm_up,
                )
                self.env.process(self._call(cell, call))

    def _call(self, cell: Cell, call: Call) -> Generator[simpy.Event, Any]:
        """Make one call, and repeat it once if its node is lost and it may be."""
        begun = 0
        while True:
            # The engine's one thread serves its calls one after another.
            cell.busy_until = max(cell.busy_until, self.env.now) + self.plan.engine_s
            yield self.env.timeout(cell.busy_until - self.env.now)
            request = yield from self._slot(cell, call)
            if isinstance(request, str):
                end = request
                break
            begun += 1
            assert begun == 1 or call.repeatable
            end = yield from self._run(cell, request, call)
            cell.give_back(request)
            if end == "done" or not call.repeatable or begun == 2:
                break
            self.figures.counts["repeated"] += 1
        if call.is_counted:
            self.figures.ends[end] += 1
            self.figures.of_caller[call.domain.principal_id, end] += 1

    def _slot(self, cell: Cell, call: Call) -> Generator[simpy.Event, Any, PlaceRequest | str]:
        """Wait for a slot. Returns why there is none, as the ending."""
        asked, granted = self.env.now, self.env.event()

        request = PlaceRequest(
            call.domain, call.kind, call.fresh, lambda: cell.on_grant(request, granted)
        )
        if not cell.ask(request):
            return "refused"
        if request.node is None:
            yield granted | self.env.timeout(QUEUE_S)
            if request.node is None:
                cell.placer.forget(request)
                return "late"
        if call.is_counted:
            who = call.domain.principal_id
            self.figures.waits.setdefault(who, []).append(self.env.now - asked)
        return request

    def _run(
        self, cell: Cell, request: PlaceRequest, call: Call
    ) -> Generator[simpy.Event, Any, str]:
        """Run the program on the node that was granted."""
        env, chance, me = self.env, self.chance, self.env.active_process
        assert request.node is not None
        machine = self._machine(request.node)
        try:
            if not machine.is_up:
                raise simpy.Interrupt("its node is dead")
            machine.running[me] = None
            shelf = machine.shelf(cell.number)
            source = shelf.take(request)
            begins_s = chance.lognormvariate(math.log(REMOTE_S), REMOTE_SIGMA)
            if source == "new":
                begins_s += CREATE_S * chance.lognormvariate(0, 0.25)
            elif source == "its own":
                begins_s += RESET_S * (chance.random() < 0.1)  # it was used just before
            crowd = len(machine.running) / machine.slots
            self._count_start(source, crowd, begins_s, call)
            yield env.timeout(begins_s + OVERHEAD_S + call.program_s * max(1.0, crowd))
        except simpy.Interrupt:
            yield env.timeout(max(0.0, machine.noticed_at - env.now))
            return "lost"
        del machine.running[me]
        shelf.running -= 1
        if not request.fresh:
            shelf.keep(request, machine.slots)
        if source == "warm" and not shelf.making:
            shelf.making = 1
            env.process(self._warm_up(machine, shelf, request.kind))
        return "done"

    def _count_start(self, source: str, crowd: float, begins_s: float, call: Call) -> None:
        if call.is_counted:
            figures = self.figures
            figures.counts[source] += 1
            figures.counts["on an overfull node"] += crowd > 1
            figures.fullest = max(figures.fullest, crowd)
            figures.starts.append(self.env.now - call.arrived + begins_s)

    # -- machines ----------------------------------------------------------------------------

    def _machine(self, node: PlacedNode) -> Machine:
        return self.machines[int(node.id.removeprefix("node-"))]

    def _warm_up(self, machine: Machine, shelf: Shelf, kind: Kind) -> Generator[simpy.Event]:
        """Make a container for the next call of anybody."""
        yield self.env.timeout(CREATE_S)
        shelf.making = 0
        unused = sum(shelf.warm.values()) + sum(shelf.idle.values())
        if shelf.running + unused < machine.slots:
            shelf.warm[kind] += 1

    def _report(self, cell: Cell) -> Generator[simpy.Event]:
        """Let the machines report to a cell, a part of them at a time."""
        yield self.env.timeout(self.chance.uniform(0, REPORT_S / REPORT_TICKS))
        tick = 0
        while True:
            yield self.env.timeout(REPORT_S / REPORT_TICKS)
            tick = (tick + 1) % REPORT_TICKS
            for machine in self.machines[tick::REPORT_TICKS]:
                if machine.is_up and machine.id in cell.placer.nodes:
                    cell.read_report(machine)

    def _die(self, machine: Machine, at: float) -> Generator[simpy.Event]:
        """Kill a machine, and let it come back empty."""
        yield self.env.timeout(at)
        machine.is_up = False
        machine.noticed_at = self.env.now + NOTICED_S
        for process in machine.running:
            process.interrupt()
        self.figures.counts["killed nodes"] += 1
        machine.running.clear()
        machine.shelves.clear()
        yield self.env.timeout(NOTICED_S)
        for cell in self.cells:
            cell.drop(machine)
        yield self.env.timeout(self.plan.down_s)
        machine.is_up = True
        yield self.env.timeout(JOIN_S)
        for cell in self.cells:
            cell.join(machine)

    def _drain(self, machine: Machine, at: float) -> Generator[simpy.Event]:
        """Let a machine take nothing new for a while. Engines see it in its next report."""
        yield self.env.timeout(at)
        machine.is_drained = True
        yield self.env.timeout(self.plan.down_s)
        machine.is_drained = False

    def _sample(self) -> Generator[simpy.Event]:
        while True:
            yield self.env.timeout(1)
            if self.env.now >= self.plan.warm_up:
                live = [one for one in self.machines if one.is_up]
                self.figures.samples.append(
                    (
                        self.env.now,
                        sum(len(one.running) for one in live),
                        sum(len(cell.placer.queue) for cell in self.cells),
                        sum(one.slots for one in live),
                    )
                )


def mean_s(plan: Plan) -> float:
    """Return the average time of a program."""
    chance = random.Random(plan.seed)
    return sum(_program_s(chance, plan) for _ in range(100_000)) / 100_000


def _program_s(chance: random.Random, plan: Plan) -> float:
    return min(MAX_PROGRAM_S, chance.lognormvariate(math.log(plan.program_s), plan.sigma))


def _burst(chance: random.Random, mean: float) -> int:
    return max(1, round(chance.lognormvariate(math.log(mean) - 0.5, 1.0)))


def _images(number: int) -> dict[str, str]:
    return {COMMON.image: "sha256:1", **({RARE.image: "sha256:2"} if number % 10 == 0 else {})}
