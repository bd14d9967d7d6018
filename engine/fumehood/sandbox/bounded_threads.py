"""Run blocking calls in threads, with a deadline for each call and a limit on the number of
threads.

Host side. A call that hangs keeps its thread until the call ends by itself; other calls share the
remaining threads. `anyio.to_thread` cannot do this: an abandoned call frees its slot while its
thread still runs, and such threads keep the process alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio

Answer = TypeVar("Answer")


class BoundedThreads:
    """Runs each call in a separate daemon thread, at most `most` calls at a time. Each thread has
    the name `name`.

    A call that has missed its deadline still counts towards `most` until its thread ends.
    """

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
        """Run `call` in a thread and return its result. Wait at most `deadline_s` seconds in total,
        for a free thread and for the end of the call.

        If the call ends after the deadline, or after the caller was cancelled, its result is passed
        to `unwanted`.

        Raises:
            TimeoutError: no thread was free in time, or the call did not end in time.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        outcome: concurrent.futures.Future[Answer] = concurrent.futures.Future()

        def work() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:  # raised again in the awaiting task
                outcome.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(finish)

        def finish() -> None:
            self._free.release()
            if not ended.done():
                ended.set_result(None)

        def throw_away(late: concurrent.futures.Future[Answer]) -> None:
            if late.exception() is None:
                unwanted(late.result())

        with anyio.fail_after(deadline_s):
            await self._free.acquire()
            try:
                threading.Thread(target=work, name=self._name, daemon=True).start()
            except BaseException:
                self._free.release()
                raise
            try:
                await ended
            except BaseException:
                outcome.add_done_callback(throw_away)  # called at once if it has ended
                raise
        return outcome.result()
