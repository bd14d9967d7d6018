"""The methods of `fumehood.Engine` for exported tools and the messages of models.

Host side, above the engine of `engine.py`. This module uses only public members of that engine.
Every call in a message goes through `Engine.run`, so that no call skips a gate (a check before a
call).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Unpack

from fumehood.batches.engine import batch_of
from fumehood.core.errors import InvalidParams, ToolNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.keyword_types import HandleKeywords
from fumehood.core.names import checked_keywords
from fumehood.core.tool import ToolDefinition
from fumehood.engine import Engine
from fumehood.formats.agent_loop import (
    MAX_TURNS,
    AgentLoop,
    Model,
    ask_model_async,
    message_of,
    options_of,
    plain,
)
from fumehood.formats.base import AUTO
from fumehood.formats.exports import FORMATS, is_offered
from fumehood.formats.in_engine import Formats
from fumehood.formats.message_calls import FindTool, MessageCalls, parse_own_message
from fumehood.formats.model import AgentRun, ExportedTools, FormatName, HandleBody, MessageFormat


class EngineWithFormats(Engine):
    """An engine that can also export tools and run the tool calls of a model's messages."""

    def export(
        self,
        format: FormatName,  # noqa: A002 - the name that the clients and HTTP have
        *,
        agent_id: str | None = None,
        tools: Collection[str] | None = None,
    ) -> list[JsonObject]:
        """Export tools in a model provider's format: all tools, an agent's tools, or the tools
        named in `tools`.

        Raises:
            InvalidParams: the format is unknown.
            ResourceNotFound: the agent is unknown.
            ToolNotFound: a name in `tools` is unknown.
        """
        exported = self.export_for(self.owner, format, agent_id=agent_id, tools=tools)
        own: list[JsonObject] = json.loads(json.dumps(exported.tools))  # the fastest way to copy
        return own

    def export_for(
        self,
        principal: Principal,
        name: FormatName,
        *,
        agent_id: str | None = None,
        tools: Collection[str] | None = None,
    ) -> ExportedTools:
        """Export tools for a principal, with the losses: what the format `name` cannot express.

        `agent_id` and `tools` select the tools as in `export`. Disabled tools and tools past their
        sunset date are omitted. The caller must not change the returned values, which are shared
        with other callers.

        Raises:
            InvalidParams, ResourceNotFound, ToolNotFound: for the same reasons as in `export`.
        """
        if name not in FORMATS:
            raise InvalidParams(f"The format is one of {', '.join(FORMATS)}.", fields=["format"])
        if agent_id is None:
            found = [tool.definition for tool in self.registry if tool.disabled_because is None]
        else:
            chosen = self.agent_tools(principal, agent_id, exclude_dangerous=False)
            found = list(chosen.tools)
        today = self.now().date()
        found = [tool for tool in found if is_offered(tool, today)]
        if agent_id is None and tools is None:
            return self.part(Formats).exports.of_all(name, found)
        if tools is not None:
            unknown = sorted(set(tools) - {tool.name for tool in found})
            if unknown:
                raise ToolNotFound(f"There is no tool {unknown[0][:80]!r} to export.")
            found = [tool for tool in found if tool.name in tools]
        return self.part(Formats).exports.of_some(name, found)

    async def handle(
        self,
        message: Any,
        *,
        format: MessageFormat,  # noqa: A002 - as in `export`
        **options: Unpack[HandleKeywords],
    ) -> list[JsonObject]:
        """Run all tool calls of an assistant's message, and return the messages with the results.

        `message` and `options` have the same meaning as in `Client.handle`.

        Raises:
            InvalidParams: the message or an option is wrong; nothing was run.
            TypeError, EngineNotRunning: for the same reasons as in `call`.
        """
        chosen = checked_keywords(HandleKeywords, "handle", options)
        self.require_begun()
        body = parse_own_message(plain(message), format, chosen)
        handled = await self.open_message(body, self.owner).run()
        return list(handled.messages)

    def open_message(self, body: HandleBody, principal: Principal) -> MessageCalls:
        """Prepare the tool calls in a message of one principal, without running them.

        Raises:
            InvalidParams: the message cannot be read.
        """
        return MessageCalls(
            body,
            self._finder(body.options.agent_id),
            lambda members, options, parse: batch_of(self, members, options, principal, parse),
            self.part(Formats).repairs,
        )

    def _finder(self, agent_id: str | None) -> FindTool:
        """Return a function that finds tools by name. If `agent_id` is None, the function finds all
        tools, otherwise only the agent's tools.

        Finding a tool grants no right to call it.
        """
        seen: dict[str, ToolDefinition] = {}
        if agent_id is not None:
            if self.agents.find(agent_id) is not None:
                seen = {t.name: t for t in self.agents.tools(agent_id, self.registry)[0]}
            return lambda name: seen.get(name.partition("@")[0])

        def find(name: str) -> ToolDefinition | None:
            try:
                return self.registry.get(name, names_others=False).definition
            except ToolNotFound:
                return None

        return find

    async def run_agent(
        self,
        llm: Model,
        messages: Sequence[Any] | AgentRun,
        *,
        format: MessageFormat = "openai",  # noqa: A002 - as in `export`
        agent: str | None = None,
        tool_choice: str = AUTO,
        max_turns: int = MAX_TURNS,
        **options: Unpack[HandleKeywords],
    ) -> AgentRun:
        """Request a message from a model, run the tool calls in it, and repeat until a message
        contains no calls.

        The arguments have the same meaning as in `Client.run_agent`, but `llm` may also be
        asynchronous.

        Raises:
            InvalidParams, ResourceNotFound, ToolNotFound: for the same reasons as in `export` and
                `handle`.
            TypeError, ValueError, EngineNotRunning: for the same reasons as in `call`, or because
                an argument is wrong.
        """
        chosen = options_of(
            checked_keywords(HandleKeywords, "run_agent", options), agent, tool_choice
        )
        self.require_begun()
        loop = AgentLoop(
            messages, format=format, tool_choice=tool_choice, max_turns=max_turns,
            max_length=options.get("max_length"),
        )  # fmt: skip
        for place, call_id in loop.waiting:
            loop.decided(place, await self.approvals.answer_of(call_id, self.owner))
        name: MessageFormat = loop.format
        offered = self.export(name, agent_id=chosen["agent_id"], tools=options.get("tools"))
        if loop.go_on():
            while loop.is_running:
                turn = loop.take(await ask_model_async(llm, loop, offered))
                if turn is not None:
                    body = parse_own_message(message_of(turn), name, chosen)
                    loop.add(await self.open_message(body, self.owner).run())
        return loop.run
