"""deepagents: the sandbox backend, through file operations and an agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from fumehood import Client, ControlClient
from fumehood.integrations.deepagents import FumehoodBackend


class Scripted(GenericFakeChatModel):
    """Scripted model that returns one message after the other and ignores bound tools."""

    def bind_tools(self, tools: Any, **named: Any) -> Any:
        return self


def scripted(*calls: tuple[str, dict[str, Any]]) -> Scripted:
    messages = [
        AIMessage(content="", tool_calls=[{"name": name, "args": args, "id": f"call_{n}"}])
        for n, (name, args) in enumerate(calls)
    ]
    return Scripted(messages=iter([*messages, AIMessage(content="Done.")]))


@pytest.fixture(scope="module")
def backend() -> Iterator[FumehoodBackend]:
    with FumehoodBackend(image="python") as made:
        yield made


def test_howto_page_example_runs_unchanged(page: Callable[[str], Any], sessions: Any) -> None:
    model = scripted(
        ("write_file", {"file_path": "/workspace/a.py", "content": "print(6 * 7)\n"}),
        ("execute", {"command": "python3 a.py; no-such-program"}),
        ("edit_file", {"file_path": "/workspace/a.py", "old_string": "6", "new_string": "8"}),
        ("execute", {"command": "python3 a.py"}),
        ("write_file", {"file_path": "/etc/a", "content": "x"}),
    )
    answer = page("use-from-deepagents")["ask"](model, "6 * 7?")
    said = [str(message.content) for message in answer["messages"] if message.type == "tool"]
    assert "42\n" in said[1]
    assert "command not found" in said[1]
    assert "56" in said[3]
    assert "permission_denied" in said[4]
    assert answer["messages"][-1].content == "Done."


def test_backend_writes_reads_edits_and_finds_files(backend: FumehoodBackend) -> None:
    assert backend.write("/workspace/d/a.txt", "one\ntwo\n").error is None
    assert backend.read("/workspace/d/a.txt", offset=1).file_data["content"].startswith("two")
    assert backend.edit("/workspace/d/a.txt", "two", "2").occurrences == 1
    large = "x" * 200_000  # more than fits a command: deepagents sends it as files in /tmp
    assert backend.edit("/workspace/d/a.txt", "one", large).error is None
    assert backend.download_files(["/workspace/d/a.txt"])[0].content == f"{large}\n2\n".encode()
    assert [one["path"] for one in backend.ls("/workspace").entries] == ["/workspace/d"]
    assert [one["path"] for one in backend.glob("*.txt", "/workspace").matches] == [
        "/workspace/d/a.txt"
    ]
    assert backend.grep("2", "/workspace").matches[0]["line"] == 2


def test_files_round_trip_byte_for_byte_and_failures_have_error_codes(
    backend: FumehoodBackend,
) -> None:
    content = bytes(range(256)) * 20_000
    paths = ["/workspace/u/a.bin", "/tmp/u/b.bin"]
    sent = backend.upload_files([(path, content[: 1 << 19]) for path in paths] + [("/etc/x", b"x")])
    assert [one.error for one in sent] == [None, None, "permission_denied"]
    assert backend.upload_files([("/workspace/u/big", content)])[0].error is None
    missing = ["/workspace/none", "/tmp/none", "/workspace/../etc/passwd", "/tmp"]
    got = backend.download_files([*paths, "/workspace/u/big", *missing])
    assert [one.content for one in got[:3]] == [content[: 1 << 19]] * 2 + [content]
    assert [one.error for one in got[3:]] == [
        "file_not_found", "file_not_found", "invalid_path", "is_directory",
    ]  # fmt: skip
    assert [one.path for one in got[3:]] == missing


def test_file_outside_the_workspace_is_refused_beside_others(
    backend: FumehoodBackend, tmp_path: Path
) -> None:
    outside = [f"/workspace/{tmp_path}/a", f"/workspace/../../..{tmp_path}/a"]
    sent = backend.upload_files([(path, b"x") for path in ("/workspace/many/1", *outside)])
    assert [one.error for one in sent] == [None, "invalid_path", "invalid_path"]
    assert not list(tmp_path.iterdir())


def test_howto_page_project_goes_in_and_out_as_a_directory(
    page: Callable[[str], Any], sessions: Any, tmp_path: Path, disk_mb: int
) -> None:
    project, result = tmp_path / "project", tmp_path / "result"
    (project / "src").mkdir(parents=True)
    (project / "src/run").write_text("#!/bin/sh\necho ran")
    (project / "src/run").chmod(0o755)
    model = scripted(("execute", {"command": "src/run > src/out"}))
    page("use-from-deepagents")["change"](model, "Run it.", project, result)
    assert (result / "src/out").read_text() == "ran\n"
    assert {path.name for path in (result / "src").iterdir()} == {"run", "out"}


def test_command_timeout_and_truncation_follow_the_framework(backend: FumehoodBackend) -> None:
    late = backend.execute("echo a; sleep 60", timeout=1)
    assert (late.exit_code, late.output.startswith("a\n")) == (124, True)
    long = backend.execute("yes | head -c 3000000")
    assert long.truncated
    whole = backend.execute("seq 20000; echo err >&2")
    assert (len(whole.output), whole.exit_code, whole.truncated) == (108_898, 0, False)


def test_agent_reads_a_pending_approval_and_continues(client: Client) -> None:
    with FumehoodBackend(image="python") as backend:
        model = scripted(
            ("execute", {"command": "echo ask-me > asked"}),
            ("execute", {"command": "ls | wc -l"}),
        )
        agent = create_deep_agent(model=model, backend=backend)
        messages = agent.invoke({"messages": [("user", "Go.")]})["messages"]
        asked, went_on = [str(one.content) for one in messages if one.type == "tool"]
        assert "REQUIRES_HUMAN_APPROVAL" in asked
        assert went_on.startswith("0\n")
        waiting = client.approvals.list(state="pending").items
        assert [one.arguments["command"] for one in waiting] == ["echo ask-me > asked"]
        client.approvals.cancel(waiting[0].id)


def test_command_waiting_for_approval_runs_once_approved(approver: ControlClient) -> None:
    with (
        FumehoodBackend(image="python", wait_for_approval=60) as backend,
        ThreadPoolExecutor() as threads,
    ):
        running = threads.submit(backend.execute, "echo ask-me")
        while not (waiting := approver.approvals.list(state="pending").items):
            assert not running.done()
        approver.approvals.approve(waiting[0].id, version=waiting[0].version)
        assert (running.result().output, running.result().exit_code) == ("ask-me\n", 0)


def test_ended_session_is_returned_as_command_output(client: Client) -> None:
    session = client.create_session(image="python")
    client.end_session(session.id)
    with FumehoodBackend(session_id=session.id) as backend:
        refused = backend.execute("echo a")
        assert (refused.exit_code, refused.output[:20]) == (126, "RESOURCE_NOT_FOUND: ")
        assert backend.upload_files([("/workspace/a", b"")])[0].error == "file_not_found"
