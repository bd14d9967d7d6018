"""LlamaIndex: the engine's tools over MCP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.llms.mock import MockFunctionCallingLLM

pytestmark = pytest.mark.anyio


async def test_agent_calls_engine_tools_and_resumes_after_an_approval(
    page: Callable[[str], Any], script: Any, options: tuple[str, ...]
) -> None:
    seen: list[ChatMessage] = []

    def follow(messages: Any, **named: Any) -> ChatMessage:
        seen[:] = messages
        call = script()
        if call is None:
            return ChatMessage(role="assistant", content="Done.")
        name, arguments = call
        block = ToolCallBlock(tool_call_id="call_1", tool_name=name, tool_kwargs=arguments)
        return ChatMessage(role="assistant", blocks=[block])

    model = MockFunctionCallingLLM(response_generator=follow)
    answer = await page("use-from-llamaindex")["ask"](model, "Go.", *options)
    assert str(answer) == "Done."
    results = [message for message in seen if message.role == "tool"]
    assert "image/png" in str(results[1].content)
    script.check([str(message.content) for message in results])
