"""Find and kill the processes of the container's program, and become its user.

Guest side, used by the supervisor, the first process of its PID namespace: all visible processes
belong to this container. Invariants: a process with an id other than root's belongs to the program,
or to a registered process (see `trees`); processes of the guest are root's until they only have a
program left to run. A process is not considered gone while it may have left another in its place.
Never used on a host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection

from fumehood.guest.core import kernel
from fumehood.guest.core.children import field, size, status

SIGKILL_PENDING = 1 << (signal.SIGKILL - 1)
"""*Source*: proc_pid_status(5), SigPnd."""

SIGSTOP_PENDING = 1 << (signal.SIGSTOP - 1)

EXITING = 0x4
"""*Source*: PF_EXITING in the kernel's include/linux/sched.h; proc_pid_stat(5), flags."""


def strangers(spared: Collection[int] = ()) -> list[int]:
    """Process ids of all processes that are not root's or vanished during the look, except `spared`
    and their dead children, which no other process can reap.

    A dead process counts until it is reaped: if only its first thread ended, the others still run.
    A process that forks and exits again and again is always dead or gone when it is checked, while
    its child did not exist yet when the list was made.
    """
    found = [pid for pid in all_pids() if pid not in spared and is_stranger(pid)]
    return [pid for pid in found if not is_dead_child(pid, spared)] if spared else found


def kill(pids: Collection[int]) -> int:
    """Send SIGKILL to processes. Returns their number, including those that are gone already."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids)


def all_pids() -> list[int]:
    """The ids of all processes, in order."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def is_alive(pid: int) -> bool:
    """Whether a process is alive, even if stopped. One that was killed or is exiting is not."""
    is_killed = int(field(status(pid), b"SigPnd") or b"0", 16) & SIGKILL_PENDING
    # Neither is a signal pending while the kernel ends it, nor is it a zombie yet.
    is_exiting = int(_stat(pid)[6]) & EXITING
    return not is_killed and not is_exiting and not has_ended(pid)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be reaped by its parent."""
    return (field(status(pid), b"State") or b"X")[:1] in b"ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, and not continued.

    One that has not had a processor since then still counts as running or asleep, but the signal is
    pending, and its only thread stops before it executes another instruction. gVisor does not show
    that.
    """
    shown = status(pid)
    if (field(shown, b"State") or b"X").startswith(b"T"):
        return True
    pending = (int(field(shown, name) or b"0", 16) for name in (b"SigPnd", b"ShdPnd"))
    has_one_thread = field(shown, b"Threads") == b"1"
    return has_one_thread and any(signals & SIGSTOP_PENDING for signals in pending)


def works(pid: int) -> bool:
    """Whether a process has work to do: it has a processor, or waits for one or for a disk."""
    return (field(status(pid), b"State") or b"X")[:1] in b"RD"


def runs(pid: int) -> bool:
    """Whether a process has a processor, or waits for one."""
    return (field(status(pid), b"State") or b"X")[:1] == b"R"


def threads_of(pid: int) -> int:
    """A process's number of threads; 0 if it is gone."""
    return int(field(status(pid), b"Threads") or 0)


def memory_bytes(pid: int) -> int | None:
    """Resident memory of a process, without files if the kernel separates them, or None."""
    shown = status(pid)
    return size(field(shown, b"RssAnon") or field(shown, b"VmRSS"))


def is_stranger(pid: int) -> bool:
    """Whether a process is not root's, or gone.

    *Source*: proc_pid_status(5). The directory's owner is no evidence if a process is not dumpable.
    """
    uids = field(status(pid), b"Uid")
    return uids is None or set(uids.split()) != {b"0"}


def is_dead_child(pid: int, parents: Collection[int]) -> bool:
    """Whether a child of these has ended with all its threads, not only the first."""
    parent = field(status(pid), b"PPid")
    is_theirs = parent is not None and int(parent) in parents
    return is_theirs and has_ended(pid) and threads_of(pid) <= 1


def parent_of(pid: int) -> int | None:
    """The parent of a process, or None if it is gone. It is 0 for one from outside."""
    shown = field(status(pid), b"PPid")
    return None if shown is None else int(shown)


def origin_of(pid: int) -> int | None:
    """Where a process descends from: 1, the container's first process; or 0, one that Docker has
    started here, which nothing inside can imitate; or None if one of them is gone.
    """
    current: int | None = pid
    while current is not None and current > 1:
        current = parent_of(current)
    return current


def waited_cpu_ns(pid: int) -> int:
    """CPU time of all descendants of a process that were reaped, in the kernel's ticks. *Source*:
    proc_pid_stat(5), cutime and cstime.
    """
    return sum(map(int, _stat(pid)[13:15])) * (10**9 // os.sysconf("SC_CLK_TCK"))


def has_terminal(pid: int) -> bool:
    """Whether a process has a controlling terminal: at its end the kernel sends SIGCONT."""
    return _stat(pid)[4] != b"0"


def _stat(pid: int) -> list[bytes]:
    """The fields of a process after its name; those of one that is gone are of one that exits."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return [b"X", *[b"0"] * 5, b"%d" % EXITING]


class Patience:
    """Waits for killed processes to be gone. Judged by the processor time of this process, which
    looks for them: on a busy machine neither gets much, and no time on the clock proves that a
    process does not end.
    """

    def __init__(self, cpu_s: float) -> None:
        self._until_s = time.process_time() + cpu_s
        self._looks = self._idle_looks = 0

    def rest(self) -> bool:
        """Pause before the next look. False if this has taken too much processor time, or no other
        process had anything to do at the last looks.
        """
        if time.process_time() >= self._until_s:
            return False
        self._looks += 1
        if self._looks < SHORT_PAUSES:
            time.sleep(SHORT_PAUSE_S)
            return True
        time.sleep(LONG_PAUSE_S)
        is_idle = not any(works(pid) for pid in all_pids() if pid != os.getpid())
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        return self._idle_looks < IDLE_LOOKS


KILL_CPU_S = 2.0
"""Processor time for the end of a program's processes, however fast they make others."""

SHORT_PAUSE_S, SHORT_PAUSES, LONG_PAUSE_S = 0.0005, 1000, 0.01
"""Killed is not yet dead, and dead not yet gone. After so many short pauses the killed processes
need the processor more than another look does.
"""

IDLE_LOOKS = 200
"""Looks in a row at which no process had a processor, or waited for one or for a disk."""

USER_ID = 10_001
"""User and group id of programs; the image has a passwd entry for it."""

REQUEST_FAILED = 71
"""A child's exit code if the request could not be set up, such as a file that does not fit."""


def become_user() -> None:
    """Become the programs' user. Raises OSError if any step fails; the process must then end."""
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)
    kernel.drop_capabilities()
