"""Find and kill the processes of the container's program, whatever it has started.

Guest side, used by the supervisor, which is the first process of its PID namespace: everything
in sight belongs to this container. Invariant: a process whose ids are not all root's is the
program's; this guest's own are root's until they have nothing to do but run a program. Never
used on a host.
"""

from __future__ import annotations

import os
import signal


def strangers() -> list[int]:
    """Process ids of all that are not root's, zombies excepted."""
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
    state = uids = ""
    try:
        with open(f"/proc/{name}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("State:"):
                    state = line.split()[1]
                elif line.startswith("Uid:"):
                    uids = line.split(":", 1)[1]
                    break
    except OSError:
        return False
    return state not in ("Z", "X") and set(uids.split()) != {"0"}
