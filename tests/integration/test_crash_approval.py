"""SIGKILL around every commit of calls that wait for approval: every promise is kept."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from support.crash_approvals import SCENES, lives, survive
from support.crash_points import Run, crash_each, nursery

pytestmark = pytest.mark.row("A2", "D6", "E4", "P3")

SEED = 20261121
KILLS = 4
SOAKED = ("edited", "harmless", "spending", "of-two")
"""Scenes of which the soak test kills every commit; the controls play the first three here, too."""
MODULE = "support.crash_approvals"
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with nursery(f"{MODULE}:play", CLEAN_ENVIRONMENT) as running:
        yield running


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory if there is one; a kill, unlike a power loss, does not need a disk."""
    where = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix="fh-", dir=where))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def prepare(home: Path, scene: str, weakness: str = "") -> None:
    """Prepare the state of a scene and record its name."""
    SCENES[scene].prepare(home)
    (home / "scene").write_text(scene)
    if weakness:
        (home / "weakness").write_text(weakness)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.soak] * (one in SOAKED)) for one in SCENES]
)
def test_engine_killed_at_every_commit_loses_no_approval_and_runs_no_call_twice(
    name: str, run: Run, place: Path
) -> None:
    scene = SCENES[name]
    seen: Counter[str] = Counter()
    examined: set[object] = set()
    points = 0

    for crash in crash_each(run, place, lambda home: prepare(home, name)):
        points += crash.point is not None
        if (left := crash.left()) in examined:
            continue
        examined.add(left)
        found, _ = asyncio.run(
            survive(
                crash.home, crash.said,
                later_s=scene.later_s, crashes=scene.crashes, in_flight=scene.in_flight,
            )
        )  # fmt: skip
        assert not found.faults, (str(crash.point), found.faults, crash.said)
        seen += found.seen
        shutil.rmtree(crash.home)
    assert points >= scene.least
    assert {what for what in scene.shows if not seen[what]} == set()


@pytest.mark.parametrize(
    ("weakness", "scene", "words"),
    [
        ("approval not consumed", "edited", "acted 2 times"),
        ("rule use not counted", "remembering", "uses of remembered rules"),
        ("budget mark not raised", "spending", "used, 0 counted"),
        ("idempotency key not claimed", "harmless", "acted 2 times"),
        ("repeated call not recognized", "replayed", "acted 2 times"),
    ],
)
def test_control_weakened_guarantee_is_detected(
    weakness: str, scene: str, words: str, run: Run, place: Path
) -> None:
    faults: list[str] = []
    for crash in crash_each(run, place, lambda home: prepare(home, scene, weakness)):
        found, _ = asyncio.run(survive(crash.home, crash.said))
        faults += found.faults
        if any(words in fault for fault in faults):
            return
    raise AssertionError(f"nobody noticed that {weakness}: {faults}")


def test_engine_killed_at_random_moments_loses_no_approval_and_runs_no_call_twice(
    place: Path,
) -> None:
    """One state, many concurrent scripts, successive engines; the soak test runs more of them."""
    home = place / "home"
    with nursery(f"{MODULE}:play_until_killed", CLEAN_ENVIRONMENT) as kill:
        found = lives(kill, home, KILLS, SEED)
    assert not found.faults, found.faults
    assert found.seen["deaths"] == KILLS
    assert found.seen["heard OK"] > KILLS
    assert found.seen["done"] > KILLS
