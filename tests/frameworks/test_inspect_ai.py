"""Inspect: the sandbox provider under Inspect's own checks, the approver, and evaluations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import includes
from inspect_ai.tool import ToolCall, ToolCallView
from inspect_ai.util import (
    ExecCompleted,
    OutputLimitExceededError,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
)
from inspect_ai.util import ExecRemoteAwaitableOptions as Awaitable
from inspect_ai.util import ExecRemoteStreamingOptions as Options
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from fumehood import Client, ControlClient
from fumehood.client.async_session import AsyncSession
from fumehood.integrations.inspect_ai import (
    FumehoodSandbox,
    FumehoodSandboxConfig,
    fumehood_approver,
)

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def session_id() -> Iterator[str]:
    """One shared session, whose files are in memory; Pydantic AI's suite has a disk."""
    with Client() as client:
        session = client.create_session(image="python")
        yield session.id
        client.end_session(session.id)


@pytest.fixture
async def sandbox_env(session_id: str) -> AsyncIterator[FumehoodSandbox]:
    """The fixture that Inspect's checks expect."""
    async with AsyncSession(session_id=session_id) as session:
        yield FumehoodSandbox(session)


async def test_exec_as_user(sandbox_env: FumehoodSandbox) -> None:
    """Replaces Inspect's check, which needs root: the sandbox supports only its single user."""
    for user in ("root", "0", "sandbox"):
        with pytest.raises(SandboxUserUnsupportedError):
            await sandbox_env.exec(["id"], user=user)
    assert "uid=0" not in (await sandbox_env.exec(["id"])).stdout


async def test_timed_out_exec_leaves_no_process(sandbox_env: FumehoodSandbox) -> None:
    """Inspect's own checks need `ps`, which the image lacks."""
    with pytest.raises(TimeoutError):
        await sandbox_env.exec(["sh", "-c", "sleep 3600 & sleep 3600"], timeout=1)
    alive = ["grep", "-qx", "sleep", *(f"/proc/{pid}/comm" for pid in range(1, 200))]
    assert (await sandbox_env.exec(alive)).returncode != 0
    assert (await sandbox_env.exec(["grep", "-x", "grep", "/proc/self/comm"])).success


async def test_missing_program_exits_127_and_missing_directory_fails(
    sandbox_env: FumehoodSandbox,
) -> None:
    assert (await sandbox_env.exec(["no-such-program"])).returncode == 127
    assert not (await sandbox_env.exec(["true"], cwd="missing")).success
    ran = await sandbox_env.exec(["pwd"], cwd="/usr", input=b"x" * 600_000)
    assert (ran.stdout, ran.success) == ("/usr\n", True)
    assert "missing" not in (await sandbox_env.exec(["ls", "-A"])).stdout


async def test_files_round_trip_byte_for_byte_and_leave_no_temporary_files(
    sandbox_env: FumehoodSandbox,
) -> None:
    content = bytes(range(256)) * 8192
    for name, size in (("/tmp/-a b'\n", 0), ("-c", 700), ("d/$(id)", len(content))):
        await sandbox_env.write_file(name, content[:size])
        assert await sandbox_env.read_file(name, text=False) == content[:size]
    with pytest.raises(UnicodeDecodeError):
        await sandbox_env.read_file("-c")
    await sandbox_env.write_file("e", "a\r\nb")
    assert await sandbox_env.read_file("e") == "a\r\nb"
    await sandbox_env.exec(["rm", "-rf", "--", "-c", "d", "e"])
    assert (await sandbox_env.exec(["ls", "-A"])).stdout in ("", "subdir\n")
    with pytest.raises(PermissionError):
        await sandbox_env.write_file("/usr/x", "")


async def test_output_over_the_limit_is_output_limit_exceeded_error(
    sandbox_env: FumehoodSandbox,
) -> None:
    with pytest.raises(OutputLimitExceededError) as long:
        await sandbox_env.exec(["sh", "-c", "yes | head -c 3000000"])
    assert len(long.value.truncated_output or "") > 1 << 20


async def events_of(process: Any) -> tuple[str, int | None]:
    text, code = "", None
    async for event in process:
        if isinstance(event, ExecCompleted):
            code = event.exit_code
        else:
            text += event.data
    return text, code


async def shown(sandbox: FumehoodSandbox, process: Any) -> Any:
    client = await sandbox.session.client()
    return await client.process(sandbox.session.id, process.name)


async def test_remote_process_streams_runs_beside_commands_and_ends_when_killed(
    sandbox_env: FumehoodSandbox,
) -> None:
    server = "trap 'echo bye; exit' TERM; echo up; echo err >&2; while :; do sleep 0.1; done"
    process = await sandbox_env.exec_remote(["sh", "-c", server])
    text = ""
    async for event in process:
        text += event.data
        if text == "up\nerr\n":
            break
    assert (await sandbox_env.exec(["echo", "beside"])).stdout == "beside\n"
    assert (await shown(sandbox_env, process)).state == "running"
    await process.kill()
    await process.kill()
    assert (await shown(sandbox_env, process)).state == "ended"
    rest = [event async for event in aiter_again(process)]
    assert "".join(one.data for one in rest).endswith("bye\n")
    with pytest.raises(RuntimeError, match="only be iterated once"):
        aiter(process)


async def aiter_again(process: Any) -> AsyncIterator[Any]:
    while True:
        try:
            yield await anext(process)
        except StopAsyncIteration:
            return


async def test_remote_process_has_input_directory_environment_and_exit_code(
    sandbox_env: FumehoodSandbox,
) -> None:
    command = ["sh", "-c", 'pwd; echo "$A"; wc -c; exit 3']
    for given in (None, "", "é" * 100, b"x" * 600_000):
        options = Awaitable(input=given, cwd="/usr", env={"A": "b c"}, timeout=60)
        ran = await sandbox_env.exec_remote(command, options, stream=False)
        size = len(given.encode() if isinstance(given, str) else given or b"")
        assert (ran.returncode, ran.stdout.split()) == (3, ["/usr", "b", "c", str(size)])
    assert ".input" not in (await sandbox_env.exec(["ls", "-A"])).stdout
    left = await sandbox_env.exec_remote(["sh", "-c", "sleep 600 & echo left"])
    assert await events_of(left) == ("left\n", 0)
    assert (await shown(sandbox_env, left)).state == "running"
    client = await sandbox_env.session.client()
    await client.stop_process(sandbox_env.session.id, left.name)
    gone = await sandbox_env.exec_remote(["no-such-program"], stream=False)
    assert gone.returncode == 127
    ended = await sandbox_env.exec_remote(["sh", "-c", "kill -9 $$"], stream=False)
    assert ended.returncode == 128 + 9


async def test_remote_process_reads_what_is_written_until_its_input_is_closed(
    sandbox_env: FumehoodSandbox,
) -> None:
    process = await sandbox_env.exec_remote(["cat"], Options(input="a\n", stdin_open=True))
    await process.write_stdin(b"b" * 200_000)
    await process.close_stdin()
    assert await events_of(process) == ("a\n" + "b" * 200_000, 0)
    with pytest.raises(RuntimeError, match="terminated"):
        await process.write_stdin("c")
    closed = await sandbox_env.exec_remote(["cat"])
    with pytest.raises(RuntimeError, match="stdin_open"):
        await closed.write_stdin("c")
    assert await events_of(closed) == ("", 0)


async def test_remote_process_ends_with_its_timeout_or_caller(sandbox_env: FumehoodSandbox) -> None:
    client = await sandbox_env.session.client()
    with pytest.raises(TimeoutError):
        await sandbox_env.exec_remote(["sleep", "3600"], Awaitable(timeout=1), stream=False)
    async with anyio.create_task_group() as group:
        process = await sandbox_env.exec_remote(["sleep", "3600"])
        group.start_soon(anext, process)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    states = {one.state for one in await client.processes(sandbox_env.session.id)}
    assert states == {"ended"}


async def test_remote_process_that_is_refused_raises_what_inspect_expects(
    client: Client, sandbox_env: FumehoodSandbox
) -> None:
    with pytest.raises(SandboxUserUnsupportedError):
        await sandbox_env.exec_remote(["id"], Options(user="root"))
    with pytest.raises(RuntimeError, match="has more than"):
        await sandbox_env.exec_remote(["echo", "x" * 200_000])
    made = await FumehoodSandbox.sample_init("t", "python", {})
    sandbox = made["default"]
    process = await sandbox.exec_remote(["sleep", "3600"])
    client.end_session(sandbox.session.id)
    with pytest.raises(SandboxUnavailableError):
        await anext(process)
    with pytest.raises(SandboxUnavailableError):
        await sandbox.exec_remote(["id"])
    await process.kill()


async def test_refused_call_is_permission_error_and_ended_session_is_sandbox_unavailable(
    session_id: str, client: Client
) -> None:
    config = FumehoodSandboxConfig(image="python", agent_id=None)
    assert FumehoodSandbox.config_deserialize(config.model_dump()) == config
    made = await FumehoodSandbox.sample_init("t", config, {})
    sandbox = made["default"]
    first, control = await sandbox.exec(["id"]), sandbox.session.id
    assert first.success
    asked = await sandbox.session.call("run_shell", {"command": "echo ask-me"})
    client.approvals.cancel(str(asked.error.approval_id))
    with pytest.raises(PermissionError, match="REQUIRES_HUMAN_APPROVAL"):
        await refused(sandbox)
    client.end_session(control)
    with pytest.raises(SandboxUnavailableError, match="has ended"):
        await sandbox.exec(["id"])
    await FumehoodSandbox.sample_cleanup("t", config, made, False)


async def test_sandbox_has_the_disk_and_limits_of_its_configuration(
    client: Client, disk_mb: int
) -> None:
    limits = {"memory_mb": 256, "disk_mb": disk_mb, "idle_seconds": 60, "lifetime_seconds": 30}
    config = FumehoodSandbox.config_deserialize({"image": "python", **limits})
    made = await FumehoodSandbox.sample_init("t", config, {})
    sandbox = made["default"]
    record = client.session(sandbox.session.id)
    assert (record.memory_mb, record.disk_mb) == (256, disk_mb)
    assert (record.expires_at - record.created_at).total_seconds() == pytest.approx(30, abs=1)
    await sandbox.write_file("run", "#!/bin/sh\necho ran")
    await sandbox.exec(["chmod", "+x", "run"])
    assert (await sandbox.exec(["./run"])).stdout == "ran\n"
    await FumehoodSandbox.sample_cleanup("t", config, made, False)


async def refused(sandbox: FumehoodSandbox) -> None:
    """Make a call for which a policy rule on commands requires approval."""
    run = sandbox.session.run

    async def as_command(program: list[str], **options: Any) -> Any:
        return await run(program[-1], **options)

    sandbox.session.run = as_command
    try:
        await sandbox.exec(["echo ask-me"])
    finally:
        sandbox.session.run = run


async def test_session_ends_with_its_sample(sessions: Callable[[], set[str]]) -> None:
    before = sessions()
    made = await FumehoodSandbox.sample_init("t", "python", {})
    assert len(sessions() - before) == 1
    await FumehoodSandbox.sample_cleanup("t", "python", made, True)
    assert sessions() == before


def scripted(*commands: str) -> Any:
    """A scripted model that runs one command after the other and then finishes."""
    calls = [
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": one}) for one in commands
    ]
    done = ModelOutput.from_content("mockllm/model", "42, done")
    return get_model("mockllm/model", custom_outputs=[*calls, done])


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INSPECT_LOG_DIR", str(tmp_path))
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    # Inspect would fetch a table of tokens from the network.
    words = SimpleNamespace(encode=lambda text, **_: text.split())
    monkeypatch.setattr("tiktoken.get_encoding", lambda _: words)


def test_howto_page_example_runs_unchanged(
    page: Callable[[str], Any], quiet: None, decide: Any, sessions: Any
) -> None:
    """The approved command runs in the sandbox; the model reads the reason for the denial."""
    with decide("approve", "deny"):
        log = page("use-from-inspect")["evaluate"](
            scripted("echo $((6 * 7)) > a; cat a; id -un", "touch b"), "6 * 7?", "42"
        )
    assert log.status == "success", log.error
    (sample,) = log.samples
    ran, rejected = (one for one in sample.messages if one.role == "tool")
    assert ran.text.split() == ["42", "sandbox"]
    assert "APPROVAL_DENIED" in rejected.error.message
    assert sample.scores["includes"].value == "C"


def test_howto_page_starts_a_process_beside_the_commands_of_its_sample(
    page: Callable[[str], Any], quiet: None, sessions: Any
) -> None:
    task = Task(
        dataset=[Sample(input="Is it up?", target="42")],
        solver=[page("use-from-inspect")["serve"]()],
        scorer=includes(),
        sandbox=("fumehood", "python"),
    )
    (log,) = evaluate(task, model=scripted())
    assert log.status == "success", log.error
    (sample,) = log.samples
    assert sample.metadata["server"].startswith("Serving HTTP on 127.0.0.1 port 8000")
    assert "Directory listing" in sample.metadata["page"]


TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import solver
from inspect_ai.util import sandbox

@solver
def run():
    async def solve(state, generate):
        ran = await sandbox().exec(["sh", "-c", "id -un; pwd"])
        state.output.completion = ran.stdout
        return state
    return solve

@task
def who():
    return Task(dataset=[Sample(input="?", target="sandbox")], solver=run(), scorer=includes())
"""


def test_inspect_finds_provider_and_approver_by_entry_point(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["entry-points"].items()
    about = tmp_path / "fumehood-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fumehood\nVersion: 0.1.0\n")
    (about / "top_level.txt").write_text("fumehood\n")
    origin = {"url": ROOT.as_uri(), "dir_info": {"editable": True}}
    (about / "direct_url.json").write_text(json.dumps(origin))
    lines = [
        line
        for group, entries in groups
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "who.py").write_text(TASK)
    (tmp_path / "approval.yaml").write_text(
        "approvers:\n  - name: fumehood/fumehood\n    tools: '*'\n    wait_for_approval: 1\n"
    )
    path = f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}"
    options = ["--model", "mockllm/model", "--display", "plain", "--approval", "approval.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "inspect_ai", "eval", "who.py", "--sandbox", "fumehood:python", *options],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout, done.stdout + done.stderr
    assert "1.000" in done.stdout


async def ask(approve: Any, function: str, arguments: Any) -> Any:
    return await approve("", ToolCall(id="1", function=function, arguments=arguments),
                         ToolCallView(), [])  # fmt: skip


async def test_approver_rejects_every_call_not_allowed_by_the_engine(
    approver: ControlClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    approve = fumehood_approver()
    first = await ask(approve, "bash", {"cmd": "make twice"})
    (waiting,) = approver.approvals.list(state="pending").items
    assert first.decision == "reject"
    assert waiting.id in first.explanation
    approver.approvals.approve(waiting.id, version=waiting.version)
    assert (await ask(approve, "bash", {"cmd": "make twice"})).decision == "approve"
    for function, options in (("no name!", {}), ("bash", {"agent_id": "nobody"})):
        answer = await ask(fumehood_approver(**options), function, {})
        assert answer.decision == "reject"
        assert "decided nothing" in answer.explanation
    monkeypatch.setenv("FUMEHOOD_SOCKET", str(tmp_path / "none.sock"))
    answer = await ask(approve, "bash", {"cmd": "make twice"})
    assert answer.decision == "reject"
    assert "decided nothing" in answer.explanation
