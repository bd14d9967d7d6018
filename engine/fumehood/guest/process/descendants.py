"""Kill all descendants of a process, by walking down from it.

Guest side, used by the jail's supervisor, which is the subreaper of everything below it.
Never by user id: on a host that would hit the operator's own processes. Each process is
stopped before its children are listed, so that none can be missed or reaped in between, and
is killed through a descriptor, so that a reused number hits no other process.
"""

from __future__ import annotations

import os
import signal

MAX_ROUNDS = 1000
"""A bound for the walk; a tree that still grows then dies with its guest."""


def kill_below(pid: int) -> set[int]:
    """Kill all descendants of a process, but not itself; the process ids of those killed.

    The process is left stopped where it had any, for its end comes next.
    """
    children = _children(pid)
    if not children:
        return set()
    _signal(pid, None, signal.SIGSTOP)
    parents = [pid]
    found: dict[int, int] = {}
    for _ in range(MAX_ROUNDS):
        new = {
            child: parent for parent in parents for child in _children(parent) if child not in found
        }
        if not new:
            break
        for child, parent in new.items():
            _signal(child, parent, signal.SIGSTOP)
        found |= new
        parents = [pid, *found]
    # The deepest first: a parent that died already would have handed its children on.
    for child, parent in reversed(found.items()):
        _signal(child, parent, signal.SIGKILL)
    return set(found)


def _children(pid: int) -> list[int]:
    """*Source*: proc_pid_task(5); every thread of a process has children of its own."""
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as listed:
                children += map(int, listed.read().split())
    except OSError:
        pass
    return children


def _signal(pid: int, parent: int | None, number: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if parent is None or pid in _children(parent):
            signal.pidfd_send_signal(process, number)
    except OSError:
        pass
    finally:
        os.close(process)
