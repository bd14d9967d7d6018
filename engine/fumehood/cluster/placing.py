"""Placing: which node serves a waiting call, and whose turn it is.

Host side, pure; `wall` drives it, and `benchmarks/simulate.py` with simulated nodes. Invariants: a
node never has more calls at once than free slots; turns are those of the container pool's queue;
no principal has more than three quarters of all slots, rounded up; an engine with more than its
part of shared nodes leaves some slots to the others. The cost of a decision grows with the
logarithm of the number of nodes, and a call that cannot be placed costs the others nothing: an
engine decides hundreds of times a second, while thousands of calls may wait.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fumehood.core.identity import TrustDomain
from fumehood.sandbox.container.pool import FairQueue, Kind

MAX_COMPARED = 16
"""Maximum number of nodes, the least loaded first, that are searched for a warm container."""

DRAWN = 3
"""Number of nodes that are drawn to choose from, if other engines use them."""

RESERVED = 16
"""An engine with more than its part of shared nodes leaves one slot in so many unused. Fewer slots
are not divided: one of two would be half of everything."""

MAX_REMEMBERED = 100_000
"""Maximum number of containers that are remembered to be idle."""


@dataclass(eq=False, slots=True)
class PlacedNode:
    """One node as the engine knows it. `Placer.put` must follow each change."""

    id: str
    name: str
    slots: int
    images: Mapping[str, str]
    """Image name → digest, of the images that calls may use there. Replaced, never changed."""
    warm: Counter[Kind] = field(default_factory=Counter)
    """Unused containers at its last report, less those that were taken since."""
    others: int = 0
    """Slots that other engines use."""
    engines: int = 1
    """The number of engines that use it, this one included."""
    used: int = 0
    """Slots that this engine's calls use."""
    is_open: bool = True
    """Whether it takes new calls: it can be reached, enforces the limits and is not drained."""
    counted: tuple[int, int, int, float, Mapping[str, str]] = field(
        default=(0, 0, 0, 0.0, {}), repr=False
    )
    """Its slots, free slots, others' slots, this engine's part of the slots, and images, as
    `Placer` has counted them."""
    number: int = field(default=0, repr=False)
    """The number of its entries in the heaps that are valid."""

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

    def __init__(self, chance: Random | None = None) -> None:
        self._chance = chance or Random()  # noqa: S311
        self.nodes: dict[str, PlacedNode] = {}
        self.queue: FairQueue[PlaceRequest] = FairQueue()
        self.slots = 0
        """The slots of all open nodes."""
        self._free = 0
        self._others = 0
        """Slots that other engines use, of all nodes."""
        self._part = 0.0
        """The slots that are this engine's if all engines want as many as possible."""
        self._used = 0
        self._shares: Counter[str] = Counter()
        """Slots by principal."""
        self._wanted: Counter[tuple[str, str]] = Counter()
        """The number of waiting calls by principal and image."""
        self._idle: dict[tuple[TrustDomain, Kind], list[PlacedNode]] = {}
        """The nodes where each trust domain has idle containers, the last used one at the end."""
        self._remembered = 0
        self._by_load: dict[str, list[tuple[float, int, PlacedNode]]] = {}
        """By image, a heap of the nodes that have it and room. Entries may be outdated."""
        self._numbers = 0

    def put(self, node: PlacedNode) -> None:
        """Add or change a node."""
        if self.nodes.get(node.id) is not node:
            self.drop(node.id)
            self.nodes[node.id] = node
        if self._count(node):
            self.dispatch()

    def drop(self, node_id: str) -> None:
        """Remove a node. Calls on it are given back by those that made them."""
        node = self.nodes.pop(node_id, None)
        if node is not None:
            node.is_open = False
            self._count(node)

    def ask(self, request: PlaceRequest) -> bool:
        """Let a call wait for a node, which may be granted at once. False: too many wait."""
        if not self.queue.join(request):
            return False
        self._wanted[_wants(request)] += 1
        self.dispatch()
        return True

    def forget(self, request: PlaceRequest) -> None:
        """Let a call wait no longer."""
        if self.queue.leave(request):
            _decrease(self._wanted, _wants(request))

    def give_back(self, request: PlaceRequest) -> None:
        """Free the slot of a call that has ended."""
        node = request.node
        assert node is not None
        node.used -= 1
        self._used -= 1
        _decrease(self._shares, request.domain.principal_id)
        self._count(node)
        if self.nodes.get(node.id) is node and not request.fresh:
            self._remember(request, node)
        self.dispatch()

    def dispatch(self) -> None:
        """Grant free slots in turn, until none is left that a waiting call may have."""
        has_changed = True
        while has_changed and self._can_grant():
            has_changed = False
            for requests in self.queue.in_turn():
                if self._grant_one(requests):
                    has_changed = True
                    if not self._can_grant():
                        return

    def _grant_one(self, requests: list[PlaceRequest]) -> bool:
        """Grant a slot to the first call of a domain that can have one."""
        for request in requests:
            if request.node is not None:
                continue
            if not self._may_have_more(request.domain.principal_id):
                return False  # its calls wait until one of its own ends
            node = self._choose(request)
            if node is not None:
                self._grant(request, node)
                return True
        return False

    def _can_grant(self) -> bool:
        """Whether a waiting call can be placed. Known without looking at every one of them."""
        return self._free > self._reserve() and any(
            self._may_have_more(principal_id) and self._least_loaded(image) is not None
            for principal_id, image in self._wanted
        )

    def _reserve(self) -> int:
        """The number of free slots that are left to other engines.

        An engine sees a slot that another one frees a second late, when that one has long used it
        again. So whoever has more than its part leaves some to those that have less.
        """
        part = round(self._part, 6)  # of a long sum of fractions
        has_more = part < self.slots and self._used >= part
        return self.slots // RESERVED if has_more else 0

    def _may_have_more(self, principal_id: str) -> bool:
        return self._shares[principal_id] < max(1, self.slots - self.slots // 4)

    def _grant(self, request: PlaceRequest, node: PlacedNode) -> None:
        node.used += 1
        self._used += 1
        if node.warm[request.kind]:
            node.warm[request.kind] -= 1
        self._shares[request.domain.principal_id] += 1
        self._count(node)
        self.queue.pass_on(request)
        self.forget(request)
        request.node = node
        request.on_grant()

    # -- choosing ----------------------------------------------------------------------------

    def _choose(self, request: PlaceRequest) -> PlacedNode | None:
        """Return the node for a request: one where its domain has a container, then one with a
        warm container, then the least loaded one. If other engines use the nodes, the latter two
        are chosen from a few that are drawn.
        """
        own = None if request.fresh else self._recall(request)
        if own is not None:
            return own
        drawn = self._draw(request.kind.image) if self._others else []
        if drawn:
            return min(drawn, key=lambda node: (not node.warm[request.kind], node.load))
        return self._search(request.kind)

    def _draw(self, image: str) -> list[PlacedNode]:
        """Draw a few nodes with room.

        What is known of other engines' use is a second old. If each of a hundred engines took the
        least loaded node, all would take the same ones. *Source*: Mitzenmacher, "How useful is old
        information?", 2000.
        """
        heap = self._by_load[image] if self._least_loaded(image) else []
        entries = [self._chance.choice(heap) for _ in range(MAX_COMPARED if heap else 0)]
        return [node for _, number, node in entries if number == node.number][:DRAWN]

    def _search(self, kind: Kind) -> PlacedNode | None:
        """Return the least loaded node with a warm container, or the least loaded one."""
        seen: list[tuple[float, int, PlacedNode]] = []
        found = None
        while found is None and len(seen) < MAX_COMPARED and self._least_loaded(kind.image):
            seen.append(heapq.heappop(self._by_load[kind.image]))
            found = seen[-1][2] if seen[-1][2].warm[kind] else None
        for entry in seen:
            heapq.heappush(self._by_load[kind.image], entry)
        return found or (seen[0][2] if seen else None)

    def _remember(self, request: PlaceRequest, node: PlacedNode) -> None:
        """Remember that a domain has an idle container on a node."""
        key = (request.domain, request.kind)
        nodes = self._idle[key] = self._idle.pop(key, [])  # the last used domain is the last one
        nodes.append(node)
        self._remembered += 1
        while self._remembered > MAX_REMEMBERED:
            self._remembered -= len(self._idle.pop(next(iter(self._idle))))

    def _recall(self, request: PlaceRequest) -> PlacedNode | None:
        """Return a node where its domain has an idle container, which is then forgotten.

        Without room, the node has destroyed that container for another's.
        """
        key = (request.domain, request.kind)
        nodes, found = self._idle.get(key, []), None
        while nodes and found is None:
            node = nodes.pop()
            self._remembered -= 1
            found = node if node.free and request.kind.image in node.images else None
        if not nodes:
            self._idle.pop(key, None)
        return found

    def _least_loaded(self, image: str) -> PlacedNode | None:
        """Return the node with this image and room that is the least loaded, the heap's first."""
        heap = self._by_load.get(image)
        if heap is None:
            nodes = [one for one in self.nodes.values() if one.free and image in one.images]
            heap = self._by_load[image] = [(one.load, one.number, one) for one in nodes]
            heapq.heapify(heap)
        while heap and heap[0][1] != heap[0][2].number:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _count(self, node: PlacedNode) -> bool:
        """Count a node's slots again, and sort it in by its load. False if nothing has changed."""
        slots, others = (node.slots, node.others) if node.is_open else (0, 0)
        counted = (slots, node.free, others, slots / node.engines, node.images)
        if counted == node.counted:
            return False
        self.slots += counted[0] - node.counted[0]
        self._free += counted[1] - node.counted[1]
        self._others += counted[2] - node.counted[2]
        self._part += counted[3] - node.counted[3]
        node.counted = counted
        self._numbers += 1
        node.number = self._numbers  # so all its entries are outdated
        if node.free:
            for image in node.images.keys() & self._by_load.keys():
                heap = self._by_load[image]
                heapq.heappush(heap, (node.load, node.number, node))
                if len(heap) > 4 * len(self.nodes) + MAX_COMPARED:
                    heap[:] = [entry for entry in heap if entry[1] == entry[2].number]
                    heapq.heapify(heap)
        return True


def _wants(request: PlaceRequest) -> tuple[str, str]:
    return request.domain.principal_id, request.kind.image


def _decrease(counter: Counter[Any], key: object) -> None:
    """Subtract one, and keep no zeros."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
