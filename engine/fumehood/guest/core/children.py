"""Children as their parent sees them: when they end, and what they have used.

Guest side, used by supervisors and by zygotes that have children of their own.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """The end of a process, as the kernel reports it."""

    pid: int
    status: int
    """As `wait` returns it."""
    cpu_ns: int
    largest_bytes: int
    """The most memory that it ever had."""


def watch() -> socket.socket:
    """A socket that can be read when a child has ended; `drain` empties it."""
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def drain(wakeup: socket.socket) -> None:
    """Forget the signals so far. To be called before `reap`, or one could be missed."""
    try:
        while wakeup.recv(512):
            pass
    except BlockingIOError:
        pass


def reap() -> Iterator[Ended]:
    """Each child that has ended by now."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        cpu_ns = int((usage.ru_utime + usage.ru_stime) * 1e9)
        yield Ended(pid, status, cpu_ns, usage.ru_maxrss * 1024)


CLAIMABLE = ("memory", "output", "policy")
"""The failures that a child may claim; see ADR 0010."""


def judge(reply: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The ending of a run that answered. A claim may name a failure, never undo one."""
    error = reply.get("error")
    if error is None and isinstance(reply.get("result"), dict):
        return "ok", {"result": reply["result"]}
    kind = error.get("kind") if isinstance(error, dict) else None
    if kind in CLAIMABLE:
        return kind, {"error": error}
    return "exception", {"error": error if isinstance(error, dict) else {}}


def ending_of(exit_code: int | None, signal_number: int | None) -> str:
    """The ending by the kernel's report, if the supervisor did not kill."""
    if signal_number == signal.SIGSYS:
        return "policy"
    if signal_number == signal.SIGXCPU:
        return "cpu_time"
    if signal_number == signal.SIGKILL or exit_code == 0:
        return "sandbox_lost"  # killed from outside, or left without an answer
    return "exit" if signal_number is None else "signal"


def decode_status(status: int) -> tuple[int | None, int | None]:
    """Exit code or signal in a status of `wait`; one of them is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


STATUS_BYTES = 16384
"""More than the kernel writes about a process with a thousand groups."""

STATE = b"\nState:"
"""The first field that every kernel writes after the name."""


def peak_bytes(pid: int) -> int | None:
    """Largest resident memory of the process so far, as the kernel counted it."""
    return size(field(status(pid), b"VmHWM"))


def is_sealed(pid: int, own_filters: int | None) -> bool:
    """Whether a child has given up its rights. Its own claim is not enough.

    In a container or a hardened service every process has a filter from the start, so the child
    must have more than `own_filters`, the number of this process.
    """
    shown = status(pid)
    return field(shown, b"NoNewPrivs") == b"1" and is_filtered(shown, own_filters)


def is_filtered(shown: bytes, own_filters: int | None) -> bool:
    """Whether a process with this status has a filter beyond `own_filters`."""
    filters = field(shown, b"Seccomp_filters")
    has_more = filters is None or own_filters is None or int(filters) > own_filters
    return field(shown, b"Seccomp") == b"2" and has_more


def own_filters() -> int | None:
    """The number of system-call filters of this process; None on kernels before 5.9."""
    filters = field(status("self"), b"Seccomp_filters")
    return None if filters is None else int(filters)


def status(pid: int | str) -> bytes:
    """All that the kernel shows of a process from its state on; nothing if it is gone.

    Before that comes the name, which the process chooses: gVisor does not escape line ends in it,
    so it may look like any other field.
    """
    try:
        # Not `open()`, whose layers cost three times as much: this is asked for every call.
        file = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        try:
            _, state, rest = os.read(file, STATUS_BYTES).rpartition(STATE)
        finally:
            os.close(file)
    except OSError:
        return b""
    return state + rest if state else b""


def field(shown: bytes, name: bytes) -> bytes | None:
    """One field of a status file, or None."""
    _, found, rest = shown.partition(b"\n" + name + b":")
    return rest.partition(b"\n")[0].strip() if found else None


def size(value: bytes | None) -> int | None:
    """The value of a field such as `1024 kB`, in bytes."""
    return None if value is None else int(value.split()[0]) * 1024


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
    while new := {
        child: parent for parent in parents for child in _children(parent) if child not in found
    }:
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
