"""Sandboxes of gVisor without Docker, with a real launcher of root: what holds them, and what is left."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest

from conftest import StartDaemon
from fumehood import Client
from fumehood.core.limits import MB, Grade, Limit, Limits
from fumehood.direct.ask import sandboxes_of
from fumehood.direct.ids import FIRST_ID
from fumehood.direct.launcher import VERSION, _as_pipes
from fumehood.direct.runtime import Direct, LauncherFault
from fumehood.direct.store import open_store
from fumehood.gvisor.runtime import STARTER, Gvisor
from fumehood.sandbox.container.container import Container, ContainerFailed
from fumehood.sandbox.container.runtime import RuntimeConflict, RuntimeFault, RuntimeNotFound
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.wall import NO_SINKS, RunEnding
from integration.test_direct import ask, groups_of, launcher, spec_of
from support.direct import ready_direct_image
from support.wait import DEADLINE_S, wait_until

__all__ = ["launcher"]

pytestmark = [pytest.mark.anyio, pytest.mark.needs("direct", "runsc"), pytest.mark.row("B13")]


@pytest.fixture(scope="module")
def image() -> Image:
    return ready_direct_image("python")


@pytest.fixture
def gvisor(launcher: Path, image: Image) -> Gvisor:
    """The runtime with a launcher of its own."""
    return Gvisor(launcher, open_store(STARTER))


@asynccontextmanager
async def started(gvisor: Gvisor, image: Image) -> AsyncIterator[Container]:
    spec = spec_of(image, runtime="runsc")
    try:
        yield await Container.start(
            gvisor, spec, required=frozenset(Limit), least=Grade.KERNEL, ready_s=DEADLINE_S
        )
    finally:
        await gvisor.remove(spec.name)


async def run(container: Container, code: str, *, keep: bool = False) -> RunEnding:
    while not container.is_free:
        await anyio.sleep(0.01)
    arguments = {"code": code, "stdin": None, "files": []}
    limits = Limits(DEADLINE_S, DEADLINE_S, 128, MB)
    isolation = "session" if keep else "call"
    return await container.run("python", arguments, limits, NO_SINKS, isolation, keep=keep)


def processes_with(word: str) -> list[int]:
    """The ids of processes, other than this one, that have a word in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word in (path / "cmdline").read_bytes().decode("utf-8", "replace"):
                found.append(int(path.name))
    return [pid for pid in found if pid != os.getpid()]


def folders_of(launcher: Path) -> list[Path]:
    return list(launcher.glob("*.folder"))


async def test_programs_have_a_kernel_of_their_own_and_gvisor_is_nobody_on_the_host(
    gvisor: Gvisor,
    image: Image,
    launcher: Path,
) -> None:
    async with started(gvisor, image) as container:
        ended = await run(container, "import os\n[os.getuid(), os.uname().release]")
        assert ended.result is not None
        assert ended.result["value"] == [10001, "4.4.0"]
        assert (ended.runtime, ended.grade) == ("gvisor", Grade.KERNEL)
        assert set(container.held) == set(Limit)
        (status,) = {
            line
            for pid in processes_with(container.name)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("Uid:")
        }
        assert status.split()[1:] == [str(FIRST_ID)] * 4
    assert folders_of(launcher) == []
    wait_until(lambda: processes_with(container.name) == [], DEADLINE_S)


async def test_sandbox_outlives_its_launcher_and_the_next_engine_takes_it_over(
    gvisor: Gvisor,
    image: Image,
    launcher: Path,
) -> None:
    async with started(gvisor, image) as container:
        container.keep(1, 600)
        assert (await run(container, "x = 5", keep=True)).ended_by == "ok"
        await gvisor.pause(container.name)
        os.kill(ask(launcher, "hello")["pid"], signal.SIGKILL)
        assert (await gvisor.state(container.name)).is_paused
        await gvisor.unpause(container.name)
        # A launcher that was killed between pausing and writing it down, or the other way round.
        os.kill(ask(launcher, "hello")["pid"], signal.SIGKILL)
        record = launcher / f"{container.name}.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "is_paused": True}))
        await gvisor.unpause(container.name)
        assert not (await gvisor.state(container.name)).is_paused
        container.end("its engine is killed")
        other = await Container.take_over(
            gvisor, container.name, image.id, required=frozenset(Limit), grade=Grade.KERNEL, epoch=2
        )
        other.keep(2, 600)
        ended = await run(other, "x", keep=True)
        assert ended.result is not None
        assert ended.result["value"] == 5
        with pytest.raises(RuntimeNotFound, match="another engine"):
            await Direct(launcher, open_store()).state(container.name)
        with pytest.raises(ContainerFailed):
            await Container.take_over(
                gvisor, container.name, image.id, required=frozenset(Limit), epoch=2
            )
        other.end("the test is over")
    assert folders_of(launcher) == []


SPEAKS_TO_GVISOR = """
import json, socket, sys
end = socket.socket(socket.AF_UNIX)
end.connect("\\0runsc-sandbox." + sys.argv[1] + "\\0")
end.send(json.dumps({"method": "containerManager.Processes", "arg": sys.argv[1]}).encode())
print(end.recv(65536).decode())
"""
"""Asks gVisor for the processes of a sandbox, as runsc does. *Source*: gVisor, pkg/urpc."""


async def test_attack_no_user_of_the_host_reaches_the_socket_of_gvisor(
    gvisor: Gvisor,
    image: Image,
    launcher: Path,
) -> None:
    """gVisor of 2022 answers every user who reaches it. The control does reach it."""
    async with started(gvisor, image) as container:
        pid = ask(launcher, "hello")["pid"]
        speak = [sys.executable, "-I", "-c", SPEAKS_TO_GVISOR, container.name]
        inside = ["nsenter", f"--net=/proc/{pid}/ns/net"]
        said = [
            subprocess.run([*way, *speak], capture_output=True, text=True, check=False)
            for way in ([], inside)
        ]
        assert "ConnectionRefusedError" in said[0].stderr
        if said[1].returncode == 0:  # newer versions have a file instead
            assert "python3" in said[1].stdout


@pytest.mark.parametrize("moment", ["written-down", "being-started", "started"])
async def test_launcher_that_is_killed_while_a_sandbox_starts_leaves_nothing(
    gvisor: Gvisor,
    image: Image,
    launcher: Path,
    moment: str,
) -> None:
    spec = spec_of(image, runtime="runsc")
    record = launcher / f"{spec.name}.json"
    pid = ask(launcher, "hello")["pid"]

    async def kill() -> None:
        while not has_come():
            await anyio.sleep(0.001)
        os.kill(pid, signal.SIGKILL)

    def has_come() -> bool:
        if moment == "written-down":
            return record.exists()
        if moment == "being-started":
            return processes_with(spec.name) != []
        return any(launcher.glob("*.folder/pid"))

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        with suppress(RuntimeConflict, LauncherFault):
            (await gvisor.launch(spec))[1].close()  # the answer may be faster
    await gvisor.remove(spec.name)
    assert sandboxes_of(launcher) == []
    assert not record.exists()
    wait_until(lambda: processes_with(spec.name) == [], DEADLINE_S)
    wait_until(lambda: not groups_of(launcher), DEADLINE_S)
    assert folders_of(launcher) == []


async def test_sandbox_that_is_removed_while_it_starts_is_gone(
    gvisor: Gvisor,
    image: Image,
    launcher: Path,
) -> None:
    spec = spec_of(image, runtime="runsc")
    record = launcher / f"{spec.name}.json"

    async def launch() -> None:
        with suppress(RuntimeFault):
            (await gvisor.launch(spec))[1].close()

    async with anyio.create_task_group() as group:
        group.start_soon(launch)
        while not record.exists():
            await anyio.sleep(0.001)
        await gvisor.remove(spec.name)
    wait_until(lambda: processes_with(spec.name) == [], DEADLINE_S)
    assert (sandboxes_of(launcher), folders_of(launcher)) == ([], [])


def test_gvisor_gets_no_device_of_the_host_as_a_stream() -> None:
    """As root, runsc would give /dev/null to another user."""
    readable, writable = os.pipe()
    with open(os.devnull, "rb") as null, _as_pipes([null.fileno(), readable]) as streams:
        assert stat.S_ISFIFO(os.fstat(streams[0]).st_mode)
        assert os.read(streams[0], 1) == b""
        assert streams[1] == readable
    for descriptor in (readable, writable):
        os.close(descriptor)


async def test_end_of_gvisor_itself_ends_its_sandbox_and_not_the_engine(
    gvisor: Gvisor, image: Image
) -> None:
    async with started(gvisor, image) as container:
        os.kill((await gvisor.state(container.name)).pid, signal.SIGKILL)
        with anyio.fail_after(DEADLINE_S):
            while not container.is_dead:
                await anyio.sleep(0.01)
            while (await gvisor.state(container.name)).is_running:
                await anyio.sleep(0.01)


def test_engine_runs_calls_and_sessions_in_gvisor_and_sessions_survive_a_kill(
    image: Image, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    directory = tmp_path / f"launcher-{VERSION}"
    variables = {
        "FUMEHOOD_LAUNCHER_DIRECTORY": str(tmp_path), "FUMEHOOD_CONTAINER__ENGINE": "gvisor",
    }  # fmt: skip
    settings = {"sessions__image": "python", "sessions__orphan_seconds": "600"}
    daemon = start_daemon(variables=variables, **settings)
    with Client(daemon.socket) as client:
        session = client.create_session().id
        code = "import os\nx = os.uname().release\nx"
        answer = client.call("run_python", {"code": code}, session_id=session)
        assert answer.success, answer
        assert answer.data["value"] == "4.4.0"
        sandbox = answer.metadata.sandbox
        assert sandbox is not None
        assert (sandbox.runtime, sandbox.grade) == ("gvisor", "kernel")
        assert sandbox.held["memory"] == "enforced"
    daemon.process.kill()
    daemon.process.wait(timeout=DEADLINE_S)
    pid = ask(directory, "hello")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), DEADLINE_S)
    again = start_daemon(variables=variables, **settings)
    with Client(again.socket) as client:
        answer = client.call("run_python", {"code": "x"}, session_id=session)
        assert answer.success, answer
        assert answer.data["value"] == "4.4.0"
        client.end_session(session)
    assert again.stop() == 0
    assert sandboxes_of(directory) == []
    assert list(directory.glob("*.folder")) == []
    os.kill(ask(directory, "hello")["pid"], signal.SIGKILL)
