"""LiteLLM: the engine's tools in OpenAI's format, with a scripted provider."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import litellm
import pytest
from litellm import CustomLLM, ModelResponse


class Scripted(CustomLLM):
    """Scripted provider that makes the calls of a script."""

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.script = script

    def completion(self, *args: Any, **named: Any) -> ModelResponse:
        assert {"calculator", "run_python", "run_shell"} <= {
            tool["function"]["name"] for tool in named["optional_params"]["tools"]
        }
        call = self.script()
        message: dict[str, Any] = {"role": "assistant", "content": "Done."}
        if call is not None:
            function = {"name": call[0], "arguments": json.dumps(call[1])}
            message["content"] = None
            message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        choice = {"message": message, "finish_reason": "stop", "index": 0}
        return ModelResponse(model="scripted/model", choices=[choice])


def test_agent_calls_engine_tools_and_resumes_after_an_approval(
    page: Callable[[str], Any],
    script: Any,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script.is_over = True  # a repeat does not wait, as one over MCP does
    provider = {"provider": "scripted", "custom_handler": Scripted(script)}
    monkeypatch.setattr(litellm, "custom_provider_map", [provider])
    messages = page("use-from-litellm")["ask"]("scripted/model", "Go.", session_id=session_id)
    assert messages[-1]["content"] == "Done."
    results = [str(one["content"]) for one in messages if one["role"] == "tool"]
    assert "image/png" in results[1]
    script.check(results)
