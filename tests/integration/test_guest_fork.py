"""The guest's fork: the parent of the process that forks learns how the child ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fumehood.sandbox.process.channel import GUEST_PROGRAM

SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
from fumehood.guest.core import kernel
parent = os.getpid()
forker = os.fork()
if forker == 0:
    if FORK() == 0:
        os._exit(7 if os.getppid() == parent else 8)
    os._exit(0)
assert os.waitpid(forker, 0)[1] == 0
try:
    print(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
except ChildProcessError:
    print("nobody")
"""


def _outcome_of(fork: str) -> str:
    command = [
        sys.executable,
        "-I",
        "-c",
        SCRIPT.replace("FORK", fork),
        str(GUEST_PROGRAM.parents[1]),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


@pytest.mark.row("S2")
def test_fork_for_parent_child_is_reaped_by_the_grandparent() -> None:
    assert _outcome_of("kernel.fork_for_parent") == "7\n"


@pytest.mark.row("S2")
def test_ordinary_fork_child_is_not_reaped_by_the_grandparent() -> None:
    assert _outcome_of("os.fork") == "nobody\n"
