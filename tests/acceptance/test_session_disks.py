"""A session's disk: its size is enforced, and nothing of it stays. Through daemons, with attacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from docker.errors import APIError

from conftest import FUMEHOOD, Daemon, StartDaemon, running_daemon
from fumehood import Client, FumehoodError
from fumehood.docker.api import Docker, open_docker
from fumehood.sandbox.container.disks import Disks
from fumehood.storage.directory import owner_id
from support.containers import containers_of, kill_container
from support.http import SocketClient
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.needs("docker", "disks"), pytest.mark.row("S11", "B14")]

MB = 1 << 20


class Disk:
    """A session of 128 MB of memory, and its disk."""

    def __init__(self, daemon: Daemon, home: Path, mb: int = 16) -> None:
        self.daemon = daemon
        self.home = home
        self.runtime = "runc"
        made = self.told("sessions", "new", "--disk", str(mb), "--memory", "128", "--json")
        assert "id" in made, (made, daemon.log)
        self.id = made["id"]

    def told(self, *arguments: str) -> Any:
        done = subprocess.run(
            [str(FUMEHOOD), *arguments],
            env=self.daemon.environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def shell(self, command: str) -> Any:
        return self._call("run_shell", command=command)

    def python(self, code: str) -> Any:
        return self._call("run_python", code=code)

    def _call(self, tool: str, **arguments: str) -> Any:
        with closing(SocketClient(self.daemon.socket)) as client:
            return client.call(tool, arguments, session_id=self.id).body

    def end(self) -> None:
        with Client(self.daemon.socket) as client:
            client.end_session(self.id)

    @property
    def devices(self) -> list[str]:
        listed = subprocess.run(
            ["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        return [line.split()[0] for line in listed.splitlines() if f"{self.home}/disks" in line]

    @property
    def left(self) -> tuple[list[str], list[str], list[str]]:
        """Files, loop devices and volumes of this state directory's disks."""
        directory = self.home / "disks"
        with closing(open_docker(timeout_s=30)) as client:
            volumes = [one["Name"] for one in client.volumes()["Volumes"] or []]
        return (
            os.listdir(directory) if directory.exists() else [],
            self.devices,
            [name for name in volumes if name == f"fumehood-{self.id}"],
        )


@pytest.fixture(scope="module")
def runc(python_image: object) -> Iterator[Daemon]:
    """The daemon of all tests that neither kill it nor need another home."""
    with running_daemon(container__runtime="runc") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def runsc(python_image: object) -> Iterator[Daemon]:
    with running_daemon(container__runtime="runsc") as daemon:
        yield daemon


on_both = pytest.mark.parametrize(
    "runtime", ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]
)


@pytest.fixture
def runtime() -> str:
    return "runc"


@pytest.fixture
def disk(request: pytest.FixtureRequest, runtime: str) -> Iterator[Disk]:
    daemon: Daemon = request.getfixturevalue(runtime)
    made = Disk(daemon, daemon.home)
    made.runtime = runtime
    yield made
    made.end()
    wait_until(lambda: made.left == ([], [], []))


FILL = "with open({path!r}, 'ab') as file:\n    while True: file.write(bytes(1 << 20))"
SLOW_ON_GVISOR = "a file through many names"
ATTACKS = {
    "one large file": FILL.format(path="large"),
    "many files": "for n in range(100_000): open(f'f{n}', 'w').close()",
    "a deleted file that is open": (
        "import os\nfile = open('gone', 'wb')\nos.remove('gone')\n"
        "while True: file.write(bytes(1 << 20))"
    ),
    "a sparse file, filled": (
        "file = open('sparse', 'wb')\nfile.truncate(12 << 20)\n"
        "for n in range(3): open(f'more{n}', 'wb').write(bytes(8 << 20))"
    ),
    "a file over the size": "open('big', 'wb').truncate(1 << 33)",
    SLOW_ON_GVISOR: (
        "import os\nopen('a', 'w').close()\nfor n in range(100_000): os.link('a', f'l{n}')"
    ),
}


@on_both
def test_disk_cannot_be_overfilled_and_the_session_continues(disk: Disk) -> None:
    """By one session after the other's attack, so that each finds what the one before left."""
    for name, attack in ATTACKS.items():
        if name == SLOW_ON_GVISOR and disk.runtime == "runsc":
            continue
        answer = disk.python(attack)
        assert answer["error"]["code"] == "EXECUTION_ERROR", name
        assert "OSError" in json.dumps(answer["error"]["details"]), (name, answer["error"])
        assert disk.shell("find . -mindepth 1 -delete")["success"], name
    used = [path.stat().st_blocks * 512 for path in (disk.home / "disks").iterdir()]
    assert max(used) <= 17 * MB
    assert disk.python("open('twin', 'wb').write(bytes(8 << 20))")["data"]["value"] == 8 << 20


@on_both
def test_files_on_a_disk_can_be_executed_but_gain_no_rights(disk: Disk) -> None:
    run = disk.shell(
        "printf '#!/bin/sh\\necho ran' > a && chmod +x a && ./a && "
        "cp /usr/bin/id id && chmod 6755 id && ./id -u && "
        "(mknod device b 7 0 || mknod device c 1 8 || true) 2>&1; ls device"
    )
    data = run["data"] or run["error"]["details"]
    assert data["stdout"].startswith("ran\n10001\n")
    assert "not permitted" in data["stdout"]
    assert "device" not in data["stdout"].split()


def test_disk_is_larger_than_the_memory_and_found_in_the_record(
    runc: Daemon, tmp_path: Path
) -> None:
    disk = Disk(runc, runc.home, mb=64)
    record = disk.told("sessions", "show", disk.id)
    assert (record["disk_mb"], record["memory_mb"]) == (64, 128)
    content = os.urandom(50 * MB)
    (tmp_path / "large").write_bytes(content)
    assert (
        disk.told("sessions", "put", disk.id, str(tmp_path / "large"), "large")["size"] == 50 * MB
    )
    with Client(disk.daemon.socket) as client:
        client.download_file(disk.id, "large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    for wrong in ("1", "100000000"):
        refused = disk.told("sessions", "new", "--disk", wrong, "--json")
        assert refused["error"]["fields"] == ["disk_mb"]
    disk.end()
    wait_until(lambda: disk.left == ([], [], []))


def test_stopped_session_has_its_files_and_nothing_else(disk: Disk) -> None:
    disk.python("x = 1\nopen('a', 'w').write('kept')\nopen('/tmp/b', 'w').write('gone')")
    assert disk.told("sessions", "stop", disk.id)["state"] == "stopped"
    wait_until(lambda: containers_of(f"fumehood.owner={owner_id(disk.home)}") == [])
    wait_until(lambda: disk.left == ([f"fumehood-{disk.id}"], [], []))
    answer = disk.python(
        "import os\n['x' in globals(), open('a').read(), os.path.exists('/tmp/b')]"
    )
    assert answer["data"]["value"] == [False, "kept", False]
    assert answer["data"]["session"]["state"] == "restarted"
    assert disk.python("y = 1")["data"]["session"]["state"] == "kept"
    disk.told("sessions", "pause", disk.id)
    assert disk.told("sessions", "stop", disk.id)["state"] == "stopped"
    assert disk.told("sessions", "resume", disk.id)["state"] == "active"
    assert disk.shell("cat a")["data"]["stdout"] == "kept"


HOST = ["container", "volume", "device"]
"""What is lost if Docker's host restarts."""


@pytest.mark.parametrize(
    ("state", "lost"),
    [("active", []), ("active", ["container"]), ("active", HOST), ("paused", HOST),
     ("stopped", []), ("stopped", HOST)],
)  # fmt: skip
def test_session_with_a_disk_outlives_its_daemon(
    start_daemon: StartDaemon, home: Path, python_image: object, state: str, lost: list[str]
) -> None:
    disk = Disk(start_daemon(home), home)
    disk.python("x = 1\nopen('a', 'w').write('kept')")
    if state != "active":
        disk.told("sessions", {"paused": "pause", "stopped": "stop"}[state], disk.id)
    disk.daemon.process.send_signal(signal.SIGKILL)
    disk.daemon.process.wait(timeout=DEADLINE_S)
    with closing(open_docker(timeout_s=30)) as client:
        if "container" in lost:
            for container in containers_of(f"fumehood.owner={owner_id(home)}"):
                with suppress(APIError):  # it is being removed, as that of a stopped session
                    client.remove_container(container["Id"], force=True)
            wait_until(lambda: containers_of(f"fumehood.owner={owner_id(home)}") == [])
        if "volume" in lost and state != "stopped":
            client.remove_volume(f"fumehood-{disk.id}")
            subprocess.run(["losetup", "--detach", *disk.devices], check=True)
    disk.daemon = start_daemon(home)
    if state == "active" and "container" in lost:  # only its next use makes another container
        wait_until(lambda: disk.told("sessions", "show", disk.id)["state"] == "stopped")
        time.sleep(0.5)
        assert containers_of(f"fumehood.owner={owner_id(home)}") == []
    answer = disk.python("['x' in globals(), open('a').read()]")
    has_variables = state != "stopped" and not lost
    assert answer["data"]["value"] == [has_variables, "kept"]
    assert answer["data"]["session"]["state"] == ("kept" if has_variables else "restarted")
    disk.end()
    wait_until(lambda: disk.left == ([], [], []))


def test_session_that_ends_while_it_starts_again_leaves_nothing(runc: Daemon) -> None:
    for number in range(5):
        disk = Disk(runc, runc.home)
        with Client(runc.socket) as client, Client(runc.socket) as other:
            client.stop_session(disk.id)
            thread = threading.Thread(target=swallow, args=(other.resume_session, disk.id))
            thread.start()
            time.sleep(0.02 * number)
            client.end_session(disk.id)
            thread.join()
        wait_until(lambda disk=disk: disk.left == ([], [], []))  # type: ignore[misc]
    wait_until(lambda: containers_of(f"fumehood.owner={owner_id(runc.home)}") == [])


def test_session_whose_disk_is_gone_is_lost_at_its_next_use(disk: Disk) -> None:
    """As if its daemon died while it ended the session, before the row was written."""
    disk.told("sessions", "stop", disk.id)
    wait_until(lambda: disk.left == ([f"fumehood-{disk.id}"], [], []))
    (disk.home / f"disks/fumehood-{disk.id}").unlink()
    refused = disk.python("1")["error"]
    assert (refused["code"], refused["details"]) == ("RESOURCE_NOT_FOUND", {"state": "lost"})
    shown = disk.told("sessions", "show", disk.id)
    assert (shown["state"], shown["why"]) == ("lost", "Its disk is gone.")


def test_variables_after_a_restart_outlive_the_daemon(
    start_daemon: StartDaemon, home: Path, python_image: object
) -> None:
    disk = Disk(start_daemon(home), home)
    disk.told("sessions", "stop", disk.id)
    assert disk.python("x = 42")["data"]["session"]["state"] == "restarted"
    disk.daemon.process.send_signal(signal.SIGKILL)
    disk.daemon.process.wait(timeout=DEADLINE_S)
    disk.daemon = start_daemon(home)
    assert disk.python("x")["data"]["value"] == 42
    disk.end()
    wait_until(lambda: disk.left == ([], [], []))


def test_session_whose_container_dies_is_stopped_and_goes_on(disk: Disk) -> None:
    disk.python("x = 1\nopen('a', 'w').write('kept')")
    (container,) = containers_of(f"fumehood.owner={owner_id(disk.home)}")
    kill_container(container["Id"])
    wait_until(lambda: disk.told("sessions", "show", disk.id)["state"] == "stopped")
    answer = disk.python("['x' in globals(), open('a').read()]")
    assert (answer["data"]["value"], answer["data"]["session"]["state"]) == (
        [False, "kept"], "restarted",
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of a client
def test_daemon_killed_at_any_moment_loses_no_file(
    start_daemon: StartDaemon, home: Path, python_image: object
) -> None:
    """Killed while a session is made, stopped and started, so mostly in the middle of one."""
    disk = Disk(start_daemon(home), home)
    disk.python("open('a', 'w').write('kept')")
    for number in range(7):
        with Client(disk.daemon.socket) as client:
            act = (client.stop_session, client.resume_session, client.pause_session)[number % 3]
            thread = threading.Thread(target=swallow, args=(act, disk.id))
            thread.start()
            time.sleep(0.03 * number)
            disk.daemon.process.kill()
            disk.daemon.process.wait(timeout=DEADLINE_S)
            thread.join()
        disk.daemon = start_daemon(home)
        wait_until(lambda number=number: is_kept(disk, number))  # type: ignore[misc]
    disk.end()
    wait_until(lambda: disk.left == ([], [], []))
    wait_until(lambda: containers_of(f"fumehood.owner={owner_id(home)}") == [])


def is_kept(disk: Disk, number: int) -> bool:
    """Whether the file is read. On a busy host the container's start may have to be tried again."""
    answer = disk.python("open('a').read()")
    assert answer["error"] is None or answer["error"]["retryable"], (number, answer["error"])
    assert answer["data"].get("value", "kept") == "kept", number
    return answer["error"] is None


def swallow(act: Any, session: str) -> None:
    with suppress(FumehoodError):
        act(session)


@pytest.mark.parametrize("step", ["file", "loop device", "volume"])
def test_next_daemon_removes_what_a_killed_one_left_of_a_disk(
    start_daemon: StartDaemon, home: Path, python_image: object, step: str
) -> None:
    """As if it was killed at each step of making a disk, before the session's row was written."""
    (home / "disks").mkdir()
    path = home / "disks/fumehood-sess_left"
    with path.open("wb") as file:
        file.truncate(16 * MB)
    if step != "file":
        subprocess.run(["mkfs.ext4", "-q", str(path)], check=True)
        made = subprocess.run(
            ["losetup", "--find", "--show", str(path)], capture_output=True, text=True, check=True
        )
        if step == "volume":
            options = {"type": "ext4", "device": made.stdout.strip()}
            with closing(open_docker(timeout_s=30)) as client:
                client.create_volume("fumehood-sess_left", driver="local", driver_opts=options)
    disk = Disk(start_daemon(home), home)
    disk.end()
    disk.id = "sess_left"
    wait_until(lambda: disk.left == ([], [], []))


@pytest.mark.anyio
async def test_device_that_is_another_disks_by_now_is_not_freed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's late end frees a device after an engine has looked for it; then another engine
    attaches its disk to it.
    """
    for name in ("mine", "others"):
        (home / name).write_bytes(bytes(MB))
    attach = ["losetup", "--find", "--show", str(home / "others")]
    device = (await anyio.run_process(attach)).stdout.decode().strip()
    disks = Disks(home, Docker({}))

    async def seen_before(path: Path) -> list[str]:
        return [device]

    async def is_attached() -> bool:
        listed = await anyio.run_process(["losetup", device], check=False)
        return str(home / "others") in listed.stdout.decode()

    monkeypatch.setattr(disks, "_devices", seen_before)
    await disks.detach("mine")
    assert await is_attached()
    await disks.detach("others")
    assert not await is_attached()
    await disks.detach("others")  # it is free already


@pytest.fixture
def small_host(home: Path, tmp_path: Path) -> Iterator[Path]:
    """`home` on a file system of its own, of 2 GB."""
    image = tmp_path / "host"
    with image.open("wb") as file:
        file.truncate(2 << 30)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(home)], check=True)
    home.chmod(0o700)
    yield home
    subprocess.run(["umount", "--lazy", str(home)], check=True)


def test_host_that_others_fill_takes_nothing_from_a_disk(
    start_daemon: StartDaemon, small_host: Path, python_image: object
) -> None:
    daemon = start_daemon(small_host)
    disk = Disk(daemon, small_host, mb=64)
    sessions = (disk.id, disk.told("sessions", "fork", disk.id, "--json")[0]["id"])
    filler = small_host / "filler"
    with filler.open("wb") as file, suppress(OSError):
        for size in range(MB, 2 << 30, MB):
            os.posix_fallocate(file.fileno(), 0, size)
    write = (
        "import os\nwith open('a', 'wb') as file:\n    file.write(bytes(48 << 20))\n"
        "    file.flush(); os.fsync(file.fileno())\nopen('a', 'rb').read().count(0)"
    )
    for session in sessions:
        disk.id = session
        answer = disk.python(write)
        assert answer["data"]["value"] == 48 << 20, answer["error"]
    refused = disk.told("sessions", "new", "--disk", "16", "--json")
    assert "no room for 16 MB" in refused["error"]["message"]
    filler.unlink()
    for session in sessions:
        disk.id = session
        disk.end()
    wait_until(lambda: disk.left == ([], [], []))
    assert daemon.stop() == 0


def test_session_has_the_processors_and_memory_that_it_asked_for(runc: Daemon) -> None:
    with Client(runc.socket) as client:
        made = client.create_session(cpus=0.5, memory_mb=2048)
        assert (made.cpus, made.memory_mb) == (0.5, 2048)
        (container,) = containers_of(f"fumehood.owner={owner_id(runc.home)}")
        limits = container["HostConfig"]
        assert limits["NanoCpus"] == 1_000_000_000  # the guest has half a processor beside them
        code = "import time\nbegun = time.process_time()\nwhile time.process_time() - begun < 0.5: pass\nlen(bytearray(1 << 30))"
        answer = client.call("run_python", {"code": code}, session_id=made.id)
        assert answer.data["value"] == 1 << 30
        assert answer.metadata.sandbox.limits.memory_mb == 2048
        client.end_session(made.id)
