"""The standby Node process: indistinguishable from a fresh one, and invisible to programs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import pytest

from conftest import ready_image
from fumehood.core.errors import EndedBy
from fumehood.sandbox.wall import RunEnding
from support.one_container import OneContainer, one_container, value_of
from support.wait import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S5", "S7")]

RUNTIMES = ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]
OTHERS = """\
require('fs').readdirSync('/proc').filter((name) => {
  if (!/^\\d+$/.test(name) || Number(name) === process.pid) return false;
  try {
    return /^Uid:\\s+10001/m.test(require('fs').readFileSync(`/proc/${name}/status`, 'utf8'));
  } catch { return false; }
})"""
OTHERS_IN_PYTHON = """\
import os
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        lines = open(f"/proc/{pid}/status").read()
    except OSError:
        continue
    if int(pid) != os.getpid() and "\\nUid:\\t10001" in lines:
        found.append(lines)
found
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=RUNTIMES)
async def shared_node(request: pytest.FixtureRequest) -> AsyncIterator[OneContainer]:
    async with one_container(ready_image("node"), runtime=request.param) as box:
        yield box


@pytest.fixture
async def node(shared_node: OneContainer) -> AsyncIterator[OneContainer]:
    """On both runtimes, unless a test does not depend on the kernel that programs see."""
    yield shared_node
    await shared_node.shell("kill -9 -1")
    await shared_node.shell("find . -mindepth 1 -delete")
    assert shared_node.ended is None


only_runc = pytest.mark.parametrize("shared_node", ["runc"], indirect=True)


@only_runc
async def test_control_standby_process_is_used(node: OneContainer) -> None:
    """Control: without a standby process the other tests would only exercise fresh ones."""
    pause_s = 0.1
    with anyio.fail_after(DEADLINE_S):
        while True:
            sent_s = time.time()
            began_s = value_of(await node.javascript("Date.now() / 1000 - process.uptime()"))
            if isinstance(began_s, float) and began_s < sent_s:
                return
            await anyio.sleep(pause_s)  # the next one starts meanwhile, on a busy host later
            pause_s *= 2


async def test_standby_process_provides_stdin_files_streams_and_value(
    node: OneContainer,
) -> None:
    for _ in range(3):
        ran = await node.run(
            "javascript",
            {
                "code": "const fs = require('fs')\n"
                "console.log(fs.readFileSync(0, 'utf8'))\nconsole.error('err');\n"
                "[fs.readFileSync('in/a.txt', 'utf8'), fs.readFileSync('b.bin')[1],"
                " process.argv.length, __filename, process.env.HOME]",
                "stdin": "typed ☃",
                "files": [
                    {"path": "in/a.txt", "content": "text"},
                    {"path": "b.bin", "content_base64": "AP8="},
                ],
            },
            keep=False,
        )
        assert (ran.stdout, ran.stderr) == ("typed ☃\n", "err\n")
        assert value_of(ran) == ["text", 255, 2, "/workspace/main.js", "/workspace"]


@only_runc
async def test_unwritable_input_file_gives_the_same_error_fresh_and_standby(
    node: OneContainer,
) -> None:
    said = set()
    for _ in range(3):
        ran = await node.run(
            "javascript",
            {"code": "0", "stdin": None, "files": [
                {"path": "a", "content": "x"}, {"path": "a/b", "content": "x"},
            ]},
            keep=False,
        )  # fmt: skip
        assert ran.ended_by is EndedBy.EXCEPTION
        assert ran.claimed_error["kind"] == "invalid"
        said.add(ran.claimed_error["message"])
        assert (await node.javascript("1")).ended_by is EndedBy.OK
    assert len(said) == 1


@only_runc
async def test_no_javascript_state_passes_between_programs(node: OneContainer) -> None:
    for number in range(4):
        ran = await node.javascript(
            f"const had = globalThis.left; globalThis.left = {number};"
            "Array.prototype.left = 1; require('fs').left = 1; process.env.LEFT = 'x'; String(had)",
            keep=False,
        )
        assert value_of(ran) == "undefined"


async def test_standby_process_is_invisible_to_programs(node: OneContainer) -> None:
    """In every order of languages, no other process of the user is visible."""
    for _ in range(3):
        assert value_of(await node.javascript(OTHERS, keep=False)) == []
        assert value_of(await node.python(OTHERS_IN_PYTHON, keep=False)) == []
        assert value_of(await node.javascript(OTHERS, keep=False)) == []
        ran = await node.shell("ps -eo uid,comm | grep -c node; ls /proc | grep -c '^[0-9]'")
        assert ran.stdout.splitlines()[0] == "0" or "not found" in ran.stderr


@only_runc
async def test_python_session_variables_survive_javascript_calls(node: OneContainer) -> None:
    await node.javascript("0")
    await node.python("x = 41")
    await node.javascript("0")
    assert value_of(await node.python("x + 1")) == 42


@only_runc
@pytest.mark.parametrize("code", ["while (true);", "process.kill(process.pid, 'SIGKILL')"])
async def test_program_runs_after_its_predecessor_was_killed(node: OneContainer, code: str) -> None:
    await node.javascript("0", wall_s=2)
    ended = await node.javascript(code, wall_s=2)
    assert ended.ended_by in (EndedBy.WALL_TIME, EndedBy.CPU_TIME, EndedBy.SIGNAL)
    assert value_of(await in_time(node, "1 + 1")) == 2


async def in_time(node: OneContainer, code: str) -> RunEnding:
    """Run a program with 2 s again until that is enough, as it may not be on a busy host."""
    with anyio.fail_after(DEADLINE_S):
        while (ending := await node.javascript(code, wall_s=2)).ended_by is EndedBy.WALL_TIME:
            pass
    return ending


async def test_program_with_another_limit_gets_a_process_with_that_limit() -> None:
    """Only on runc, because gVisor does not show a process's limits."""
    limit = (
        "require('fs').readFileSync('/proc/self/limits', 'utf8').match(/Max cpu time +(\\d+)/)[1]"
    )
    async with one_container(ready_image("node"), runtime="runc") as box:
        for wall_s, expected in ((60, "62"), (60, "62"), (90, "92"), (90, "92")):
            assert value_of(await box.javascript(limit, wall_s=wall_s)) == expected
