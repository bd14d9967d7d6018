"""Batches: several calls in one request, each run by the pipeline as if it had been sent alone.

Host side. `engine.py` creates batches, whose calls go through `Engine.run`. Invariants: each member
has exactly one answer, at the member's own position; a member's failure never affects another
member; no member starts after the batch was ended; when `run` returns, no member is running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from fumehood.batches.model import BatchOptions, RawBatch
from fumehood.core.call import MAX_TOOL_CHARACTERS, CallBody
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    Cancelled,
    EngineError,
    InternalError,
    InvalidParams,
    OutputLimitExceeded,
    Timeout,
)
from fumehood.core.limits import MB
from fumehood.executors.base import CallHandle
from fumehood.executors.outcome import MAX_DATA_BYTES
from fumehood.observe.log import Logger, log_fault
from fumehood.pipeline.incoming import as_sent, parse_call_body, parsed
from fumehood.protocol.messages import encode_envelope

NOT_BEGUN = "This call was not begun, so it can be sent again."

Parse = Callable[[Any], tuple[str, CallBody]]
"""Returns the tool and the body of a member. Raises EngineError if the member is malformed."""

Run = Callable[[str, CallBody, CallHandle], Awaitable[Envelope]]
"""Runs one member, given its tool, its body and a handle to cancel it."""

Refuse = Callable[[EngineError, str | None], Envelope]
"""Builds the answer to a member that is not run, given the error and the member's tool."""


class Batch:
    """A batch: several calls (the members) that are made together. `run` must be awaited exactly
    once; `cancel` may be called at any time.
    """

    def __init__(
        self,
        members: Sequence[Any],
        options: BatchOptions,
        *,
        parse: Parse,
        run: Run,
        refuse: Refuse,
        delivered: Callable[[CallHandle], None],
        log: Logger,
    ) -> None:
        self._members = members
        self._options = options
        self._parse = parse
        self._run = run
        self._refuse = refuse
        self._delivered = delivered
        self._log = log
        self._ended: list[CallHandle] = []
        self._answers: dict[int, Envelope] = {}
        self._texts: dict[int, bytes] = {}
        self._answer_bytes = 0
        self._running: set[CallHandle] = set()
        self._ended_by: EngineError | None = None

    async def run(self) -> list[Envelope]:
        """Run all members, a few at a time, and return their answers in the members' order.

        If the task is cancelled, all running members are cancelled.
        """
        options, timer = self._options, None
        if options.timeout_seconds is not None:
            words = f"The batch reached its limit of {options.timeout_seconds:g} s. {NOT_BEGUN}"
            timer = asyncio.get_running_loop().call_later(
                options.timeout_seconds, self._end, Timeout(words, retryable=True)
            )
        waiting = iter(enumerate(self._members))
        width = options.max_parallel if options.parallel_tool_calls else 1
        try:
            async with anyio.create_task_group() as group:
                for _ in range(min(width, len(self._members))):
                    group.start_soon(self._work, waiting)
        finally:
            if timer is not None:
                timer.cancel()
        if not isinstance(self._ended_by, Cancelled):  # otherwise the caller has left
            # Equal members can share one call, so none counts as delivered until all have run.
            for handle in self._ended:
                self._delivered(handle)
        return [self._answers[place] for place in range(len(self._members))]

    @property
    def texts(self) -> list[bytes]:
        """The answers as JSON, in the members' order. Valid after `run`."""
        return [self._texts[place] for place in range(len(self._members))]

    def cancel(self) -> None:
        """Cancel the running members, and start no others."""
        self._end(Cancelled(f"The batch was cancelled. {NOT_BEGUN}", retryable=True))

    def _end(self, error: EngineError) -> None:
        if self._ended_by is None:
            self._ended_by = error
        for handle in tuple(self._running):
            handle.cancel()

    async def _work(self, waiting: Iterator[tuple[int, Any]]) -> None:
        """Take the next member from `waiting`, and store its answer, until no member is left.
        `waiting` yields each member with its position.

        Several tasks run this method at the same time and share the iterator.
        """
        for place, member in waiting:
            # Refused members never yield to the event loop, so without this they would block it.
            await anyio.lowlevel.checkpoint()
            self._answers[place] = answer = await self._answer(member)
            self._texts[place] = text = encode_envelope(answer)
            self._answer_bytes += len(text)
            if self._answer_bytes > MAX_DATA_BYTES and self._ended_by is None:
                words = f"The answers of the batch are over {MAX_DATA_BYTES // MB} MB."
                self._ended_by = OutputLimitExceeded(f"{words} {NOT_BEGUN}", retryable=True)

    async def _answer(self, member: Any) -> Envelope:
        try:
            tool, body = self._parse(member)
        except EngineError as error:
            return self._refuse(error, _named_by(member))
        if self._ended_by is not None:
            return self._refuse(self._ended_by, tool)
        handle = CallHandle()
        handle.is_delivered_later = True
        self._running.add(handle)
        try:
            envelope = await self._run(tool, body, handle)
            self._ended.append(handle)
            return envelope
        except Exception as fault:  # the other members still have their answers
            log_fault(self._log, "batch.internal_error", fault)
            return self._refuse(InternalError("The engine failed internally."), tool)
        finally:
            self._running.discard(handle)


def _named_by(member: Any) -> str | None:
    """Return the tool that a malformed member names, or None."""
    tool = member.get("tool") if isinstance(member, dict) else None
    return tool if isinstance(tool, str) else None


def parse_batch(document: Any) -> RawBatch:
    """Parse the body of a batch from a JSON document. The calls in the batch are not parsed yet.

    Raises:
        InvalidParams: some fields of the batch itself are invalid; the error names each of them.
    """
    return parsed(RawBatch, document, "batch")


def parse_batch_call(document: Any) -> tuple[str, CallBody]:
    """Parse one call of a batch. Return the tool's name and the call's body.

    Raises:
        InvalidParams: some fields are invalid; the error names each of them.
    """
    tool = document.get("tool") if isinstance(document, dict) else None
    if not isinstance(tool, str) or len(tool) > MAX_TOOL_CHARACTERS:
        raise InvalidParams(
            'A call of a batch must be an object with the name of a tool: {"tool": "…", '
            '"arguments": {…}}.',
            fields=["tool"],
        )
    return tool, parse_call_body({key: document[key] for key in document if key != "tool"})


def parse_own_batch_call(call: Any) -> tuple[str, CallBody]:
    """Parse one call of a batch that this process made. Return the tool's name and the call's body.
    The call is checked as strictly as one that arrives over a socket.
    """
    # In a list, so that the call is nested as deeply as in a batch.
    return parse_batch_call(as_sent([call], "call")[0])
