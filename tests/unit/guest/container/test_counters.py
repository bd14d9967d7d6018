"""Counters of both cgroup versions, and None where a host shows none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood.guest.container.meter import Counters

V1 = {
    "cpuacct/cpuacct.usage": "1234567\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    "memory/memory.max_usage_in_bytes": "5000\n",
    "memory/memory.limit_in_bytes": "167772160\n",
    "pids/pids.events": "max 7\n",
    "pids/pids.current": "4\n",
    "pids/pids.max": "76\n",
}
V2 = {
    "cpu.stat": "usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n",
    "memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\n",
    "memory.peak": "6000\n",
    "memory.max": "167772160\n",
    "pids.events": "max 5\n",
    "pids.current": "3\n",
    "pids.max": "76\n",
}


def _counters(root: Path, files: dict[str, str]) -> Counters:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Counters(str(root))


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("files", "expected"),
    [(V1, (1234567, 3, 5000, 7, 4)), (V2, (1500000, 2, 6000, 5, 3)), ({}, (None,) * 5)],
    ids=["v1", "v2", "none"],
)
def test_both_cgroup_versions_are_read_with_missing_counters_as_none(
    tmp_path: Path, files: dict[str, str], expected: tuple[int | None, ...]
) -> None:
    found = _counters(tmp_path, files)
    assert (
        found.read("cpu_ns"), found.read("oom_kills"), found.read("peak_bytes"),
        found.read("refused_processes"), found.read("processes"),
    ) == expected  # fmt: skip
    limits = (found.memory_limit, found.process_limit)
    assert limits == ((167772160, 76) if files else (None, None))


@pytest.mark.row("S4")
@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", "-1\n x\n", ""])
def test_unlimited_memory_is_none(tmp_path: Path, text: str) -> None:
    found = _counters(tmp_path, {**V2, "memory.max": text})
    assert found.memory_limit is None
