"""The chain of a session: which process holds its variables, and which has the next call.

Guest side, used by the supervisor. There are at most two of them when nothing runs, both stopped:
the head, in which the last call that stayed was run, and the next link, its copy, which will run
the following one (see `link` for how they come to be). Where that one is killed, the head makes
another copy, and the variables are those from before the call.

What these processes say is a stranger's word: their programs were the session's. Believed is what
the kernel adds to it, who sent it. Invariant: whatever they do, nothing here waits for them for
longer than a few seconds, and the worst that comes of it is that the variables are gone.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable

from fumehood.guest.container import processes
from fumehood.guest.container.link import AGAIN, DESCRIPTORS, READY, TAKE

AGAIN_PATIENCE_S = 3.0
"""For the head to make another copy."""

MAX_WORDS = 4096
"""Read at once, of what the links have said; more do not fit the socket."""

END_PATIENCE_S = 1.0
"""For what a program started to be ended before its process makes another copy."""

_CREDENTIALS = struct.Struct("3i")


class Chain:
    """The processes that keep a session's variables, if there are any."""

    def __init__(self, reap: Callable[[], None]) -> None:
        self._reap = reap
        self._orders, self.next_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._orders.setblocking(False)
        self.again_end, self._again = os.pipe()
        os.set_blocking(self._again, False)
        self._head: int | None = None
        self._next: int | None = None

    @property
    def head(self) -> int | None:
        """The process that has the variables; None where there are none."""
        return self._head

    @property
    def pids(self) -> set[int]:
        """Of the processes that are to live on."""
        return {pid for pid in (self._head, self._next) if pid is not None}

    def threads(self) -> int:
        """How many threads they have together, as the kernel counts processes."""
        return sum(processes.threads_of(pid) for pid in self.pids)

    def begin(self, *descriptors: int) -> int | None:
        """Give a call to the next link: its process id; None where there is none."""
        if self._next is None:
            return None
        pid, self._next = self._next, None
        rights = array.array("i", descriptors)
        assert len(descriptors) == DESCRIPTORS
        self._take_back()
        try:
            self._orders.sendmsg([TAKE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            os.kill(pid, signal.SIGCONT)
        except OSError:
            return None
        return pid

    def settle(self, stayed: int | None) -> str:
        """After a call: find who goes on, stop them, end all others; what became of the variables.

        `stayed` is the process of the call, where it said that it is done and lives.
        """
        before = self._head
        if stayed is not None:
            self._head, self._next = stayed, self._newest(stayed)
            if self._go_on(before):
                return "kept"
        self._head, self._next = before, None
        if before is not None and self._go_on():
            return "rolled_back"
        self._head = self._next = None
        self._end_the_others()
        return "reset" if before is not None or stayed is not None else "rolled_back"

    def look(self) -> bool:
        """After a call that was none of the chain's: stop both again; whether all is well."""
        if not self.pids:
            return True
        if all(processes.is_alive(pid) for pid in self.pids) and self._next is not None:
            self._stop()
            return True
        self._head = self._next = None
        return False

    def _go_on(self, spared: int | None = None) -> bool:
        """Whether head and next link are there, at last, with nobody beside them.

        `spared` is another head, which may still be needed.
        """
        self._stop()
        self._end_the_others(spared)
        if self._head is None or not processes.is_alive(self._head):
            return False
        if self._next is None or not processes.is_alive(self._next):
            self._next = self._made_again(self._head)
            self._stop()
            self._end_the_others(spared)
        return self._next is not None and processes.is_alive(self._next)

    def _made_again(self, head: int) -> int | None:
        """Have the head make another copy, for which it is woken."""
        self._newest(head)  # what was said before is over
        self._take_back()  # or the copy takes an order whose call is over, before it is stopped
        while select.select([self.again_end], [], [], 0)[0]:
            os.read(self.again_end, 1)
        try:
            os.write(self._again, AGAIN)
            os.kill(head, signal.SIGCONT)
        except OSError:
            return None
        give_up = time.monotonic() + AGAIN_PATIENCE_S
        while (left_s := give_up - time.monotonic()) > 0:
            select.select([self._orders], [], [], left_s)
            found = self._newest(head)
            if found is not None:
                return found
            if not processes.is_alive(head):
                return None
        return None

    def _newest(self, head: int) -> int | None:
        """The last process, not the head, that said it is ready: by the kernel's word who it is."""
        found = None
        for _ in range(MAX_WORDS):
            try:
                word, ancillary, _, _ = self._orders.recvmsg(
                    len(READY), socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:
                break
            if not word:
                break
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid, _, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
                    if word == READY and pid != head:
                        found = pid
        is_there = found is not None and processes.is_alive(found)
        return found if is_there and processes.is_stranger(found or 0) else None

    def _stop(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _take_back(self) -> None:
        """A link that was killed at once has left its order to the one after it."""
        with contextlib.suppress(BlockingIOError):
            while True:
                _, ancillary, _, _ = self.next_end.recvmsg(
                    len(TAKE), socket.CMSG_SPACE(DESCRIPTORS * 4), socket.MSG_DONTWAIT
                )
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        for descriptor in array.array("i", data):
                            os.close(descriptor)

    def _end_the_others(self, spared: int | None = None) -> None:
        """As far as it takes a moment; the supervisor goes on until none is left."""
        give_up = time.monotonic() + END_PATIENCE_S
        kept = self.pids | ({spared} if spared is not None else set())
        while processes.kill_all(kept) and time.monotonic() < give_up:
            self._reap()
            time.sleep(0.0005)  # killed is not yet dead, and dead not yet gone
