"""Provider formats and the agent loop, through the socket, the clients and the commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from conftest import FUMEHOOD, Daemon, StartDaemon, shell_path
from fumehood import AgentRun, ControlClient, Refused
from support.answers import error_of
from support.approving import approving_daemon, ran
from support.clients import KINDS, LEAVES_SOCKETS, client_of
from support.definition_files import DefinitionDirectory
from support.http import connect
from support.wait import wait_until

pytestmark = [*LEAVES_SOCKETS]

FORMATS = ["openai", "openai-responses", "anthropic", "gemini", "mcp"]


def call(name: str, arguments: Any, call_id: str = "id1") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def message(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def command(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [FUMEHOOD, "tools", "export", *words],
        env=daemon.environment, capture_output=True, timeout=600,
    )  # fmt: skip


@pytest.mark.row("T6", "T8")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_socket_and_client_export_equal_tools_without_internal_fields(
    shared_daemon: Daemon, name: str, kind: str
) -> None:
    http = shared_daemon.client()
    answer = http.get(f"/v1/tools?format={name}")
    data = answer.body["data"]
    assert sorted(data) == ["format", "losses", "tools"]
    assert data["format"] == name
    text = json.dumps(data["tools"])
    assert "calculator" in text
    assert not any(
        word in text for word in ("executor", "sandboxed", "code:python", "memory_limit")
    )
    with client_of(kind, shared_daemon.socket) as client:
        assert client.export(name) == data["tools"]
        with pytest.raises(Refused, match="nobody"):
            client.export(name, agent_id="nobody")


@pytest.mark.row("T8")
def test_command_line_exports_tools_and_explains_losses(
    start_daemon: StartDaemon, definitions: DefinitionDirectory
) -> None:
    free = {
        "name": "send_anything", "type": "MCP", "description": "Send it.",
        "parameters": {"properties": {"body": {"type": "object"}}},
    }  # fmt: skip
    definitions.put("free.json", free)
    daemon = start_daemon(tools_directory=str(definitions.path))
    done = command(daemon, "--format", "openai")
    assert done.returncode == 0, done.stderr
    tools = {tool["function"]["name"]: tool["function"] for tool in json.loads(done.stdout)}
    assert tools["calculator"]["strict"] is True
    assert tools["send_anything"]["strict"] is False
    assert b"--explain" in done.stderr
    done = command(daemon, "--format", "openai", "--explain", "--only", "send_anything")
    assert json.loads(done.stdout) == [
        {
            "tool": "send_anything",
            "where": "parameters.properties.body",
            "what": "strict is false: the object takes fields of any name",
            "change": "name them in properties and say additionalProperties: false",
        }
    ]
    for words, status, said in (
        (["--format", "yaml"], 1, b"INVALID_PARAMS"),
        (["--format", "openai", "--only", "nothing"], 1, b"TOOL_NOT_FOUND"),
        (["--format", "openai", "--out", "."], 2, b"skill"),
        (["--format", "skill", "--explain"], 2, b"loses nothing"),
        (["--format", "skill", "--only", "nothing"], 2, b"nothing"),
        ([], 2, b"--format"),
    ):
        done = command(daemon, *words)
        assert (done.returncode, said in done.stdout + done.stderr) == (status, True), done


@pytest.mark.row("T8")
def test_commands_in_exported_skill_run_unchanged(shared_daemon: Daemon, tmp_path: Path) -> None:
    done = command(shared_daemon, "--format", "skill", "--out", str(tmp_path / "a" / "skill"))
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    text = (tmp_path / "a" / "skill" / "SKILL.md").read_text(encoding="utf-8")
    assert command(shared_daemon, "--format", "skill").stdout.decode() == text
    (line,) = [line for line in text.splitlines() if line.startswith("fumehood call calculator")]
    called = subprocess.run(
        ["bash", "-c", line], capture_output=True, timeout=600,
        env={**shared_daemon.environment, "PATH": shell_path()},
    )  # fmt: skip
    assert json.loads(called.stdout)["data"]["value"] == 1144
    done = command(shared_daemon, "--format", "skill", "--out", "/proc/nothing")
    assert done.returncode == 2
    assert b"cannot be written" in done.stderr


@pytest.mark.row("P10")
@pytest.mark.parametrize("kind", KINDS)
def test_client_handles_tool_calls_of_openai_library_message(
    shared_daemon: Daemon, kind: str
) -> None:
    calls = [
        call("calculator", {"expression": "6 * 7", "precision": None}, "1"),
        call("nothing", {}, "2"),
        {**call("calculator", {}, "3"), "function": {"name": "calculator", "arguments": "{"}},
    ]
    written = ChatCompletionMessage.model_validate(message(*calls))
    with client_of(kind, shared_daemon.socket) as client:
        first, second, third = client.handle(written, format="openai")
        assert json.loads(first["content"]) == {"value": 42, "text": "42"}
        assert second["content"].startswith("TOOL_NOT_FOUND: ")
        assert third["content"].startswith("INVALID_PARAMS: ")
        assert [m["tool_call_id"] for m in (first, second, third)] == ["1", "2", "3"]
        assert client.handle({"role": "assistant", "content": "Hello."}, format="openai") == []
        with pytest.raises(Refused, match="must be a list"):
            client.handle({"tool_calls": 7}, format="openai")
        with pytest.raises(ValueError, match="not JSON"):
            client.handle({"tool_calls": {1, 2}}, format="openai")


@pytest.mark.row("P10", "P11")
def test_tool_calls_answer_has_truncated_message_and_full_envelope(shared_daemon: Daemon) -> None:
    http = shared_daemon.client()
    code = "print('x' * 6000)"
    body = {"format": "openai", "message": message(call("run_restricted_python", {"code": code}))}
    answer = http.post("/v1/tool_calls", json.dumps(body).encode())
    assert answer.status == 200
    (shown,), (envelope,) = answer.body["data"]["messages"], answer.body["data"]["envelopes"]
    assert len(shown["content"]) <= 2000
    assert len(envelope["data"]["stdout"]) == 6001
    assert list(envelope) == ["success", "status", "data", "error", "metadata"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[]", 400), (b"{}", 400), (b'{"format": "openai"}', 400),
        (b'{"format": "openai", "message": {}, "more": 1}', 400),
        (b'{"format": "openai", "message": {}, "options": {"idempotency_key": "k"}}', 400),
        (b'{"format": "openai", "message": ' + b"[" * 1000 + b"]" * 1000 + b"}", 400),
        (json.dumps({"format": "openai", "message": message(*[call("a", {})] * 10_000)}).encode(), 400),
        (b'{"format": "openai", "message": "' + b"x" * (8 << 20) + b'"}', 413),
        (b'{"format": "openai", "message": {}}', 200),
    ],
    ids=range(9),
)  # fmt: skip
def test_malformed_tool_calls_request_is_refused(
    shared_daemon: Daemon, body: bytes, status: int
) -> None:
    client = shared_daemon.client()
    answer = client.post("/v1/tool_calls", body)
    assert answer.status == status
    if status == 400:
        assert answer.code == "INVALID_PARAMS"


def test_client_disconnect_cancels_its_running_tool_calls(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(interpreter__timeout_seconds="60")
    endless = call("run_restricted_python", {"code": "while True:\n    pass"}, "1")
    body = json.dumps(
        {"format": "openai", "message": message(endless), "options": {"timeout_seconds": 60}}
    ).encode()
    with client_of("blocking", daemon.socket) as client:
        connection = connect(daemon.socket)
        connection.sendall(
            b"POST /v1/tool_calls HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        connection.close()
        wait_until(lambda: [row.code for row in client.calls().items] == ["CANCELLED"])


# -- The loop, with a human in it ---------------------------------------------------------------

USER = {"role": "user", "content": "Note it, and calculate."}
FINAL = {"role": "assistant", "content": "Done."}


class Script:
    """A scripted model that records the messages it receives."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[list[Any]] = []

    def __call__(self, messages: list[Any], *, tools: list[Any], tool_choice: Any) -> Any:
        self.asked.append(messages)
        return self.answers.pop(0)


@pytest.fixture(scope="module")
def approving() -> Iterator[Daemon]:
    with approving_daemon() as daemon:
        yield daemon


@pytest.mark.row("P10", "A1")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_agent_run_stops_for_approval_and_resumes_after_decision(
    approving: Daemon, kind: str, decision: str
) -> None:
    daemon, text = approving, f"{decision} {kind}"
    turn = message(
        call("note", {"text": text}, "1"), call("calculator", {"expression": "6 * 7"}, "2")
    )
    with (
        client_of(kind, daemon.socket) as client,
        ControlClient(daemon.control, credential=daemon.credential) as control,
    ):
        before = [row.tool_name for row in client.calls().items].count("calculator")
        run = client.run_agent(Script(turn), [USER])
        assert (run.ended_by, run.turns) == ("approval", 1)
        (waiting,) = run.waiting
        assert run.messages[2]["content"].startswith("REQUIRES_HUMAN_APPROVAL: ")
        assert error_of(waiting).approval_id in run.messages[2]["content"]
        assert json.loads(run.messages[3]["content"])["value"] == 42

        run = AgentRun.model_validate_json(run.model_dump_json())  # another process goes on
        silent = Script()
        still = client.run_agent(silent, run)
        assert (still.ended_by, still.turns, silent.asked) == ("approval", 0, [])
        assert still.messages == run.messages
        assert f"{text!r} 1" not in ran(daemon)

        getattr(control.approvals, decision)(error_of(waiting).approval_id, version=None)
        wait_until(lambda: client.call_state(waiting.metadata.call_id).envelope is not None)
        llm = Script(FINAL)
        after = client.run_agent(llm, still)
        assert after.ended_by == "answer"
        shown = llm.asked[0][2]["content"]
        if decision == "approve":
            assert json.loads(shown) == {"noted": text}
            assert ran(daemon).count(f"{text!r} 1") == 1
        else:
            assert shown.startswith("APPROVAL_DENIED: ")
            assert f"{text!r} 1" not in ran(daemon)
        assert llm.asked[0][3] == run.messages[3]  # the calculation was not done again
        assert [row.tool_name for row in client.calls().items].count("calculator") == before + 1
        assert [m.get("role") for m in after.messages] == [
            "user", "assistant", "tool", "tool", "assistant",
        ]  # fmt: skip
