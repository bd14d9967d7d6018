"""CrewAI: the engine's tools over MCP, and approvals for a crew's own tools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crewai import Agent, BaseLLM, Crew, Task
from crewai.hooks import get_after_tool_call_hooks, get_before_tool_call_hooks
from crewai.tools import tool

from fumehood import Client, ControlClient
from fumehood.integrations.crewai import FumehoodApprover


class Scripted(BaseLLM):
    """Scripted model that makes the calls of a script and records the conversation."""

    script: Any = None
    seen: Any = None

    def supports_function_calling(self) -> bool:
        return True

    def call(self, messages: Any, tools: Any = None, **named: Any) -> Any:
        self.seen = list(messages)
        call = self.script()
        if call is None:
            return "Done."
        names = [one["function"]["name"] for one in tools]
        (name,) = [one for one in names if one.endswith(call[0])]
        function = {"name": name, "arguments": json.dumps(call[1])}
        return [{"id": f"call_{len(messages)}", "type": "function", "function": function}]

    async def acall(self, messages: Any, tools: Any = None, **named: Any) -> Any:
        return self.call(messages, tools, **named)

    @property
    def results(self) -> list[str]:
        return [str(one["content"]) for one in self.seen if one["role"] == "tool"]


def test_agent_calls_engine_tools_and_resumes_after_an_approval(
    page: Callable[[str], Any],
    script: Any,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = tmp_path / "tools"
    command.write_text(f"#!/bin/sh\nexec fumehood mcp {' '.join(options)}\n", encoding="utf-8")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    model = Scripted(model="scripted", script=script)
    answer = page("use-from-crewai")["ask"](model, "Go.", "tools")
    assert answer.raw == "Done."
    assert "[image: image/png]" in model.results[1]
    script.check(model.results)


def crew(ran: list[str], calls: Iterator[Any]) -> tuple[Crew, Scripted]:
    """A crew with its own tool, and its model."""

    @tool("deploy")
    def deploy(target: str) -> str:
        """Deploy."""
        ran.append(target)
        return f"{target} is deployed"

    model = Scripted(model="scripted", script=lambda: next(calls, None))
    worker = Agent(role="worker", goal="Go.", backstory="-", llm=model, tools=[deploy], cache=False)
    task = Task(description="Go.", expected_output="An answer.", agent=worker)
    return Crew(agents=[worker], tasks=[task], cache=False), model


def test_guarded_own_tool_runs_once_after_approval(page: Any, script: Any) -> None:
    ran: list[str] = []
    before: list[list[str]] = []

    def calls() -> Any:
        yield "deploy", {"target": "d"}
        before.append(list(ran))
        script.approve()
        yield "deploy", {"target": "d"}

    made, model = crew(ran, calls())
    assert page("use-from-crewai")["kickoff_guarded"](made).raw == "Done."
    assert (before, ran) == ([[]], ["d"])
    assert model.results[0].startswith("REQUIRES_HUMAN_APPROVAL: ")
    assert model.results[1] == "d is deployed"
    assert (get_before_tool_call_hooks(), get_after_tool_call_hooks()) == ([], [])


def test_denied_own_tool_does_not_run(approver: ControlClient) -> None:
    ran: list[str] = []

    def calls() -> Any:
        yield "deploy", {"target": "e"}
        (waiting,) = approver.approvals.list(state="pending").items
        approver.approvals.deny(waiting.id, version=waiting.version, reason="Not today.")
        yield "deploy", {"target": "e"}

    made, model = crew(ran, calls())
    with FumehoodApprover():
        made.kickoff()
    assert ran == []
    assert model.results[1].startswith("APPROVAL_DENIED: ")
    assert "Not today." in model.results[1]


@pytest.mark.parametrize("is_gated", [True, False])
def test_guarded_own_tool_does_not_run_without_an_engine(is_gated: bool, tmp_path: Path) -> None:
    ran: list[str] = []
    made, model = crew(ran, iter([("deploy", {"target": "f"})]))
    if is_gated:
        with FumehoodApprover(Client(tmp_path / "none.sock")):
            made.kickoff()
        assert "decided nothing" in model.results[0]
    else:  # the control: nothing but the hook holds the tool back
        made.kickoff()
    assert ran == ([] if is_gated else ["f"])
