"""Chooses a node for each waiting call, and the order of the calls.

Host side, without input or output. `wall` uses it, and `benchmarks/simulate.py` runs it with
simulated nodes. Invariants: a node never runs more calls at once than it has slots; calls take
turns as in the container pool's queue; no principal has more than three quarters of all slots,
rounded up; an engine that already uses its fair share of shared nodes leaves some slots to other
engines. The cost of a decision grows with the logarithm of the number of nodes. A call that cannot
be placed does not make the placement of other calls slower. This is necessary because an engine
decides hundreds of times a second while thousands of calls may wait.
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
"""Maximum number of nodes that are checked for a warm container, beginning with the least
loaded."""

DRAWN = 3
"""If other engines also use the nodes, a node is chosen from at most this many nodes that are drawn
at random."""

RESERVED = 16
"""An engine that uses its fair share of shared nodes leaves one of this many slots free. If there
are fewer slots in total, it leaves none free, because one slot would be too large a share."""

MAX_REMEMBERED = 100_000
"""Maximum number of idle containers that are remembered."""


@dataclass(eq=False, slots=True)
class PlacedNode:
    """What the engine knows about one node. After each change, pass the node to `Placer.put`."""

    id: str
    name: str
    slots: int
    images: Mapping[str, str]
    """Image name → digest, for the images that calls may use on this node. The mapping is replaced,
    never changed."""
    warm: Counter[Kind] = field(default_factory=Counter)
    """The number of warm containers of each kind: those in the node's last report, minus those that
    were taken since."""
    others: int = 0
    """Slots that other engines use."""
    engines: int = 1
    """The number of engines that use the node, including this one."""
    used: int = 0
    """Slots that this engine's calls use."""
    is_open: bool = True
    """Whether the node takes new calls: it can be reached, enforces the limits and is not
    drained."""
    counted: tuple[int, int, int, float, Mapping[str, str]] = field(
        default=(0, 0, 0, 0.0, {}), repr=False
    )
    """The node's slots, free slots, other engines' slots, this engine's fair share of the slots,
    and images, as last counted by `Placer`."""
    number: int = field(default=0, repr=False)
    """The number of the node's valid heap entries. Entries with another number are outdated."""

    @property
    def free(self) -> int:
        """The number of calls that the node can take now."""
        return max(0, self.slots - self.used - self.others) if self.is_open else 0

    @property
    def load(self) -> float:
        """The fraction of the node's slots that are in use."""
        return (self.used + self.others) / max(self.slots, 1)


@dataclass(eq=False, slots=True)
class PlaceRequest:
    """A call that waits for a node or has been given one."""

    domain: TrustDomain
    kind: Kind
    fresh: bool
    on_grant: Callable[[], None] = field(repr=False)
    """Called by `Placer` once `node` is set."""
    node: PlacedNode | None = None
    """The node that the call may use, or None while the call waits."""


class Placer:
    """Gives each waiting call a slot on a node. Keeps the known nodes, the calls that wait for a
    node, and the number of slots that running calls use.
    """

    def __init__(self, chance: Random | None = None) -> None:
        self._chance = chance or Random()  # noqa: S311
        self.nodes: dict[str, PlacedNode] = {}
        self.queue: FairQueue[PlaceRequest] = FairQueue()
        self.slots = 0
        """The slots of all open nodes."""
        self._free = 0
        self._others = 0
        """Slots on all nodes that other engines use."""
        self._part = 0.0
        """The slots that this engine gets if all engines share each node equally."""
        self._used = 0
        self._shares: Counter[str] = Counter()
        """The number of used slots by principal."""
        self._wanted: Counter[tuple[str, str]] = Counter()
        """The number of waiting calls by principal and image."""
        self._idle: dict[tuple[TrustDomain, Kind], list[PlacedNode]] = {}
        """The nodes on which each trust domain has idle containers. The last used node is at the
        end."""
        self._remembered = 0
        self._by_load: dict[str, list[tuple[float, int, PlacedNode]]] = {}
        """Image → a heap of the nodes that have the image and a free slot. Entries may be
        outdated."""
        self._numbers = 0

    def put(self, node: PlacedNode) -> None:
        """Add a node, or apply the changes of a known node. Waiting calls may then get a node."""
        if self.nodes.get(node.id) is not node:
            self.drop(node.id)
            self.nodes[node.id] = node
        if self._count(node):
            self.dispatch()

    def drop(self, node_id: str) -> None:
        """Remove a node. When a call that runs on this node ends, `give_back` must still be
        called.
        """
        node = self.nodes.pop(node_id, None)
        if node is not None:
            node.is_open = False
            self._count(node)

    def ask(self, request: PlaceRequest) -> bool:
        """Add a waiting call, and return True. As soon as the call gets a node, perhaps during this
        method, `request.node` is set and `request.on_grant` is called.

        If too many calls are waiting, do not add the call, and return False.
        """
        if not self.queue.join(request):
            return False
        self._wanted[_wants(request)] += 1
        self.dispatch()
        return True

    def forget(self, request: PlaceRequest) -> None:
        """Remove a call from the waiting calls."""
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
        """Grant free slots to the waiting calls in turn, until no call can get one."""
        has_changed = True
        while has_changed and self._can_grant():
            has_changed = False
            for requests in self.queue.in_turn():
                if self._grant_one(requests):
                    has_changed = True
                    if not self._can_grant():
                        return

    def _grant_one(self, requests: list[PlaceRequest]) -> bool:
        """Grant a slot to the first of these calls that can get one.

        Return whether a slot was granted.
        """
        for request in requests:
            if request.node is not None:
                continue
            if not self._may_have_more(request.domain.principal_id):
                return False  # the principal's calls wait until one of them ends
            node = self._choose(request)
            if node is not None:
                self._grant(request, node)
                return True
        return False

    def _can_grant(self) -> bool:
        """Return whether any waiting call can be placed, without examining each waiting call."""
        return self._free > self._reserve() and any(
            self._may_have_more(principal_id) and self._least_loaded(image) is not None
            for principal_id, image in self._wanted
        )

    def _reserve(self) -> int:
        """Return the number of free slots that this engine leaves to other engines.

        The number is 0 if this engine uses less than its fair share of the slots, or if its fair
        share is all of them.
        """
        # The reserve lets an engine with less than its share get a slot. Such an engine learns up
        # to a second late that this engine has freed a slot. Without a reserve, this engine would
        # have used the slot again by then.
        part = round(self._part, 6)  # the sum of many fractions is inexact
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
        """Return the node for a request, or None if no node is free.

        The first choice is a node with an idle container that an earlier call of the same trust
        domain used. The second choice is a node with a warm container, which was started in advance
        for any domain. The third choice is the least loaded node.

        If other engines use the nodes, the second and third choices are made among a few random
        nodes.
        """
        own = None if request.fresh else self._recall(request)
        if own is not None:
            return own
        drawn = self._draw(request.kind.image) if self._others else []
        if drawn:
            return min(drawn, key=lambda node: (not node.warm[request.kind], node.load))
        return self._search(request.kind)

    def _draw(self, image: str) -> list[PlacedNode]:
        """Return up to `DRAWN` random nodes that have the image and a free slot."""
        # Random, because reports of the load by other engines are up to a second old. If a hundred
        # engines always chose the node with the least reported load, they would all choose the same
        # node. *Source*: Mitzenmacher, "How useful is old information?", 2000.
        heap = self._by_load[image] if self._least_loaded(image) else []
        entries = [self._chance.choice(heap) for _ in range(MAX_COMPARED if heap else 0)]
        return [node for _, number, node in entries if number == node.number][:DRAWN]

    def _search(self, kind: Kind) -> PlacedNode | None:
        """Return the least loaded node that has a warm container of this `kind`. A warm container
        was started in advance for any trust domain.

        Only the `MAX_COMPARED` least loaded nodes are searched. If none of them has such a
        container, return the least loaded node. Return None if no node with the image has a free
        slot.
        """
        seen: list[tuple[float, int, PlacedNode]] = []
        found = None
        while found is None and len(seen) < MAX_COMPARED and self._least_loaded(kind.image):
            seen.append(heapq.heappop(self._by_load[kind.image]))
            found = seen[-1][2] if seen[-1][2].warm[kind] else None
        for entry in seen:
            heapq.heappush(self._by_load[kind.image], entry)
        return found or (seen[0][2] if seen else None)

    def _remember(self, request: PlaceRequest, node: PlacedNode) -> None:
        """Record that a domain has an idle container on a node."""
        key = (request.domain, request.kind)
        nodes = self._idle[key] = self._idle.pop(
            key, []
        )  # keeps the least recently used domain first
        nodes.append(node)
        self._remembered += 1
        while self._remembered > MAX_REMEMBERED:
            self._remembered -= len(self._idle.pop(next(iter(self._idle))))

    def _recall(self, request: PlaceRequest) -> PlacedNode | None:
        """Return a free node that has an idle container of the request's trust domain, or None.

        The container then no longer counts as idle. If the search finds a node that is not free,
        the node's idle container is forgotten.
        """
        key = (request.domain, request.kind)
        nodes, found = self._idle.get(key, []), None
        while nodes and found is None:
            node = nodes.pop()
            self._remembered -= 1
            # A full node has destroyed the container to make room. A drained node may still have
            # it, but remembering it would slow down every later call, and no call needs an idle
            # container.
            found = node if node.free and request.kind.image in node.images else None
        if not nodes:
            self._idle.pop(key, None)
        return found

    def _least_loaded(self, image: str) -> PlacedNode | None:
        """Return the least loaded node that has this image and a free slot, or None."""
        heap = self._by_load.get(image)
        if heap is None:
            nodes = [node for node in self.nodes.values() if node.free and image in node.images]
            heap = self._by_load[image] = [(node.load, node.number, node) for node in nodes]
            heapq.heapify(heap)
        while heap and heap[0][1] != heap[0][2].number:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _count(self, node: PlacedNode) -> bool:
        """Count a node's slots again, and update its heap entries.

        Return False if nothing has changed.
        """
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
    """Subtract one from the count of `key`, and delete the count if it is then zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
