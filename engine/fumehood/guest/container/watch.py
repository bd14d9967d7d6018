"""Watches the memory of the container's programs on a host that does not limit it.

Guest side, used by the supervisor. A container without a control group has no memory limit of its
own. Each process then has one, and this module adds up the memory of all of them. It finds an
excess only after it has happened, so programs can exceed the limit for a moment. Memory that the
sum does not contain is refused to programs by the system-call filter (`filter`): shared memory
without a file, and files in memory. What the operating system needs for sockets and pipes is not
counted.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from fumehood.guest.container import processes
from fumehood.guest.core.children import field, size, status


@dataclass
class Use:
    """What all programs of the container use together."""

    memory_bytes: int
    threads: int


class Watch:
    """The memory of the programs' processes and of the directories `mounts`. The programs together
    may use `limit_bytes`.
    """

    def __init__(self, mounts: Collection[str], limit_bytes: int) -> None:
        self._mounts = mounts
        self._limit_bytes = limit_bytes

    def look(self) -> Use:
        """Return what the programs use now. Memory that processes share is counted once for each of
        them, unless the sum then exceeds the limit.
        """
        found = Use(sum(map(_used_bytes, self._mounts)), 0)
        pids = []
        for pid in processes.all_pids():
            shown = status(pid)
            users = field(shown, b"Uid")
            if users is not None and set(users.split()) != {b"0"}:
                pids.append(pid)
                found.memory_bytes += memory_of(shown)
                found.threads += int(field(shown, b"Threads") or 0)
        if found.memory_bytes > self._limit_bytes:  # slower, but exact
            found.memory_bytes = sum(map(_used_bytes, self._mounts)) + sum(map(_share_of, pids))
        return found

    def is_too_much(self, use: Use) -> bool:
        """Return whether the programs use more memory than they may."""
        return use.memory_bytes > self._limit_bytes


def memory_of(shown: bytes) -> int:
    """Return the memory in bytes that belongs to a process, resident or swapped out. `shown` is
    what `children.status` has returned. *Source*: proc_pid_status(5).
    """
    return sum(size(field(shown, name)) or 0 for name in (b"RssAnon", b"VmSwap"))


def _share_of(pid: int) -> int:
    """Return the memory in bytes that belongs to a process. Of memory that it shares with other
    processes, count only its share. *Source*: Linux, Documentation/ABI/testing/procfs-smaps_rollup.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            shown = b"\n" + file.read()
    except OSError:
        shown = b""
    own, swapped = (size(field(shown, name)) for name in (b"Pss_Anon", b"SwapPss"))
    return memory_of(status(pid)) if own is None else own + (swapped or 0)


def _used_bytes(path: str) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize
