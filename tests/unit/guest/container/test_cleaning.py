"""Cleaning where the kernel counts no processes (gVisor): what vanishes during a look."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from fumehood.guest.container import cleaning
from fumehood.guest.container.cleaning import Cleaner

GONE = 2**22 + 1
"""A process id beyond all that the kernel gives."""


@pytest.mark.row("S6")
@pytest.mark.parametrize(
    ("has_trial", "reaped", "is_clean"),
    [(False, [], True), (False, [GONE], False), (True, [], False)],
    ids=["a registered one", "reaped by a zygote", "reaped for the process of a trial"],
)
def test_process_that_vanishes_counts_if_it_may_be_the_programs(
    has_trial: bool, reaped: list[int], is_clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "KILL_CPU_S", 0.05)
    pools, trees = Mock(), Mock()
    trees.strangers.return_value = [GONE]
    cleaner = Cleaner(
        pools, Mock(pids=set(), has_trial=has_trial), Mock(), Mock(), Mock(), Mock(),
        Mock(get_orphans=True, pids={2}), trees,
    )  # fmt: skip
    cleaner._is_counted = False
    pools.receive.side_effect = lambda: [cleaner.on_reaped(pid) for pid in reaped]
    assert cleaner._kill_beside() is is_clean
