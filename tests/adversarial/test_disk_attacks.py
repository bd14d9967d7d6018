"""All attacks on containers, from sessions with a disk: its files stay and can be executed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fumehood.attack.containers import container_target
from fumehood.attack.run import run_attacks
from fumehood.attack.scorecard import Verdict
from fumehood.sandbox.images.catalog import Image
from support.attacked_disks import on_disks
from support.docker_images import DockerWith

pytestmark = [
    pytest.mark.anyio, pytest.mark.needs("docker", "disks"), pytest.mark.row("S11", "B14"),
]  # fmt: skip

OWN_PROCESSES = "2 were left after it"
"""Those that keep a session's variables."""


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    ("runtime", "least"),
    [
        pytest.param("runc", 60, id="runc"),
        # The quick ones: the others take gVisor three quarters of a minute. The test run attacks it
        # in tests/integration/test_doctor_attack.py, its disks in tests/acceptance/.
        pytest.param("runsc", 15, id="runsc", marks=[pytest.mark.needs("runsc"), pytest.mark.soak]),
    ],
)
async def test_sessions_with_a_disk_hold_all_attacks(
    runtime: str, least: int, python_image: Image, directory: Path
) -> None:
    """But for those on what is cleaned up between two calls: a session keeps it."""
    target = container_target(runtime, DockerWith(python_image))
    card = await run_attacks(
        [on_disks(target, directory / "disks")],
        engine_version="1",
        quick=runtime == "runsc",
        choose=lambda attack: not attack.id.startswith("left-"),
        total_s=300,
    )
    (wall,) = card.walls
    assert len(wall.attacks) >= least, wall.why
    failed = {
        one.id: (one.verdict, one.why, one.ended, one.twin)
        for one in wall.attacks
        if one.verdict is not Verdict.HELD and one.why != OWN_PROCESSES
    }
    assert failed == {}
    assert list((directory / "disks").iterdir()) == []
