"""Find and kill the processes of the container's programs, and switch to the user that runs
programs.

Guest side, used by the supervisor, which is the first process of its PID namespace. So all visible
processes belong to this container. Invariants: every process that does not run as root was started
by the program, or is a registered process (see `trees`). A process of the guest runs as root until
immediately before it runs a program. A killed process may have forked just before it died, so it
counts as gone only when a later search finds no child of it.

If the host gives no namespaces, all processes run as the same user, and others are visible. Marks
then tell them apart (`places.MARK`): those of the guest have another mark than those of programs,
and processes without a mark are ignored.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Collection

from fumehood.guest.container.places import EXECUTABLE, MARK, MOUNTS, READABLE
from fumehood.guest.core import kernel, landlock
from fumehood.guest.core.children import field, size, status
from fumehood.guest.core.marks import mark_of, marked
from fumehood.guest.core.pipes import held

SIGKILL_PENDING = 1 << (signal.SIGKILL - 1)
"""The bit of SIGKILL in a set of pending signals. *Source*: proc_pid_status(5), SigPnd."""

SIGSTOP_PENDING = 1 << (signal.SIGSTOP - 1)

EXITING = 0x4
"""The flag of a process that is exiting. *Source*: PF_EXITING in the Linux kernel's
include/linux/sched.h; proc_pid_stat(5), flags.
"""


def strangers(spared: Collection[int] = ()) -> list[int]:
    """Return the ids of all processes that run as a user other than root, or that vanish while they
    are checked. A process that has ended is included until it is reaped.

    The processes in `spared` are left out, and so are their dead children.
    """
    # If only the first thread of a process has ended, its other threads still run. A process that
    # has vanished may have forked a child after the processes were listed, so the caller must
    # search again. Dead children of `spared` are left out, because only the processes in `spared`
    # reap them.
    found = [pid for pid in all_pids() if pid not in spared and is_stranger(pid)]
    return [pid for pid in found if not is_dead_child(pid, spared)] if spared else found


def kill(pids: Collection[int]) -> int:
    """Send SIGKILL to the processes `pids`. Return the number of `pids`, even if some processes are
    already gone.
    """
    for pid in pids:
        try:
            send(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids)


def send(pid: int, number: int) -> None:
    """Send a signal to a process. Raises ProcessLookupError if it is gone."""
    if MARK is None:
        os.kill(pid, number)
        return
    # A call of kill(2) would wait for the warden, and a signal could interrupt it.
    with held(os.pidfd_open(pid)) as process:
        signal.pidfd_send_signal(process, number)


def fork() -> int:
    """Fork this process, as `os.fork`."""
    while True:
        try:
            return os.fork()
        except InterruptedError:  # a signal came before the warden looked at the call
            continue


def all_pids() -> list[int]:
    """Return the ids of all processes of the container, in ascending order."""
    if MARK is not None:
        return marked(MARK)
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def is_alive(pid: int) -> bool:
    """Return whether a process is alive. This is True for a stopped process, but False for a
    process that was killed, is exiting or has ended.
    """
    is_killed = int(field(status(pid), b"SigPnd") or b"0", 16) & SIGKILL_PENDING
    # While the kernel ends a process, SIGKILL is no longer pending, and it is not a zombie yet.
    is_exiting = int(_stat(pid)[6]) & EXITING
    return not is_killed and not is_exiting and not has_ended(pid)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or has ended and waits to be reaped by its parent."""
    return (field(status(pid), b"State") or b"X")[:1] in b"ZX"


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, and was not resumed.

    A process with a single thread also counts as stopped while the stop signal is pending.
    """
    # After a stop signal, the Linux kernel shows the process as running or asleep until it is
    # scheduled again. Until then, the signal is pending, and a process with a single thread
    # executes no more instructions. gVisor does not show pending signals.
    shown = status(pid)
    if (field(shown, b"State") or b"X").startswith(b"T"):
        return True
    pending = (int(field(shown, name) or b"0", 16) for name in (b"SigPnd", b"ShdPnd"))
    has_one_thread = field(shown, b"Threads") == b"1"
    return has_one_thread and any(signals & SIGSTOP_PENDING for signals in pending)


def works(pid: int) -> bool:
    """Return whether a process is running, ready to run, or waiting for a disk."""
    return (field(status(pid), b"State") or b"X")[:1] in b"RD"


def runs(pid: int) -> bool:
    """Return whether a process is running or ready to run."""
    return (field(status(pid), b"State") or b"X")[:1] == b"R"


def threads_of(pid: int) -> int:
    """Return the number of threads of a process, or 0 if it is gone."""
    return int(field(status(pid), b"Threads") or 0)


def memory_bytes(pid: int) -> int | None:
    """Return the resident memory of a process in bytes, or None if the operating system shows none.
    Mapped files are not counted if the operating system shows them separately.
    """
    shown = status(pid)
    return size(field(shown, b"RssAnon") or field(shown, b"VmRSS"))


def is_stranger(pid: int) -> bool:
    """Return whether a process runs as a user other than root, or is gone. *Source*:
    proc_pid_status(5).
    """
    if MARK is not None:
        return mark_of(pid) != MARK
    # The owner of the directory in /proc is root if the process is not dumpable.
    uids = field(status(pid), b"Uid")
    return uids is None or set(uids.split()) != {b"0"}


def is_dead_child(pid: int, parents: Collection[int]) -> bool:
    """Return whether a process is a child of one of `parents`, and has ended with all its
    threads.
    """
    parent = field(status(pid), b"PPid")
    is_theirs = parent is not None and int(parent) in parents
    return is_theirs and has_ended(pid) and threads_of(pid) <= 1


def parent_of(pid: int) -> int | None:
    """Return the id of a process's parent, or None if the process is gone. The id is 0 if the
    process was started from outside the container.
    """
    shown = field(status(pid), b"PPid")
    return None if shown is None else int(shown)


def origin_of(pid: int) -> int | None:
    """Return where a process comes from:

    * 1 if it descends from the supervisor;
    * 0 if Docker has started it or one of its ancestors. No process in the container can fake this
      value;
    * None if the process or one of its ancestors is gone.
    """
    current: int | None = pid
    while current is not None and current > 1 and current != SUPERVISOR:
        current = parent_of(current)
    return current if current is None else int(current == SUPERVISOR)


SUPERVISOR = os.getpid()
"""Process id of the supervisor, which imports this module and then forks all other processes of the
guest. In a PID namespace it is 1.
"""


def waited_cpu_ns(pid: int) -> int:
    """Return the CPU time in nanoseconds that all reaped descendants of a process have used, with
    the precision of the kernel's ticks. *Source*: proc_pid_stat(5), cutime and cstime.
    """
    return sum(map(int, _stat(pid)[13:15])) * (10**9 // os.sysconf("SC_CLK_TCK"))


def has_terminal(pid: int) -> bool:
    """Return whether a process has a controlling terminal. If so, the operating system sends
    SIGCONT to the process when this terminal is closed.
    """
    return _stat(pid)[4] != b"0"


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process's stat file that follow the process's name. If the process is
    gone, return only the first seven fields, with the state "dead" and the flag `EXITING`.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except OSError:
        return [b"X", *[b"0"] * 5, b"%d" % EXITING]


class Patience:
    """Decides how long a process waits for killed processes to disappear.

    It must stop waiting when its searches for them have used `cpu_s` seconds of CPU time, or when
    all other processes stay asleep.
    """

    def __init__(self, cpu_s: float) -> None:
        # Not a wall time: on a busy machine, the killed processes get little CPU time, so they may
        # still end after a long wait.
        self._until_s = time.process_time() + cpu_s
        self._looks = self._idle_looks = 0

    def rest(self) -> bool:
        """Pause before the next search for killed processes. Return False if the caller must give
        up.

        It must give up if this process has used too much CPU time, or if all other processes were
        asleep at the last `IDLE_LOOKS` searches.
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
"""Maximum CPU time in seconds for killing a program's processes, however fast these start new
ones.
"""

SHORT_PAUSE_S, SHORT_PAUSES, LONG_PAUSE_S = 0.0005, 1000, 0.01
"""Length of a short pause between searches in seconds, number of short pauses, and length of each
later pause. Killed processes take time to die and to be reaped, and longer pauses leave them more
CPU time.
"""

IDLE_LOOKS = 200
"""Number of successive searches after which the wait ends because no other process was active at
any of them. A process is active if it is running, ready to run, or waiting for a disk.
"""

USER_ID = 10_001
"""User id and group id of programs. The image's passwd file has an entry for this user."""

REQUEST_FAILED = 71
"""Exit code of a child that could not set up what its request needs, for example because a file
does not fit.
"""


def become_user() -> None:
    """Change this process from root to the user that runs programs (`USER_ID`), without groups and
    capabilities. If the host gives no namespaces, mark it as a program instead, and restrict it to
    the files that programs may use.

    Raises OSError if a step fails; the process must then end.
    """
    if MARK is not None:
        landlock.restrict_to(READABLE, executable=EXECUTABLE, writable=(*MOUNTS, "/dev/null"))
        if mark_of(os.getpid()) == MARK:  # the supervisor has not done it
            resource.setrlimit(resource.RLIMIT_RTTIME, (MARK - 1, MARK - 1))
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # so that the warden can read paths
        return
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)
    kernel.drop_capabilities()
