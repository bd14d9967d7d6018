"""How one provider writes tools (`Format`), and calls and results (`ChatFormat`).

A new provider is a subclass in a file of its own, and a row in `table.py`. What a message holds
comes from outside: a method that reads one raises InvalidParams for what it cannot read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.formats.model import FormatName, Loss, ModelCall
from fumehood.formats.schemas import Dialect

AUTO, NONE, REQUIRED = "auto", "none", "required"
"""Values of `tool_choice`; every other one is a tool's name."""


class Format(ABC):
    """How a provider writes tools."""

    name: ClassVar[FormatName]

    @abstractmethod
    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """One tool, and what of it cannot be expressed."""

    def tools(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        """What a request to the model takes of these tools."""
        return tuple(tools)


class ChatFormat(Format):
    """How a provider writes a conversation with tool calls."""

    dialect: ClassVar[Dialect]
    """Of the schemas that models answer by: its names of properties are theirs."""

    @abstractmethod
    def turn(self, message: Any) -> list[JsonObject]:
        """An assistant's message, or the whole response, as the conversation holds it."""

    @abstractmethod
    def calls(self, turn: Sequence[JsonObject]) -> list[ModelCall]:
        """The tool calls of a turn, in order."""

    @abstractmethod
    def results(
        self, calls: Sequence[ModelCall], envelopes: Sequence[Envelope], max_length: int
    ) -> list[JsonObject]:
        """The messages that answer the calls."""

    @abstractmethod
    def choice(self, tool_choice: str) -> Any:
        """A `tool_choice` as the request takes it."""


def object_of(value: Any, what: str) -> JsonObject:
    """A part of a message that must be an object."""
    if not isinstance(value, dict):
        raise InvalidParams(f"The message is wrong: {what} must be an object.", fields=["message"])
    return value


def items_of(value: Any, what: str) -> Iterator[JsonObject]:
    """The objects of a list in a message; absent is empty."""
    if not isinstance(value, list | tuple | None):
        raise InvalidParams(f"The message is wrong: {what} must be a list.", fields=["message"])
    return (object_of(item, f"each item of {what}") for item in value or ())


def text_of(value: Any, what: str) -> str:
    """A part of a message that must be a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidParams(f"The message is wrong: {what} must be a text.", fields=["message"])
    return value
