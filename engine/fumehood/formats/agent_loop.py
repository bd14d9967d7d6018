"""An agent's loop: request a message from the model, run the calls in it, and repeat.

`AgentLoop` holds the state and does no I/O; the method `run_agent` of an engine or a client makes
the requests and runs the calls. The loop ends when a message contains no calls, when the maximum
number of turns is reached, or when a call waits for approval. If the caller then passes the
returned `AgentRun` to `run_agent`, the run continues, with the decisions that approvers have made
in the meantime.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import anyio.to_thread

from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.formats.base import AUTO, NONE
from fumehood.formats.model import (
    MODEL_TEXT_CHARACTERS,
    AgentRun,
    HandledCalls,
    MessageFormat,
    waits,
)
from fumehood.formats.table import CHAT_FORMATS

MAX_TURNS = 10
"""The default maximum number of requests to the model in one run."""

Model = Callable[..., Any]
"""A function of the caller that requests a message from a model. It is called as `llm(messages,
tools=…, tool_choice=…)`, and returns the assistant's message or the provider's whole response."""


class AgentLoop:
    """The state of one run of an agent: the conversation with the model, the envelopes of the last
    turn's calls, and why the run ended.
    """

    def __init__(
        self,
        messages: Sequence[Any] | AgentRun,
        *,
        format: MessageFormat,  # noqa: A002 - the public keyword
        tool_choice: str = AUTO,
        max_turns: int = MAX_TURNS,
        max_length: int | None = None,
    ) -> None:
        before = messages if isinstance(messages, AgentRun) else None
        name: MessageFormat = format if before is None else before.format
        if name not in CHAT_FORMATS:
            raise ValueError(f"The format is one of {', '.join(CHAT_FORMATS)}, not {name!r}.")
        if max_turns < 1:
            raise ValueError("max_turns must be at least 1.")
        self._name = name
        self._format = CHAT_FORMATS[name]
        self._max_turns = max_turns
        self._max_length = max_length or MODEL_TEXT_CHARACTERS
        self._first_choice = tool_choice
        self._turns = 0
        self._ended_by: Literal["answer", "max_turns", "approval"] | None = None
        self.messages: list[JsonObject] = (
            [plain(m) for m in messages] if before is None else list(before.messages)
        )
        self._last_turn = len(self.messages) if before is None else before.last_turn
        self.envelopes: list[Envelope] = [] if before is None else list(before.envelopes)

    @property
    def format(self) -> MessageFormat:
        """The name of the provider's format."""
        return self._name

    @property
    def waiting(self) -> list[tuple[int, str]]:
        """The index in `envelopes` and the call id of each call that waits for approval."""
        return [
            (place, envelope.metadata.call_id)
            for place, envelope in enumerate(self.envelopes)
            if waits(envelope) and envelope.metadata.call_id is not None
        ]

    def decided(self, place: int, envelope: Envelope | None) -> None:
        """Replace the envelope at the index `place` by the call's final envelope.

        Do nothing if `envelope` is None, which means that the call still waits for approval.
        """
        if envelope is not None:
            self.envelopes[place] = envelope

    def go_on(self) -> bool:
        """Prepare the run for its next request to the model. Return False if a call of the last
        turn still waits for approval, otherwise True.

        If the run continues an earlier one, which was passed as an `AgentRun`, the last turn's
        calls now have final results. These replace the earlier results in the conversation. For a
        new run, do nothing.
        """
        if not self.envelopes:
            return True
        end = self._last_turn
        while end < len(self.messages) and self._is_of_model(self.messages[end]):
            end += 1
        turn = self.messages[self._last_turn : end]
        results = self._format.results(self._format.calls(turn), self.envelopes, self._max_length)
        # The former results were as many. The caller may have added messages after them.
        self.messages[end : end + len(results)] = results
        if self.waiting:
            self._ended_by = "approval"
        return not self.waiting

    @property
    def choice(self) -> Any:
        """The `tool_choice` for the next request to the model. Only the first request of a run can
        force the model to call a tool.
        """
        is_first = self._turns == 0 or self._first_choice == NONE
        return self._format.choice(self._first_choice if is_first else AUTO)

    @property
    def is_running(self) -> bool:
        """Whether the loop needs another message from the model."""
        return self._ended_by is None

    def take(self, message: Any) -> list[JsonObject] | None:
        """Append the model's message to the conversation.

        If the message contains tool calls, return the appended messages. Otherwise, end the run and
        return None.
        """
        turn = self._format.turn(plain(message))
        self._last_turn = len(self.messages)
        self.messages += turn
        self._turns += 1
        self.envelopes = []
        if self._format.calls(turn):
            return turn
        self._ended_by = "answer"
        return None

    def add(self, handled: HandledCalls) -> None:
        """Append the results of the last turn's calls to the conversation.

        End the run if one of the calls waits for approval, or if `max_turns` is reached.
        """
        self.messages += handled.messages
        self.envelopes = list(handled.envelopes)
        if any(map(waits, self.envelopes)):
            self._ended_by = "approval"
        elif self._turns >= self._max_turns:
            self._ended_by = "max_turns"

    @property
    def run(self) -> AgentRun:
        """Return the state of the run so far, from which the caller can continue the run later."""
        return AgentRun.model_construct(
            format=self._name,
            messages=tuple(self.messages),
            ended_by=self._ended_by,
            turns=self._turns,
            envelopes=tuple(self.envelopes),
            last_turn=self._last_turn,
        )

    def _is_of_model(self, message: JsonObject) -> bool:
        return message.get("role", "assistant") in ("assistant", "model") and (
            message.get("type") != "function_call_output"
        )


def options_of(options: JsonObject, agent: str | None, tool_choice: str) -> JsonObject:
    """Return the options for all calls of a run. These are `options`, with `agent` as the agent's
    id unless they contain another one.

    If `tool_choice` is `none`, the returned options allow no tool.
    """
    chosen = {"agent_id": agent, **options}
    return {**chosen, "tools": []} if tool_choice == NONE else chosen


def message_of(turn: list[JsonObject]) -> Any:
    """Return a turn as the `message` of a request to the engine.

    If the turn is a single message, this is an object, and otherwise a list of objects.
    """
    return turn[0] if len(turn) == 1 else turn


def how_many_calls(message: Any, name: MessageFormat) -> int:
    """Return the number of tool calls in a message. For a message that has none or is malformed,
    return 1.
    """
    chat = CHAT_FORMATS.get(name)
    try:
        return max(1, len(chat.calls(chat.turn(message)))) if chat is not None else 1
    except InvalidParams:  # the engine reports it in more detail
        return 1


def plain(message: Any, levels: int = 4) -> Any:
    """Convert a message to JSON types. The message may be, or contain, objects of a provider's
    library.

    Such objects are found inside lists and dictionaries, down to `levels` levels.
    """
    if isinstance(message, list | tuple) and levels:
        return [plain(item, levels - 1) for item in message]
    if isinstance(message, dict) and levels:
        return {key: plain(part, levels - 1) for key, part in message.items()}
    dump = getattr(message, "model_dump", None)
    return message if dump is None else dump(mode="json", exclude_none=True)


def ask_model(llm: Model, loop: AgentLoop, tools: Sequence[JsonObject]) -> Any:
    """Request the next message of the run `loop` from the model. `llm` is called in the current
    thread.
    """
    return llm(list(loop.messages), tools=list(tools), tool_choice=loop.choice)


async def ask_model_async(llm: Model, loop: AgentLoop, tools: Sequence[JsonObject]) -> Any:
    """Request the next message of the run `loop` from the model. If `llm` is not asynchronous, it
    is called in a worker thread.
    """
    ask = partial(ask_model, llm, loop, tools)
    is_async = inspect.iscoroutinefunction(llm) or inspect.iscoroutinefunction(
        getattr(llm, "__call__", None)  # noqa: B004 - of a callable object
    )
    answer = ask() if is_async else await anyio.to_thread.run_sync(ask)
    return await answer if inspect.isawaitable(answer) else answer
