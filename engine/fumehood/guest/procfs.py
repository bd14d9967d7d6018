"""What the kernel tells about another process. Its own word would be no evidence.

Guest side, used by the supervisor on its children.
"""

from __future__ import annotations


def peak_bytes(pid: int) -> int | None:
    """Largest resident memory of the process so far, as the kernel counted it."""
    value = _status_field(pid, "VmHWM")
    return None if value is None else int(value.split()[0]) * 1024


def is_sealed(pid: int) -> bool:
    """Look from outside: the child's own word is not enough.

    In a container or a hardened service every process has a filter from the start, so what
    counts is that the child has one more than this process. Kernels before 5.9 do not tell.
    """
    if _status_field(pid, "Seccomp") != "2" or _status_field(pid, "NoNewPrivs") != "1":
        return False
    filters, ours = _status_field(pid, "Seccomp_filters"), _status_field("self", "Seccomp_filters")
    return filters is None or ours is None or int(filters) > int(ours)


def _status_field(pid: int | str, name: str) -> str | None:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(name + ":"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return None
