"""The handle of a running call: its output and progress for listeners, and its cancellation.

Host side, made by the engine for each call, and passed through the pipeline to the executors.
Nothing here waits; events without a listener are dropped. Invariant: a call is cancelled at most
once, and only while a part of it can still be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from fumehood.core.errors import EngineError
from fumehood.executors.outcome import Outcome
from fumehood.sandbox.wall import FileSink, OnCall, OnEnding, OnOutput, OnProgress, RunSinks

MAX_REPORTS = 1000
"""Progress reports of one call; later ones are dropped."""


class CallHandle:
    """One running call. The pipeline calls `attach`, `begin` and `close`."""

    __slots__ = (
        "_cancelling_before", "_is_over", "_on_begun", "_on_output", "_on_progress",
        "_on_retrying", "_on_waiting", "_over", "_reports", "_task", "answered_call", "drained",
        "has_output", "is_cancelled", "is_delivered_later", "output", "partial",
    )  # fmt: skip

    def __init__(
        self,
        *,
        output: OnOutput | None = None,
        progress: OnProgress | None = None,
        begun: Callable[[], None] | None = None,
        retrying: Callable[[int, int, EngineError], None] | None = None,
        drained: Callable[[], Awaitable[None]] | None = None,
        waiting: Callable[[bool], None] | None = None,
    ) -> None:
        self._on_output = output
        self.output = self._pass_on if output is not None else None
        self.has_output = False
        """Whether its followers have got output: what they have read cannot be taken back."""
        self.drained = drained
        """Waits until little of the output waits for the disk."""
        self.partial: Outcome | None = None
        """The partial outcome of a cancelled run, if its executor knows it."""
        self.is_cancelled = False
        """Whether its caller has cancelled it."""
        self.answered_call: str | None = None
        """The call whose stored answer its caller gets: its own, or the one that it repeats."""
        self.is_delivered_later = False
        """Whether the face itself says when the caller has that answer (`Engine.delivered`)."""
        self._over: asyncio.Event | None = None
        self._on_progress = progress
        self._on_begun = begun
        self._on_retrying = retrying
        self._on_waiting = waiting
        self._reports = 0
        self._task: asyncio.Task[object] | None = None
        self._cancelling_before = 0
        self._is_over = False

    @property
    def over(self) -> asyncio.Event:
        """Set when nothing of the call runs any more. Created on first use."""
        if self._over is None:
            self._over = asyncio.Event()
            if self._is_over:
                self._over.set()
        return self._over

    def attach(self) -> None:
        """Note that the current task runs the call."""
        self._task = asyncio.current_task()
        self._cancelling_before = self._task.cancelling() if self._task is not None else 0

    def begin(self) -> None:
        """Note that the call has passed every gate; it waits for its place, then it runs."""
        on_begun, self._on_begun = self._on_begun, None
        if on_begun is not None:
            on_begun()

    def report(self, percent: float, message: str) -> None:
        """Pass on the tool's progress. From any thread."""
        self._reports += 1
        if self._on_progress is not None and self._reports <= MAX_REPORTS:
            self._on_progress(percent, message)

    @contextlib.contextmanager
    def waiting_for_human(self) -> Iterator[None]:
        """Note that the call waits for an approval, and for the answer that follows it."""
        if self._on_waiting is None:
            yield
            return
        self._on_waiting(True)
        try:
            yield
        finally:
            self._on_waiting(False)

    def _pass_on(self, stream: str, text: str) -> None:
        self.has_output = True
        if self._on_output is not None:
            self._on_output(stream, text)

    def retrying(self, retry_count: int, max_retries: int, error: EngineError) -> None:
        """Pass on that an attempt failed and another one follows."""
        if self._on_retrying is not None:
            self._on_retrying(retry_count, max_retries, error)

    def for_fallback(self) -> CallHandle:
        """A handle for the call of another tool in this one's place, in the same task.

        Its events are this call's. Cancelling this call also ends it.
        """
        return CallHandle(
            output=self.output,
            progress=self._on_progress,
            begun=self.begin,
            retrying=self._on_retrying,
            drained=self.drained,
        )

    def sinks(
        self,
        *,
        files: FileSink | None = None,
        output: OnOutput | None = None,
        ending: OnEnding | None = None,
        call: OnCall | None = None,
    ) -> RunSinks:
        """The sinks for a run behind a wall: the call's own and those of its executor."""
        return RunSinks(
            progress=self.report,
            files=files,
            output=output,
            ending=ending,
            call=call,
            is_live=self.output is not None or self._on_progress is not None,
        )

    def cancel(self) -> bool:
        """Cancel the call. False if nothing of it can be ended any more."""
        if self._is_over or self._task is None:
            return False
        if not self.is_cancelled:
            self.is_cancelled = True
            self._task.cancel()
        return True

    def close(self) -> bool:
        """Note that nothing of the call runs any more. Returns whether its caller cancelled it.

        Also False if the task is cancelled from outside: that cancellation continues.
        """
        if not self._is_over:
            self._is_over = True
            if self._over is not None:
                self._over.set()
            if self.is_cancelled and self._task is not None:
                self._task.uncancel()
        if not self.is_cancelled:
            return False
        return self._task is None or self._task.cancelling() <= self._cancelling_before
