"""The mark of a sandbox's processes where the host gives no namespaces.

Used by the guest and by the host; reads only /proc. A mark is a limit for realtime scheduling
(RLIMIT_RTTIME), which no such process can use. The processes of a guest have the hard limit `mark`,
and its programs have `mark - 1`. Every descendant inherits it. It can only be lowered, and the
system-call filter refuses that to programs. *Source*: getrlimit(2), proc_pid_limits(5).
"""

from __future__ import annotations

import os

_LINE = b"\nMax realtime timeout"
_LIMITS_BYTES = 4096


def mark_of(pid: int) -> int | None:
    """Return the mark of a process, or None if it has none or is gone."""
    try:
        file = os.open(f"/proc/{pid}/limits", os.O_RDONLY | os.O_CLOEXEC)
        try:
            shown = os.read(file, _LIMITS_BYTES)
        finally:
            os.close(file)
    except OSError:
        return None
    _, _, rest = shown.partition(_LINE)
    words = rest.partition(b"\n")[0].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else None


def marked(mark: int) -> list[int]:
    """Return the ids of the processes of the sandbox with this mark: those of its guest, and those
    of its programs.
    """
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if mark_of(pid) in (mark, mark - 1)]
