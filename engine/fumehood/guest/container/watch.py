"""Watches the memory of the container's programs on a host that does not limit it.

Guest side, used by the supervisor. A container without a control group has no memory limit of its
own. Each process then has one, and this module adds up the memory of all of them. It finds an
excess only after it has happened, so programs can exceed the limit for a moment. Memory that the
sum does not contain is refused to programs by the system-call filter (`filter`): shared memory
without a file, files in memory, and pages that a pipe or a socket holds. Other memory that the
operating system itself needs, such as for pipes and locks, is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fumehood.guest.container import processes
from fumehood.guest.container.places import MARK
from fumehood.guest.core import kernel
from fumehood.guest.core.children import field, size, status
from fumehood.guest.core.syscalls import own_number

if TYPE_CHECKING:
    from fumehood.guest.container.workspace import Mounts

KCMP_VM = 1
"""Kind of comparison of two processes: whether they have the same memory. *Source*: kcmp(2)."""

FREE_SOCKETS = 64
"""Number of sockets that are not counted. The guest itself has some."""

SOCKET_BYTES = 256 << 10
"""What a socket counts. Its buffers can hold about as much, because programs cannot enlarge them.
"""


@dataclass
class Use:
    """What all programs of the container use together."""

    memory_bytes: int
    threads: int


class Watch:
    """The memory of the programs' processes, of the directories `mounts` and of sockets. The
    programs together may use `limit_bytes`.
    """

    def __init__(self, mounts: Mounts, limit_bytes: int) -> None:
        self._mounts = mounts
        self._limit_bytes = limit_bytes

    def look(self) -> Use:
        """Return what the programs use now. Memory that processes share is counted once for each of
        them, unless the sum then exceeds the limit.
        """
        shown = {}
        for pid in processes.all_pids():
            found = status(pid)
            users = field(found, b"Uid")
            if users is not None and set(users.split()) != {b"0"}:
                shown[pid] = _with_memory(pid, found)
        fixed = self._mounts.used_bytes() + _socket_bytes(shown)
        threads = sum(int(field(one, b"Threads") or 0) for one in shown.values())
        use = Use(fixed + sum(map(memory_of, shown.values())), threads)
        if use.memory_bytes > self._limit_bytes:  # slower, but exact
            own = (_share_of(pid, one) for pid, one in shown.items() if not _is_same(pid, shown))
            use.memory_bytes = fixed + sum(own)
        return use

    def is_too_much(self, use: Use) -> bool:
        """Return whether the programs use more memory than they may."""
        return use.memory_bytes > self._limit_bytes


def memory_of(shown: bytes) -> int:
    """Return the memory in bytes that belongs to a process, resident or swapped out, with the
    tables of its pages. `shown` is what `children.status` has returned. *Source*:
    proc_pid_status(5).
    """
    names = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
    return sum(size(field(shown, name)) or 0 for name in names)


def _with_memory(pid: int, shown: bytes) -> bytes:
    """Return the status of a process that says how much memory it has. If its first thread has
    ended, only its other threads say so.
    """
    if field(shown, b"RssAnon") is None and int(field(shown, b"Threads") or 0) > 1:
        for thread in _threads_of(pid):
            found = status(f"{pid}/task/{thread}")
            if field(found, b"RssAnon") is not None:
                return found
    return shown


def _threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _share_of(pid: int, shown: bytes) -> int:
    """Return the memory in bytes that belongs to a process. Of memory that it shares with other
    processes, count only its share. *Source*: Linux, Documentation/ABI/testing/procfs-smaps_rollup.
    """
    for thread in _threads_of(pid):
        try:
            with open(f"/proc/{pid}/task/{thread}/smaps_rollup", "rb") as file:
                exact = b"\n" + file.read()
        except OSError:  # this thread has ended
            continue
        own = size(field(exact, b"Pss_Anon"))
        if own is not None:
            names = ((exact, b"SwapPss"), (shown, b"VmPTE"), (shown, b"HugetlbPages"))
            return own + sum(size(field(text, name)) or 0 for text, name in names)
    return memory_of(_with_memory(pid, status(pid)))  # nothing, if it is gone by now


def _is_same(pid: int, shown: Mapping[int, bytes]) -> bool:
    """Return whether a process has the memory of its parent, as after vfork(2)."""
    parent = int(field(shown[pid], b"PPid") or 0)
    if parent not in shown:
        return False
    try:
        return kernel.syscall(own_number("kcmp"), parent, pid, KCMP_VM) == 0
    except OSError:
        return False


def _socket_bytes(pids: Collection[int]) -> int:
    """Return the memory that the sockets of the container may need for their buffers. The operating
    system does not say how much they contain. If the host gives no namespaces, only the sockets of
    the processes `pids` are counted. *Source*: Linux, net/ipv4/proc.c, sockstat.
    """
    if MARK is not None:
        return max(0, _sockets_of(pids) - FREE_SOCKETS) * SOCKET_BYTES
    with open("/proc/net/sockstat", "rb") as file:
        words = file.readline().split()
    return max(0, int(words[2]) - FREE_SOCKETS) * SOCKET_BYTES


def _sockets_of(pids: Collection[int]) -> int:
    """Return the number of the sockets that the processes `pids` have open, or an upper bound below
    `FREE_SOCKETS`. A socket counts for each of its descriptors.
    """
    found = []
    for pid in pids:
        with suppress(OSError):
            found += [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return len(found) if len(found) <= FREE_SOCKETS else sum(map(_is_socket, found))


def _is_socket(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except OSError:
        return False
