"""The tool calls of an assistant's message, which run as one batch.

Host side, above `batches/batch.py`. The provider's format reads the message and writes the answer.
Invariant: each call in the message has exactly one result, even if the call is malformed, is
denied, waits for approval or names an unknown tool. The results have the order of the calls. A
message for which this is impossible is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread

from fumehood.batches.batch import Batch, Parse
from fumehood.batches.model import MAX_CALLS, BatchOptions
from fumehood.call_options import CallBody, CallOptions
from fumehood.core.call import MAX_KEYS, MAX_TOOL_CHARACTERS
from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams, ToolNotFound
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.formats.model import (
    MODEL_TEXT_CHARACTERS,
    HandleBody,
    HandledCalls,
    ModelCall,
)
from fumehood.formats.schemas import restored
from fumehood.formats.table import CHAT_FORMATS
from fumehood.pipeline.incoming import as_sent, parsed
from fumehood.protocol import strict_json

MAX_REPAIRED_CHARACTERS = 8192
"""Maximum number of characters of broken JSON that are repaired in one message. For some texts, the
library's time is quadratic in the length, and takes a few seconds for this number of characters."""

REPAIRED = "the model's arguments were no JSON and were repaired"

FindTool = Callable[[str], ToolDefinition | None]
"""A function that returns the definition of the tool with this name, or None if there is no such
tool."""

OpenBatch = Callable[[Sequence[Any], BatchOptions, Parse], Batch]
"""A function that creates a batch from unparsed calls. The batch parses each call with the `Parse`
function."""


def parse_message(document: Any) -> HandleBody:
    """Parse the body of `POST /v1/tool_calls`, without reading the calls in the message.

    Raises:
        InvalidParams: some fields are invalid. The error names all of them.
    """
    return parsed(HandleBody, document, "request")


def parse_own_message(message: Any, name: str, options: JsonObject) -> HandleBody:
    """Parse a message that code in this process passes to the engine. `name` is the name of the
    message's format.

    The message is parsed as strictly as if it had arrived over HTTP. Raises the same errors as
    `parse_message`.
    """
    body = {"format": name, "message": message, "options": options}
    return parse_message(as_sent(body, "message"))


class MessageCalls:
    """The tool calls in one message. The caller must await `run` at most once. It can call `cancel`
    at any time.

    `repairs` limits how many threads of the engine may repair JSON at the same time.

    Raises:
        InvalidParams: the constructor raises this if the message is invalid or contains too many
            calls. It also does so if the options request repairs, and the library for repairs is
            not installed.
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
        """Cancel the running calls, and start no further calls."""
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
        """Repair the arguments that are broken JSON. Calls of dangerous or unknown tools are not
        repaired.
        """
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
    """Repair broken JSON with the library's function `repair`, and return the object in it. Return
    {} if this finds no object.
    """
    try:
        found = strict_json.loads(strict_json.dumps(repair(text)))
    except Exception:  # the text is arbitrary, so the library may fail in any way
        return {}
    return found if isinstance(found, dict) else {}


def _is_absent(arguments: Any) -> bool:
    """Return True if a model sent no arguments. Models use several forms for this, such as an empty
    text.
    """
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
