"""Pydantic AI: the workspace backend, under the framework's conformance suite and in an agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from pydantic_ai import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.workspaces import (
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from fumehood import AsyncClient, Client
from fumehood.integrations.pydantic_ai import FumehoodWorkspace

pytestmark = pytest.mark.anyio

ALIVE = "grep -qx sleep /proc/[0-9]*/comm"
"""Shell command that succeeds if a `sleep` process is running."""


@pytest.fixture(scope="module")
def one_session(any_disk_mb: int | None) -> Iterator[str]:
    """One shared session; each test of the suite uses its own directory."""
    with Client() as client:
        session = client.create_session(image="python", disk_mb=any_disk_mb)
        yield session.id
        client.end_session(session.id)


@pytest.fixture
async def workspace(one_session: str) -> AsyncIterator[FumehoodWorkspace]:
    async with FumehoodWorkspace(session_id=one_session) as made:
        yield made


async def destroy(backend: Any) -> None:
    async with AsyncClient() as client:
        await client.end_session(backend.ref.id)


class TestConformance(WorkspaceBackendSuite):
    """The whole suite, except tests that need processes to outlive or run beside a command."""

    @pytest.fixture
    def backend(self, workspace: FumehoodWorkspace) -> FumehoodWorkspace:
        return workspace

    @pytest.fixture
    async def fresh_backend(
        self, any_disk_mb: int | None
    ) -> AsyncIterator[Callable[[], FumehoodWorkspace]]:
        async with AsyncExitStack() as made:  # the suite ends none of them
            yield lambda: made.push_async_exit(
                FumehoodWorkspace(image="python", disk_mb=any_disk_mb)
            )

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], FumehoodWorkspace]:
        return FumehoodWorkspace

    @pytest.fixture
    def destroy_environment(self) -> Callable[[Any], Awaitable[None]]:
        return destroy

    async def test_background_child_does_not_hold_up_completed_command(
        self, workspace: Any
    ) -> None:
        """The child ends with its command, so the command does not wait for it."""
        with anyio.fail_after(120):
            done = await workspace.run("(sleep 3600; touch late) & printf done", shell=True)
        assert (done.exit_code, done.stdout) == (0, "done")
        assert (await workspace.run(ALIVE, shell=True)).exit_code == 1

    async def test_a_backend_attached_by_ref_reaches_a_detached_process(
        self, workspace: Any
    ) -> None:
        """A detached process ends with its command as well."""
        await workspace.run("setsid sleep 3600 > /dev/null 2>&1 &", shell=True)
        attached = FumehoodWorkspace(workspace.ref)
        assert (await attached.run(ALIVE, shell=True)).exit_code == 1
        await attached.close()

    async def test_cancellation_stops_foreground_work(self, workspace: Any) -> None:
        """The session runs one call at a time, so a file records that the command began."""
        async with anyio.create_task_group() as group:
            group.start_soon(workspace.run, ["sh", "-c", "echo > began; exec sleep 3600"])
            await until_busy(workspace)
            group.cancel_scope.cancel()
        with anyio.fail_after(120):
            assert (await workspace.run(f"test -e began && {ALIVE}", shell=True)).exit_code == 1

    async def test_destroying_environment_during_command_raises_unavailable(
        self, fresh_backend: Callable[[], FumehoodWorkspace]
    ) -> None:
        backend = fresh_backend()
        await backend.working_dir()

        async def command() -> None:
            with pytest.raises(WorkspaceUnavailableError):
                await backend.run(["sleep", "3600"], timeout=30)

        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                group.start_soon(command)
                await until_busy(backend)
                await destroy(backend)


async def test_cancelled_command_ends_and_stops_neither_the_next_nor_a_process_beside_it(
    workspace: FumehoodWorkspace,
) -> None:
    await workspace.working_dir()
    assert workspace.ref is not None
    session_id = workspace.ref.id
    async with AsyncClient() as client:
        watcher = {"name": "watcher", "command": "while read line; do echo got $line; done"}
        (await client.call("start_process", watcher, session_id=session_id)).raise_for_error()
        results: list[Any] = []

        async def second() -> None:
            results.append(await workspace.run(f"{ALIVE}; echo $?", shell=True))

        with anyio.fail_after(120):
            async with anyio.create_task_group() as group, anyio.create_task_group() as cancelled:
                cancelled.start_soon(workspace.run, ["sh", "-c", "sleep 3600 & sleep 3600"])
                await until_busy(workspace)
                group.start_soon(second)  # waits for its turn
                await anyio.wait_all_tasks_blocked()
                cancelled.cancel_scope.cancel()
        assert [one.stdout for one in results] == ["1\n"]
        with pytest.raises(WorkspaceTimeoutError):
            await workspace.run(["sleep", "3600"], timeout=0.2)
        (shown,) = await client.processes(session_id)
        assert (shown.name, shown.state) == ("watcher", "running")
        line = {"name": "watcher", "text": "a line\n"}
        (await client.call("write_process", line, session_id=session_id)).raise_for_error()
        piece = await client.process_output(session_id, "watcher", wait_seconds=20)
        assert (piece.text, piece.ended) == ("got a line\n", False)
        assert (await client.stop_process(session_id, "watcher")).state == "ended"


async def until_busy(workspace: FumehoodWorkspace) -> None:
    """Wait until the engine reports the session as busy."""
    assert workspace.ref is not None or await workspace.working_dir()
    async with AsyncClient() as client:
        with anyio.fail_after(120):
            while workspace.ref is None or not (await client.session(workspace.ref.id)).is_busy:
                await anyio.sleep(0.01)


async def test_howto_page_example_runs_unchanged(page: Callable[[str], Any], sessions: Any) -> None:
    def script(messages: Any, info: Any) -> ModelResponse:
        last = messages[-1].parts[-1]
        if last.part_kind == "tool-return":
            return ModelResponse(parts=[TextPart(f"It gave {last.content}")])
        return ModelResponse(parts=[ToolCallPart("shell", {"command": "echo $((6 * 7)); cat no"})])

    result = await page("use-from-pydantic-ai")["ask"](FunctionModel(script), "6 * 7?")
    assert result.output == "It gave 42\ncat: no: No such file or directory\n"


async def test_timeout_and_output_limit_raise_the_frameworks_errors(
    workspace: FumehoodWorkspace,
) -> None:
    with pytest.raises(WorkspaceTimeoutError) as late:
        await workspace.run("echo a; sleep 60", shell=True, timeout=0.5)
    assert late.value.stdout == "a\n"
    with pytest.raises(WorkspaceOutputLimitError) as long:
        await workspace.run(["sh", "-c", "yes | head -c 3000000"])
    assert len(long.value.stdout) == long.value.limit == 1 << 20
    for timeout in (0, -1, float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            await workspace.run(["true"], timeout=timeout)


async def test_denied_command_is_a_tool_result_and_the_run_continues(
    page: Any, sessions: Any
) -> None:
    def script(messages: Any, info: Any) -> ModelResponse:
        told = [part.content for part in messages[-1].parts if part.part_kind == "tool-return"]
        if told:
            return ModelResponse(parts=[TextPart("|".join(told))])
        commands = ("echo a", "echo deny-me", "echo b")
        return ModelResponse(parts=[ToolCallPart("shell", {"command": one}) for one in commands])

    result = await page("use-from-pydantic-ai")["ask"](FunctionModel(script), "Go.")
    ran, denied, twin = result.output.split("|")
    assert (ran, twin) == ("a\n", "b\n")
    assert denied.startswith("PERMISSION_DENIED: ")


async def test_workspace_ref_of_another_provider_or_unknown_session_is_refused() -> None:
    with pytest.raises(ValueError, match="no workspace of fumehood"):
        FumehoodWorkspace(WorkspaceRef(provider="local", id="/"))
    async with FumehoodWorkspace(session_id="sess_0123456789abcdef0123456789abcdef") as none:
        with pytest.raises(WorkspaceUnavailableError):
            await none.run(["true"])


async def test_agent_calls_engine_tools_and_resumes_after_an_approval(
    page: Callable[[str], Any], script: Any, options: tuple[str, ...]
) -> None:
    def follow(messages: Any, info: Any) -> ModelResponse:
        call = script()
        return ModelResponse(parts=[TextPart("Done.") if call is None else ToolCallPart(*call)])

    run = await page("use-from-pydantic-ai")["ask_with_tools"](
        FunctionModel(follow), "Go.", *options
    )
    assert run.output == "Done."
    results = [
        part
        for message in run.all_messages()
        for part in message.parts
        if part.part_kind == "tool-return"
    ]
    assert [file.media_type for file in results[1].files] == ["image/png"]
    script.check([part.model_response_str() for part in results])
