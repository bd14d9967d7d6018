"""The prefork pools: spare children of each zygote, ready or being made, and the standby Node
process.

Guest side, used by the supervisor. A spare child is a forked process that waits for a program. It
runs as root until its program arrives, so no program can touch it. Invariants: a child is taken
once, and only after it has reported that it is ready; no more of a standard stream than its limit
is kept or forwarded.
"""

from __future__ import annotations

import codecs
import os
import resource
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fumehood.guest.container import processes
from fumehood.guest.container.processes import KILL_CPU_S, USER_ID, Patience
from fumehood.guest.container.zygote import NOTICE_BYTES, PRELOAD, Notice, order_child
from fumehood.guest.core import kernel
from fumehood.guest.core.pipes import CHUNK_BYTES, MAX_REPLY_DEPTH
from fumehood.protocol import framing

if TYPE_CHECKING:
    from fumehood.guest.container.run import Run

READY_BYTES = 4096

FAT_SPARES = 1
"""Number of spare children of the fat zygote, which has loaded the image's modules. Such a child
needs many times the memory of a child of the thin zygote, which has loaded only the standard
library.
"""


class PreforkFailed(Exception):
    """No more children can be forked, so the container is unusable."""


@dataclass(eq=False)
class Child:
    """A child of a zygote. The object exists from the time when the zygote is ordered to fork the
    child until the operating system reports the child's end.
    """

    request_fd: int
    reply_fd: int
    stdout: Stream
    stderr: Stream
    pid: int = 0
    decoder: framing.Decoder = field(
        default_factory=lambda: framing.Decoder(READY_BYTES, MAX_REPLY_DEPTH)
    )

    def close(self) -> None:
        """Close the supervisor's ends of the child's pipes."""
        for descriptor in (
            self.request_fd, self.reply_fd, self.stdout.descriptor, self.stderr.descriptor,
        ):  # fmt: skip
            if descriptor >= 0:
                os.close(descriptor)
        self.request_fd = self.reply_fd = self.stdout.descriptor = self.stderr.descriptor = -1

    def limit(self, which: int, value: int) -> None:
        """Lower one of the child's resource limits to `value`. `which` is the number of the
        resource (RLIMIT).

        The child must still run as root. Raises OSError if this fails.
        """
        resource.prlimit(self.pid, which, (value, value))


def make_child() -> tuple[Child, list[int]]:
    """Create the pipes of a child that will be forked. Return the child, and the descriptors of its
    ends of the pipes, in this order: request, reply, stdout, stderr.
    """
    request_read, request_write = os.pipe()
    # The other pipes are created as the programs' user, so that a program can open /dev/stdout.
    with kernel.files_made_as(USER_ID):
        others = [os.pipe() for _ in range(3)]
    ours = [request_write, *(read for read, _ in others)]
    for descriptor in ours:
        os.set_blocking(descriptor, False)
    child = Child(
        request_fd=ours[0],
        reply_fd=ours[1],
        stdout=Stream("stdout", ours[2]),
        stderr=Stream("stderr", ours[3]),
    )
    return child, [request_read, *(write for _, write in others)]


@dataclass(frozen=True, slots=True)
class Zygote:
    """A zygote, and the socket for orders to it."""

    pid: int
    orders: socket.socket


class PreforkPool:
    """A pool of forked children: orders a zygote to fork them, and keeps them until programs need
    them.
    """

    def __init__(
        self,
        zygote: Zygote,
        spares: int,
        selector: selectors.BaseSelector,
        chain_ends: tuple[int, int],
        on_ready: Callable[[], None],
        on_end: Callable[[Notice], None],
    ) -> None:
        self.zygote_pid = zygote.pid
        self._spares = spares
        self._chain_ends = chain_ends
        self._orders = zygote.orders
        self._selector = selector
        self._on_ready = on_ready
        self._on_end = on_end
        self._ordered: deque[Child] = deque()  # in the order in which the zygote answers
        self._coming: dict[int, Child] = {}
        self._ready: deque[Child] = deque()
        os.set_blocking(self._orders.fileno(), False)
        selector.register(self._orders, selectors.EVENT_READ, self.receive)

    def stock(self, wanted: int | None = None) -> None:
        """Order children from the zygote, until the pool has `wanted` children. Ready children and
        children that were already ordered are included in this number.

        If `wanted` is None, use the pool's number of spares.
        """
        wanted = self._spares if wanted is None else wanted
        for _ in range(wanted - len(self._ordered) - len(self._coming) - len(self._ready)):
            self._order()

    def preload(self) -> None:
        """Make the zygote load its modules, without waiting until they are loaded."""
        self._orders.sendall(PRELOAD)

    @property
    def pids(self) -> set[int]:
        """The process ids of the pool's children, as far as they are already known."""
        return {child.pid for child in (*self._coming.values(), *self._ready)}

    @property
    def is_settled(self) -> bool:
        """Whether the zygote has forked all ordered children, so that the process ids of all
        children are known.
        """
        return not self._ordered

    def take(self) -> Child | None:
        """Remove a ready child from the pool and return it. Return None if no child is ready."""
        return self._ready.popleft() if self._ready else None

    def _order(self) -> None:
        child, theirs = make_child()
        try:
            order_child(self._orders, *theirs[:2], *self._chain_ends, *theirs[2:])
        except ConnectionError:
            raise PreforkFailed("the zygote is gone") from None
        for descriptor in theirs:
            os.close(descriptor)
        self._ordered.append(child)

    def receive(self) -> None:
        """Handle the notices of the zygote. Raises PreforkFailed if the zygote is gone or a child
        has died before it was used.
        """
        while True:
            try:
                data = self._orders.recv(NOTICE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:  # the zygote died with an unread order
                data = b""
            if len(data) != NOTICE_BYTES:
                raise PreforkFailed("the zygote is gone")
            notice = Notice.unpack(data)
            if notice.has_ended:
                self._on_child_end(notice)
            else:
                self._register(notice.pid)

    def _register(self, pid: int) -> None:
        child = self._ordered.popleft()
        child.pid = pid
        self._coming[pid] = child
        self._selector.register(
            child.reply_fd, selectors.EVENT_READ, lambda: self._on_ready_message(child)
        )

    def _on_child_end(self, ended: Notice) -> None:
        """Handle the end of a child. Raises PreforkFailed if the child is still in the pool."""
        if ended.pid in self.pids:
            raise PreforkFailed("a child died before it was used")
        self._on_end(ended)

    def _on_ready_message(self, child: Child) -> None:
        try:
            chunk = os.read(child.reply_fd, READY_BYTES)
        except BlockingIOError:
            return
        if not chunk:  # the child is dead; the zygote will report its end
            self._unwatch(child)
            return
        for message in child.decoder.feed(chunk):
            if message != {"ready": True}:
                raise PreforkFailed(str(message.get("fault", "a child was not ready"))[:200])
            self._unwatch(child)
            del self._coming[child.pid]
            self._ready.append(child)
            self._on_ready()

    def _unwatch(self, child: Child) -> None:
        if child.reply_fd in self._selector.get_map():
            self._selector.unregister(child.reply_fd)


class PreforkPools:
    """The prefork pools of the thin and the fat zygote.

    The thin zygote loads only the standard library. The fat zygote also loads the modules that the
    image preloads. If there are no such modules, there is no fat zygote.
    """

    def __init__(self, thin: PreforkPool, fat: PreforkPool | None) -> None:
        self.thin = thin
        self.fat = fat or thin
        self.is_fat_loaded = fat is None
        """Whether the fat zygote was ordered to load its modules, or does not exist."""
        self._all = (thin,) if fat is None else (thin, fat)

    def load_fat(self) -> None:
        """Make the fat zygote load its modules, unless it was already ordered to do so."""
        if not self.is_fat_loaded:
            self.is_fat_loaded = True
            self.fat.preload()

    def stock(self) -> None:
        """Order children in all pools until each pool has its number of spares.

        If the fat zygote was not yet ordered to load its modules, its pool is skipped.
        """
        for pool in self._all if self.is_fat_loaded else (self.thin,):
            pool.stock()

    def receive(self) -> None:
        """Handle the notices of all zygotes. Raises PreforkFailed as `PreforkPool.receive` does."""
        for pool in self._all:
            pool.receive()

    @property
    def zygote_pids(self) -> tuple[int, ...]:
        """The process ids of all zygotes."""
        return tuple(pool.zygote_pid for pool in self._all)

    @property
    def pids(self) -> set[int]:
        """The process ids of all children that are not taken, as far as they are already known."""
        return set().union(*(pool.pids for pool in self._all))

    @property
    def is_settled(self) -> bool:
        """Whether the zygotes have forked all ordered children."""
        return all(pool.is_settled for pool in self._all)


FRAME_CHARACTERS = 32 * 1024


class Stream:
    """The supervisor's end of a program's standard output or error."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor
        self.received_bytes = 0
        self.is_over = False
        """Whether the program has written more than its limit."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def read(self, limit_bytes: int) -> bool:
        """Read the data that is available. Return False if there is none, or if the other end is
        closed.

        At most `limit_bytes` bytes of the whole stream are kept. The rest is dropped.
        """
        try:
            chunk = os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            return False
        room = max(0, limit_bytes - self.received_bytes)
        self.received_bytes += len(chunk)
        self.is_over = self.received_bytes > limit_bytes
        self._text += self._decoder.decode(chunk[:room])
        return True

    def take(self, *, last: bool = False) -> list[str]:
        """Return the text that was read since this method was last called, in pieces that fit into
        a frame.

        If the text ends with an incomplete character, its bytes are kept until the next call. If
        `last` is True, nothing is kept.
        """
        if last and not self.is_over:  # a character that the limit has cut is not invalid UTF-8
            self._text += self._decoder.decode(b"", final=True)
        text, self._text = self._text, ""
        return [
            text[start : start + FRAME_CHARACTERS]
            for start in range(0, len(text), FRAME_CHARACTERS)
        ]


REQUEST = b"G" + framing.encode(
    {"program": "javascript", "keep": False, "arguments": {"standby": True}}
)


class Standby:
    """Keeps at most one standby: a Node process that has started before its program is known. It
    runs only one program. Before any other program starts, it is killed.

    The standby already runs as the programs' user, because Node cannot give up root by itself. So
    it must wait only while no program is running that could access it.
    """

    def __init__(
        self, take: Callable[[], Child | None], limit: Callable[[Child, int], None]
    ) -> None:
        self._take = take
        self._limit = limit
        self._child: Child | None = None
        self._child_cpu_s = 0
        self._expected_cpu_s: int | None = None
        """CPU limit in seconds of the last JavaScript program. None if no JavaScript program is
        expected.
        """
        self._ended: set[int] = set()

    def expect(self, cpu_s: int) -> None:
        """Record that a JavaScript program runs now, with the CPU limit `cpu_s` in seconds. From
        now on, another JavaScript program with the same limit is expected.
        """
        self._expected_cpu_s = cpu_s

    def prepare(self) -> None:
        """Start a standby from a spare child. Do nothing if no JavaScript program is expected, if
        there is already a standby, or if no spare child is ready.
        """
        cpu_s = self._expected_cpu_s
        if cpu_s is None or self._child is not None:
            return
        child = self._take()
        if child is None:
            return
        self._limit(child, cpu_s)
        os.write(child.request_fd, REQUEST)
        self._child, self._child_cpu_s = child, cpu_s

    def give(self, run: Run, cpu_s: int) -> Child | None:
        """Return the standby if it can run the program of `run`. Otherwise, kill the standby and
        return None.

        `cpu_s` is the program's CPU limit in seconds, which must be the standby's limit too.
        """
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
        """Kill the standby, and wait until it is gone. From now on, no JavaScript program is
        expected.

        Raises PreforkFailed if the standby does not end.
        """
        child, self._child, self._expected_cpu_s = self._child, None, None
        if child is None:
            return
        self._ended.add(child.pid)
        child.close()
        patience = Patience(KILL_CPU_S)
        try:
            processes.send(child.pid, signal.SIGKILL)
            while patience.rest():  # its zygote reaps it
                processes.send(child.pid, 0)
        except ProcessLookupError:
            return
        raise PreforkFailed("the standby Node process could not be ended")

    def has_ended(self, pid: int) -> bool:
        """Record the end of the process `pid`. Return whether it was a standby."""
        if self._child is not None and self._child.pid == pid:
            self._child.close()
            self._child = self._expected_cpu_s = None  # it ended by itself: do not start another
            return True
        was_one = pid in self._ended
        self._ended.discard(pid)
        return was_one
