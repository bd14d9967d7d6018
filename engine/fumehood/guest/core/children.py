"""Child processes as seen by their parent: how they ended, their status in /proc, and how to kill
them.

Guest side, used by supervisors and by zygotes that are parents. A child's claim may name a failure
but never undo one: the operating system's report and the supervisor's own reason to kill take
precedence over the claim. *Source*: proc_pid_status(5).
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from fumehood.guest.core.pipes import held


class Ended(NamedTuple):
    """The end of a process, as the operating system reports it."""

    pid: int
    status: int
    """The status in the form in which `wait` returns it."""
    cpu_ns: int
    largest_bytes: int
    """Peak resident memory in bytes."""


def watch() -> socket.socket:
    """Return a socket that becomes readable when a child has ended. Empty it with `drain`."""
    readable, writable = socket.socketpair()
    readable.setblocking(False)
    writable.setblocking(False)
    signal.set_wakeup_fd(writable.detach())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return readable


def drain(wakeup: socket.socket) -> None:
    """Discard the bytes that were received on `wakeup`, the socket that `watch` returned. Call this
    before `reap`, so that no child's end is missed.
    """
    try:
        while wakeup.recv(512):
            pass
    except BlockingIOError:
        pass


def reap() -> Iterator[Ended]:
    """Reap and yield every child that has ended."""
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
"""The kinds of failure that a child may claim (ADR 0010)."""


def judge(reply: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return how a run ended, such as "ok", and the claim to report to the host. `reply` is the
    message that the run's child has sent. The child may claim only the kinds of failure in
    `CLAIMABLE`. Every other error counts as an exception.
    """
    error = reply.get("error")
    if error is None and isinstance(reply.get("result"), dict):
        return "ok", {"result": reply["result"]}
    kind = error.get("kind") if isinstance(error, dict) else None
    if kind in CLAIMABLE:
        return kind, {"error": error}
    return "exception", {"error": error if isinstance(error, dict) else {}}


def ending_of(exit_code: int | None, signal_number: int | None) -> str:
    """Return how a run ended, such as "exit". Used for a run whose process has sent no reply and
    was not killed by the supervisor. The process ended with `exit_code` or by the signal
    `signal_number`. The other parameter is None.
    """
    if signal_number == signal.SIGSYS:
        return "policy"
    if signal_number == signal.SIGXCPU:
        return "cpu_time"
    if signal_number == signal.SIGKILL or exit_code == 0:
        return "sandbox_lost"  # killed from outside, or left without an answer
    return "exit" if signal_number is None else "signal"


def decode_status(status: int) -> tuple[int | None, int | None]:
    """Return the exit code and the signal in a status that `wait` has returned. One of the two is
    None.
    """
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


STATUS_BYTES = 16384
"""Maximum number of bytes that are read from a status file. The Linux kernel writes fewer bytes,
even for a process with a thousand groups.
"""

STATE = b"\nState:"
"""The beginning of the status field that follows the name of the process on every kernel."""


def peak_bytes(pid: int) -> int | None:
    """Return the peak resident memory of a process in bytes, or None if the operating system does
    not show it.
    """
    return size(field(status(pid), b"VmHWM"))


def is_sealed(pid: int, own_filters: int | None) -> bool:
    """Return whether a child has sealed itself. For this, the operating system must show that the
    child has dropped its privileges and installed a system-call filter of its own.

    In a container or a hardened service, every process inherits a filter. Therefore the child must
    have more filters than this process, which has `own_filters`.
    """
    shown = status(pid)
    return field(shown, b"NoNewPrivs") == b"1" and is_filtered(shown, own_filters)


def is_filtered(shown: bytes, own_filters: int | None) -> bool:
    """Return whether a process has more system-call filters than this process, which has
    `own_filters`. `shown` is what `status` has returned for the process. If the kernel does not
    show one of the two numbers, it is enough that the process has a filter.
    """
    filters = field(shown, b"Seccomp_filters")
    has_more = filters is None or own_filters is None or int(filters) > own_filters
    return field(shown, b"Seccomp") == b"2" and has_more


def own_filters() -> int | None:
    """Return the number of this process's system-call filters, or None on Linux before 5.9."""
    filters = field(status("self"), b"Seccomp_filters")
    return None if filters is None else int(filters)


def status(pid: int | str) -> bytes:
    """Return a process's status in /proc from the state field on, or b"" if the process is gone.

    The part before the state field is left out, because it contains the name, which the process
    chooses. gVisor does not escape line ends in the name, so a name could imitate any field.
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
    """Return the value of the field `name` in a process's status, or None if the field is missing.
    `shown` is what `status` has returned.
    """
    _, found, rest = shown.partition(b"\n" + name + b":")
    return rest.partition(b"\n")[0].strip() if found else None


def size(value: bytes | None) -> int | None:
    """Return the value of a status field, such as `1024 kB`, in bytes. Return None if `value` is
    None.
    """
    return None if value is None else int(value.split()[0]) * 1024


def kill_below(pid: int) -> set[int]:
    """Kill all descendants of the process `pid`, but not `pid` itself, and return their process
    ids. If there are any descendants, also stop `pid`, because the caller kills it next.

    Used by the jail's supervisor, which is the subreaper of all processes below it. The descendants
    are found by their parents and not by their user, because on a host the operator's own processes
    have the same user. Each process is stopped before its children are listed, so no child is
    missed. Each process is killed through a descriptor, so no other process that has got the same
    id meanwhile is killed.
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
    # The deepest first: once a parent has died, its children have another parent.
    for child, parent in reversed(found.items()):
        _signal(child, parent, signal.SIGKILL)
    return set(found)


def _children(pid: int) -> list[int]:
    """Return the process ids of all children of a process, also of those that threads other than
    its first have forked. *Source*: proc_pid_task(5).
    """
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as listed:
                children += map(int, listed.read().split())
    except OSError:
        pass
    return children


def _signal(pid: int, parent: int | None, number: int) -> None:
    with suppress(OSError), held(os.pidfd_open(pid)) as process:
        if parent is None or pid in _children(parent):
            signal.pidfd_send_signal(process, number)
