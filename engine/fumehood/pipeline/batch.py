"""Batches: several calls in one request, each run by the pipeline as if it had been sent alone.

Host side, created by the engine; below it `Calls.run`. Invariants: each member has exactly one
answer, at its own position; a member's failure never affects another; a member whose turn comes
after the batch was ended is never started; when `run` returns, no member is running.

The tool calls of an assistant's message run as one batch; `formats/` reads the message and writes
the answer. Every call of the message has exactly one result, in the order of the calls, even if it
is malformed, denied, waits for approval or names an unknown tool. If that is not possible, the
whole message is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread

from fumehood.core.call import (
    MAX_CALLS,
    MAX_KEYS,
    MAX_TOOL_CHARACTERS,
    BatchOptions,
    CallBody,
    CallOptions,
)
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    Cancelled,
    EngineError,
    InternalError,
    InvalidParams,
    OutputLimitExceeded,
    Timeout,
    ToolNotFound,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import CallHandle
from fumehood.executors.outcome import MAX_DATA_BYTES
from fumehood.formats.model import (
    MODEL_TEXT_CHARACTERS,
    HandleBody,
    HandledCalls,
    ModelCall,
)
from fumehood.formats.schemas import restored
from fumehood.formats.table import CHAT_FORMATS
from fumehood.observe.log import Logger, log_fault
from fumehood.protocol import strict_json
from fumehood.protocol.messages import encode_envelope

NOT_BEGUN = "This call was not begun, so it can be sent again."

Parse = Callable[[Any], tuple[str, CallBody]]
"""Returns the tool and the body of a member. Raises EngineError if the member is malformed."""

Run = Callable[[str, CallBody, CallHandle], Awaitable[Envelope]]
"""Runs one member, given its tool, its body and a handle to cancel it."""

Refuse = Callable[[EngineError, str | None], Envelope]
"""Builds the answer to a member that is not run, given the error and the tool that it names."""


class Batch:
    """One batch. `run` must be awaited exactly once; `cancel` may be called at any time."""

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
            # Equal members can be one call, so all have run before any counts as delivered.
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
        """Answer one member after the other. Several of these tasks share the iterator."""
        for place, member in waiting:
            # Refused members never wait, so without this they would block other callers.
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


# -- the calls of a message -----------------------------------------------------------------

MAX_REPAIRED_CHARACTERS = 8192
"""Maximum number of characters of broken JSON that are repaired in one message. For some texts, the
library's time grows with the square of their length, to a few seconds for this many."""

REPAIRED = "the model's arguments were no JSON and were repaired"

FindTool = Callable[[str], ToolDefinition | None]
"""Returns the definition of a tool by its name, or None."""

OpenBatch = Callable[[Sequence[Any], BatchOptions, Parse], Batch]
"""Creates a batch of members that `Parse` can parse."""


class MessageCalls:
    """The calls of one message. `run` is awaited once; `cancel` may be called at any time.

    `repairs` limits how many threads of an engine repair JSON at the same time.

    Raises:
        InvalidParams: by the constructor, if the message is invalid, has too many calls, or
            requests repairs and the library for them is not installed.
    """

    def __init__(
        self,
        body: HandleBody,
        find: FindTool,
        open_batch: OpenBatch,
        repairs: anyio.CapacityLimiter,
    ) -> None:
        self._format = CHAT_FORMATS[body.format]
        self._calls = self._format.calls(self._format.turn(body.message))
        if len(self._calls) > MAX_CALLS:
            raise InvalidParams(
                f"The message has {len(self._calls)} tool calls; at most {MAX_CALLS} are answered. "
                "Nothing was run.",
                fields=["message"],
            )
        self._find = find
        self._options = body.options
        self._repair = _repairer() if body.options.repair_arguments else None
        self._repairs = repairs
        self._repaired: dict[int, JsonObject] = {}
        self._call_options = CallOptions.model_validate(
            body.options.model_dump(include=set(CallOptions.model_fields))
        )
        self._batch = open_batch(
            _members(self._calls),
            BatchOptions(
                max_parallel=body.options.max_parallel,
                parallel_tool_calls=body.options.parallel_tool_calls,
            ),
            self._parse,
        )

    async def run(self) -> HandledCalls:
        """Run the calls, and return their results in the provider's format."""
        if self._repair is not None:
            await self._repair_all(self._repair)
        answers = await self._batch.run()
        envelopes = tuple(
            _flagged(envelope) if place in self._repaired else envelope
            for place, envelope in enumerate(answers)
        )
        max_length = self._options.max_length or MODEL_TEXT_CHARACTERS
        messages = self._format.results(self._calls, envelopes, max_length)
        return HandledCalls.model_construct(messages=tuple(messages), envelopes=envelopes)

    def cancel(self) -> None:
        """Cancel the running calls, and start no further ones."""
        self._batch.cancel()

    def _parse(self, member: JsonObject) -> tuple[str, CallBody]:
        call: ModelCall = member["call"]
        if not call.name or len(call.name) > MAX_TOOL_CHARACTERS:
            raise InvalidParams("The call names no tool, or has no function.", fields=["name"])
        if call.id == "":
            raise InvalidParams("The call has no id. It was not run.", fields=["id"])
        if member["is_repeated"]:
            raise InvalidParams(
                "Another call of this message has the same id. This one was not run.", fields=["id"]
            )
        allowed = self._options.tools
        if allowed is not None and call.name.partition("@")[0] not in allowed:
            raise ToolNotFound(f"There is no tool {call.name[:80]!r} in this conversation.")
        tool = self._find(call.name)
        arguments = self._arguments(call.arguments, member["place"])
        if tool is not None:
            arguments = restored(arguments, tool.parameters, self._format.dialect)
        if len(arguments) > MAX_KEYS:
            raise InvalidParams(f"The call has more than {MAX_KEYS} arguments.")
        return call.name, CallBody(arguments=arguments, options=self._call_options)

    def _arguments(self, given: Any, place: int) -> JsonObject:
        if _is_absent(given):
            return {}
        if place in self._repaired:
            return self._repaired[place]
        if isinstance(given, str):
            try:
                given = _loads(given)
            except strict_json.StrictJsonError as error:
                raise InvalidParams(
                    f"The arguments cannot be read: {error}. Send one JSON object.",
                    fields=["arguments"],
                ) from None
        if not isinstance(given, dict):
            raise InvalidParams("The arguments must be one JSON object.", fields=["arguments"])
        return given

    async def _repair_all(self, repair: Callable[[str], Any]) -> None:
        """Repair broken JSON arguments, except those of dangerous and unknown tools."""
        left = MAX_REPAIRED_CHARACTERS
        for place, call in enumerate(self._calls):
            tool = self._find(call.name)
            if tool is None or tool.dangerous or not _is_broken(call.arguments):
                continue
            left -= len(call.arguments)
            if left < 0:
                return
            found = await anyio.to_thread.run_sync(
                _guess, repair, call.arguments, limiter=self._repairs
            )
            if found:
                self._repaired[place] = found


def _guess(repair: Callable[[str], Any], text: str) -> JsonObject:
    """Return the object that the library reads from broken JSON, or {} if it finds no object."""
    try:
        found = strict_json.loads(strict_json.dumps(repair(text)))
    except Exception:  # the text is arbitrary, so the library may fail in any way
        return {}
    return found if isinstance(found, dict) else {}


def _is_absent(arguments: Any) -> bool:
    """Whether a model sent nothing, in one of the forms that models use for it."""
    if not isinstance(arguments, str):
        return arguments is None
    return arguments.removeprefix(strict_json.BYTE_ORDER_MARK).strip(" \t\r\n") in ("", "null")


def _is_broken(arguments: Any) -> bool:
    if not isinstance(arguments, str) or _is_absent(arguments):
        return False
    try:
        _loads(arguments)
    except strict_json.StrictJsonError:
        return True
    return False


def _loads(text: str) -> Any:
    return strict_json.loads(text.encode("utf-8", "surrogatepass"))


def _members(calls: Sequence[ModelCall]) -> list[JsonObject]:
    seen: set[str | None] = set()
    members: list[JsonObject] = []
    for place, call in enumerate(calls):
        is_repeated = call.id is not None and call.id in seen
        seen.add(call.id)
        members.append(
            {"tool": call.name, "call": call, "place": place, "is_repeated": is_repeated}
        )
    return members


def _flagged(envelope: Envelope) -> Envelope:
    metadata = envelope.metadata
    warned = metadata.model_copy(update={"warnings": (*metadata.warnings, REPAIRED)})
    return envelope.model_copy(update={"metadata": warned})


def _repairer() -> Callable[[str], Any]:
    try:
        import json_repair
    except ImportError:
        raise InvalidParams(
            "repair_arguments needs the extra `repair`, which is not installed here.",
            fields=["options.repair_arguments"],
        ) from None
    return lambda text: json_repair.loads(text, skip_json_loads=True)
