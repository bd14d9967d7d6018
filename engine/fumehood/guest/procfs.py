"""What the kernel tells about another process. Its own word would be no evidence.

Guest side, used by the supervisor on its children.
"""

from __future__ import annotations

import os

STATUS_BYTES = 16384
"""More than the kernel writes about a process with a thousand groups."""


def peak_bytes(pid: int) -> int | None:
    """Largest resident memory of the process so far, as the kernel counted it."""
    value = _status(pid).get(b"VmHWM")
    return None if value is None else int(value.split()[0]) * 1024


def is_sealed(pid: int) -> bool:
    """Look from outside: the child's own word is not enough.

    In a container or a hardened service every process has a filter from the start, so what
    counts is that the child has one more than this process. Kernels before 5.9 do not tell.
    """
    status = _status(pid)
    if status.get(b"Seccomp") != b"2" or status.get(b"NoNewPrivs") != b"1":
        return False
    filters, ours = status.get(b"Seccomp_filters"), _status("self").get(b"Seccomp_filters")
    return filters is None or ours is None or int(filters) > int(ours)


def _status(pid: int | str) -> dict[bytes, bytes]:
    """The fields that the kernel shows of a process; none where it is gone."""
    try:
        # Not `open()`, whose layers cost three times as much: this is asked for every call.
        file = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        try:
            lines = os.read(file, STATUS_BYTES).splitlines()
        finally:
            os.close(file)
    except OSError:
        return {}
    fields = (line.partition(b":") for line in lines)
    return {name: value.strip() for name, _, value in fields}
