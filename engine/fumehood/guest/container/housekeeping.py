"""The housekeeper: a short process of the program's user that hands over files and cleans up.

Guest side, used by the supervisor when no process of the program is left. It writes its frames
into the channel itself, while the supervisor waits for it, for a bounded time.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass
from typing import Any

from fumehood.guest.container import workspace
from fumehood.guest.container.user import become_user
from fumehood.protocol import framing

DEADLINE_S = 20.0
LEFT_OUT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Housekeeper:
    """What became of one: how many files were left out, and why it failed; then at least one."""

    left_out: int = 0
    fault: str | None = None


NOTHING_DONE = Housekeeper()


def keep_house(
    run_id: int, mounts: workspace.Mounts, *, since_ns: int | None = None
) -> Housekeeper:
    """Have files handed over and the mounts emptied, if there is anything in them.

    With `since_ns` only what has changed since then is handed over, and everything stays.
    """
    if mounts.are_clean() or (mounts.are_clean() is None and mounts.are_empty()):
        return NOTHING_DONE
    readable, writable = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(readable)
        os.close(writable)
        return Housekeeper(1, f"no housekeeper could be made: {error.strerror}")
    if pid == 0:
        _work(run_id, mounts, writable, since_ns)
    os.close(writable)
    try:
        return _await(pid, readable)
    finally:
        os.close(readable)


def _work(run_id: int, mounts: workspace.Mounts, report_fd: int, since_ns: int | None) -> None:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        os.closerange(3, report_fd)
        os.closerange(report_fd + 1, 1024)
        become_user()
        left_out = workspace.keep_house(run_id, _tell, mounts.paths, since_ns)
        os.write(report_fd, left_out.to_bytes(LEFT_OUT_BYTES, "big"))
        status = 0
    except BaseException as fault:
        os.write(2, f"housekeeper: {type(fault).__name__}: {fault}\n".encode()[:400])
    finally:
        os._exit(status)


def _await(pid: int, readable: int) -> Housekeeper:
    """Its end is told by its pipe, which closes with it."""
    give_up = time.monotonic() + DEADLINE_S
    report = b""
    while len(report) < LEFT_OUT_BYTES:
        ready, _, _ = select.select([readable], [], [], max(0.0, give_up - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return Housekeeper(1, "the workspace could not be read in time")
        chunk = os.read(readable, LEFT_OUT_BYTES)
        if not chunk:
            break
        report += chunk
    os.waitpid(pid, 0)
    if len(report) < LEFT_OUT_BYTES:
        return Housekeeper(1, "the workspace could not be emptied")
    return Housekeeper(left_out=int.from_bytes(report, "big"))


def _tell(message: dict[str, Any]) -> None:
    view = memoryview(framing.encode(message))
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            select.select([], [1], [], DEADLINE_S)
