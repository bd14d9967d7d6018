"""Disks of sessions: what is promised, and who has none. Real ones are in the integration tests."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import anyio
import pytest

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.limits import MB
from fumehood.docker.api import Docker
from fumehood.sandbox.container import disks
from fumehood.sandbox.container.disks import SPARED_BYTES, Disks

pytestmark = [pytest.mark.anyio, pytest.mark.row("S11")]

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disks:
    """Disks whose programs do nothing, on a file system with room for 100 MB."""

    async def run(program: str, *arguments: str, told: str = "", most_status: int = 0) -> str:
        return ""

    monkeypatch.setattr(disks, "_run", run)
    free = SPARED_BYTES + 100 * MB

    def usage(directory: Path) -> Usage:
        used = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return Usage(free, used, free - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    docker = Docker({})

    async def done(*arguments: object) -> None:
        """Docker makes and removes everything."""

    monkeypatch.setattr(docker, "attach_disk", done)
    monkeypatch.setattr(docker, "detach_disk", done)
    return Disks(tmp_path / "disks", docker)


def listed(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "disks"))


async def test_no_more_is_promised_than_there_is(made: Disks, tmp_path: Path) -> None:
    await made.make("a", 60)
    with pytest.raises(SandboxUnavailable, match="40 MB are not promised") as refused:
        await made.make("b", 41)
    assert not refused.value.may_retry
    assert listed(tmp_path) == ["a"]
    await made.make("b", 40)
    await made.remove("a")
    await made.make("c", 60)
    assert listed(tmp_path) == ["b", "c"]
    assert (tmp_path / "disks").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "disks/b").stat().st_mode & 0o777 == 0o600


async def test_simultaneous_disks_share_the_room(made: Disks, tmp_path: Path) -> None:
    refused = []

    async def make(name: str) -> None:
        try:
            await made.make(name, 30)
        except SandboxUnavailable:
            refused.append(name)

    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(make, str(number))
    assert (len(refused), len(listed(tmp_path))) == (7, 3)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/home/of/somebody"), "No space left on device"),
        (OSError("/home/of/somebody is broken"), "OSError"),
        (subprocess.CalledProcessError(4, "debugfs", stderr=b"/home/of/somebody"), "debugfs ended with status 4"),
        (subprocess.TimeoutExpired("debugfs", 20.0), "debugfs took longer than 20 s"),
    ],
)  # fmt: skip
async def test_failed_disk_leaves_nothing_and_its_error_says_what_failed(
    made: Disks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, cause: str
) -> None:
    async def fail(program: str, *arguments: str, told: str = "", most_status: int = 0) -> str:
        if program == "debugfs":
            raise fault
        return ""

    monkeypatch.setattr(disks, "_run", fail)
    with pytest.raises(SandboxUnavailable) as refused:
        await made.make("a", 20)
    assert refused.value.message == (
        f"The session's disk could not be made: {cause}. Repeat the request."
    )
    assert listed(tmp_path) == []


@pytest.mark.parametrize("how", ["make", "copy"])
async def test_disk_that_has_the_name_already_is_kept(
    made: Disks, tmp_path: Path, how: str
) -> None:
    await made.make("a", 20)
    await made.make("b", 20)
    (tmp_path / "disks/a").write_bytes(b"a session's files")
    with pytest.raises(SandboxUnavailable, match="File exists"):
        await (made.make("a", 20) if how == "make" else made.copy("b", "a"))
    assert (tmp_path / "disks/a").read_bytes() == b"a session's files"


async def test_failure_before_the_copy_keeps_the_disk_with_its_name(
    made: Disks, tmp_path: Path
) -> None:
    await made.make("b", 20)
    with pytest.raises(SandboxUnavailable, match="No such file"):
        await made.copy("a", "b")
    assert listed(tmp_path) == ["b"]


async def test_sweep_removes_disks_that_nobody_uses(made: Disks, tmp_path: Path) -> None:
    await made.sweep(lambda: ["a"])  # before there is a directory
    for name in "abc":
        await made.make(name, 20)
    await made.sweep(lambda: ["b"])
    assert listed(tmp_path) == ["b"]


def test_engine_says_why_it_has_no_disks(
    made: Disks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: f"/sbin/{name}")
    docker = Docker({})
    assert Disks(tmp_path, docker).why_none() is None
    assert "state directory" in str(Disks(None, docker).why_none())
    remote = Docker({"DOCKER_HOST": "tcp://127.0.0.1:1"})
    assert Disks(tmp_path, remote).why_none() == "Docker is on another host"
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    assert "lacks mkfs.ext4 and debugfs and e2fsck and losetup" in str(
        Disks(tmp_path, docker).why_none()
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(Disks(tmp_path, docker).why_none())
