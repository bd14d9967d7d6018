"""A session beside a load of 20: nothing that is promised to it depends on the clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from fumehood.sandbox.images.catalog import Image
from support.one_container import OneContainer, one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]

LOAD = 20
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


@pytest.fixture
def _load() -> Iterator[None]:
    with ExitStack() as load:
        for _ in range(LOAD):
            command = [sys.executable, "-c", BUSY, str(os.getpid())]
            load.callback(load.enter_context(subprocess.Popen(command)).kill)
        yield


@pytest.fixture(params=["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))])
async def box(request: pytest.FixtureRequest, python_image: Image) -> AsyncIterator[OneContainer]:
    async with one_container(python_image, runtime=request.param) as box:
        box.container.keep(1, 60)
        yield box


@pytest.mark.usefixtures("_load")
async def test_ten_cells_keep_variables_and_files_and_a_killed_one_rolls_back(
    box: OneContainer,
) -> None:
    await box.python("x = 0")
    for number in range(1, 9):
        cell = f"x += 1\nimport os\nos.system('true')\nopen('{number}', 'w').write(str(x))\nx"
        assert value_of(await box.python(cell, wall_s=60)) == number
        assert (await box.shell("sleep 1 &", wall_s=60)).exit_code == 0
    killed = await box.python("import os\nx = -1\nos.fork()\nwhile True: pass", wall_s=1)
    assert (killed.ended_by.value, killed.state) == ("wall_time", "rolled_back")
    assert value_of(await box.python("x, open('8').read()", wall_s=60)) == [8, "8"]
