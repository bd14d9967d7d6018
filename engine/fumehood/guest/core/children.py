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
    """Discard everything that was received on `wakeup`, the socket that `watch` returned. The
    caller must call this before `reap`, so that no child's end is missed.
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
    """Return two values: how a run ended, such as "ok", and the claim to report to the host.
    `reply` is the message of the run's child. If `reply` has an error whose kind is not in
    `CLAIMABLE`, the run counts as ended by an exception.
    """
    error = reply.get("error")
    if error is None and isinstance(reply.get("result"), dict):
        return "ok", {"result": reply["result"]}
    kind = error.get("kind") if isinstance(error, dict) else None
    if kind in CLAIMABLE:
        return kind, {"error": error}
    return "exception", {"error": error if isinstance(error, dict) else {}}


def ending_of(exit_code: int | None, signal_number: int | None) -> str:
    """Return how a run ended, such as "exit". Used if the run's process has sent no reply and was
    not killed by the supervisor. The process ended either with `exit_code` or by the signal
    `signal_number`; the other of these two parameters is None.
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
    """Return whether the child `pid` has given up its rights, as the operating system shows them.
    It must no longer be able to gain privileges, and must have installed its own system-call
    filter. `own_filters` is the number of filters of this process, or None if unknown.
    """
    shown = status(pid)
    return field(shown, b"NoNewPrivs") == b"1" and is_filtered(shown, own_filters)


def is_filtered(shown: bytes, own_filters: int | None) -> bool:
    """Return whether a process has more system-call filters than this process. `shown` is what
    `status` has returned for the process. `own_filters` is the number of this process's filters, or
    None if it is unknown. If one of the two numbers is unknown, it is enough that the process has a
    filter.
    """
    filters = field(shown, b"Seccomp_filters")
    # In a container or a hardened service, every process inherits a filter.
    has_more = filters is None or own_filters is None or int(filters) > own_filters
    return field(shown, b"Seccomp") == b"2" and has_more


def own_filters() -> int | None:
    """Return the number of this process's system-call filters, or None on Linux before 5.9."""
    filters = field(status("self"), b"Seccomp_filters")
    return None if filters is None else int(filters)


def status(pid: int | str) -> bytes:
    """Return the status of the process `pid` in /proc, or b"" if the process is gone. Everything
    before the state field is left out.
    """
    try:
        # Not `open()`, whose layers cost three times as much: this is asked for every call.
        file = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        try:
            # The part before the state contains the name, which the process chooses. gVisor does
            # not escape line ends in the name, so a name could imitate any field.
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
    """Kill all descendants of the process `pid`, and return their process ids. The process `pid`
    itself is not killed. If it has descendants, it is stopped, so the caller should kill it next.
    The caller must be the subreaper of these processes.
    """
    # The descendants are found by their parents and not by their user: on a host, the operator's
    # own processes have the same user.
    children = _children(pid)
    if not children:
        return set()
    _signal(pid, None, signal.SIGSTOP)
    parents = [pid]
    found: dict[int, int] = {}
    # Each process is stopped before its children are listed, so no child is missed. It is signalled
    # through a descriptor, so no other process is killed if its id is used again.
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
    """Return the process ids of all children of a process. This includes children that other
    threads than its first have forked. *Source*: proc_pid_task(5).
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
