"""AutoGen: the code executor, alone and in an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult

from fumehood import Client
from fumehood.integrations.autogen import FumehoodCodeExecutor

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def executor() -> AsyncIterator[FumehoodCodeExecutor]:
    async with FumehoodCodeExecutor(timeout=20, image="python") as made:
        yield made


async def run(executor: FumehoodCodeExecutor, *blocks: tuple[str, str]) -> CodeResult:
    made = [CodeBlock(code=code, language=language) for language, code in blocks]
    return await executor.execute_code_blocks(made, CancellationToken())


async def test_howto_page_example_runs_unchanged(page: Callable[[str], Any], sessions: Any) -> None:
    text = "Do it.\n```python\nn = 6\nprint(n * 7)\n```\n```sh\necho and shell\n```\n"
    answer = await page("use-from-autogen")["answer"](text)
    assert answer.chat_message.content == "42\nand shell\n"


async def test_code_blocks_share_state_and_stop_at_the_first_failure(
    executor: FumehoodCodeExecutor,
) -> None:
    done = await run(
        executor, ("python", "n = 1; open('f', 'w').write('x')"), ("bash", "cat f"), ("py", "n + 1")
    )
    assert (done.exit_code, done.output) == (0, "1\nx2\n")
    failed = await run(executor, ("python", "print('a'); 1 / 0"), ("sh", "touch never"))
    assert failed.exit_code == 1
    assert failed.output.startswith("a\nTraceback")
    assert (await run(executor, ("sh", "exit 7"))).exit_code == 7
    assert "never" not in (await run(executor, ("sh", "ls"))).output
    assert len((await run(executor, ("sh", "seq 20000"))).output) == 108_894
    with pytest.raises(ValueError, match="no sandbox for 'cobol'"):
        await run(executor, ("sh", "touch never"), ("cobol", "x"))
    assert "never" not in (await run(executor, ("sh", "ls"))).output


async def test_timeout_is_asyncio_timeout_error() -> None:
    async with FumehoodCodeExecutor(timeout=0.5, image="python") as executor:
        with pytest.raises(asyncio.TimeoutError):
            await run(executor, ("python", "while True: pass"))
        assert (await run(executor, ("python", "1 + 1"))).output == "2\n"


async def test_cancellation_token_kills_the_running_block(
    executor: FumehoodCodeExecutor, client: Client
) -> None:
    token = CancellationToken()
    block = CodeBlock(code="sleep 3600", language="sh")
    running = asyncio.ensure_future(executor.execute_code_blocks([block], token))
    while not any(one.is_busy for one in client.sessions()):
        await asyncio.sleep(0.01)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    looks = "grep -qx sleep /proc/[0-9]*/comm || echo gone"
    assert (await run(executor, ("sh", looks))).output == "gone\n"


async def test_saved_executor_keeps_its_disk(client: Client, disk_mb: int) -> None:
    made = FumehoodCodeExecutor(image="python", memory_mb=256, disk_mb=disk_mb)
    async with FumehoodCodeExecutor.load_component(made.dump_component()) as executor:
        script = "printf '#!/bin/sh\\necho ran' > run; chmod +x run"
        assert (await run(executor, ("sh", script), ("sh", "./run"))).output == "ran\n"
        (record,) = (one for one in client.sessions() if one.disk_mb and one.state == "active")
        assert (record.memory_mb, record.image) == (256, "python")


async def test_executor_restart_starts_a_new_session(executor: FumehoodCodeExecutor) -> None:
    await run(executor, ("python", "n = 1"))
    await executor.restart()
    assert "NameError" in (await run(executor, ("python", "n"))).output


async def test_executor_component_round_trips_through_its_configuration() -> None:
    made = FumehoodCodeExecutor(timeout=7, image="python").dump_component()
    assert made.provider == "fumehood.integrations.autogen.FumehoodCodeExecutor"
    again = CodeExecutor.load_component(made)
    assert isinstance(again, FumehoodCodeExecutor)
    assert again.dump_component() == made


async def test_denied_block_is_reported_after_earlier_output_and_stops_the_rest(
    executor: FumehoodCodeExecutor,
) -> None:
    done = await run(executor, ("sh", "echo a"), ("sh", "echo deny-me"), ("sh", "touch never"))
    assert done.exit_code == 126
    assert done.output.startswith("a\nPERMISSION_DENIED: ")
    assert "never" not in (await run(executor, ("sh", "ls"))).output


async def test_ended_session_is_reported_in_the_output(client: Client) -> None:
    session = client.create_session(image="python")
    client.end_session(session.id)
    async with FumehoodCodeExecutor(session_id=session.id) as executor:
        done = await run(executor, ("sh", "true"))
        assert (done.exit_code, "has ended" in done.output) == (126, True)
