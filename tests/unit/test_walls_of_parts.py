"""Walls of parts: what they may replace, what they must require, and how long they run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest

from fumehood import Config, ConfigError, Engine, engine_parts
from fumehood.core.errors import SandboxUnavailable
from fumehood.core.limits import PROCESS_WALL_LIMITS, Limit
from fumehood.core.part import Part, PartError
from fumehood.engine_part import EnginePart
from fumehood.interpreter.wall import InterpreterWall
from fumehood.sandbox.wall import Wall
from fumehood.sandbox.walls import OwnWalls
from fumehood.testing import FakeWall
from support.answers import error_of

pytestmark = pytest.mark.anyio

HERE = "test_walls_of_parts"
PROGRAM = {"code": "1"}


class RunningWall(FakeWall):
    """Notes when it starts and ends."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.noted = list[str]()

    async def __aenter__(self) -> RunningWall:
        self.noted.append("starts")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.noted.append("ends")


class Giving(EnginePart):
    given: ClassVar[dict[str, Any]] = {}
    own: ClassVar[list[OwnWalls]] = []

    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        self.own.append(own)
        return self.given


class GivingAlso(Giving):
    pass


@pytest.fixture(autouse=True)
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    names = ("Giving", "GivingAlso")
    parts = tuple(Part(name=name, in_engine=f"{HERE}:{name}") for name in names)
    monkeypatch.setattr(engine_parts, "parts", lambda: parts)
    monkeypatch.setattr(Giving, "given", {})
    monkeypatch.setattr(GivingAlso, "given", {})
    monkeypatch.setattr(Giving, "own", [])


def engine_in(home: Path, **walls: Any) -> Engine:
    return Engine(config=Config(home=home), interpreter=FakeWall(), **walls)


async def test_containers_of_a_part_serve_programs_while_the_engine_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = RunningWall()
    monkeypatch.setattr(Giving, "given", {"container": wall})
    async with engine_in(home) as engine:
        assert wall.noted == ["starts"]
        assert (await engine.call("run_python", PROGRAM)).success
        assert engine.walls["container"]["ready"] is True
    assert len(wall.runs) == 1
    assert wall.noted == ["starts", "ends"]
    (own, _) = Giving.own
    assert own.container is not None  # which the part may wrap
    assert own.container.status.is_in_use is False


async def test_wall_with_a_new_name_is_found_and_reported(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = RunningWall()
    monkeypatch.setattr(GivingAlso, "given", {"cloud": wall})
    async with engine_in(home) as engine:
        assert engine._made.walls.by_name.get("cloud") is wall
        assert list(engine.walls) == ["interpreter", "cloud"]
        assert (engine.walls["cloud"]["ready"], engine.walls["cloud"]["essential"]) == (True, False)
        assert wall.noted == ["starts"]


async def test_wall_that_was_passed_in_is_used_and_not_a_parts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, added = FakeWall(), FakeWall()
    monkeypatch.setattr(Giving, "given", {"container": added})
    async with engine_in(home, container=passed) as engine:
        assert (await engine.call("run_python", PROGRAM)).success
    assert (len(passed.runs), len(added.runs)) == (1, 0)
    assert Giving.own[0].container is None


REQUIRED = {
    "cloud": frozenset(Limit),
    "container": frozenset(Limit),
    "interpreter": PROCESS_WALL_LIMITS,
}
"""Names of walls → what the engine requires of a wall with this name, whoever adds it."""


@pytest.mark.parametrize(
    ("name", "missing"),
    [(name, limit) for name, every in REQUIRED.items() for limit in sorted(every)],
)
def test_wall_that_requires_less_than_the_engine_stops_the_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, missing: Limit
) -> None:
    lying = FakeWall(required=frozenset(Limit) - {missing})
    monkeypatch.setattr(Giving, "given", {name: lying})
    with pytest.raises(PartError, match=f"Giving adds the wall '{name}', .* require {missing}"):
        engine_in(home)


async def test_essential_wall_of_a_part_is_reported_first_and_decides_readiness(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = FakeWall(required=PROCESS_WALL_LIMITS, enforced=PROCESS_WALL_LIMITS)
    monkeypatch.setattr(Giving, "given", {"cloud": FakeWall(), "interpreter": wall})
    async with Engine(config=Config(home=home)) as engine:
        assert list(engine.walls) == ["interpreter", "cloud"]
        assert engine.walls["interpreter"]["essential"] is True
        assert engine.ready().status == "ready"  # the twin
        wall.enforced = PROCESS_WALL_LIMITS - {Limit.FILES}
        assert engine.walls["interpreter"]["ready"] is False
        assert engine.ready().status != "ready"


async def test_twin_wall_that_requires_everything_and_enforces_less_is_never_used(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = FakeWall(enforced=PROCESS_WALL_LIMITS)
    monkeypatch.setattr(Giving, "given", {"container": wall})
    async with engine_in(home) as engine:  # which serves other calls
        assert (await engine.call("calculator", {"expression": "1"})).success
        refused = error_of(await engine.call("run_python", PROGRAM))
    assert refused.code == "SANDBOX_UNAVAILABLE"
    assert "cannot enforce disk, file_size, open_files on this host" in refused.message
    assert wall.runs == []


@pytest.mark.parametrize("missing", list(Limit))
async def test_wall_that_enforces_less_holds_no_session(home: Path, missing: Limit) -> None:
    wall = FakeWall(enforced=frozenset(Limit) - {missing})
    async with engine_in(home, container=wall) as engine:
        with pytest.raises(SandboxUnavailable, match=f"wall cannot enforce {missing} on this host"):
            await engine.sessions.create(engine.owner)
        assert wall.held == []
        wall.enforced = frozenset(Limit)  # the twin
        await engine.sessions.create(engine.owner)
        assert len(wall.held) == 1


class NoSessions:
    """A wall whose containers cannot belong to sessions."""

    status = FakeWall().status
    limits = FakeWall().limits
    lease = FakeWall.lease


@pytest.mark.parametrize(
    ("name", "wall", "words"),
    [
        ("jail", FakeWall(), "'jail', which exists"),
        ("host", FakeWall(), "'host', which exists"),
        ("container", NoSessions(), "'container', which has no containers to keep"),
        ("cloud", InterpreterWall(), "does not require disk, file_size, open_files"),
    ],
)
def test_wall_that_cannot_take_its_place_stops_the_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, wall: Any, words: str
) -> None:
    monkeypatch.setattr(Giving, "given", {name: wall})
    with pytest.raises(PartError, match=words):
        engine_in(home)


def test_two_parts_cannot_add_one_wall(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (Giving, GivingAlso):
        monkeypatch.setattr(part, "given", {"cloud": FakeWall()})
    with pytest.raises(PartError, match="GivingAlso adds the wall 'cloud', which exists"):
        engine_in(home)


class Broken(Giving):
    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        raise LookupError("no")


class Unconfigured(Giving):
    def walls(self, own: OwnWalls) -> Mapping[str, Wall]:
        raise ConfigError("cloud.url is missing.")


@pytest.mark.parametrize(
    ("part", "error", "words"),
    [
        (Broken, PartError, "The walls of Broken could not be made: no"),
        (Unconfigured, ConfigError, "^cloud.url is missing.$"),
    ],
)
def test_part_whose_walls_cannot_be_made_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, part: type[Giving], error: Any, words: str
) -> None:
    made = (Part(name="a", in_engine=f"{HERE}:{part.__name__}"),)
    monkeypatch.setattr(engine_parts, "parts", lambda: made)
    with pytest.raises(error, match=words):
        engine_in(home)


async def test_one_part_of_an_engine_makes_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(GivingAlso, "image_maker", lambda _: lambda *_: None)
    async with engine_in(tmp_path):
        pass
    monkeypatch.setattr(Giving, "image_maker", lambda _: lambda *_: None)
    with pytest.raises(PartError, match="Giving and GivingAlso both make images"):
        engine_in(tmp_path)


async def test_one_part_of_an_engine_saves_files_of_sessions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(GivingAlso, "saver", lambda _: object())
    async with engine_in(tmp_path):
        pass
    monkeypatch.setattr(Giving, "saver", lambda _: object())
    with pytest.raises(PartError, match="Giving and GivingAlso both save files of sessions"):
        engine_in(tmp_path)
