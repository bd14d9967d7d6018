"""Zygotes and spare children of a container: memory leaks between calls, OOM and limits."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conftest import ready_image
from fumehood.core.errors import EndedBy
from support.one_container import OneContainer, one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S3", "S4", "S5")]

CANARY = "canary-9f2c"
SCAN = """\
import gc, re
word = re.compile(rb"canary-[9]f2c")  # whose own text is not what it finds
found = 0
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps"):
        span, rights = line.split()[:2]
        if not rights.startswith("rw") or "[stack]" in line:
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        try:
            memory.seek(start)
            found += sum(1 for _ in word.finditer(memory.read(end - start)))
        except (OSError, ValueError, OverflowError):
            pass
gc.unfreeze()
kinds = {str(type(each).__module__) for each in gc.get_objects()}
[found, sorted(kind for kind in kinds if "supervisor" in kind)]
"""


@pytest.fixture
async def data() -> AsyncIterator[OneContainer]:
    async with one_container(ready_image("python-data")) as box:
        yield box


@pytest.mark.parametrize("first", ["", "# import numpy\n"])
async def test_program_memory_contains_no_data_of_earlier_calls(
    data: OneContainer, first: str
) -> None:
    """Includes modules loaded after earlier calls: a fork inherits its parent's memory."""
    for _ in range(3):
        sent = {"code": f"{first}'{CANARY}'", "stdin": CANARY}
        sent["files"] = [{"path": "a.txt", "content": CANARY}]  # type: ignore[assignment]
        ran = await data.run("python", sent, keep=False)
        assert ran.ended_by is EndedBy.OK
    for start in ("", "# import numpy\n"):
        count, kinds = value_of(await data.python(start + SCAN, keep=False))  # type: ignore[misc]
        assert (count, kinds) == (0, [])


async def test_control_memory_scan_finds_existing_data(data: OneContainer) -> None:
    code = f"kept = '{CANARY}' * 3\n{SCAN}"
    count, _ = value_of(await data.python(code, keep=False))  # type: ignore[misc]
    assert count >= 3


@pytest.mark.parametrize(("count", "each_mb"), [(10, 70), (14, 45)])
async def test_session_survives_program_killed_by_oom(
    data: OneContainer, count: int, each_mb: int
) -> None:
    """On OOM the program's processes are killed, not a waiting child."""
    code = (
        f"import os\nfor _ in range({count}):\n    if os.fork() == 0:\n"
        f"        hoard = b'x' * ({each_mb} << 20)\n        while True: pass\nwhile True: pass"
    )
    await data.python("# import pandas\nx = 41")
    ended = await data.python(code, wall_s=15)
    assert ended.ended_by is EndedBy.MEMORY
    assert data.ended is None
    assert value_of(await data.python("x + 1")) == 42


async def test_oom_kill_of_zygote_is_reported_as_memory_limit_with_output(
    data: OneContainer,
) -> None:
    """Programs may lower their OOM score; the kernel then kills the guest's large process."""
    code = (
        "import os, time\nprint('begun', flush=True)\n"
        "for _ in range(60):\n    if os.fork() == 0:\n"
        "        open('/proc/self/oom_score_adj', 'w').write('0')\n        hoard = []\n"
        "        for _ in range(40):\n            hoard.append(b'x' * (1 << 20))\n"
        "            time.sleep(0.01)\n        while True: time.sleep(1)\n"
        "while True: time.sleep(1)"
    )
    await data.python("# import pandas\n1", keep=False)
    ended = await data.python(code, keep=False, wall_s=20)
    assert (ended.ended_by, ended.stdout) == (EndedBy.MEMORY, "begun\n")


async def test_program_exhausting_processes_ends_at_its_own_time_limit(
    data: OneContainer,
) -> None:
    code = (
        "import os, time\n"
        "try:\n    while os.fork(): pass\nexcept OSError: pass\n"
        "while True: time.sleep(1)"
    )
    ended = await data.python(code, keep=False, wall_s=14)
    assert ended.ended_by is EndedBy.WALL_TIME
    assert data.ended is None
    assert value_of(await data.python("1 + 1", keep=False)) == 2


@pytest.mark.needs("runsc")
async def test_spare_node_process_has_process_limit_under_gvisor() -> None:
    code = (
        "const { spawnSync } = require('child_process');\n"
        "const many = 'for n in $(seq 90); do sleep 1 & done';\n"  # a fork of Node itself is slow
        "console.log(/fork/.test(spawnSync('sh', ['-c', many]).stderr));"
    )
    async with one_container(ready_image("node"), runtime="runsc") as box:
        await box.javascript("0", keep=False)
        ran = await box.javascript(code, keep=False)
        assert ran.stdout == "true\n"
