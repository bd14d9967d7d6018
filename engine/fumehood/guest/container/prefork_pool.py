"""The prefork pools: for each zygote, children that are ready and those that are on their way.

Guest side, used by the supervisor. A spare is root's until its program arrives, so no program can
touch it. Invariant: a child is taken once, and only after it has reported that it is ready.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fumehood.guest.container.stream import Stream
from fumehood.guest.container.user import USER_ID
from fumehood.guest.container.zygote import NOTICE_BYTES, PRELOAD, Notice, order_child
from fumehood.guest.core import kernel
from fumehood.protocol import framing

READY_BYTES = 4096
MAX_REPLY_DEPTH = 60
"""A little less than a reader of frames accepts."""
READY_DEADLINE_S = 10.0
FIRST_DEADLINE_S = 60.0
"""Seconds the first child may take, because the image's modules are loaded before it."""

MAX_FAILURES = 3

FAT_SPARES = 1
"""Each has pages of its own; the thin ones are many times smaller."""


class PreforkFailed(Exception):
    """No child can be made any more; the container is useless."""


@dataclass(eq=False)
class Child:
    """One child, from the order to fork it until the kernel reported its end."""

    request_fd: int
    reply_fd: int
    stdout: Stream
    stderr: Stream
    ordered_at: float
    pid: int = 0
    decoder: framing.Decoder = field(
        default_factory=lambda: framing.Decoder(READY_BYTES, MAX_REPLY_DEPTH)
    )

    def close(self) -> None:
        """Close this process's ends of its pipes."""
        for descriptor in (
            self.request_fd, self.reply_fd, self.stdout.descriptor, self.stderr.descriptor,
        ):  # fmt: skip
            if descriptor >= 0:
                os.close(descriptor)
        self.request_fd = self.reply_fd = self.stdout.descriptor = self.stderr.descriptor = -1

    def limit(self, which: int, value: int) -> None:
        """Lower one of its limits while it is still of the same user. Raises OSError."""
        resource.prlimit(self.pid, which, (value, value))


def make_child() -> tuple[Child, list[int]]:
    """A child's pipes, before it is there, and its ends of them: request, reply, two streams."""
    request_read, request_write = os.pipe()
    # The program's own streams are made as its user's, so that it can open /dev/stdout.
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
        ordered_at=time.monotonic(),
    )
    return child, [request_read, *(write for _, write in others)]


@dataclass(frozen=True, slots=True)
class Zygote:
    """A zygote, and the way to it."""

    pid: int
    orders: socket.socket


class PreforkPool:
    """Orders children from the zygote and keeps them until they are wanted."""

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
        self._patience_s = FIRST_DEADLINE_S
        self._orders = zygote.orders
        self._selector = selector
        self._on_ready = on_ready
        self._on_end = on_end
        self._ordered: deque[Child] = deque()  # in the order in which the zygote answers
        self._coming: dict[int, Child] = {}
        self._ready: deque[Child] = deque()
        self._failures = 0
        os.set_blocking(self._orders.fileno(), False)
        selector.register(self._orders, selectors.EVENT_READ, self._on_zygote)

    def stock(self, wanted: int | None = None) -> None:
        """Order the missing children; by default the spares."""
        wanted = self._spares if wanted is None else wanted
        for _ in range(wanted - len(self._ordered) - len(self._coming) - len(self._ready)):
            self._order()

    def preload(self) -> None:
        """Let the zygote load its modules, which takes a while."""
        self._orders.sendall(PRELOAD)

    def receive(self) -> None:
        """Handle the notices of the zygote. Raises PreforkFailed."""
        self._on_zygote()

    def restart_deadlines(self) -> None:
        """Restart the wait for ordered children: a program may have delayed them."""
        for child in (*self._ordered, *self._coming.values()):
            child.ordered_at = time.monotonic()

    @property
    def pids(self) -> set[int]:
        """The process ids of the pool's children, as far as they are known."""
        return {child.pid for child in (*self._coming.values(), *self._ready)}

    @property
    def is_settled(self) -> bool:
        """Whether every child is known: none is just being forked."""
        return not self._ordered

    def take(self) -> Child | None:
        """A child that is ready, which is the caller's from now on."""
        return self._ready.popleft() if self._ready else None

    def until_late(self) -> float | None:
        """The moment at which the oldest order is late."""
        children = [*self._ordered, *self._coming.values()]
        oldest = min((child.ordered_at for child in children), default=None)
        return None if oldest is None else oldest + self._patience_s

    def check_time(self, now: float) -> None:
        """Raises PreforkFailed if a child is overdue."""
        late = self.until_late()
        if late is not None and now >= late:
            raise PreforkFailed("a child was not ready in time")

    def _order(self) -> None:
        child, theirs = make_child()
        try:
            order_child(self._orders, *theirs[:2], *self._chain_ends, *theirs[2:])
        except ConnectionError:
            raise PreforkFailed("the zygote is gone") from None
        for descriptor in theirs:
            os.close(descriptor)
        self._ordered.append(child)

    def _on_zygote(self) -> None:
        while True:
            try:
                notice = Notice.unpack(self._orders.recv(NOTICE_BYTES))
            except BlockingIOError:
                return
            except ConnectionError:  # it died with an order unread
                raise PreforkFailed("the zygote is gone") from None
            except ValueError as fault:
                raise PreforkFailed(str(fault)) from None
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
        """Handle the end of a child; one that was not taken yet should have waited."""
        child = self._coming.pop(ended.pid, None)
        if child is None:
            child = next((spare for spare in self._ready if spare.pid == ended.pid), None)
            if child is None:
                self._on_end(ended)
                return
            self._ready.remove(child)
        self._unwatch(child)
        child.close()
        self._fail("a child died before it was used")

    def _on_ready_message(self, child: Child) -> None:
        try:
            chunk = os.read(child.reply_fd, READY_BYTES)
        except BlockingIOError:
            return
        if not chunk:  # dead; its exit tells the rest
            self._unwatch(child)
            return
        for message in child.decoder.feed(chunk):
            if message != {"ready": True}:
                self._fail(str(message.get("fault", "a child was not ready"))[:200])
                return
            self._failures = 0
            self._patience_s = READY_DEADLINE_S
            self._unwatch(child)
            del self._coming[child.pid]
            self._ready.append(child)
            self._on_ready()

    def _unwatch(self, child: Child) -> None:
        if child.reply_fd in self._selector.get_map():
            self._selector.unregister(child.reply_fd)

    def _fail(self, fault: str) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise PreforkFailed(fault)


class PreforkPools:
    """The pool of the thin zygote and, if the image preloads modules, that of the fat one."""

    def __init__(self, thin: PreforkPool, fat: PreforkPool | None) -> None:
        self.thin = thin
        self.fat = fat or thin
        self.is_fat_loaded = fat is None
        """Whether the fat zygote has loaded its modules, or does not exist."""
        self._all = (thin,) if fat is None else (thin, fat)

    def load_fat(self) -> None:
        """Let the fat zygote load its modules, unless it did."""
        if not self.is_fat_loaded:
            self.is_fat_loaded = True
            self.fat.preload()

    def stock(self) -> None:
        """Order the missing spares."""
        for pool in self._all if self.is_fat_loaded else (self.thin,):
            pool.stock()

    def receive(self) -> None:
        """Handle the notices of all zygotes. Raises PreforkFailed."""
        for pool in self._all:
            pool.receive()

    def restart_deadlines(self) -> None:
        """Restart the wait for ordered children."""
        for pool in self._all:
            pool.restart_deadlines()

    @property
    def zygote_pids(self) -> tuple[int, ...]:
        """The process ids of all zygotes."""
        return tuple(pool.zygote_pid for pool in self._all)

    @property
    def pids(self) -> set[int]:
        """The process ids of all children that are known and not taken."""
        return set().union(*(pool.pids for pool in self._all))

    @property
    def is_settled(self) -> bool:
        """Whether every child is known: none is just being forked."""
        return all(pool.is_settled for pool in self._all)

    def until_late(self) -> float | None:
        """The moment at which the oldest order is late."""
        moments = [pool.until_late() for pool in self._all]
        return min((moment for moment in moments if moment is not None), default=None)

    def check_time(self, now: float) -> None:
        """Raises PreforkFailed if a child is overdue."""
        for pool in self._all:
            pool.check_time(now)
