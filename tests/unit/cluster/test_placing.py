"""Calls are placed on nodes with room, in fair turns, at a cost that does not grow with the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fumehood.cluster.placing import RESERVED, PlacedNode, Placer, PlaceRequest
from fumehood.core.identity import TrustDomain
from fumehood.sandbox.container.pool import Kind

COMMON, RARE = Kind("python", 512), Kind("solver", 512)
BOTH = {"python": "sha256:1", "solver": "sha256:2"}
ONLY_COMMON = {"python": "sha256:1"}


class World:
    """A placer, and what was asked of it."""

    def __init__(self) -> None:
        self.placer = Placer(Random(1))
        self.granted: list[PlaceRequest] = []
        self.waiting: list[PlaceRequest] = []
        self.shares: Counter[str] = Counter()

    def node(self, name: str, slots: int, **values: object) -> PlacedNode:
        node = PlacedNode(name, name, slots, ONLY_COMMON)
        for key, value in values.items():
            setattr(node, key, value)
        self.placer.put(node)
        return node

    def ask(self, who: str, kind: Kind = COMMON, *, fresh: bool = False) -> PlaceRequest:
        """Ask for `principal/agent`."""
        principal_id, _, agent_id = who.partition("/")
        domain = TrustDomain(principal_id, agent_id)
        request = PlaceRequest(domain, kind, fresh, lambda: self._on_grant(request))
        self.waiting.append(request)
        assert self.placer.ask(request)
        return request

    def give_back(self, request: PlaceRequest) -> None:
        self.granted.remove(request)
        self.shares[request.domain.principal_id] -= 1
        self.placer.give_back(request)

    def forget(self, request: PlaceRequest) -> None:
        self.waiting.remove(request)
        self.placer.forget(request)

    def most_of_one(self) -> int:
        slots = sum(one.slots for one in self.placer.nodes.values() if one.is_open)
        return max(1, slots - slots // 4)

    def _on_grant(self, request: PlaceRequest) -> None:
        node, who = request.node, request.domain.principal_id
        assert self.placer.nodes[node.id] is node
        assert node.is_open
        assert node.used + node.others <= node.slots
        assert request.kind.image in node.images
        self.waiting.remove(request)  # fails if it was granted before
        self.granted.append(request)
        self.shares[who] += 1
        assert self.shares[who] <= self.most_of_one()

    def check(self) -> None:
        """Assert that nobody waits without need, and that everything is counted."""
        nodes = [one for one in self.placer.nodes.values() if one.is_open]
        slots = sum(one.slots for one in nodes)
        part = round(sum(one.slots / one.engines for one in nodes), 6)
        has_more = part < slots and len(self.granted) >= part
        is_left_to_others = has_more and sum(one.free for one in nodes) <= slots // RESERVED
        for request in [] if is_left_to_others else self.waiting:
            has_node = any(one.free and request.kind.image in one.images for one in nodes)
            assert not has_node or self.shares[request.domain.principal_id] >= self.most_of_one()
        assert set(self.placer.queue) == set(self.waiting)
        assert self.placer.slots == slots
        for node in self.placer.nodes.values():
            assert node.used == sum(one.node is node for one in self.granted)


NODES = st.sampled_from(["n1", "n2", "n3"])
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"),
            st.sampled_from(["a", "a/1", "a/2", "b", "c"]),
            st.sampled_from([COMMON, COMMON, RARE]),
            st.booleans(),
        ),
        st.tuples(st.sampled_from(["give back", "forget"]), st.integers(0, 20)),
        st.tuples(st.just("join"), NODES, st.integers(0, 4), st.sampled_from([BOTH, ONLY_COMMON])),
        st.tuples(
            st.just("report"), NODES, st.integers(0, 3), st.booleans(),
            st.sampled_from([BOTH, ONLY_COMMON]), st.integers(0, 2), st.integers(1, 3),
        ),
        st.tuples(st.just("drop"), NODES),
    ),
    max_size=60,
)  # fmt: skip


@given(STEPS)
def test_whatever_happens_no_slot_is_given_twice_or_left_unused(steps: list[tuple]) -> None:
    world = World()
    world.node("n1", 2, images=BOTH)
    world.node("n2", 3)
    for what, *values in steps:
        match what:
            case "ask":
                world.ask(values[0], values[1], fresh=values[2])
            case "give back" if world.granted:
                world.give_back(world.granted[values[0] % len(world.granted)])
            case "forget" if world.waiting:
                world.forget(world.waiting[values[0] % len(world.waiting)])
            case "join":  # in the place of a node that has the same id
                world.node(values[0], values[1], images=values[2])
            case "report" if values[0] in world.placer.nodes:
                node = world.placer.nodes[values[0]]
                _, node.others, node.is_open, node.images, warm, node.engines = values
                node.warm = Counter({COMMON: warm})
                world.placer.put(node)
            case "drop":
                world.placer.drop(values[0])
        world.check()
    for request in [*world.waiting]:
        world.forget(request)
    for request in [*world.granted]:
        world.give_back(request)
    world.check()
    assert len(world.placer.queue) == 0


def test_call_for_a_rare_image_gets_the_next_slot_of_its_node() -> None:
    world = World()
    world.node("n1", 2)
    world.node("n2", 1, images=BOTH)
    first = [world.ask("a") for _ in range(2)]
    first.append(world.ask("b"))
    for _ in range(20):
        world.ask("a")
        world.ask("b")
    rare = world.ask("c", RARE)
    on_rare = next(one for one in first if one.node is world.placer.nodes["n2"])
    for one in [one for one in first if one is not on_rare]:
        world.give_back(one)
    world.give_back(on_rare)
    assert rare.node is world.placer.nodes["n2"]


def test_waiting_calls_that_fit_nowhere_are_not_looked_at_again() -> None:
    world = World()
    node = world.node("n1", 100)
    for number in range(400):
        world.ask(f"a/{number}", RARE)
    for _ in range(75):
        world.ask("b")
    for number in range(400):
        world.ask(f"b/{number}")
    turns = _count_turns(world.placer)
    for others in range(20):  # there is room, but not for these
        node.others = others
        world.placer.put(node)
    assert next(turns) == 0
    world.give_back(world.granted[0])
    assert next(turns) == 1


def _count_turns(placer: Placer) -> Iterator[int]:
    """Yield how often the queue was read in turn."""
    count, in_turn = 0, placer.queue.in_turn

    def counted() -> Iterator[list[PlaceRequest]]:
        nonlocal count
        count += 1
        return in_turn()

    placer.queue.in_turn = counted  # type: ignore[method-assign]

    def read() -> Iterator[int]:
        while True:
            yield count

    return read()


def test_call_goes_where_its_domain_has_an_idle_container() -> None:
    world = World()
    for number in range(6):
        world.node(f"n{number}", 4)
    first = [world.ask("a") for _ in range(3)]
    used = {one.node.id for one in first if one.node}
    assert len(used) == 3
    for one in first:
        world.give_back(one)
    again = [world.ask("a") for _ in range(3)]
    assert {one.node.id for one in again if one.node} == used
    fresh = world.ask("a", fresh=True)
    assert fresh.node.id not in used


def test_without_one_it_goes_to_a_warm_container_then_to_the_least_loaded_node() -> None:
    world = World()
    world.node("n1", 4)
    world.node("n2", 4, warm=Counter({COMMON: 1}), others=0)
    assert [world.ask(who).node.id for who in "abc"] == ["n2", "n1", "n2"]  # type: ignore[union-attr]


def test_engines_with_the_same_reports_do_not_all_take_the_same_node() -> None:
    taken: Counter[str] = Counter()
    for seed in range(50):
        placer = Placer(Random(seed))
        for number in range(100):
            others = 0 if number < 5 else 3
            placer.put(PlacedNode(f"n{number}", "", 10, ONLY_COMMON, others=others))
        request = PlaceRequest(TrustDomain("a"), COMMON, False, lambda: None)
        placer.ask(request)
        taken[request.node.id] += 1
    assert max(taken.values()) <= 10


def test_engine_with_more_than_its_part_leaves_slots_to_another() -> None:
    world = World()
    node = world.node("n1", 32, engines=2)
    calls = [world.ask(who) for who in "ab" for _ in range(16)]
    assert sum(one.node is not None for one in calls) == 30
    node.others = 2  # the other one has taken them
    world.placer.put(node)
    world.give_back(world.granted[0])
    assert len(world.granted) == 29
    node.engines = 1
    node.others = 0
    world.placer.put(node)
    assert not world.waiting
