"""Base classes for a provider's format. `Format` converts tools, and `ChatFormat` also calls and
results.

To add a provider, write a subclass in a separate module, and add it to `table.py`. Messages are
untrusted: methods that read a message raise InvalidParams if the message is malformed.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import head_and_tail
from fumehood.core.returned_file import FILE_CONTENT
from fumehood.core.tool import ToolDefinition
from fumehood.formats.model import FormatName, Loss, ModelCall
from fumehood.formats.schemas import Dialect

AUTO, NONE, REQUIRED = "auto", "none", "required"
"""Values of `tool_choice`. Any other value is a tool's name."""

SHORT_CHARACTERS = 64
"""Texts of at most this many characters are never shortened, so that names and codes stay
complete."""


class Format(ABC):
    """Converts tools to one provider's format."""

    name: ClassVar[FormatName]

    @abstractmethod
    def tool(self, tool: ToolDefinition) -> tuple[JsonObject, list[Loss]]:
        """Convert one tool to the format. Also return what the format cannot express."""

    def tools(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        """Combine converted tools to the `tools` parameter of a request to the model."""
        return tuple(tools)


class ChatFormat(Format):
    """A format that can also read tool calls from a provider's messages, and write their
    results.
    """

    dialect: ClassVar[Dialect]
    """The JSON Schema dialect in which the model receives a tool's parameters. It decides which
    property names get an alias."""

    @abstractmethod
    def turn(self, message: Any) -> list[JsonObject]:
        """Return the messages that represent the model's answer, and that the caller appends to the
        conversation.

        `message` is the assistant's message, or the provider's whole response.
        """

    @abstractmethod
    def calls(self, turn: Sequence[JsonObject]) -> list[ModelCall]:
        """Return the tool calls in a turn, in order. A turn is the list of messages that `turn`
        returned.
        """

    @abstractmethod
    def results(
        self, calls: Sequence[ModelCall], envelopes: Sequence[Envelope], max_length: int
    ) -> list[JsonObject]:
        """Return messages for the model that report the results of its calls.

        `envelopes` are the answers to `calls`, in the same order. Each result has at most
        `max_length` characters.
        """

    @abstractmethod
    def choice(self, tool_choice: str) -> Any:
        """Convert the engine's `tool_choice` to the corresponding parameter of the provider's
        request.
        """


def object_of(value: Any, what: str) -> JsonObject:
    """Return `value`, which must be an object. `what` names the value in the error message.

    Raises:
        InvalidParams: `value` is not an object.
    """
    if not isinstance(value, dict):
        raise InvalidParams(f"The message is wrong: {what} must be an object.", fields=["message"])
    return value


def items_of(value: Any, what: str) -> Iterator[JsonObject]:
    """Return an iterator over a list of objects. None counts as an empty list. `what` names the
    list in the error message.

    Raises:
        InvalidParams: `value` is not a list, or an item is not an object.
    """
    if not isinstance(value, list | tuple | None):
        raise InvalidParams(f"The message is wrong: {what} must be a list.", fields=["message"])
    return (object_of(item, f"each item of {what}") for item in value or ())


def text_of(value: Any) -> str:
    """Return `value` if it is a text. For any other value, return an empty text."""
    return value if isinstance(value, str) else ""


# -- results --------------------------------------------------------------------------------


def result_text(envelope: Envelope, max_length: int) -> str:
    """Return a call's result as text for the model. If the call succeeded, this is the data as
    JSON, otherwise `CODE: message` with the error's details.

    The text has at most `max_length` characters.
    """
    error = envelope.error
    if error is None:
        return fitted(envelope.data, max_length)
    head = f"{error.code}: {error.message}"
    known = error.model_dump(exclude={"code", "message", "retryable", "human_review"})
    if error.retryable:
        known["retryable"] = True
    if error.approval_id is not None:
        known["call_id"] = envelope.metadata.call_id
    if not known:
        return head_and_tail(head, max_length) if len(head) > max_length else head
    room = max_length - len(head) - 1
    return f"{head}\n{fitted(known, room)}" if room > SHORT_CHARACTERS else head[:max_length]


def fitted(data: JsonObject, max_length: int) -> str:
    """Return an object as JSON with at most `max_length` characters. File contents are left out,
    and long texts are shortened.
    """
    lists = {key: _bare(data[key]) for key in ("images", "files") if data.get(key)}
    data = {**data, **lists}
    text = _dumps(data)
    if len(text) > max_length:  # leave a quarter for everything around the longest text
        text = _dumps(_cut(data, max(SHORT_CHARACTERS, max_length * 3 // 4)))
    return text if len(text) <= max_length else head_and_tail(text, max_length)


def _bare(listed: Any) -> Any:
    if not isinstance(listed, list | tuple):  # a tool may give the name another meaning
        return listed
    return [
        {key: said for key, said in item.items() if key != FILE_CONTENT}
        if isinstance(item, dict)
        else item
        for item in listed
    ]


def _dumps(data: JsonObject) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _cut(node: Any, limit: int) -> Any:
    if isinstance(node, str):
        return head_and_tail(node, limit) if len(node) > limit else node
    if isinstance(node, dict):
        return {
            key: said if key in ("url", "resource_url") else _cut(said, limit)
            for key, said in node.items()
        }
    return [_cut(item, limit) for item in node] if isinstance(node, list | tuple) else node
