"""Blocking calls in threads: each with a deadline, and never more than a fixed number at a time.

Host side. A call that hangs keeps its thread until it ends by itself, and the other calls share the
rest. `anyio.to_thread` cannot do this: a call abandoned there gives its limiter back while its
thread still runs, and its threads keep the process alive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio

Answer = TypeVar("Answer")


class _Job(Generic[Answer]):
    """A call in a thread, and the future of its end."""

    def __init__(self, call: Callable[[], Answer], unwanted: Callable[[Answer], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._unwanted = unwanted
        self._lock = threading.Lock()
        self._abandoned = False
        self.answer: Answer
        self.error: BaseException | None = None
        self._done = False

    def run(self, at_end: Callable[[], None]) -> None:
        """Run the call, in the thread."""
        try:
            self.answer = self._call()
        except BaseException as error:  # raised again in the awaiting task
            self.error = error
        with self._lock:
            self._done = True
            abandoned = self._abandoned
        if abandoned:
            self._throw_away()
        with suppress(RuntimeError):  # the loop is closed: no task is waiting any more
            self._loop.call_soon_threadsafe(self._tell, at_end)

    def abandon(self) -> None:
        """Give up on the answer. Its resources are released now, or when it comes."""
        with self._lock:
            self._abandoned = True
            done = self._done
        if done:
            self._throw_away()

    def _throw_away(self) -> None:
        if self.error is None:
            with suppress(Exception):
                self._unwanted(self.answer)

    def _tell(self, at_end: Callable[[], None]) -> None:
        at_end()
        if not self.ended.done():
            self.ended.set_result(None)


class BoundedThreads:
    """At most `most` daemon threads at a time, one for each call, also after their deadlines."""

    def __init__(self, most: int, name: str) -> None:
        self._free = anyio.Semaphore(most, max_value=most)
        self._name = name

    async def run(
        self,
        call: Callable[[], Answer],
        deadline_s: float,
        *,
        unwanted: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """The call's answer. A late answer is passed to `unwanted` instead.

        Raises:
            TimeoutError: no thread was free in time, or the call did not end in time.
        """
        with anyio.fail_after(deadline_s):
            await self._free.acquire()
            try:
                job = _Job(call, unwanted)
                thread = threading.Thread(
                    target=job.run, args=(self._free.release,), name=self._name, daemon=True
                )
                thread.start()
            except BaseException:
                self._free.release()
                raise
            try:
                await job.ended
            except BaseException:
                job.abandon()
                raise
        if job.error is not None:
            raise job.error
        return job.answer
