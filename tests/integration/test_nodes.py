"""Nodes that come, are lost, are drained and obey: real nodes and containers, in this process."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood.cluster import node as node_module
from fumehood.cluster import wall as cluster_module
from fumehood.cluster.model import VERSION, NodeFacts, RunOrder, Terms, Ticket
from fumehood.cluster.node import Fenced, Node
from fumehood.cluster.wall import ClusterWall, RemoteContainer
from fumehood.core.errors import (
    EndedBy,
    EngineError,
    InvalidParams,
    NetworkError,
    PermissionDenied,
    ResourceNotFound,
    SandboxUnavailable,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.core.session import SessionStatus
from fumehood.core.status import NodeState
from fumehood.gateway.authority import Authority
from fumehood.gateway.service import Gateway
from fumehood.gateway.settings import GatewaySettings
from fumehood.images.packages import new_layers
from fumehood.images.settings import PackageSettings
from fumehood.observe.log import quiet_logger
from fumehood.policy.model import Decision, Verdict
from fumehood.processes.arguments import checked
from fumehood.projects.service import feed
from fumehood.projects.tree import Entry, ProjectDirectory
from fumehood.redaction.redactor import Redactor
from fumehood.registry.secrets import SecretBindings, SecretSettings
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.session import CopySource
from fumehood.sandbox.wall import NO_SINKS, HostSize, RunEnding, RunSinks, pins_of
from support.nodes import LocalMembership, LocalPort, make_cluster
from support.wait import DEADLINE_S
from support.wheels import only_from, write_wheel
from upstream import Reply, running_upstream

pytestmark = [
    pytest.mark.anyio, pytest.mark.row("B10"), pytest.mark.needs("docker"),
    pytest.mark.usefixtures("python_image"),
]  # fmt: skip

MEMORY_MB = 128
LIMITS = Limits(wall_s=20, cpu_s=20, memory_mb=MEMORY_MB, output_bytes=64 * MB)
ME = TrustDomain("uid:1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def program(code: str) -> JsonObject:
    return {"code": code, "stdin": None, "files": []}


async def run(wall: ClusterWall, code: str, sinks: RunSinks = NO_SINKS) -> RunEnding:
    async with wall.lease(ME, fresh=False, memory_mb=MEMORY_MB) as lease:
        return await lease.run("python", program(code), LIMITS, sinks)


async def run_in(place: RemoteContainer, code: str) -> object:
    await place.until_free()
    ending = await place.run("python", program(code), LIMITS, NO_SINKS)
    assert ending.ended_by is EndedBy.OK, ending
    return (ending.result or {})["value"]


async def hold(wall: ClusterWall, name: str, lost: list[str] | None = None) -> RemoteContainer:
    return await wall.hold(
        TrustDomain("uid:1", None, name), image="python", memory_mb=MEMORY_MB,
        on_lost=lambda: lost.append(name) if lost is not None else None,
    )  # fmt: skip


def states(wall: ClusterWall) -> dict[str, NodeState]:
    return {node.name: node.state for node in wall.nodes()}


@pytest.fixture
async def members(tmp_path: Path) -> AsyncIterator[LocalMembership]:
    made = LocalMembership(tmp_path)
    yield made
    for port in made.found:
        await port.node.close()


async def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    with anyio.fail_after(deadline_s):
        while not condition():
            await anyio.sleep(0.02)


async def joined(wall: ClusterWall, count: int) -> None:
    await wait_until(
        lambda: sum(state is NodeState.JOINED for state in states(wall).values()) == count
    )


@pytest.fixture
def port(members: LocalMembership) -> LocalPort:
    return members.add()


@pytest.fixture
async def wall(members: LocalMembership, port: LocalPort) -> AsyncIterator[ClusterWall]:
    """A cluster of one node."""
    async with make_cluster(members) as wall:
        await joined(wall, 1)
        yield wall


async def test_processes_and_ports_of_a_session_are_reached_on_its_node(
    members: LocalMembership,
    wall: ClusterWall,
) -> None:
    place = await hold(wall, "s1")
    server = (
        "import socket\ns = socket.create_server(('127.0.0.1', 9000))\nprint('on', flush=True)\n"
        "c, _ = s.accept()\nn = 0\nwhile data := c.recv(65536): n += len(data)\n"
        "c.sendall(b'%d' % n)"
    )
    wanted = {"do": "start", "name": "count", "argv": ["python3", "-c", server]}
    assert (await place.processes(checked(wanted)))["process"]["state"] == "running"
    assert place.running == 1
    with anyio.fail_after(DEADLINE_S):
        while not (await place.processes(checked({"do": "read", "name": "count"})))["output"][
            "text"
        ]:
            await anyio.sleep(0.02)
    with pytest.raises(NetworkError):
        await place.connect(9001)
    async with await place.connect(9000) as stream:
        await stream.send(b"x" * 300_000)
        await stream.send_eof()
        assert b"".join([piece async for piece in stream]) == b"300000"
    await wait_until(lambda: place.running == 0)
    with pytest.raises(ResourceNotFound):
        await place.processes(checked({"do": "stop", "name": "other"}))
    (node,) = members.found
    (inside,) = node.node._joined.values()
    await wait_until(lambda: inside.ports == {"s1": {}})


async def test_project_is_copied_into_a_session_on_its_node(
    members: LocalMembership, tmp_path: Path
) -> None:
    top = tmp_path / "project"
    top.mkdir()
    for number in range(30):
        (top / f"{number}.bin").write_bytes(os.urandom(100_000))
    tree: dict[str, Entry] = {}
    members.add()
    async with make_cluster(members) as wall:
        await joined(wall, 1)
        place = await hold(wall, "s1")
        with ProjectDirectory(top) as project:
            found, _ = project.look(everything=False)
            taken = await feed(CopySource("s1", 256, None, place), project.fed(found, tree))
        assert (taken.files, taken.size) == (30, 3_000_000)
        paths = list(tree)
        limits = Limits(30, 30, 256, 1 << 20)
        ending = await place.run("files", {"do": "digest", "paths": paths}, limits, NO_SINKS)
        assert ending.result == {"digests": [tree[path].digest for path in paths]}


@pytest.mark.needs("root")
async def test_disk_and_its_copies_stay_on_their_node_while_they_are_needed(
    members: LocalMembership, tmp_path: Path
) -> None:
    port = members.add()
    needed = {"snap_1"}
    session, other = f"sess_{secrets.token_hex(8)}", f"sess_{secrets.token_hex(8)}"
    async with make_cluster(members) as wall:
        wall.spare_copies(lambda: needed)
        await joined(wall, 1)
        place = await wall.hold(
            TrustDomain("uid:1", None, session), image="python", memory_mb=MEMORY_MB,
            disk_mb=64, on_lost=lambda: None,
        )  # fmt: skip
        await run_in(place, "open('f', 'w').write('first')")
        for copy in ("snap_1", "snap_2"):
            async with place.copy_disk(copy) as size:
                assert size > 0
        (link,) = wall._links.values()
        port.node.keep_copies(link.ticket, frozenset(), 0)  # sent before them, and late
        await run_in(place, "open('f', 'w').write('second')")
        disks = next((tmp_path / "nodes").glob("node-0/*/disks"))
        await wait_until(lambda: not (disks / "snap_2").exists())
        await members.remove(port)
        await wait_until(lambda: NodeState.GONE in states(wall).values())
        members.add()
        await joined(wall, 1)
        assert await run_in(place, "open('f').read()") == "second"
        await place.restore("snap_1")
        assert await run_in(place, "open('f').read()") == "first"
        record, home = place.stored()
        async with wall.fork("snap_1", other, home) as name:
            pass
        forked = record.model_copy(update={"id": other, "state": SessionStatus.STOPPED})
        fork = wall.resume(forked, replace(home, container=name, epoch=1), lambda: None)
        assert await run_in(fork, "open('f').read()") == "first"
        needed.clear()
        for one in (place, fork):
            one.end("the test is over")
            await one.until_gone()
        await wait_until(lambda: list(disks.iterdir()) == [])


async def test_engine_that_is_moved_to_another_cluster_says_which_node_its_sessions_wait_for(
    members: LocalMembership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.add()
    owner, lost = "e" * 32, list[str]()
    async with make_cluster(members, owner=owner) as wall:
        await joined(wall, 1)
        record, home = (await hold(wall, "sess_1")).stored()
    monkeypatch.setattr(cluster_module, "FIRST_JOIN_S", 0.1)
    others = LocalMembership(tmp_path / "others")
    others.add()
    async with make_cluster(others, owner=owner, epoch=2, lost_s=0.7) as second:
        again = second.resume(record, replace(home, epoch=2), lambda: lost.append("sess_1"))
        await joined(second, 1)
        await wait_until(lambda: home.node in states(second))
        (missing,) = [one for one in second.nodes() if one.name == home.node]
        assert missing.state is NodeState.GONE
        assert "has not joined this cluster" in str(missing.why)
        with pytest.raises(SandboxUnavailable) as refused:
            await run_in(again, "x")
        assert refused.value.may_retry
        await wait_until(lambda: lost == ["sess_1"])
        assert again.lost == f"its node {home.node} is lost"
    await others.found[0].node.close()


async def test_drained_node_takes_nothing_new_also_from_the_next_engine(
    members: LocalMembership,
) -> None:
    members.add(), members.add()
    owner = "b" * 32
    async with make_cluster(members, owner=owner) as wall:
        await joined(wall, 2)
        name = min(states(wall))
        assert (await wall.drain(name, is_drained=True)).state is NodeState.DRAINED
        endings = await asyncio.gather(*[run(wall, "1") for _ in range(6)])
        assert name not in {ending.node for ending in endings}
    async with make_cluster(members, owner=owner, epoch=2) as second:
        await joined(second, 1)
        assert states(second)[name] is NodeState.DRAINED
        await second.drain(name, is_drained=False)
        await joined(second, 2)  # once it has reported to this engine


async def test_nodes_of_one_name_are_drained_by_their_ids(members: LocalMembership) -> None:
    ports = [members.add(), members.add()]
    for port in ports:
        port.node._home.name = "twin"
    async with make_cluster(members) as wall:
        await wait_until(lambda: [one.state for one in wall.nodes()] == [NodeState.JOINED] * 2)
        with pytest.raises(InvalidParams, match=ports[0].node._home.id):
            await wall.drain("twin", is_drained=True)
        drained = await wall.drain(ports[1].node._home.id, is_drained=True)
        assert (drained.id, drained.state) == (ports[1].node._home.id, NodeState.DRAINED)
        assert sorted(node.state for node in wall.nodes()) == [NodeState.DRAINED, NodeState.JOINED]


async def test_node_that_was_drained_and_taken_away_is_forgotten_and_a_lost_one_is_not(
    members: LocalMembership,
) -> None:
    drained, lost = members.add(), members.add()
    async with make_cluster(members) as wall:
        await joined(wall, 2)
        await wall.drain(drained.node._home.name, is_drained=True)
        await members.remove(drained)
        await members.remove(lost)
        await wait_until(lambda: not wall._links)
        assert states(wall) == {lost.node._home.name: NodeState.GONE}


async def test_node_obeys_the_newest_engine_only(members: LocalMembership) -> None:
    port = members.add()
    owner = "c" * 32
    async with make_cluster(members, owner=owner, epoch=2) as newer:
        await joined(newer, 1)
        running = asyncio.ensure_future(run(newer, "import time; time.sleep(1); 5"))
        async with make_cluster(members, owner=owner, epoch=1) as older:
            await wait_until(lambda: bool(older._refused))
            assert "is not joined" in next(iter(older._refused.values()))[1]
        with pytest.raises(Fenced):
            await port.call("report", Ticket(owner, 1_000_001), 0)
        assert (await running).ended_by is EndedBy.OK


async def test_newer_engine_ends_the_runs_of_the_older(members: LocalMembership) -> None:
    members.add()
    owner = "d" * 32
    async with make_cluster(members, owner=owner) as older:
        await joined(older, 1)
        running = asyncio.ensure_future(run(older, "import time; time.sleep(15)"))
        await wait_until(lambda: any(link.placed.used for link in older._links.values()))
        await asyncio.sleep(0.3)
        async with make_cluster(members, owner=owner, epoch=2) as newer:
            await joined(newer, 1)
            with anyio.fail_after(120):
                assert (await running).ended_by is EndedBy.SANDBOX_LOST  # nobody cancelled it
            assert (await run(newer, "1")).ended_by is EndedBy.OK


async def test_engines_of_two_states_share_a_node_and_its_slots(members: LocalMembership) -> None:
    members.add(slots=2)
    async with make_cluster(members) as one, make_cluster(members) as other:
        await joined(one, 1)
        await joined(other, 1)
        running = [asyncio.ensure_future(run(one, "import time; time.sleep(2)")) for _ in "12"]
        await wait_until(lambda: any(link.placed.others == 2 for link in other._links.values()))
        assert next(iter(other._links.values())).placed.free == 0
        assert [(await task).ended_by for task in running] == [EndedBy.OK] * 2
        assert (await run(other, "1")).ended_by is EndedBy.OK


async def test_unfit_node_is_refused_by_name_while_it_is_there(members: LocalMembership) -> None:
    port = members.add()
    honest = await port.node.facts()

    async def lie() -> NodeFacts:
        return {**honest, "clock": time.time() - 3600}

    port.node.facts = lie  # type: ignore[method-assign]
    async with make_cluster(members) as wall:
        await wait_until(lambda: NodeState.REFUSED in states(wall).values())
        (record,) = wall.nodes()
        assert record.name == honest["name"]
        assert "clock differs from the engine's by -3" in (record.why or "")
        await members.remove(port)
        await wait_until(lambda: not wall.nodes())


async def test_node_that_was_upgraded_under_its_feet_says_which_version_it_runs(
    members: LocalMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process outlives an upgrade in place, and still has the old code."""
    port = members.add()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    assert (await port.node.facts())["version"] == VERSION


async def test_node_gets_no_more_calls_than_its_memory_holds(members: LocalMembership) -> None:
    members.add(slots=500)
    async with make_cluster(members) as wall:
        await joined(wall, 1)
        link = next(iter(wall._links.values()))
        assert link.report is not None
        link.report = replace(link.report, host=HostSize(1024, 2))
        wall._place(link)
        (node,) = wall.nodes()
        assert node.slots == 1024 // 128
        assert node.why == "Its 1024 MB are enough for 8 of 500 slots."


async def test_node_whose_docker_is_away_is_unready_and_gets_no_call(
    tmp_path: Path, members: LocalMembership, wall: ClusterWall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    members.add()
    await wait_until(lambda: any("Docker" in (node.why or "") for node in wall.nodes()))
    (away,) = (node for node in wall.nodes() if node.state is NodeState.UNREADY)
    endings = await asyncio.gather(*[run(wall, "1") for _ in range(4)])
    assert away.name not in {ending.node for ending in endings}
    assert {ending.ended_by for ending in endings} == {EndedBy.OK}
    monkeypatch.undo()


async def test_attack_image_built_again_after_placing_runs_nothing(
    wall: ClusterWall,
) -> None:
    """An approval is bound to the image's digest. Twin: the same call with the right one."""
    async with wall.lease(ME, fresh=False, memory_mb=MEMORY_MB) as lease:
        other = replace(lease, order=replace(lease.order, digest="sha256:another"))
        with pytest.raises(SandboxUnavailable, match="has changed"):
            await other.run("python", program("1"), LIMITS)
        assert (await lease.run("python", program("1"), LIMITS)).ended_by is EndedBy.OK


async def test_large_output_stops_the_program_while_the_engine_does_not_read(
    members: LocalMembership,
) -> None:
    port = members.add()
    waiting: list[int] = []
    received = 0

    def output(stream: str, text: str) -> None:
        nonlocal received
        received += len(text)
        for run in next(iter(port.node._joined.values())).runs.values():
            waiting.append(run.events._bytes)
        time.sleep(0.001)  # a slow engine

    async with make_cluster(members) as wall:
        await joined(wall, 1)
        ending = await run(wall, "print('x' * 20_000_000)", RunSinks(output=output))
    assert ending.ended_by is EndedBy.OK
    assert received >= 20_000_000
    assert max(waiting) <= 6 * MB


async def test_packages_are_added_on_the_node_of_their_call_or_session(
    members: LocalMembership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "index", "tool")
    for name, value in only_from(tmp_path / "index").items():
        monkeypatch.setenv(name, value)
    own = partial(new_layers, PackageSettings(allow=("tool",)))
    members.add()
    async with make_cluster(members, image_maker=pickle.loads(pickle.dumps(own))) as wall:
        await wall.until_host_is_known()
        image = await wall.with_additions("python", ["tool"], "uid:1")
        assert (await wall.facts_of(image))["packages"] == ["tool==1.0"]
        async with wall.lease(ME, fresh=False, memory_mb=MEMORY_MB, image=image) as lease:
            code = program("import tool\ntool.VERSION")
            ending = await lease.run("python", code, LIMITS, NO_SINKS)
        assert (ending.result or {})["value"] == "1.0"
        with pytest.raises(InvalidParams, match="does not allow other"):
            await wall.with_additions("python", ["other"], "uid:1")
        place = await wall.hold(
            replace(ME, session_id="sess_1"), image="python", memory_mb=MEMORY_MB,
            additions=["tool"], on_lost=lambda: None,
        )  # fmt: skip
        assert pins_of(place.lock) == ("tool==1.0",)
        assert await run_in(place, "import tool\ntool.VERSION") == "1.0"


async def test_nothing_is_added_on_a_node_of_an_engine_that_cannot_add(
    members: LocalMembership, port: LocalPort
) -> None:
    async with make_cluster(members) as wall:
        await wall.until_host_is_known()
        with pytest.raises(InvalidParams, match="Nothing can be added to images here"):
            await wall.with_additions("python", ["tool"], "uid:1")


async def test_image_that_a_node_lacks_comes_from_another(
    members: LocalMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.add(), members.add()
    loaded: list[int] = []
    lacking = members.found[1].node

    async def load(ticket: Ticket, transfer: str) -> None:
        loaded.append(lacking._transfer(ticket, transfer).tell())

    async def find(ticket: Ticket, image: str) -> str:
        raise SandboxUnavailable("There is no such image.", retryable=False)

    told: list[tuple[str, JsonObject]] = []
    async with make_cluster(members, told=told) as wall:
        await joined(wall, 2)
        lacking_wall = next(iter(lacking._joined.values())).wall
        monkeypatch.setattr(lacking, "load_image", load)
        monkeypatch.setattr(lacking, "find_image", find)
        lacking_wall._supply.images = {}  # as if Docker had none
        monkeypatch.setattr(lacking_wall._supply, "_by_language", {})
        next(iter(lacking._joined.values())).on_change()
        await wait_until(lambda: bool(loaded))
        await wait_until(lambda: not wall._syncing)
        await asyncio.sleep(3)
        copied = [values["image"] for event, values in told if event == "node.image_copied"]
        assert len(copied) == len(set(copied))  # a copy that does not help is not repeated
        held = [file for node in members.found for file in transfers(node)]
    assert loaded[0] > 10 * MB
    assert held == []


async def test_image_that_a_node_has_not_looked_for_is_not_copied_to_it(
    members: LocalMembership,
) -> None:
    told: list[tuple[str, JsonObject]] = []
    first = members.add()
    async with make_cluster(members, told=told) as wall:
        await joined(wall, 1)
        await wall.ask(first.node._home.id, "find_image", "python")  # which no language uses
        await wait_until(lambda: "python" in wall._images())
        members.add()
        await joined(wall, 2)
        await wait_until(lambda: all("python" in one.placed.images for one in wall._links.values()))
        assert not [event for event, _ in told if event == "node.image_copied"]


async def test_node_with_an_older_image_is_listed_with_that_reason(
    members: LocalMembership,
) -> None:
    members.add(), members.add()
    async with make_cluster(members) as wall:
        await joined(wall, 2)
        link = next(iter(wall._links.values()))
        assert link.report is not None
        older = replace(link.report.images["python"], id="sha256:another", created=0.0)
        link.report = replace(link.report, images={**link.report.images, "python": older})
        wall._newest = None
        wall._place(link)
        (why,) = [node.why for node in wall.nodes() if node.why is not None]
        assert why == "Outdated images: python."


def transfers(port: LocalPort) -> list[Any]:
    return [file for one in port.node._joined.values() for file in one.transfers.values()]


async def test_transfers_of_an_engine_that_is_gone_leave_no_file(members: LocalMembership) -> None:
    port = members.add()
    async with make_cluster(members) as wall:
        await joined(wall, 1)
        link = next(iter(wall._links.values()))
        await link.port.call("write_image", link.ticket, "t", b"x")
        (file,) = transfers(port)
    assert file.closed


async def test_run_cancelled_while_its_node_receives_it_ends_at_once(
    wall: ClusterWall, port: LocalPort
) -> None:
    link = next(iter(wall._links.values()))
    order = RunOrder("run", "python", program("1"), LIMITS, ME, kind=Kind("python", MEMORY_MB))
    running = asyncio.ensure_future(port.node.run(link.ticket, order))
    asyncio.get_running_loop().call_soon(port.node.cancel, link.ticket, "run")
    with anyio.fail_after(120):
        ((name, ending),) = await running
    assert (name, ending.ended_by) == ("ending", EndedBy.CANCELLED)
    assert not next(iter(port.node._joined.values())).runs


async def test_node_gives_all_its_slots_to_one_caller_if_the_engine_placed_that_many_there(
    members: LocalMembership,
) -> None:
    port = members.add(slots=4)
    async with make_cluster(members) as wall:
        await joined(wall, 1)
        link = next(iter(wall._links.values()))
        code = program("import time; time.sleep(60)")
        kind, digest = Kind("python", MEMORY_MB), wall._images()["python"].id
        orders = [
            RunOrder(str(number), "python", code, LIMITS, ME, kind=kind, digest=digest)
            for number in range(4)
        ]
        runs = [asyncio.ensure_future(port.node.run(link.ticket, order)) for order in orders]
        mine = port.node._joined[link.ticket.owner]
        await wait_until(lambda: mine.wall.counts["busy"] == 4)
        for order in orders:
            port.node.cancel(link.ticket, order.id)
        await asyncio.gather(*runs)


async def test_events_that_nobody_fetches_are_forgotten(
    members: LocalMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "FORGET_S", 0.5)
    port = members.add()
    async with make_cluster(members) as wall, make_cluster(members) as other:
        await joined(wall, 1)
        await joined(other, 1)
        link = next(iter(wall._links.values()))
        order = RunOrder("run", "python", program("1"), LIMITS, ME, kind=Kind("python", MEMORY_MB))
        task = asyncio.ensure_future(port.node.run(link.ticket, order))
        await asyncio.sleep(0)
        task.cancel()  # its answer is lost
        mine = port.node._joined[link.ticket.owner]
        await wait_until(lambda: not mine.running)
        await wait_until(lambda: not mine.runs)
        await wait_until(lambda: not any(one.placed.others for one in other._links.values()))
        with pytest.raises(SandboxUnavailable):
            await port.node.more(link.ticket, "run")


async def test_session_that_is_resumed_after_its_node_has_joined_continues(
    members: LocalMembership,
) -> None:
    members.add()
    owner = "e" * 32
    async with make_cluster(members, owner=owner) as wall:
        await joined(wall, 1)
        place = await hold(wall, "sess_1")
        await run_in(place, "x = 41")
        record, home = place.stored()
    second = make_cluster(members, owner=owner, epoch=2)
    second.expect(record, replace(home, epoch=1))
    async with second:
        await joined(second, 1)
        await asyncio.sleep(3)  # the node has removed what it did not have to expect
        again = second.resume(record, replace(home, epoch=2), lambda: None)
        with anyio.fail_after(DEADLINE_S):
            while not again.is_known.is_set():
                await asyncio.sleep(0.05)
        assert await run_in(again, "x") == 41
        again.end("the test is over")
        await again.until_gone()


async def test_session_that_nobody_waits_for_leaves_no_container(
    wall: ClusterWall,
    port: LocalPort,
) -> None:
    mine = next(iter(port.node._joined.values()))
    began, may_go_on, is_over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    holds = mine.wall.hold

    async def slow(*arguments: Any, **options: Any) -> Any:
        began.set()
        await may_go_on.wait()
        try:
            return await holds(*arguments, **options)
        finally:
            is_over.set()

    mine.wall.hold = slow  # type: ignore[method-assign]
    making = asyncio.ensure_future(hold(wall, "sess_1"))
    await began.wait()
    making.cancel()
    await asyncio.wait([making])
    may_go_on.set()
    await is_over.wait()
    await wait_until(lambda: not (mine.wall._held or mine.held or mine.holding))
    assert not next(iter(wall._links.values())).promised_mb


async def test_session_that_is_restored_on_its_node_is_not_forgotten_with_its_old_container(
    wall: ClusterWall,
    port: LocalPort,
) -> None:
    first = await hold(wall, "sess_1")
    leaving = asyncio.ensure_future(first.until_gone())
    await asyncio.sleep(0.1)
    second = await hold(wall, "sess_1")
    mine = next(iter(port.node._joined.values()))
    next(one for one in mine.wall._held.values() if one.name == first.name).end("over")
    await leaving
    assert await run_in(second, "1") == 1
    second.end("the test is over")
    await second.until_gone()


async def test_session_that_ends_while_its_node_joins_leaves_no_container(
    members: LocalMembership,
    wall: ClusterWall,
    port: LocalPort,
) -> None:
    place = await hold(wall, "sess_1")
    await members.remove(port)
    await wait_until(lambda: not wall._links)
    again = members.add()
    joins = again.node.join

    async def slow(ticket: Ticket, terms: Terms) -> None:
        await joins(ticket, terms)
        place.end("its owner ended it")

    again.node.join = slow  # type: ignore[method-assign]
    await joined(wall, 1)
    mine = next(iter(again.node._joined.values()))
    await wait_until(lambda: not (mine.wall._held or mine.held))


async def test_node_that_is_lost_again_gets_all_its_time_again(members: LocalMembership) -> None:
    port = members.add()
    lost: list[str] = []
    told: list[tuple[str, JsonObject]] = []
    async with make_cluster(members, lost_s=4, told=told) as wall:
        await joined(wall, 1)
        place = await hold(wall, "sess_1", lost)
        await members.remove(port)
        began = time.monotonic()
        await asyncio.sleep(1.5)
        port = members.add()
        await joined(wall, 1)
        await members.remove(port)
        await wait_until(lambda: not wall._links)
        await asyncio.sleep(began + 4.5 - time.monotonic())
        assert (place.lost, lost) == (None, [])
        await wait_until(lambda: lost == ["sess_1"])
        assert place.lost == f"its node {port.node._home.name} is lost"
        assert any(event == "node.lost" for event, _ in told)


async def test_node_that_fails_in_any_way_does_not_end_the_engine(
    members: LocalMembership,
) -> None:
    members.add()
    failing = members.add()

    async def fail(*arguments: object) -> Any:
        raise ValueError("no words for callers")

    failing.node.facts = fail  # type: ignore[method-assign]
    async with make_cluster(members) as wall:
        await joined(wall, 1)
        await wait_until(lambda: NodeState.REFUSED in states(wall).values())
        assert (await run(wall, "1")).ended_by is EndedBy.OK
        assert "no words" not in str(wall.nodes())
        await members.remove(members.found[0])
        await wait_until(lambda: not wall._links)
        assert "ValueError" in str(wall.nodes())
        assert "ValueError" not in wall.status.remedy
        assert "nodes were refused" in wall.status.remedy


async def test_node_that_falls_silent_while_it_joins_is_given_up_and_may_come_back(
    members: LocalMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = members.add()
    async with make_cluster(members) as wall:
        await joined(wall, 1)
        place = await hold(wall, "sess_1")
        await run_in(place, "x = 41")
        await members.remove(port)
        await wait_until(lambda: not wall._links)
        monkeypatch.setattr(cluster_module, "SILENT_S", 1.0)
        again = members.add()
        resumes = again.node.resume

        async def silent(*arguments: Any) -> Any:
            await asyncio.Event().wait()

        again.node.resume = silent  # type: ignore[method-assign]
        await wait_until(lambda: NodeState.REFUSED in states(wall).values())
        assert not wall._links
        again.node.resume = resumes  # type: ignore[method-assign]
        await joined(wall, 1)
        assert await run_in(place, "x") == 41
        place.end("the test is over")
        await place.until_gone()


async def test_run_on_a_silent_node_ends_when_the_node_joins_in_another_life(
    members: LocalMembership, wall: ClusterWall, port: LocalPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "SILENT_S", 600.0)  # its silence is not noticed
    running = asyncio.ensure_future(run(wall, "import time; time.sleep(15)"))
    await wait_until(lambda: any(link.placed.used for link in wall._links.values()))
    port.is_silent = True
    members.found.append(LocalPort(port.node))
    with anyio.fail_after(120):
        assert (await running).ended_by is EndedBy.SANDBOX_LOST
    port.lose()
    members.found.remove(port)


async def test_engine_stops_while_a_node_is_silent_and_another_has_left(
    members: LocalMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "LEAVE_S", 2.0)
    port, other = members.add(), members.add()
    async with make_cluster(members) as wall:
        await joined(wall, 2)
        port.is_silent = True
        began = time.monotonic()
    assert time.monotonic() - began < 60
    assert not other.node._joined  # it has not joined again
    port.lose()


@pytest.mark.parametrize("tls", [True, False], ids=["https", "http"])
async def test_node_that_connections_leave_from_sees_no_secret(
    members: LocalMembership, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """It would see what passes by plain HTTP, so no secret does. Twin: HTTPS, whose answer arrives
    in order, although what the engine tells the node does not.
    """
    members.add()
    monkeypatch.setenv("API_KEY", "s3cret-of-the-api")
    seen: list[bytes] = []
    use = Node.use_dialled

    async def watch(node: Node, *arguments: Any) -> Any:
        if "send" in arguments:
            seen.append(arguments[-1])
        return await use(node, *arguments)

    monkeypatch.setattr(Node, "use_dialled", watch)
    authority = Authority(None)
    gateway = Gateway(
        GatewaySettings(hosts=("localhost",), allowed_hosts=("localhost",), leave="node"),
        lambda facts: Decision(Verdict.ALLOW, "default: all"), None,
        SecretBindings({"api": SecretSettings(env="API_KEY", hosts=("localhost",), inside="KEY")}),
        forget, quiet_logger(), ssl.create_default_context(cadata=authority.certificate),
    )  # fmt: skip
    with running_upstream(authority.context_for("localhost") if tls else None) as service:
        service.script("/", Reply(body=b"x" * 300_000))
        url = f"{'https' if tls else 'http'}://localhost:{service.port}/"
        async with (
            make_cluster(members) as wall,
            gateway.door(
                ["localhost"], nobody_says_yes, Redactor(), tool="run_python",
                call_id="one", principal_id="uid:1", agent_id=None, session_id=None,
            ) as (door, stream),
        ):  # fmt: skip
            await joined(wall, 1)
            code = ASK.format(url=url, key=door.placeholders.environment["KEY"])
            ending = await run(wall, code, RunSinks(streams=(stream,)))
        assert (ending.result or {})["value"] == ([200, 300_000] if tls else 403), ending
        headers = [one.headers["authorization"] for one in service.requests]
    assert headers == (["Bearer s3cret-of-the-api"] if tls else [])
    assert bool(seen) is tls
    assert b"s3cret" not in b"".join(seen)


ASK = """
import ssl, urllib.error, urllib.request
proxy = urllib.request.ProxyHandler({{one: 'http://127.0.0.1:3128' for one in ('http', 'https')}})
trust = ssl.create_default_context(cafile='/run/fumehood/trust.pem')
opener = urllib.request.build_opener(proxy, urllib.request.HTTPSHandler(context=trust))
asked = urllib.request.Request('{url}', headers={{'authorization': 'Bearer {key}'}})
try:
    with opener.open(asked) as answer: status = answer.status, len(answer.read())
except urllib.error.HTTPError as error: status = error.code
status
"""


async def forget(kind: str, fields: JsonObject) -> None:
    """Nothing is recorded here."""


async def nobody_says_yes(*_: object) -> EngineError | None:
    return PermissionDenied("Nobody says yes here.")
