"""What the kernel reports about a process. The process's own report would be no evidence.

Guest side, used by supervisors. *Source*: proc_pid_status(5).
"""

from __future__ import annotations

import os

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
