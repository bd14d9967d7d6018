"""Live: one running call as those see it who watch it, and the way to end it.

Host side, made by the engine for each call, handed through the spine to the executors. Nothing
here waits; what nobody listens to is dropped. Invariant: a call is cancelled at most once, and
only while something of it can still be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fumehood.executors.outcome import Outcome
from fumehood.sandbox.wall import FileSink, OnEnding, OnOutput, OnProgress, RunSinks

MAX_REPORTS = 1000
"""Of progress, in one call; what comes after them is dropped."""


class CallHandle:
    """One running call. `begin` and `close` are the spine's."""

    __slots__ = (
        "_cancelling_before", "_is_over", "_on_begun", "_on_progress", "_reports", "_task",
        "is_cancelled", "output", "over", "partial",
    )  # fmt: skip

    def __init__(
        self,
        *,
        output: OnOutput | None = None,
        progress: OnProgress | None = None,
        begun: Callable[[], None] | None = None,
    ) -> None:
        self.output = output
        self.partial: Outcome | None = None
        """What a cancelled run had come to, where its executor knows."""
        self.is_cancelled = False
        """Whether its caller has asked for its end."""
        self.over = asyncio.Event()
        """Nothing of it runs any more."""
        self._on_progress = progress
        self._on_begun = begun
        self._reports = 0
        self._task: asyncio.Task[object] | None = None
        self._cancelling_before = 0
        self._is_over = False

    def attach(self) -> None:
        """The call is carried by this task."""
        self._task = asyncio.current_task()
        self._cancelling_before = self._task.cancelling() if self._task is not None else 0

    def begin(self) -> None:
        """Every gate has let it through; it waits for its place, then it runs."""
        if self._on_begun is not None:
            self._on_begun()

    def report(self, percent: float, message: str) -> None:
        """What the tool says of how far it is. From any thread."""
        self._reports += 1
        if self._on_progress is not None and self._reports <= MAX_REPORTS:
            self._on_progress(percent, message)

    def sinks(
        self,
        *,
        files: FileSink | None = None,
        output: OnOutput | None = None,
        ending: OnEnding | None = None,
    ) -> RunSinks:
        """What a run in a wall tells, besides what its executor itself wants to hear."""
        return RunSinks(
            progress=self.report,
            files=files,
            output=output,
            ending=ending,
            is_live=self.output is not None or self._on_progress is not None,
        )

    def cancel(self) -> bool:
        """Ask for its end; False where nothing of it can be ended any more."""
        if self._is_over or self._task is None:
            return False
        if not self.is_cancelled:
            self.is_cancelled = True
            self._task.cancel()
        return True

    def close(self) -> bool:
        """Nothing of it runs any more; whether its caller's cancelling is what ended it.

        False, too, where somebody else cancels the task besides: that goes on.
        """
        if not self._is_over:
            self._is_over = True
            self.over.set()
            if self.is_cancelled and self._task is not None:
                self._task.uncancel()
        if not self.is_cancelled:
            return False
        return self._task is None or self._task.cancelling() <= self._cancelling_before
