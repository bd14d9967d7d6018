"""What the kernel tells about another process. Its own word would be no evidence.

Guest side, used by the supervisor on its children.
"""

from __future__ import annotations

import os

STATUS_BYTES = 16384
"""More than the kernel writes about a process with a thousand groups."""


def peak_bytes(pid: int) -> int | None:
    """Largest resident memory of the process so far, as the kernel counted it."""
    value = _field(_status(pid), b"VmHWM")
    return None if value is None else int(value.split()[0]) * 1024


def is_sealed(pid: int, own_filters: int | None) -> bool:
    """Look from outside: the child's own word is not enough.

    In a container or a hardened service every process has a filter from the start, so what
    counts is that the child has more than `own_filters`, those of this process.
    """
    status = _status(pid)
    if _field(status, b"Seccomp") != b"2" or _field(status, b"NoNewPrivs") != b"1":
        return False
    filters = _field(status, b"Seccomp_filters")
    return filters is None or own_filters is None or int(filters) > own_filters


def own_filters() -> int | None:
    """How many system-call filters this process has; kernels before 5.9 do not tell."""
    filters = _field(_status("self"), b"Seccomp_filters")
    return None if filters is None else int(filters)


def _status(pid: int | str) -> bytes:
    """What the kernel shows of a process; nothing where it is gone."""
    try:
        # Not `open()`, whose layers cost three times as much: this is asked for every call.
        file = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        try:
            return os.read(file, STATUS_BYTES)
        finally:
            os.close(file)
    except OSError:
        return b""


def _field(status: bytes, name: bytes) -> bytes | None:
    """One field, whose name stands at the start of a line; a process's own name, in the first line,
    has its line ends escaped by the kernel.
    """
    _, found, rest = status.partition(b"\n" + name + b":")
    return rest.partition(b"\n")[0].strip() if found else None
