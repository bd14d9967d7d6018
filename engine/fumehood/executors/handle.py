"""The handle of a running call: it passes output and progress to listeners, and cancels the call.

Host side. The engine makes one for each call, and the pipeline passes it to the executors. Nothing
here waits; events without a listener are dropped. Invariant: a call is cancelled at most once, and
only while it still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from fumehood.core.errors import EngineError
from fumehood.executors.outcome import Outcome
from fumehood.protocol.framing import MAX_REPORTS
from fumehood.sandbox.wall import (
    FileSink,
    Network,
    OnCall,
    OnEnding,
    OnOutput,
    OnProgress,
    RunSinks,
)

HEARD_CHARACTERS = 16 * 1024
"""Characters of each stream of a running call that can be looked at."""


class CallHandle:
    """One running call. The pipeline calls `attach`, `begin` and `close`."""

    __slots__ = (
        "_cancelling_before", "_is_over", "_on_begun", "_on_output", "_on_progress",
        "_on_retrying", "_on_waiting", "_over", "_reports", "_task", "answered_call", "drained",
        "has_output", "heard", "is_cancelled", "is_delivered_later", "is_waiting", "output",
        "partial", "progress",
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
        """Whether followers have received output. It cannot be taken back, so no retry follows."""
        self.heard: dict[str, str] = {}
        """The end of what each stream has printed so far."""
        self.progress: tuple[float, str] | None = None
        """The last report: percent, and a message."""
        self.is_waiting = False
        """Whether it waits for a human."""
        self.drained = drained
        """Function that waits until the output so far is on disk, or None if it is not recorded."""
        self.partial: Outcome | None = None
        """The partial outcome of a cancelled run, if its executor knows it."""
        self.is_cancelled = False
        """Whether the caller has cancelled the call."""
        self.answered_call: str | None = None
        """Id of the call whose stored answer the caller gets: this one, or the one it repeats."""
        self.is_delivered_later = False
        """Whether the face (such as HTTP) itself calls `Engine.delivered` after the answer."""
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
        """An event that is set when the call no longer runs. Created on first use."""
        if self._over is None:
            self._over = asyncio.Event()
            if self._is_over:
                self._over.set()
        return self._over

    def attach(self) -> None:
        """Record the current task as the one that runs the call, and that `cancel` cancels."""
        self._task = asyncio.current_task()
        self._cancelling_before = self._task.cancelling() if self._task is not None else 0

    def begin(self) -> None:
        """Notify the listener, once, that the call has passed every gate. It may still queue."""
        on_begun, self._on_begun = self._on_begun, None
        if on_begun is not None:
            on_begun()

    def report(self, percent: float, message: str) -> None:
        """Pass the tool's progress to the listener. May run in any thread."""
        self._reports += 1
        if self._reports <= MAX_REPORTS:
            self.progress = percent, message
        if self._on_progress is not None and self._reports <= MAX_REPORTS:
            self._on_progress(percent, message)

    @contextlib.contextmanager
    def waiting_for_human(self) -> Iterator[None]:
        """Notify the listener while the call waits for an approval and the answer after it."""
        tell = self._on_waiting or (lambda is_waiting: None)
        self.is_waiting = True
        tell(True)
        try:
            yield
        finally:
            self.is_waiting = False
            tell(False)

    def hear(self, stream: str, text: str) -> None:
        """Keep the end of a stream, and pass a piece of it to the listener."""
        self.heard[stream] = (self.heard.get(stream, "") + text)[-HEARD_CHARACTERS:]
        if self._on_output is not None:
            self._pass_on(stream, text)

    def _pass_on(self, stream: str, text: str) -> None:
        self.has_output = True
        if self._on_output is not None:
            self._on_output(stream, text)

    def retrying(self, retry_count: int, max_retries: int, error: EngineError) -> None:
        """Notify the listener that an attempt failed and another one follows."""
        if self._on_retrying is not None:
            self._on_retrying(retry_count, max_retries, error)

    def for_fallback(self) -> CallHandle:
        """Return a handle for a fallback tool's call, which runs in this call's task.

        Its events go to this call's listeners. Cancelling this call also ends the fallback.
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
        network: Network | None = None,
    ) -> RunSinks:
        """Return the sinks for a run behind a wall: the executor's, and this call's progress."""
        return RunSinks(
            progress=self.report,
            files=files,
            output=output,
            ending=ending,
            call=call,
            network=network,
            is_live=self.output is not None or self._on_progress is not None,
        )

    def cancel(self) -> bool:
        """Cancel the call. Return False if it does not run."""
        if self._is_over or self._task is None:
            return False
        if not self.is_cancelled:
            self.is_cancelled = True
            self._task.cancel()
        return True

    def close(self) -> bool:
        """Record that the call no longer runs. Return whether its caller cancelled it.

        Return False if the task is also being cancelled from outside, so that the task ends.
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
