"""Placing: which node serves a waiting call, and whose turn it is.

Host side, pure; `wall` drives it, and `benchmarks/simulate.py` with simulated nodes. Invariants: a
node never has more calls at once than free slots; turns are those of the container pool's queue;
no principal has more than three quarters of all slots, unless there is only one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from fumehood.core.identity import TrustDomain
from fumehood.sandbox.container.pool import FairQueue, Kind

MAX_COMPARED = 16
"""Of how many nodes, the least loaded ones first, one with a warm container is chosen."""

MAX_REMEMBERED = 100_000
"""Maximum number of trust domains whose last node is remembered."""


@dataclass(eq=False, slots=True)
class PlacedNode:
    """One node as the engine knows it."""

    id: str
    name: str
    slots: int
    images: Mapping[str, str]
    """Image name → digest, of the images that calls may use there."""
    warm: Counter[Kind] = field(default_factory=Counter)
    """Unused containers at its last report, less those that were taken since."""
    others: int = 0
    """Slots that other engines use."""
    used: int = 0
    """Slots that this engine's calls use."""
    is_open: bool = True
    """Whether it takes new calls: it can be reached, enforces the limits and is not drained."""

    @property
    def free(self) -> int:
        """The number of calls that it can take now."""
        return max(0, self.slots - self.used - self.others) if self.is_open else 0

    @property
    def load(self) -> float:
        """The part of its slots that is in use."""
        return (self.used + self.others) / max(self.slots, 1)


@dataclass(eq=False, slots=True)
class PlaceRequest:
    """A call that waits for a node."""

    domain: TrustDomain
    kind: Kind
    fresh: bool
    on_grant: Callable[[], None] = field(repr=False)
    """Called once `node` is set, from within `Placer`."""
    node: PlacedNode | None = None
    """The node that was granted, or None while it waits."""


class Placer:
    """The nodes, the calls that wait for them, and the calls on them."""

    def __init__(self) -> None:
        self.nodes: dict[str, PlacedNode] = {}
        self.queue: FairQueue[PlaceRequest] = FairQueue()
        self._shares: Counter[str] = Counter()
        """Slots by principal."""
        self._last: dict[tuple[TrustDomain, Kind], str] = {}
        """The node that served each trust domain last, where a container of it may be idle."""
        self._by_load: list[tuple[float, int, PlacedNode]] = []
        """A heap of nodes with their load, which may be outdated."""
        self._pushes = 0

    @property
    def slots(self) -> int:
        """The slots of all open nodes."""
        return sum(node.slots for node in self.nodes.values() if node.is_open)

    def put(self, node: PlacedNode) -> None:
        """Add or change a node."""
        self.nodes[node.id] = node
        self._push(node)
        self.dispatch()

    def drop(self, node_id: str) -> None:
        """Remove a node. Calls on it are given back by those that made them."""
        node = self.nodes.pop(node_id, None)
        if node is not None:
            node.is_open = False

    def ask(self, request: PlaceRequest) -> bool:
        """Let a call wait for a node, which may be granted at once. False: too many wait."""
        if not self.queue.join(request):
            return False
        self.dispatch()
        return True

    def forget(self, request: PlaceRequest) -> None:
        """Let a call wait no longer."""
        self.queue.leave(request)

    def give_back(self, request: PlaceRequest) -> None:
        """Free the slot of a call that has ended."""
        node = request.node
        assert node is not None
        node.used -= 1
        self._shares[request.domain.principal_id] -= 1
        if self.nodes.get(node.id) is node:
            self._push(node)
            if not request.fresh:
                self._last.pop((request.domain, request.kind), None)
                self._last[request.domain, request.kind] = node.id
                if len(self._last) > MAX_REMEMBERED:
                    del self._last[next(iter(self._last))]
        self.dispatch()

    def dispatch(self) -> None:
        """Grant free slots in turn, until none is left or nobody waits."""
        has_changed = True
        while has_changed and self.queue and self._has_free():
            has_changed = False
            most_of_one = max(1, self.slots - self.slots // 4)
            for requests in self.queue.in_turn():
                for request in requests:
                    if request.node is not None:
                        continue
                    if self._shares[request.domain.principal_id] >= most_of_one:
                        break  # its calls wait until one of its own ends
                    node = self._choose(request)
                    if node is not None:
                        self._grant(request, node)
                        has_changed = True
                        break
                if not self._has_free():
                    return

    def _grant(self, request: PlaceRequest, node: PlacedNode) -> None:
        node.used += 1
        if node.warm[request.kind]:
            node.warm[request.kind] -= 1
        self._shares[request.domain.principal_id] += 1
        self._push(node)
        self.queue.pass_on(request)
        self.queue.leave(request)
        request.node = node
        request.on_grant()

    def _choose(self, request: PlaceRequest) -> PlacedNode | None:
        """Return the node for a request: one where its domain has a container, then one with a
        warm container, then the least loaded one.
        """
        last = self.nodes.get(self._last.get((request.domain, request.kind), ""))
        if last is not None and not request.fresh and _fits(last, request):
            return last
        fitting = (node for node in self._from_least_loaded() if _fits(node, request))
        some = list(islice(fitting, MAX_COMPARED))
        return next((node for node in some if node.warm[request.kind]), some[0] if some else None)

    def _has_free(self) -> bool:
        return next(self._from_least_loaded(), None) is not None

    def _from_least_loaded(self) -> Iterator[PlacedNode]:
        """Yield the nodes that are not full, the least loaded one first."""
        seen = []
        try:
            while self._by_load:
                load, _, node = self._by_load[0]
                if self.nodes.get(node.id) is not node or load != node.load or not node.free:
                    heapq.heappop(self._by_load)  # outdated, or pushed again once it has room
                    continue
                seen.append(heapq.heappop(self._by_load))
                yield node
        finally:
            for one in seen:
                heapq.heappush(self._by_load, one)

    def _push(self, node: PlacedNode) -> None:
        if len(self._by_load) > 4 * len(self.nodes) + MAX_COMPARED:
            self._by_load = [(one.load, i, one) for i, one in enumerate(self.nodes.values())]
            heapq.heapify(self._by_load)
        self._pushes += 1
        heapq.heappush(self._by_load, (node.load, self._pushes, node))


def _fits(node: PlacedNode, request: PlaceRequest) -> bool:
    return node.free > 0 and request.kind.image in node.images
