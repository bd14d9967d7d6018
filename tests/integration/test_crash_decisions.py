"""SIGKILL at every commit of a decision: a tool never runs more often than it was approved."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from support.crash_decisions import examine, prepare
from support.crash_points import Run, crash_each, nursery

pytestmark = pytest.mark.row("A2", "D6")

SCENARIO = "support.crash_decisions:play"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with nursery(SCENARIO, CLEAN_ENVIRONMENT) as running:
        yield running


def outcomes(run: Run, home: Path, weakness: str = "") -> Iterator[tuple[int, int]]:
    """The number of runs and the number of approvals, for each crash point."""

    def prepared(place: Path) -> None:
        prepare(place)
        if weakness:
            (place / "weakness").write_text(weakness)

    known: dict[object, tuple[int, int]] = {}
    for crash in crash_each(run, home, prepared):
        left = crash.left()
        if left not in known:
            known[left] = asyncio.run(examine(crash.home))
        yield known[left]


def test_decision_killed_at_every_commit_lets_at_most_one_call_run(run: Run, home: Path) -> None:
    found = Counter(outcomes(run, home))
    assert all(ran <= yes for ran, yes in found), found
    assert {(0, 0), (1, 1)} <= found.keys()  # nobody was asked yet; and the yes was used
    assert found.total() >= 10


def test_control_decision_reported_before_it_is_consumed_is_detected(run: Run, home: Path) -> None:
    assert any(ran > yes for ran, yes in outcomes(run, home, "decision not consumed"))
