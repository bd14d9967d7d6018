"""The standby: a Node process that has started and waits for its program.

Guest side, used by the supervisor. Unlike a spare child it is the programs' user already: Node
could not give up root by itself. Invariant: it waits only while no other process of that user is
there, so no program can reach it; it is ended before any other program begins; it serves once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from fumehood.guest.container import processes
from fumehood.guest.container.prefork_pool import Child, PreforkFailed
from fumehood.guest.container.run import Run
from fumehood.protocol import framing

REQUEST = b"G" + framing.encode(
    {"program": "javascript", "keep": False, "arguments": {"standby": True}}
)
END_DEADLINE_S = 2.0


class Standby:
    """At most one Node process, with the CPU limit that it was given as root."""

    def __init__(
        self, take: Callable[[], Child | None], limit: Callable[[Child, int], None]
    ) -> None:
        self._take = take
        self._limit = limit
        self._child: Child | None = None
        self._child_cpu_s = 0
        self._expected_cpu_s: int | None = None
        """CPU limit of the last JavaScript program, and so probably of the next."""
        self._ended: set[int] = set()

    def expect(self, cpu_s: int) -> None:
        """A program of this language ran with this limit on CPU time; another may follow."""
        self._expected_cpu_s = cpu_s

    def prepare(self) -> None:
        """Start one, if one is expected and a child is there for it."""
        cpu_s = self._expected_cpu_s
        if cpu_s is None or self._child is not None:
            return
        child = self._take()
        if child is None:
            return
        try:
            self._limit(child, cpu_s)
            os.write(child.request_fd, REQUEST)
        except OSError:  # it is dead already
            child.close()
            return
        self._child, self._child_cpu_s = child, cpu_s

    def give(self, run: Run, cpu_s: int) -> Child | None:
        """The standby, for a program that it can run; for any other it is ended."""
        child = self._child
        if child is None:
            return None
        is_fit = run.program == "javascript" and cpu_s == self._child_cpu_s
        if is_fit and processes.is_alive(child.pid):
            self._child = None
            return child
        self.end()
        return None

    def end(self) -> None:
        """End it, and expect no such program any more; returns when it is gone.

        Raises PreforkFailed where it does not go.
        """
        child, self._child, self._expected_cpu_s = self._child, None, None
        if child is None:
            return
        self._ended.add(child.pid)
        child.close()
        give_up = time.monotonic() + END_DEADLINE_S
        try:
            while time.monotonic() < give_up:  # its zygote reaps it
                os.kill(child.pid, signal.SIGKILL)
                time.sleep(0.0005)
        except ProcessLookupError:
            return
        raise PreforkFailed("the standby Node process could not be ended")

    def has_ended(self, pid: int) -> bool:
        """Note the end of a process; whether it was a standby, and no program."""
        if self._child is not None and self._child.pid == pid:
            self._child.close()
            self._child = self._expected_cpu_s = None  # it ended by itself: not another one
            return True
        was_one = pid in self._ended
        self._ended.discard(pid)
        return was_one
