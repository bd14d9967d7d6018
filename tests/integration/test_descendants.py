"""`kill_below`: kills every descendant of a process and nothing else."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from fumehood.guest.core.children import kill_below
from support.processes import is_gone
from support.wait import wait_until

TREE = """
import subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    for _ in range(2):
        subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2], str(depth - 1), sys.argv[2]],
                         start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.row("P8")
def test_kill_below_kills_all_descendants_and_no_sibling() -> None:
    beside = subprocess.Popen(["sleep", "600"])
    root = subprocess.Popen([sys.executable, "-S", "-c", TREE, "2", TREE])
    try:
        process = psutil.Process(root.pid)
        wait_until(lambda: len(process.children(recursive=True)) == 6)
        below = process.children(recursive=True)
        assert kill_below(root.pid) == {each.pid for each in below}
        wait_until(lambda: all(map(is_gone, below)))
        assert root.poll() is None
        assert beside.poll() is None
        assert psutil.Process(beside.pid).status() != psutil.STATUS_STOPPED
    finally:
        for started in (root, beside):
            started.kill()
            started.wait()
