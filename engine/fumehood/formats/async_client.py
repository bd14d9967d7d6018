"""The methods of `AsyncClient` for exported tools and the messages of models.

Client side: this module uses the protocol and values, but not the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from fumehood.client.api_request import ApiRequest, ask, batch_work_s, data_of, listed
from fumehood.client.async_client import AsyncClient
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import HandleKeywords
from fumehood.core.names import checked_keywords
from fumehood.formats.model import AgentRun, ExportedTools, FormatName, HandledCalls, MessageFormat


class AsyncClientWithFormats(AsyncClient):
    """A client that can also export tools and run the tool calls of a model's messages."""

    async def export(
        self,
        format: FormatName,  # noqa: A002 - the name that the engine and HTTP have
        *,
        agent_id: str | None = None,
        tools: Iterable[str] | None = None,
    ) -> list[JsonObject]:
        """Export tools in a model provider's format: all tools, an agent's tools, or the tools
        named in `tools`.

        Raises:
            Refused: the format, the agent or a name in `tools` is unknown.
        """
        found = await self.export_with_losses(format, agent_id=agent_id, tools=tools)
        return list(found.tools)

    async def export_with_losses(
        self,
        format: FormatName,  # noqa: A002 - as in `export`
        *,
        agent_id: str | None = None,
        tools: Iterable[str] | None = None,
    ) -> ExportedTools:
        """Export tools as `export` does. The result's `losses` list what the format cannot express,
        and what to change in the tools' definitions.

        Raises:
            Refused: for the same reasons as in `export`.
        """
        query = {"format": format, "agent_id": agent_id, "tools": listed(tools)}
        return await self._transport.send(ask("GET", data_of(ExportedTools), "tools", query=query))

    async def handle(
        self,
        message: Any,
        *,
        format: MessageFormat,  # noqa: A002 - as in `export`
        **options: Unpack[HandleKeywords],
    ) -> list[JsonObject]:
        """Run all tool calls of an assistant's message, and return the messages with the results.

        `message` is the provider's message or whole response, as an object of the provider's
        library or as JSON. Each call has one result, even if the call is refused, fails or waits
        for approval. The results have the order of the calls. `options` are the fields of
        `HandleOptions`, and apply to all calls.

        Raises:
            TypeError: an option is unknown.
            ValueError: the message or the options are not JSON, so nothing was sent.
            Refused: the message or an option is wrong; nothing was run.
        """
        chosen = checked_keywords(HandleKeywords, "handle", options)
        handled = await self._transport.send(handle_request(message, format, chosen))
        return list(handled.messages)

    async def run_agent(
        self,
        llm: Callable[..., Any],
        messages: Sequence[Any] | AgentRun,
        *,
        format: MessageFormat = "openai",  # noqa: A002 - as in `export`
        agent: str | None = None,
        tool_choice: str = "auto",
        max_turns: int = 10,
        **options: Unpack[HandleKeywords],
    ) -> AgentRun:
        """Request a message from a model, run the tool calls in it, and repeat until a message
        contains no calls.

        `llm(messages, tools=…, tool_choice=…)` returns the assistant's message. `tool_choice` is
        `auto`, `none`, `required` or a tool's name, and applies to the first message only. The run
        also ends after `max_turns` messages of the model, or if a call waits for approval. To
        continue a run, pass the returned `AgentRun` as `messages`.

        Raises:
            Refused: for the same reasons as in `export` and `handle`.
            TypeError, ValueError: an argument is wrong.
        """
        from fumehood.formats.agent_loop import AgentLoop, ask_model_async, message_of, options_of

        chosen = options_of(
            checked_keywords(HandleKeywords, "run_agent", options), agent, tool_choice
        )
        loop = AgentLoop(
            messages, format=format, tool_choice=tool_choice, max_turns=max_turns,
            max_length=options.get("max_length"),
        )  # fmt: skip
        for place, call_id in loop.waiting:
            state = await self.call_state(call_id)
            loop.decided(place, state.envelope)
        offered = await self.export(
            loop.format, agent_id=chosen["agent_id"], tools=options.get("tools")
        )
        if loop.go_on():
            while loop.is_running:
                turn = loop.take(await ask_model_async(llm, loop, offered))
                if turn is not None:
                    request = handle_request(message_of(turn), loop.format, chosen)
                    loop.add(await self._transport.send(request))
        return loop.run


def handle_request(
    message: Any, name: MessageFormat, options: JsonObject
) -> ApiRequest[HandledCalls]:
    """Return the request that runs a message's tool calls. `name` is the provider's format.

    The request's time limit is long enough for all calls to run one after the other.
    """
    from fumehood.formats.agent_loop import how_many_calls, plain

    message = plain(message)
    calls = [{"options": options}] * how_many_calls(message, name)
    body: JsonObject = {"format": name, "message": message, "options": options}
    return ask(
        "POST", data_of(HandledCalls), "tool_calls", body=body, work_s=batch_work_s(calls, {})
    )
