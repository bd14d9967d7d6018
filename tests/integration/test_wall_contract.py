"""The contract of every wall: one suite, run against each wall including the fake."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import pytest

from fumehood.core.errors import ENDING_ERRORS, EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Held, Limit, Limits, least_limits
from fumehood.direct.runtime import new_direct
from fumehood.gvisor.runtime import new_gvisor
from fumehood.interpreter.wall import InterpreterWall
from fumehood.sandbox.container.wall import ContainerWall
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.process.wall import JailWall
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity, LanguageImages
from fumehood.sandbox.wall import RunEnding, Wall
from fumehood.testing import SMALL_LIMITS, FakeWall, SeenRun
from support.cloud import example_module, running_service
from support.direct import ready_direct_image
from support.docker_images import DockerWith
from support.nodes import cluster_wall

pytestmark = pytest.mark.anyio

ME = TrustDomain("uid:1")
LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=64, output_bytes=65536)
TESTS = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Case:
    """A wall with the programs of this suite in its own language."""

    wall: Wall
    program: str
    works: JsonObject
    gives: JsonObject
    breaks_a_rule: JsonObject
    takes_long: JsonObject
    isolation: str
    isolation_if_fresh: str = "call"
    memory_mb: int = 64
    name: str = "interpreter"
    """The name by which the engine knows what the wall must enforce."""


def expression(text: str) -> JsonObject:
    return {"expression": text}


def function(code: str) -> JsonObject:
    return {
        "module": "support.jailed_tools", "name": "run_code", "import_path": TESTS,
        "arguments": {"code": code},
    }  # fmt: skip


EXPRESSIONS = {
    "program": "calculator",
    "works": expression("2 + 2"),
    "gives": {"value": 4, "text": "4"},
    "breaks_a_rule": expression("open(1)"),
    "takes_long": expression("pow(7, 10**4200, 10**4200 + 7)"),
    "isolation": "resident",
}
PROGRAMS = {
    "program": "python",
    "works": {"code": "2 + 2", "stdin": None, "files": []},
    "gives": {"value": 4, "has_value": True, "value_repr": "4"},
    # A system call by the numbers of another kind of program: no library ever does that.
    "breaks_a_rule": {
        "code": "import ctypes; ctypes.CDLL(None).syscall(0x40000000)", "stdin": None, "files": []
    },
    "takes_long": {"code": "while True: pass", "stdin": None, "files": []},
    "isolation": "call",
    "isolation_if_fresh": "container_per_call",
    "memory_mb": 128,
    "name": "container",
}  # fmt: skip
FUNCTIONS = {
    "program": "function",
    "works": function("out = 2 + 2"),
    "gives": {"data": 4, "tokens_used": 0, "cost": "0"},
    "breaks_a_rule": function("import os; os.fork()"),
    "takes_long": function("while True: pass"),
    "isolation": "call",
    "name": "jail",
}


def pretend(run: SeenRun) -> RunEnding:
    """Simulates the interpreter for the few programs of this suite."""
    isolation = "call" if run.fresh else "resident"
    if run.arguments["expression"] == "2 + 2":
        return RunEnding(EndedBy.OK, isolation, cpu_ms=0.1, result={"value": 4, "text": "4"})
    if run.limits.wall_s < 1:
        return RunEnding(EndedBy.WALL_TIME, isolation, cpu_ms=run.limits.wall_s * 1e3)
    return RunEnding(EndedBy.POLICY, isolation, claimed_kind="policy", claimed_message="no")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(
    scope="module",
    params=[
        "interpreter",
        pytest.param("jail", marks=pytest.mark.needs("landlock")),
        pytest.param("runc", marks=pytest.mark.needs("docker")),
        pytest.param("runsc", marks=pytest.mark.needs("docker", "runsc")),
        pytest.param("direct", marks=pytest.mark.needs("direct")),
        pytest.param("gvisor", marks=pytest.mark.needs("direct", "runsc")),
        pytest.param("nodes", marks=pytest.mark.needs("docker")),
        "fake",
        "documented",
    ],
)
async def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Case]:
    if request.param == "fake":
        yield Case(FakeWall(answer=pretend), **EXPRESSIONS)
    elif request.param == "documented":
        of_cloud = {**EXPRESSIONS, "isolation": "call", "name": "cloud"}
        async with (
            InterpreterWall() as behind,
            running_service(behind) as url,
            example_module().CloudWall(url, SMALL_LIMITS) as cloud,
        ):
            yield Case(cloud, **of_cloud)
    elif request.param == "jail":
        async with JailWall([TESTS]) as jail:
            yield Case(jail, **FUNCTIONS)
    elif request.param in ("runc", "runsc"):
        async with container_wall(request.getfixturevalue("python_image"), request.param) as wall:
            yield Case(wall, **PROGRAMS)
    elif request.param in ("direct", "gvisor"):
        ready_direct_image("python")
        async with direct_wall(request.param) as wall:
            yield Case(wall, **PROGRAMS)
    elif request.param == "nodes":
        request.getfixturevalue("python_image")
        async with cluster_wall(tmp_path_factory.mktemp("nodes")) as nodes:
            yield Case(nodes, **PROGRAMS)
    else:
        async with InterpreterWall() as interpreter:
            yield Case(interpreter, **EXPRESSIONS)


def container_wall(image: Image, runtime: str) -> ContainerWall:
    identity = EngineIdentity(secrets.token_hex(16), secrets.token_hex(16))
    settings = ContainerSettings(pool_min=1, pool_max=3, memory_mb=128, runtime=runtime)
    return ContainerWall(settings, DockerWith(image), identity)


def direct_wall(engine: str) -> ContainerWall:
    """The wall of one of the engines that need no Docker."""
    identity = EngineIdentity(secrets.token_hex(16), secrets.token_hex(16))
    images = LanguageImages(python="python", shell="python", javascript="python")
    is_gvisor = engine == "gvisor"
    settings = ContainerSettings(
        pool_min=1, pool_max=3, memory_mb=128, images=images,
        runtime="runsc" if is_gvisor else None,
    )  # fmt: skip
    return ContainerWall(settings, (new_gvisor if is_gvisor else new_direct)(Path()), identity)


async def run(
    case: Case, arguments: JsonObject, limits: Limits = LIMITS, *, fresh: bool = False
) -> RunEnding:
    limits = replace(limits, memory_mb=case.memory_mb)
    async with case.wall.lease(ME, fresh=fresh, memory_mb=case.memory_mb) as lease:
        assert lease.queue_ms >= 0
        return await lease.run(case.program, arguments, limits)


@pytest.mark.row("S1", "S4")
async def test_wall_enforces_at_least_its_required_limits(case: Case) -> None:
    status = case.wall.status
    assert least_limits(case.name) <= status.required <= status.enforced <= frozenset(Limit)
    assert status.lacking(case.name) == frozenset()
    assert case.wall.limits.default_wall_s <= case.wall.limits.max_wall_s


async def test_program_that_succeeds_has_a_result_and_no_error(case: Case) -> None:
    ending = await run(case, case.works)
    assert ending.ended_by is EndedBy.OK
    assert ending.result == case.gives
    assert ending.claimed_kind is None
    assert ending.cpu_ms is not None


async def test_program_that_breaks_a_rule_has_no_result(case: Case) -> None:
    ending = await run(case, case.breaks_a_rule)
    assert ending.ended_by is EndedBy.POLICY
    assert ending.result is None
    assert ending.claimed_message or ending.signal


@pytest.mark.row("P8")
async def test_program_over_its_time_ends_as_wall_time_and_the_next_succeeds(case: Case) -> None:
    limits = Limits(wall_s=0.1, cpu_s=0.1, memory_mb=64, output_bytes=65536)
    ending = await run(case, case.takes_long, limits)
    assert ending.ended_by is EndedBy.WALL_TIME
    assert ENDING_ERRORS[ending.ended_by] is not None
    assert (await run(case, case.works)).ended_by is EndedBy.OK


@pytest.mark.row("B13")
async def test_container_refuses_a_program_that_needs_a_stronger_one(case: Case) -> None:
    """And says how it holds each limit. Other walls have no grade."""
    ending = await run(case, case.works)
    if case.name != "container":
        assert (ending.grade, ending.held) == (None, {})
        return
    assert ending.grade is not None
    assert ending.held == dict.fromkeys(Limit, Held.ENFORCED)
    for grade in Grade:
        limits = replace(LIMITS, least_grade=grade)
        if ending.grade.is_at_least(grade):
            assert (await run(case, case.works, limits)).ended_by is EndedBy.OK
            continue
        with pytest.raises(SandboxUnavailable) as caught:
            await run(case, case.works, limits)
        assert caught.value.details is not None
        assert caught.value.details["least_grade"] == grade


@pytest.mark.row("S2")
async def test_fresh_lease_reports_its_stronger_isolation(case: Case) -> None:
    assert (await run(case, case.works)).isolation == case.isolation
    assert (await run(case, case.works, fresh=True)).isolation == case.isolation_if_fresh


async def test_concurrent_leases_are_all_served(case: Case) -> None:
    endings = []

    async def one() -> None:
        endings.append(await run(case, case.works))

    async with anyio.create_task_group() as group:
        for _ in range(12):
            group.start_soon(one)
    assert len(endings) == 12
    assert all(ending.ended_by is EndedBy.OK for ending in endings)


# -- controls ---------------------------------------------------------------------------------


def lies_about_time(run: SeenRun) -> RunEnding:
    return RunEnding(EndedBy.OK, "call", cpu_ms=1, result={"value": 4, "text": "4"})


@pytest.mark.parametrize(
    ("lying", "test"),
    [
        (FakeWall(required=frozenset()), test_wall_enforces_at_least_its_required_limits),
        (FakeWall(enforced=frozenset()), test_wall_enforces_at_least_its_required_limits),
        (FakeWall(lies_about_time), test_program_that_breaks_a_rule_has_no_result),
        (
            FakeWall(lies_about_time),
            test_program_over_its_time_ends_as_wall_time_and_the_next_succeeds,
        ),
        (FakeWall(lies_about_time), test_fresh_lease_reports_its_stronger_isolation),
    ],
    ids=["requires", "enforces", "rules", "time", "isolation"],
)
async def test_wall_that_lies_fails_the_contract(
    lying: FakeWall, test: Callable[[Case], Awaitable[None]]
) -> None:
    with pytest.raises(AssertionError):
        await test(Case(lying, **EXPRESSIONS))
    await test(Case(FakeWall(answer=pretend), **EXPRESSIONS))  # the same test, and an honest wall
