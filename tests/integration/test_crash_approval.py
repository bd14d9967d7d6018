"""SIGKILL around every commit of calls that wait for humans: what was promised is kept."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from support.crash_approvals import SCENES, survive
from support.crash_points import Crash, Run, crash_each, nursery

pytestmark = pytest.mark.row("A2", "D6")

MODULE = "support.crash_approvals"
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with nursery(f"{MODULE}:play", CLEAN_ENVIRONMENT) as running:
        yield running


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory where there is such a place: a kill is no loss of power."""
    where = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix="fh-", dir=where))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def ahead(crashes: Iterator[Crash]) -> Iterator[Crash]:
    """While one is examined here, the next one dies over there."""
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(next, crashes, None)
        while (crash := coming.result()) is not None:
            coming = beside.submit(next, crashes, None)
            yield crash


@pytest.mark.parametrize("name", SCENES)
def test_killed_at_every_commit_nothing_is_lost_and_nothing_acts_twice(
    name: str, run: Run, place: Path
) -> None:
    scene = SCENES[name]
    seen: Counter[str] = Counter()
    points = 0

    def prepare(home: Path) -> None:
        scene.prepare(home)
        (home / "scene").write_text(name)

    for crash in ahead(crash_each(run, place, prepare)):
        found, _ = asyncio.run(
            survive(
                crash.home, crash.said,
                later_s=scene.later_s, crashes=scene.crashes, in_flight=scene.in_flight,
            )
        )  # fmt: skip
        assert not found.faults, (str(crash.point), found.faults, crash.said)
        seen += found.seen
        points += crash.point is not None
        shutil.rmtree(crash.home)
    print(name, points, dict(seen))
    assert points >= scene.least
