"""Find and kill the processes of the container's program, whatever it has started.

Guest side, used by the supervisor, which is the first process of its PID namespace: everything
in sight belongs to this container. Invariants: a process whose ids are not all root's is the
program's; this guest's own are root's until they have nothing to do but run a program. None is
taken for gone as long as it may have left another in its place. Never used on a host.
"""

from __future__ import annotations

import os
import signal


def strangers() -> list[int]:
    """Process ids of all that are not root's, or went while they were looked at.

    The dead count until they are reaped: where only the first thread of a process has ended, the
    others run on; and one that forks and ends at once, again and again, is always dead or gone when
    it is looked at, while its child was not there yet when the list was made.
    """
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_stranger(name)]


def kill_all() -> int:
    """Send SIGKILL to each of them once; how many there were."""
    found = strangers()
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found)


def _is_stranger(name: str) -> bool:
    """*Source*: proc_pid_status(5); the owner of the directory says nothing where a process is
    not dumpable.
    """
    uids = ""
    try:
        with open(f"/proc/{name}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("Uid:"):
                    uids = line.split(":", 1)[1]
                    break
    except OSError:
        return True
    return set(uids.split()) != {"0"}
