"""The contract of every wall that holds containers for sessions: one suite, including the fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import anyio
import pytest

from fumehood.cluster.wall import ClusterWall
from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Grade, Limits
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.wall import NO_SINKS, ImageMissing, RunEnding, SessionContainer, SessionWall
from fumehood.testing import CONTAINER_LIMITS, FakeWall, SeenRun
from integration.test_wall_contract import container_wall, direct_wall
from support.direct import ready_direct_image
from support.nodes import cluster_wall

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6", "S5")]

SLOW_S = 90.0
MEMORY_MB = 128
LIMITS = Limits(wall_s=20, cpu_s=20, memory_mb=MEMORY_MB, output_bytes=MB)


@dataclass
class Case:
    wall: SessionWall
    places: list[SessionContainer] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    async def hold(self, name: str = "one") -> SessionContainer:
        with anyio.fail_after(SLOW_S):
            place = await self.wall.hold(
                TrustDomain("uid:1", None, name),
                image="python",
                memory_mb=MEMORY_MB,
                on_lost=lambda: self.lost.append(name),
            )
        self.places.append(place)
        return place


async def run(place: SessionContainer, code: str, limits: Limits = LIMITS) -> RunEnding:
    arguments: JsonObject = {"code": code, "stdin": None, "files": []}
    with anyio.fail_after(SLOW_S):
        await place.until_free()
        return await place.run("python", arguments, limits, NO_SINKS)


class Pretended:
    """Simulates a container for the few programs of this suite."""

    def __init__(self) -> None:
        self.files: dict[str | None, set[str]] = {}

    def __call__(self, seen: SeenRun) -> RunEnding:
        code, files = seen.arguments["code"], self.files.setdefault(seen.domain.session_id, set())
        if code == LEAVES:
            files.add("left")
        if code == FOREVER:
            return RunEnding(EndedBy.WALL_TIME, "session")
        result: JsonObject = {"value": len(files), "has_value": True, "value_repr": ""}
        return RunEnding(EndedBy.OK, "session", result=result)


CANCELLED_RUNS = 20
"""Number of cancelled runs on each wall; the bug once hit one run in twelve."""

LEAVES = "open('left', 'w').close()\nimport os\nlen(os.listdir('.'))"
COUNTS = "import os\nlen(os.listdir('.'))"
FOREVER = "while True: pass"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(
    scope="module",
    params=[
        "fake",
        pytest.param("runc", marks=pytest.mark.needs("docker")),
        pytest.param("runsc", marks=pytest.mark.needs("docker", "runsc")),
        pytest.param("direct", marks=pytest.mark.needs("direct")),
        pytest.param("gvisor", marks=pytest.mark.needs("direct", "runsc")),
        pytest.param("nodes", marks=pytest.mark.needs("docker")),
    ],
)
async def containers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SessionWall | None]:
    """One real wall for all tests, or None for a fake one for each."""
    if request.param == "fake":
        yield None
        return
    if request.param in ("direct", "gvisor"):
        ready_direct_image("python")
        async with direct_wall(request.param) as made:
            yield made
        return
    image: Image = request.getfixturevalue("python_image")
    if request.param == "nodes":
        async with cluster_wall(tmp_path_factory.mktemp("nodes")) as nodes:
            yield nodes
        return
    async with container_wall(image, request.param) as made:
        yield made


@pytest.fixture
async def case(containers: SessionWall | None) -> AsyncIterator[Case]:
    """A wall, whose places are ended after each test."""
    made = Case(containers or FakeWall(answer=Pretended(), limits=CONTAINER_LIMITS))
    yield made
    for place in made.places:
        place.end("the test is over")
        with anyio.fail_after(SLOW_S):
            await place.until_gone()


def value(ending: RunEnding) -> object:
    assert ending.ended_by is EndedBy.OK, ending
    return (ending.result or {})["value"]


@pytest.mark.row("B13")
async def test_container_says_its_grade_and_refuses_a_program_that_needs_a_stronger_one(
    case: Case,
) -> None:
    place = await case.hold()
    assert value(await run(place, COUNTS)) == 0
    assert place.grade is not None
    for grade in Grade:
        limits = replace(LIMITS, least_grade=grade)
        if place.grade.is_at_least(grade):
            assert value(await run(place, COUNTS, limits)) == 0
            continue
        with pytest.raises(SandboxUnavailable) as caught:
            await run(place, LEAVES, limits)
        assert caught.value.details is not None
        assert caught.value.details["grade"] == place.grade
    assert value(await run(place, COUNTS)) == 0  # nothing ran


async def test_file_left_by_a_run_is_found_by_the_next_run(case: Case) -> None:
    place = await case.hold()
    assert value(await run(place, COUNTS)) == 0
    first = await run(place, LEAVES)
    assert (value(first), first.isolation) == (1, "session")
    assert value(await run(place, COUNTS)) == 1
    assert (place.lost, case.lost) == (None, [])


async def test_held_places_share_no_files(case: Case) -> None:
    one, other = await case.hold("one"), await case.hold("other")
    await run(one, LEAVES)
    assert value(await run(other, COUNTS)) == 0


async def test_timed_out_run_leaves_the_place_usable(case: Case) -> None:
    place = await case.hold()
    await run(place, LEAVES)
    late = await run(place, FOREVER, replace(LIMITS, wall_s=0.3))
    assert late.ended_by is EndedBy.WALL_TIME
    assert value(await run(place, COUNTS)) == 1


async def test_run_cancelled_as_it_begins_never_replaces_the_next_run(
    case: Case,
) -> None:
    """Its order may be in flight to a process that is killed before it reads it."""
    place = await case.hold()
    await run(place, LEAVES)
    for _ in range(CANCELLED_RUNS):
        running = asyncio.ensure_future(run(place, FOREVER))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert value(await run(place, COUNTS, replace(LIMITS, wall_s=5))) == 1


async def test_ended_place_reports_its_loss_once_and_refuses_runs(case: Case) -> None:
    place = await case.hold()
    assert place.languages == ("python", "shell")
    place.end("its owner ended it")
    place.end("again")
    assert place.lost is not None
    with anyio.fail_after(SLOW_S):
        await place.until_free()
        await place.until_gone()
    assert case.lost == ["one"]
    assert (await run(place, COUNTS)).ended_by is EndedBy.SANDBOX_LOST


async def test_missing_image_is_sandbox_unavailable(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(case.wall, FakeWall | ClusterWall):
        monkeypatch.setattr(case.wall._runtime, "find_image", _finds_nothing)  # type: ignore[attr-defined]
    with pytest.raises(SandboxUnavailable), anyio.fail_after(SLOW_S):
        await case.wall.hold(
            TrustDomain("uid:1"), image="nothing", memory_mb=MEMORY_MB, on_lost=lambda: None
        )
    assert case.lost == []


async def _finds_nothing(name: str) -> Image:
    raise ImageMissing.of(name, "is missing", "Build it.")
