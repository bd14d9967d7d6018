"""Find and kill the processes of the container's program and all their descendants.

Guest side, used by the supervisor, which is the first process of its PID namespace: all visible
processes belong to this container. Invariants: a process whose ids are not all root's is the
program's; this guest's own are root's until they have nothing to do but run a program. None is
taken for gone as long as it may have left another in its place. Never used on a host.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from fumehood.guest.core import kernel
from fumehood.guest.core.children import field, size, status

SIGKILL_PENDING = 1 << (signal.SIGKILL - 1)
"""*Source*: proc_pid_status(5), SigPnd."""

EXITING = 0x4
"""*Source*: PF_EXITING in the kernel's include/linux/sched.h; proc_pid_stat(5), flags."""


def strangers(spared: Collection[int] = ()) -> list[int]:
    """Process ids of all that are not root's, or went while they were looked at, but the spared
    and those of their children that have ended, which no other process can reap.

    The dead count until they are reaped: where only the first thread of a process has ended, the
    others run on; and one that forks and ends at once, again and again, is always dead or gone when
    it is looked at, while its child was not there yet when the list was made.
    """
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = [pid for pid in pids if pid not in spared and is_stranger(pid)]
    return [pid for pid in found if not _is_dead_child(pid, spared)] if spared else found


def dead_children(parents: Collection[int]) -> int:
    """How many processes have ended and wait to be reaped by one of these."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return sum(_is_dead_child(pid, parents) for pid in pids)


def kill_all(spared: Collection[int] = ()) -> int:
    """Send SIGKILL to each of them once; how many there were."""
    found = strangers(spared)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found)


def is_alive(pid: int) -> bool:
    """Whether a process lives, also if it is stopped. One that was killed but has not died yet,
    or is just exiting, does not.
    """
    is_killed = int(field(status(pid), b"SigPnd") or b"0", 16) & SIGKILL_PENDING
    return not is_killed and not _is_exiting(pid) and not has_ended(pid)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be reaped by its parent."""
    return (field(status(pid), b"State") or b"X")[:1] in b"ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and not continued."""
    return (field(status(pid), b"State") or b"X").startswith(b"T")


def threads_of(pid: int) -> int:
    """How many a process has; none where it is gone."""
    return int(field(status(pid), b"Threads") or 0)


def memory_bytes(pid: int) -> int | None:
    """Resident memory of a process, without files if the kernel separates them, or None."""
    shown = status(pid)
    return size(field(shown, b"RssAnon") or field(shown, b"VmRSS"))


def is_stranger(pid: int) -> bool:
    """Whether it is not root's, or gone.

    *Source*: proc_pid_status(5); the owner of the directory says nothing where a process is not
    dumpable.
    """
    uids = field(status(pid), b"Uid")
    return uids is None or set(uids.split()) != {b"0"}


def _is_dead_child(pid: int, parents: Collection[int]) -> bool:
    """Whether a child of these has ended with all its threads, not only the first."""
    parent = field(status(pid), b"PPid")
    is_theirs = parent is not None and int(parent) in parents
    return is_theirs and has_ended(pid) and threads_of(pid) <= 1


def _is_exiting(pid: int) -> bool:
    """Whether the kernel takes it down: no signal is pending any more, and it is no zombie yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return bool(int(stat.read().rpartition(b")")[2].split()[6]) & EXITING)
    except OSError:
        return True


USER_ID = 10_001
"""User and group id of programs; the image has an entry for it."""

REQUEST_FAILED = 71
"""A child's exit code if the request could not be set up, such as a file that does not fit."""


def become_user() -> None:
    """Raises OSError if any step fails; the process must end then."""
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)
    kernel.drop_capabilities()
