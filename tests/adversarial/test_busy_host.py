"""A session on a busy host: nothing that is promised to it depends on the clock.

The test run gives the container a tenth of a processor, which takes nothing from other tests; the
soak test puts it beside a load of 20.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing

import pytest

from fumehood.docker.api import open_docker
from fumehood.sandbox.images.catalog import Image
from support.one_container import OneContainer, one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]

LOAD = 20
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
SHARE = 0.1
"""Processors of the container."""


@pytest.fixture
async def box(request: pytest.FixtureRequest, python_image: Image) -> AsyncIterator[OneContainer]:
    async with one_container(python_image, runtime=request.param) as box:
        box.container.keep(1, 600)
        yield box


@pytest.fixture
def _share(box: OneContainer) -> None:
    with closing(open_docker(timeout_s=30)) as client:
        address = client._url("/containers/{0}/update", box.name)
        answer = client._post_json(address, data={"NanoCpus": int(SHARE * 1e9)})
        client._raise_for_status(answer)
        assert client.inspect_container(box.name)["HostConfig"]["NanoCpus"] == SHARE * 1e9


@pytest.fixture
def _load() -> Iterator[None]:
    with ExitStack() as load:
        for _ in range(LOAD):
            command = [sys.executable, "-c", BUSY, str(os.getpid())]
            load.callback(load.enter_context(subprocess.Popen(command)).kill)
        yield


@pytest.mark.parametrize(
    ("box", "how"),
    [
        ("runc", "_share"),  # which gVisor cannot change
        pytest.param("runc", "_load", marks=pytest.mark.soak),
        pytest.param("runsc", "_load", marks=[pytest.mark.needs("runsc"), pytest.mark.soak]),
    ],
    indirect=["box"],
)
async def test_ten_cells_keep_variables_and_files_and_a_killed_one_rolls_back(
    box: OneContainer, how: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(how)
    await box.python("x = 0", wall_s=60)
    for number in range(1, 9):
        cell = f"x += 1\nimport os\nos.system('true')\nopen('{number}', 'w').write(str(x))\nx"
        assert value_of(await box.python(cell, wall_s=60)) == number
        assert (await box.shell("sleep 1 &", wall_s=60)).exit_code == 0
    killed = await box.python("import os\nx = -1\nos.fork()\nwhile True: pass", wall_s=1)
    assert (killed.ended_by.value, killed.state) == ("wall_time", "rolled_back")
    assert value_of(await box.python("x, open('8').read()", wall_s=60)) == [8, "8"]
