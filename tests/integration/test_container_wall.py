"""The container wall on a real Docker: hardening, cleanup, and behaviour when Docker fails."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop

from conftest import Daemon, StartDaemon
from fumehood import Config, Engine
from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limit, Limits
from fumehood.docker import api
from fumehood.sandbox.container import supply, wall
from fumehood.sandbox.container.supply import Making
from fumehood.sandbox.container.wall import ContainerWall
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity
from fumehood.sandbox.wall import RunEnding
from support.containers import containers_of, kill_container
from support.docker_images import DockerWith
from support.own_docker import OwnDocker
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker")]

SLOW_START_S = 60.0
"""Deadline for container starts on a busy host, several at once, in seconds."""

READY = {"op": "ready", "enforces": {limit.value: True for limit in Limit}, "faults": []}
EATS_MEMORY = f"""
import json, struct, sys
body = json.dumps({READY!r}).encode()
sys.stdout.buffer.write(struct.pack("!I", len(body)) + body)
sys.stdout.buffer.flush()
sys.stdin.buffer.read(4)
hoard = []
while True:
    hoard.append(b"x" * (8 << 20))
"""
"""A guest whose first process runs out of memory, so that only Docker can report it."""


class Bench:
    """A wall with its own engine id, and the events it logged."""

    def __init__(self, image: Image, environment: dict[str, str], **settings: Any) -> None:
        self.owner = secrets.token_hex(16)
        self.events: list[tuple[str, JsonObject]] = []
        self.wall = ContainerWall(
            ContainerSettings(pool_min=0, pool_max=2),
            DockerWith(image, environment),
            EngineIdentity(secrets.token_hex(16), self.owner),
            **settings,
            on_event=lambda event, values: self.events.append((event, values)),
        )

    @property
    def containers(self) -> list[dict[str, Any]]:
        return containers_of(f"fumehood.owner={self.owner}")

    async def run(
        self, code: str = "2 + 2", *, who: str = "uid:1", memory_mb: int = 128, wall_s: float = 20
    ) -> RunEnding:
        limits = Limits(wall_s=wall_s, cpu_s=wall_s, memory_mb=memory_mb, output_bytes=MB)
        with anyio.fail_after(SLOW_START_S):
            lease = self.wall.lease(TrustDomain(who), fresh=False, memory_mb=memory_mb)
            async with lease as place:
                return await place.run("python", {"code": code}, limits)

    async def until(self, condition: Callable[[], object]) -> None:
        with anyio.fail_after(SLOW_START_S):
            while not condition():
                await anyio.sleep(0.02)


@asynccontextmanager
async def bench(
    image: Image, docker_host: str | None = None, **settings: Any
) -> AsyncIterator[Bench]:
    environment = dict(os.environ)
    if docker_host is not None:
        environment["DOCKER_HOST"] = docker_host
    made = Bench(image, environment, **settings)
    async with made.wall:
        yield made
    assert made.containers == []


@pytest.fixture
def _quick_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "QUICK_S", 1.0)
    monkeypatch.setattr(api, "SLOW_S", 5.0)
    monkeypatch.setattr(supply, "REMEMBERED_S", 0.0)
    monkeypatch.setattr(wall, "LOOK_WHILE_AWAY_S", 0.2)
    monkeypatch.setattr(wall, "LOOK_AGAIN_S", 0.5)


@pytest.mark.row("S3", "S5")
async def test_container_runs_a_program_and_has_every_specified_hardening(
    python_image: Image,
) -> None:
    async with bench(python_image) as made:
        ending = await made.run("print('out'); 6 * 7")
        assert (ending.ended_by, ending.stdout) == (EndedBy.OK, "out\n")
        assert ending.result["value"] == 42
        (container,) = made.containers
        config, inside = container["HostConfig"], container["Config"]
        assert container["Image"] == python_image.id
        assert config["NetworkMode"] == "none"
        assert config["ReadonlyRootfs"] is True
        assert config["CapDrop"] == ["ALL"]
        assert sorted(name.removeprefix("CAP_") for name in config["CapAdd"]) == [
            "KILL", "SETGID", "SETPCAP", "SETUID",
        ]  # fmt: skip
        assert config["SecurityOpt"] == ["no-new-privileges:true"]
        assert config["Memory"] == config["MemorySwap"] == 160 * MB
        assert config["PidsLimit"] == 76
        assert config["Privileged"] is False
        assert config["LogConfig"]["Type"] == "none"
        assert container["Mounts"] == []
        assert not inside["Tty"]
        pid = container["State"]["Pid"]
        status = status_of(pid)
        assert "\nNoNewPrivs:\t1\n" in status
        assert "\nSeccomp:\t2\n" in status
        assert "\nCapEff:\t00000000000000e0\n" in status
        assert "\nCapBnd:\t0000000000000000\n" in status
        for name in ("ipc", "net", "mnt", "pid", "uts", "cgroup"):
            theirs, ours = (os.readlink(f"/proc/{who}/ns/{name}") for who in (pid, "self"))
            assert theirs != ours, name


@pytest.mark.row("S4")
async def test_container_killed_by_oom_ends_as_memory(python_image: Image) -> None:
    command = ("/usr/bin/python3", "-I", "-S", "-c", EATS_MEMORY)
    async with bench(python_image, making=Making(command)) as made:
        assert (await made.run()).ended_by is EndedBy.MEMORY


@pytest.mark.row("S4")
async def test_container_killed_from_outside_ends_as_sandbox_lost(
    python_image: Image,
) -> None:
    async with bench(python_image) as made:
        await made.run()
        endings: list[RunEnding] = []

        async def call() -> None:
            endings.append(
                await made.run("import time; print('so far', flush=True); time.sleep(60)")
            )

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await made.until(lambda: made.wall.counts["busy"] == 1)
            await anyio.to_thread.run_sync(kill_container, made.containers[0]["Id"])
        assert endings[0].ended_by is EndedBy.SANDBOX_LOST
        assert (await made.run()).ended_by is EndedBy.OK


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text(encoding="ascii")


def owner_of(daemon: Daemon) -> str:
    """The owner label of a daemon's containers."""
    (label,) = {
        one["Config"]["Labels"]["fumehood.owner"]
        for one in containers_of(f"fumehood.pid={daemon.process.pid}")
    }
    return str(label)


def call_python(daemon: Daemon, code: str = "2 + 2", **options: Any) -> dict[str, Any]:
    body: dict[str, Any] = daemon.client().call("run_python", {"code": code}, **options).body
    return body


@pytest.mark.row("S9")
@pytest.mark.usefixtures("python_image")
def test_killed_engines_containers_are_reaped_at_its_next_start(
    start_daemon: StartDaemon, home: Path
) -> None:
    """Idle ones, and ones that are just starting. Another engine's stay."""
    (home / "other").mkdir(mode=0o700)
    other = start_daemon(home / "other")
    assert call_python(other)["success"]
    for is_idle in (True, False):
        killed = start_daemon(variables={"FUMEHOOD_CONTAINER__POOL_MIN": "3"})
        label = f"fumehood.pid={killed.process.pid}"
        wait_until(lambda label=label: containers_of(label), SLOW_START_S)
        if is_idle:
            assert call_python(killed)["success"]
        owner = owner_of(killed)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait(timeout=DEADLINE_S)
        again = start_daemon()
        wait_until(lambda label=label: not containers_of(label), SLOW_START_S)
        assert call_python(again)["success"]
        assert owner_of(again) == owner
        assert again.stop() == 0
        assert containers_of(f"fumehood.pid={again.process.pid}") == []
    assert len(containers_of(f"fumehood.pid={other.process.pid}")) == 1
    assert call_python(other)["success"]
    assert other.stop() == 0
    assert containers_of(f"fumehood.pid={other.process.pid}") == []


@pytest.mark.row("S9", "D7")
def test_engine_without_docker_serves_other_walls_and_logs_the_cure_once(
    start_daemon: StartDaemon, home: Path
) -> None:
    daemon = start_daemon(variables={"DOCKER_HOST": f"unix://{home}/nobody.sock"})
    client = daemon.client()
    assert client.calculate("2 + 2").body["data"]["value"] == 4
    refused = call_python(daemon)
    assert refused["error"]["code"] == "SANDBOX_UNAVAILABLE"
    assert "Docker is not" in refused["error"]["message"]
    assert str(home) not in refused["error"]["message"]
    walls = client.get("/v1/ready").body["walls"]
    assert walls["container"] == {
        "ready": False, "enforced": [], "missing": [], "runtime": "docker"
    }  # fmt: skip
    assert walls["interpreter"]["ready"]
    assert daemon.stop() == 0
    lines = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    told = [line for line in lines if line["event"] == "container.unavailable"]
    assert len(told) == 1
    assert told[0]["level"] == "warning"
    assert "docker.io" in told[0]["cure"] or "systemctl" in told[0]["cure"]


@pytest.mark.row("S9")
@pytest.mark.needs("root")
@pytest.mark.usefixtures("_quick_deadlines")
async def test_docker_restart_loses_the_run_and_later_calls_succeed(
    python_image: Image, home: Path
) -> None:
    with OwnDocker(home) as docker:
        await anyio.to_thread.run_sync(docker.copy_image, python_image.id)
        async with bench(python_image, docker.address) as made:
            endings: list[EndedBy] = []

            async def call() -> None:
                endings.append((await made.run("import time; time.sleep(90)", wall_s=120)).ended_by)

            async with anyio.create_task_group() as group:
                group.start_soon(call)
                await made.until(lambda: made.wall.counts.get("busy") == 1)
                await anyio.to_thread.run_sync(docker.stop)
            assert endings == [EndedBy.SANDBOX_LOST]
            await made.until(lambda: not made.wall.status.is_ready)
            with pytest.raises(SandboxUnavailable, match=r"not (running|installed)"):
                await made.run()
            await anyio.to_thread.run_sync(docker.start)
            assert (await made.run()).ended_by is EndedBy.OK
            await made.until(lambda: len(docker.containers()) == 1)  # what was lost is removed


def test_engine_serves_in_a_loop_of_uvloop(home: Path) -> None:
    """Servers that embed it use one, and its transports are not asyncio's."""

    images: Any = {"images": {"python": "python"}}
    config = Config(home=home, container=images)

    async def serve() -> list[bool]:
        async with Engine(config=config) as engine:
            calculated = await engine.call("calculator", {"expression": "6*7"})
            return [calculated.success, (await engine.call("run_python", {"code": "0"})).success]

    assert uvloop.run(serve()) == [True, True]


def test_program_of_the_operator_runs_in_a_loop_of_uvloop(python_image: Image) -> None:
    made = Bench(python_image, dict(os.environ))

    async def serve() -> bytes:
        async with made.wall:
            program = await made.wall.open_program(
                ("/bin/sh", "-c", "echo no >&2; cat"), {}, image="python", memory_mb=128
            )
            program.writer.write(b"hello")
            await program.writer.drain()
            said = await program.reader.readexactly(5)
            while program.said() != b"no\n":
                await anyio.sleep(0.01)
            await program.stop()
            return said

    assert uvloop.run(serve()) == b"hello"
