"""OpenAI Agents SDK: a shell tool whose commands run in a session."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from agents import (
    Agent,
    Model,
    ModelResponse,
    RunContextWrapper,
    Runner,
    ShellActionRequest,
    ShellCallData,
    ShellCommandRequest,
    ShellTool,
    Usage,
)  # fmt: skip
from agents.tracing import set_tracing_disabled
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)
from openai.types.responses.response_function_shell_tool_call import (
    Action,
    ResponseFunctionShellToolCall,
)

from fumehood import Client
from fumehood.integrations.openai_agents import FumehoodShell

pytestmark = pytest.mark.anyio

set_tracing_disabled(True)


class Scripted(Model):
    """Scripted model that requests commands once and then repeats their output."""

    def __init__(self, *commands: str) -> None:
        self.commands = list(commands)
        self.seen: list[Any] = []

    async def get_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002
        *args: Any,
        **named: Any,
    ) -> Any:
        self.seen = (
            [item for item in input if dict(item).get("type") == "shell_call_output"]
            if isinstance(input, list)
            else []
        )
        if not self.seen:
            action = Action(commands=self.commands, max_output_length=None, timeout_ms=None)
            output: Any = ResponseFunctionShellToolCall(
                id="sh_1", call_id="call_1", action=action, status="completed", type="shell_call"
            )
        else:
            text = ResponseOutputText(
                text=str(self.seen[0]["output"]), type="output_text", annotations=[]
            )
            output = ResponseOutputMessage(
                id="msg_1", content=[text], role="assistant", status="completed", type="message"
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError


def request(*commands: str, timeout_ms: int | None = None) -> ShellCommandRequest:
    action = ShellActionRequest(list(commands), timeout_ms)
    return ShellCommandRequest(RunContextWrapper(None), ShellCallData("c", action))


async def test_howto_page_example_runs_unchanged(page: Callable[[str], Any], sessions: Any) -> None:
    result = await page("use-from-openai-agents")["ask"](
        Scripted("echo $((6 * 7)) > a", "cat a; exit 3"), "6 * 7?"
    )
    assert "42" in result.final_output
    assert "'exit_code': 3" in result.final_output


async def test_each_shell_command_has_its_own_complete_output(sessions: Any) -> None:
    async with FumehoodShell(image="python") as shell:
        done = await shell(
            request("seq 20000", "echo oops >&2; exit 4", "kill -9 $$", "cat missing")
        )
        assert done.output[0].stdout == "".join(f"{n}\n" for n in range(1, 20001))
        assert (done.output[1].stderr, done.output[1].exit_code) == ("oops\n", 4)
        assert done.output[2].exit_code == 137
        assert [one.outcome.type for one in done.output] == ["exit"] * 4
        assert [one.command for one in done.output][3] == "cat missing"


async def test_timed_out_command_has_a_timeout_outcome_and_the_next_runs(sessions: Any) -> None:
    async with FumehoodShell(image="python") as shell:
        late, twin = (await shell(request("echo a; sleep 60", "echo b", timeout_ms=500))).output
        assert (late.outcome.type, late.stdout, late.exit_code) == ("timeout", "a\n", None)
        assert (twin.outcome.type, twin.stdout) == ("exit", "b\n")


async def test_denied_command_reports_its_denial_and_the_others_still_run(sessions: Any) -> None:
    commands = ("echo a", "echo deny-me", "echo b")
    async with FumehoodShell(image="python") as shell:
        ran, denied, twin = (await shell(request(*commands))).output
        assert (ran.stdout, ran.exit_code, twin.stdout, twin.exit_code) == ("a\n", 0, "b\n", 0)
        assert (denied.stdout, denied.exit_code, denied.command) == ("", 126, commands[1])
        assert denied.stderr.startswith("PERMISSION_DENIED: ")
        agent = Agent(name="a", model=Scripted(*commands), tools=[ShellTool(executor=shell)])
        told = (await Runner.run(agent, "Go.")).final_output
        assert all(part in told for part in ("a\\n", "PERMISSION_DENIED: ", "b\\n"))


async def test_ended_session_is_reported_to_the_model(client: Client) -> None:
    session = client.create_session(image="python")
    client.end_session(session.id)
    shell = FumehoodShell(session_id=session.id)
    agent = Agent(name="a", model=Scripted("echo a"), tools=[ShellTool(executor=shell)])
    assert "has ended" in (await Runner.run(agent, "Go.")).final_output
    await shell.close()


class Following(Model):
    """Scripted model that makes the calls of a script and records the conversation."""

    def __init__(self, script: Any) -> None:
        self.script = script
        self.seen: list[Any] = []

    async def get_response(
        self,
        system_instructions: Any,
        input: Any,  # noqa: A002
        *args: Any,
        **named: Any,
    ) -> Any:
        self.seen = input
        call = self.script()
        if call is None:
            text = ResponseOutputText(text="Done.", type="output_text", annotations=[])
            output: Any = ResponseOutputMessage(
                id="msg_1", content=[text], role="assistant", status="completed", type="message"
            )
        else:
            output = ResponseFunctionToolCall(
                call_id=f"call_{len(input)}",
                name=call[0],
                arguments=json.dumps(call[1]),
                type="function_call",
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **named: Any) -> Any:
        raise NotImplementedError


async def test_agent_calls_engine_tools_and_resumes_after_an_approval(
    page: Callable[[str], Any], script: Any, options: tuple[str, ...]
) -> None:
    model = Following(script)
    result = await page("use-from-openai-agents")["ask_with_tools"](model, "Go.", *options)
    assert result.final_output == "Done."
    results = [
        item["output"] for item in model.seen if dict(item).get("type") == "function_call_output"
    ]
    assert any(part["type"] == "input_image" for part in results[1])
    script.check([texts(result) for result in results])


def texts(output: Any) -> str:
    """The text of a tool's output, joined if it has several parts."""
    parts = json.loads(output) if isinstance(output, str) and output[:1] in "[{" else output
    parts = parts if isinstance(parts, list) else [parts]
    return " ".join(
        part["text"] if isinstance(part, dict) and "text" in part else str(part) for part in parts
    )
