"""Claude Agent SDK: the permission callback, invoked through the SDK."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from claude_agent_sdk import (
    AssistantMessage,
    PermissionResultAllow,
    PermissionResultDeny,
    ResultMessage,
    ToolPermissionContext,
    Transport,
)

from fumehood import AsyncClient, ControlClient
from fumehood.integrations.claude_agent_sdk import fumehood_permissions

pytestmark = pytest.mark.anyio

CONTEXT = ToolPermissionContext(tool_use_id="toolu_1")


class Scripted(Transport):
    """Replaces the Claude Code program: asks permission for each call and records the answers."""

    def __init__(self, *calls: tuple[str, Any]) -> None:
        self.calls = list(calls)
        self.answers: list[Any] = []
        self._out, self._in = anyio.create_memory_object_stream[Any](100)

    async def connect(self) -> None: ...

    async def close(self) -> None:
        self._out.close()

    async def end_input(self) -> None: ...

    def is_ready(self) -> bool:
        return True

    async def write(self, data: str) -> None:
        message = json.loads(data)
        if message["type"] == "control_request":
            answer = {"subtype": "success", "request_id": message["request_id"], "response": {}}
            await self._out.send({"type": "control_response", "response": answer})
            return
        if message["type"] == "control_response":
            self.answers.append(message["response"])
        if len(self.answers) < len(self.calls):
            name, arguments = self.calls[len(self.answers)]
            asked = {
                "subtype": "can_use_tool", "tool_name": name, "input": arguments,
                "tool_use_id": f"toolu_{len(self.answers)}", "permission_suggestions": [],
            }  # fmt: skip
            request = {"type": "control_request", "request_id": f"r{len(self.answers)}"}
            await self._out.send({**request, "request": asked})
            return
        text = {"type": "text", "text": json.dumps(self.answers)}
        said = {"role": "assistant", "model": "scripted", "content": [text]}
        await self._out.send({"type": "assistant", "message": said, "parent_tool_use_id": None})
        await self._out.send(
            {
                "type": "result", "subtype": "success", "duration_ms": 1, "duration_api_ms": 1,
                "is_error": False, "num_turns": 1, "session_id": "s", "result": "done",
            }
        )  # fmt: skip

    async def read_messages(self) -> AsyncIterator[Any]:
        async for message in self._in:
            yield message


async def test_howto_page_example_runs_unchanged(page: Callable[[str], Any], decide: Any) -> None:
    """The SDK passes on one approval and one denial."""
    calls = ("Bash", {"command": "make release"}), ("Write", {"file_path": "/etc/x", "content": ""})
    script = Scripted(*calls)
    with decide("approve", "deny"):
        messages = await page("use-from-claude-agent-sdk")["ask"]("Go.", "/tmp", script)
    assert [type(one) for one in messages] == [AssistantMessage, ResultMessage]
    approved, denied = (one["response"] for one in script.answers)
    assert approved == {"behavior": "allow", "updatedInput": calls[0][1]}
    assert denied["behavior"] == "deny"
    assert "APPROVAL_DENIED" in denied["message"]


async def test_pending_call_is_denied_and_allowed_once_after_approval(
    approver: ControlClient,
) -> None:
    """The approver sees arguments and context. Another directory makes it a different call."""
    ask = fumehood_permissions(context={"cwd": "/a"})
    command = {"command": f"make {uuid.uuid4()}"}
    first = await ask("Bash", command, CONTEXT)
    assert isinstance(first, PermissionResultDeny)
    (waiting,) = approver.approvals.list(state="pending").items
    assert waiting.id in first.message
    approver.approvals.approve(waiting.id, version=waiting.version)
    elsewhere = await fumehood_permissions(context={"cwd": "/b"})("Bash", command, CONTEXT)
    assert isinstance(elsewhere, PermissionResultDeny)
    assert await ask("Bash", command, CONTEXT) == PermissionResultAllow(updated_input=command)
    assert isinstance(await ask("Bash", command, CONTEXT), PermissionResultDeny)
    for left in approver.approvals.list(state="pending").items:
        approver.approvals.deny(left.id, version=left.version)


@pytest.mark.parametrize(
    ("tool", "arguments", "options"),
    [
        ("no such name!", {}, {}),
        ("Bash", {"command": float("nan")}, {}),
        ("Bash", {}, {"agent_id": "nobody"}),
        ("Bash", {}, {"no_such_option": 1}),
    ],
    ids=["name", "arguments", "agent", "option"],
)
async def test_invalid_permission_request_is_denied(
    tool: str, arguments: Any, options: Any
) -> None:
    answer = await fumehood_permissions(**options)(tool, arguments, CONTEXT)
    assert isinstance(answer, PermissionResultDeny)
    assert "decided nothing" in answer.message


async def test_permission_request_without_an_engine_is_denied(tmp_path: Path) -> None:
    async with AsyncClient(tmp_path / "none.sock", connect_timeout_s=0.2) as client:
        answer = await fumehood_permissions(client)("Read", {}, CONTEXT)
    assert isinstance(answer, PermissionResultDeny)
    assert "decided nothing" in answer.message
