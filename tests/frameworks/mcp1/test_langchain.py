"""LangChain and LangGraph: the engine's tools over MCP, and approvals for an agent's own tools."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command

from fumehood import Client, ControlClient
from fumehood.integrations.langchain import FumehoodApprover

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class Scripted(GenericFakeChatModel):
    """Scripted model that returns one message after the other and ignores bound tools."""

    def bind_tools(self, tools: Any, **named: Any) -> Any:
        return self


def following(script: Callable[[], Any]) -> Scripted:
    """Scripted model that makes the calls of a script."""

    def messages() -> Any:
        while call := script():
            yield calling(*call)
        yield AIMessage(content="Done.")

    return Scripted(messages=messages())


def calling(name: str, arguments: Any) -> AIMessage:
    return AIMessage(
        content="", tool_calls=[{"name": name, "args": arguments, "id": f"call_{id(arguments)}"}]
    )


def said(answer: Any) -> list[Any]:
    return [message for message in answer["messages"] if message.type == "tool"]


def texts(message: Any) -> str:
    return " ".join(part.get("text", "") for part in message.content_blocks)


@pytest.mark.anyio
async def test_agent_calls_engine_tools_and_resumes_after_an_approval(
    page: Callable[[str], Any], script: Any, options: tuple[str, ...]
) -> None:
    names = page("use-from-langchain")
    client = names["MultiServerMCPClient"](
        {"fumehood": {"transport": "stdio", "command": "fumehood", "args": ["mcp", *options]}}
    )
    agent = names["create_agent"](following(script), await client.get_tools())
    results = said(await agent.ainvoke({"messages": [("user", "Go.")]}))
    assert [block["type"] for block in results[1].content_blocks] == ["text", "image"]
    assert [one.status for one in results] == ["success", "success", "error", "success", "success"]
    script.check([texts(one) for one in results])


async def half(page: Any, checkpoints: Path, options: Any, resume: Any, command: str) -> Any:
    """Run one part of a graph that another process resumes."""
    model = Scripted(
        messages=iter(
            [AIMessage(content="Done.") if resume else calling("run_shell", {"command": command})]
        )
    )
    async with AsyncSqliteSaver.from_conn_string(str(checkpoints)) as saver:
        agent = await page("use-from-langchain")["make_agent"](model, saver, *options)
        start = Command(resume=True) if resume else {"messages": [("user", "Go.")]}
        return await agent.ainvoke(start, CONFIG)


@pytest.mark.anyio
async def test_graph_resumed_in_another_process_acts_once(
    page: Any, script: Any, options: Any, session_id: str, client: Client, tmp_path: Path
) -> None:
    # Long enough that it still runs when the other process repeats it.
    command, checkpoints = "echo ask-me >> log; sleep 10; echo done", tmp_path / "checkpoints"
    paused = await half(page, checkpoints, options, False, command)
    assert paused["__interrupt__"][0].value.startswith("REQUIRES_HUMAN_APPROVAL")
    still = await half(page, checkpoints, options, True, command)
    assert still["__interrupt__"][0].value.startswith("REQUIRES_HUMAN_APPROVAL")
    script.approve(is_over=False)
    resumed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, __file__, checkpoints, *options],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "done" in resumed.stdout
    lines = client.call("run_shell", {"command": "wc -l < log"}, session_id=session_id)
    assert lines.data["stdout"] == "1\n"
    assert not client.approvals.list(state="pending").items


def own_tool(ran: list[str]) -> Any:
    @tool
    def deploy(target: str) -> str:
        """Deploy."""
        ran.append(target)
        return f"{target} is deployed"

    return deploy


def test_guarded_own_tool_runs_once_after_approval(page: Any, client: Client, script: Any) -> None:
    ran: list[str] = []
    model = Scripted(
        messages=iter([calling("deploy", {"target": "a"}), AIMessage(content="Done.")])
    )
    agent = page("use-from-langchain")["make_guarded_agent"](
        model, [own_tool(ran)], InMemorySaver()
    )
    paused = agent.invoke({"messages": [("user", "Go.")]}, CONFIG)
    assert paused["__interrupt__"][0].value["tool"] == "external:deploy"
    assert agent.invoke(Command(resume="yes, run it"), CONFIG)["__interrupt__"]
    assert ran == []
    script.approve()
    (result,) = said(agent.invoke(Command(resume=True), CONFIG))
    assert (ran, result.content) == (["a"], "a is deployed")


@pytest.mark.anyio
@pytest.mark.parametrize("is_async", [False, True])
async def test_pending_or_denied_own_tool_does_not_run(
    approver: ControlClient, is_async: bool
) -> None:
    ran: list[str] = []
    call = ("deploy", {"target": f"b{is_async}"})

    def messages() -> Any:
        yield calling(*call)
        (waiting,) = approver.approvals.list(state="pending").items
        approver.approvals.deny(waiting.id, version=waiting.version, reason="Not today.")
        yield calling(*call)
        yield AIMessage(content="Done.")

    agent = create_agent(
        Scripted(messages=messages()), [own_tool(ran)], middleware=[FumehoodApprover()]
    )
    start: Any = {"messages": [("user", "Go.")]}
    waited, denied = said(await agent.ainvoke(start) if is_async else agent.invoke(start))
    assert (waited.status, denied.status, ran) == ("error", "error", [])
    assert waited.content.startswith("REQUIRES_HUMAN_APPROVAL: ")
    assert denied.content.startswith("APPROVAL_DENIED: ")
    assert "Not today." in denied.content


@pytest.mark.anyio
@pytest.mark.parametrize("is_async", [False, True])
async def test_guarded_own_tool_does_not_run_without_an_engine(
    is_async: bool, tmp_path: Path
) -> None:
    ran: list[str] = []
    model = Scripted(
        messages=iter([calling("deploy", {"target": "c"}), AIMessage(content="Done.")])
    )
    approver = FumehoodApprover(Client(tmp_path / "none.sock"), interrupts=True)
    agent = create_agent(model, [own_tool(ran)], middleware=[approver])
    start: Any = {"messages": [("user", "Go.")]}
    (denied,) = said(await agent.ainvoke(start) if is_async else agent.invoke(start))
    assert (denied.status, ran) == ("error", [])
    assert denied.content.startswith(
        "fumehood decided nothing, so the call must not run. No engine"
    )


if __name__ == "__main__":
    page_of = run_path(str(Path(__file__).parents[1] / "conftest.py"))["names_of"]
    answer = asyncio.run(half(page_of, Path(sys.argv[1]), sys.argv[2:], True, ""))
    print(texts(said(answer)[0]))
