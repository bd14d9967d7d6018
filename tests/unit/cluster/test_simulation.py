"""The placing code keeps its promises to simulated callers, on nodes that die and are drained."""

from __future__ import annotations

import pytest

from benchmarks.simulate import only, quick
from benchmarks.simulated_cluster import QUEUE_S


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_modest_callers_are_served_while_others_ask_for_everything(seed: int) -> None:
    figures = quick(seed)  # asserts at each grant that no node or principal gets too much
    assert figures.counts["killed nodes"] == 6
    assert figures.counts["repeated"] > 0
    assert figures.shares["greedy"] <= 76  # three quarters, rounded up to a whole slot
    assert figures.utilisation > 0.8
    greedy = only(figures, "greedy")
    assert greedy.ends["done"] > 100
    for name in ("modest", "other"):
        mine = only(figures, name)
        assert mine.ends["done"] > 50
        assert not mine.ends["refused"] + mine.ends["late"]
        assert max(mine.all_waits()) < QUEUE_S / 2
        assert sum(mine.all_waits()) / len(mine.all_waits()) < 2
