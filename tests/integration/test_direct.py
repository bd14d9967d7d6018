"""Sandboxes without Docker, with a real launcher: what holds them, and what is left of them."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from conftest import StartDaemon
from fumehood import Client
from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import MB, Limit, Limits
from fumehood.direct import ask as ask_module
from fumehood.direct import runtime as direct_runtime
from fumehood.direct.ask import ask_launcher, sandboxes_of
from fumehood.direct.host_files import python_version
from fumehood.direct.ids import FIRST_ID
from fumehood.direct.launcher import VERSION, host_folders
from fumehood.direct.runtime import Direct, LauncherFault
from fumehood.direct.store import DirectoryStore, LayerChanged, default_home, open_store
from fumehood.image_store.faults import ImageBuildError
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.runtime import (
    LimitsRefused,
    RuntimeConflict,
    RuntimeNotFound,
    RuntimeTimeout,
)
from fumehood.sandbox.container.spec import MASKED_PATHS, ContainerSpec
from fumehood.sandbox.container.wall import ContainerWall
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity, LanguageImages
from fumehood.sandbox.wall import NO_SINKS, RunEnding
from support.direct import ready_direct_image
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.needs("direct"), pytest.mark.row("B13")]

IMAGES = LanguageImages(python="python", shell="python", javascript="python")


@pytest.fixture(scope="module")
def image() -> Image:
    return ready_direct_image("python")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Path]:
    """The directory of a launcher of its own. Nothing of it is left at the end."""
    directory = tmp_path / "launcher"
    yield directory
    with suppress(OSError):
        for one in sandboxes_of(directory):
            ask(directory, "remove", name=one["name"])
        os.kill(ask(directory, "hello")["pid"], signal.SIGKILL)
    wait_until(lambda: not groups_of(directory), DEADLINE_S)
    for group in groups_of(directory, below=""):  # a launcher that was killed leaves it
        group.rmdir()


@pytest.fixture
def direct(launcher: Path, image: Image) -> Direct:
    return Direct(launcher, open_store())


def ask(directory: Path, do: str, **fields: Any) -> dict[str, Any]:
    return ask_launcher(directory, {"do": do, **fields}, [], 60)


def groups_of(directory: Path, below: str = "/*") -> list[Path]:
    """The control groups of a launcher's sandboxes."""
    parent = f"fumehood-{hashlib.sha256(str(directory).encode()).hexdigest()[:12]}"
    root = Path("/sys/fs/cgroup")
    found = [*root.glob(f"*/{parent}{below}"), *root.glob(f"{parent}{below}")]
    return [path for path in found if path.is_dir()]


def spec_of(image: Image, **fields: Any) -> ContainerSpec:
    name = f"fumehood-test-{secrets.token_hex(6)}"
    given = {
        "name": name, "image_id": image.id, "image_name": image.name, "engine_id": name,
        "owner_id": name, "memory_mb": 128, "cpus": 1, "lifetime_s": 600,
        "deadline": int(time.time()) + 600, "guest_mb": image.guest_mb,
    }  # fmt: skip
    return ContainerSpec(**{**given, **fields})


@asynccontextmanager
async def started(direct: Direct, image: Image, **fields: Any) -> AsyncIterator[Container]:
    spec = spec_of(image, **fields)
    container = await Container.start(direct, spec, required=frozenset(Limit), ready_s=90)
    try:
        yield container
    finally:
        container.end("the test is over")
        with anyio.CancelScope(shield=True):
            await direct.remove(spec.name)


async def python(container: Container, code: str, wall_s: float = 60) -> RunEnding:
    limits = Limits(wall_s, wall_s, 128, MB)
    arguments = {"code": code, "stdin": None, "files": []}
    with anyio.fail_after(DEADLINE_S):
        return await container.run("python", arguments, limits, NO_SINKS, "session", keep=True)


def cpu_s(pids: list[int]) -> list[float]:
    return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]


def is_gone(pid: int) -> bool:
    """Whether a process has ended. The child of a killed launcher may not be reaped yet."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def pid_of(direct: Direct, name: str) -> int:
    return (await direct.state(name)).pid


# -- what a sandbox is -----------------------------------------------------------------------


async def test_sandbox_has_every_limit_and_its_root_is_nobody_on_the_host(
    direct: Direct, image: Image
) -> None:
    async with started(direct, image) as container:
        assert container.enforced == frozenset(Limit)
        pid = await pid_of(direct, container.name)
        status = Path(f"/proc/{pid}/status").read_text()
        assert f"\nUid:\t{FIRST_ID}\t{FIRST_ID}\t{FIRST_ID}\t{FIRST_ID}\n" in status
        assert "\nNoNewPrivs:\t1\n" in status
        assert "\nSeccomp:\t2\n" in status
        assert "\nCapEff:\t00000000000000e0\n" in status
        assert "\nCapBnd:\t0000000000000000\n" in status
        for kind in ("user", "ipc", "net", "mnt", "pid", "uts", "cgroup"):
            own, host = (Path(f"/proc/{of}/ns/{kind}").readlink() for of in (pid, "self"))
            assert own != host, kind
        ending = await python(container, "open('/proc/1/cmdline', 'rb').read()[:5]; 6 * 7")
        assert (ending.ended_by, ending.result["value"]) == (EndedBy.OK, 42)


async def test_mounts_of_a_sandbox_are_the_image_and_new_file_systems(
    direct: Direct, image: Image
) -> None:
    async with started(direct, image) as container:
        pid = await pid_of(direct, container.name)
        rows = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    found = {row.split()[4]: (row.split()[5], row.split(" - ")[1].split()[0]) for row in rows}
    assert found["/"][1] == "overlay"
    assert "ro" in found["/"][0].split(",")
    writable = {path for path, (options, _) in found.items() if "ro" not in options.split(",")} - {
        "/proc",
        "/dev/pts",
    }
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    masked = {path for path, (_, kind) in found.items() if kind == "devtmpfs"} - devices
    assert writable - devices - masked == {"/workspace", "/tmp", "/dev/shm", "/run/fumehood"}
    assert masked == {path for path in MASKED_PATHS if os.path.isfile(path)} != set()
    read_only = {path for path, (options, _) in found.items() if "ro" in options.split(",")}
    assert {"/proc/sys", "/proc/bus", "/proc/irq"} <= read_only
    for path, (options, _) in found.items():
        assert "nosuid" in options.split(","), path


PROGRAM_OF_HOST = """
import os, subprocess, sys
found = {"inode": os.stat("/usr/bin/env").st_ino, "python": list(sys.version_info[:3])}
for path in ("/usr/x", "/usr/bin/x", "/etc/x", "/usr/bin/env"):
    try:
        open(path, "wb").close()
    except OSError as error:
        found[path] = error.errno
found["etc"] = sorted(os.listdir("/etc"))
found["top"] = sorted(os.listdir("/"))
found["ran"] = subprocess.run(["/usr/bin/env", "echo", "1"], capture_output=True, text=True).stdout
found
"""


async def test_image_of_the_host_shows_only_its_programs_and_shows_them_read_only(
    direct: Direct, image: Image
) -> None:
    of_host = ready_direct_image("host")
    async with started(direct, of_host) as container:
        assert container.enforced == frozenset(Limit)
        pid = await pid_of(direct, container.name)
        rows = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        found = (await python(container, PROGRAM_OF_HOST)).result["value"]
    options = {row.split()[4]: set(row.split()[5].split(",")) for row in rows}
    for path in host_folders():
        assert {"ro", "nosuid", "nodev"} <= options[path]
    assert found["inode"] == os.stat("/usr/bin/env").st_ino
    assert tuple(found["python"]) == python_version()
    assert found["ran"] == "1\n"
    assert {found[path] for path in ("/usr/x", "/usr/bin/x", "/etc/x", "/usr/bin/env")} == {
        errno.EROFS
    }
    assert not {"shadow", "ssl", "fumehood", "ssh"} & set(found["etc"])
    assert not {"boot", "mnt", "srv"} & set(found["top"])
    async with started(direct, image) as container:  # the twin has nothing of the host
        found = (await python(container, PROGRAM_OF_HOST)).result["value"]
    assert found["inode"] != os.stat("/usr/bin/env").st_ino


async def test_archive_with_the_label_of_the_host_shows_nothing_of_it(
    direct: Direct, image: Image
) -> None:
    """Whoever makes an archive chooses its labels, but not the name of the image that is used."""
    of_host = ready_direct_image("host")
    with pytest.raises(LauncherFault, match="python3 cannot be executed"):
        async with started(direct, replace(of_host, name="python")):
            pass
    async with started(direct, of_host):
        pass  # the twin


@pytest.mark.needs("root")
async def test_what_the_host_mounts_later_does_not_appear(direct: Direct) -> None:
    place = Path("/usr/local/fumehood-test")
    later = place / "later"
    look = f"import os\n[os.path.exists('{later}/file'), os.path.exists('{later}')]"
    place.mkdir()
    try:
        # As systemd does with all mounts, so that a mount appears in copies of this one.
        for command in (["-t", "tmpfs", "none", place], ["--make-shared", place]):
            subprocess.run(["mount", *command], check=True)
        later.mkdir()
        async with started(direct, ready_direct_image("host")) as container:
            subprocess.run(["mount", "-t", "tmpfs", "none", later], check=True)
            (later / "file").touch()
            assert (await python(container, look)).result["value"] == [False, True]
        async with started(direct, ready_direct_image("host")) as container:  # the twin
            assert (await python(container, look)).result["value"] == [True, True]
    finally:
        subprocess.run(["umount", "--recursive", place], check=False)
        place.rmdir()


async def test_sandbox_does_not_start_if_a_limit_cannot_be_set(
    direct: Direct, image: Image, launcher: Path
) -> None:
    with pytest.raises(LimitsRefused):
        await direct.launch(spec_of(image, memory_mb=-1000))
    assert sandboxes_of(launcher) == []
    assert groups_of(launcher) == []
    async with started(direct, image):  # the control
        assert groups_of(launcher)


async def test_command_that_is_missing_starts_nothing(
    direct: Direct, image: Image, launcher: Path
) -> None:
    with pytest.raises(direct_runtime.LauncherFault, match="cannot be executed"):
        await direct.launch(spec_of(image, command=("/no/such/program",)))
    assert sandboxes_of(launcher) == []
    wait_until(lambda: not groups_of(launcher), DEADLINE_S)


async def test_name_that_leads_out_of_the_directory_is_refused(
    direct: Direct, image: Image
) -> None:
    for name in ("../x", ".x", "a/b"):
        with pytest.raises(direct_runtime.LauncherFault):
            await direct.launch(spec_of(image, name=name))


async def test_program_cannot_reach_the_launcher(
    direct: Direct, image: Image, launcher: Path
) -> None:
    attack = (
        "import socket\n"
        "with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:\n"
        f"    result = end.connect_ex({str(launcher / 'socket')!r})\n"
        "result"
    )
    async with started(direct, image) as container:
        assert (await python(container, attack)).result["value"] == errno.ENOENT
        assert ask(launcher, "hello")["version"] == VERSION  # the control: the host reaches it


SAYS_HELLO = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setresgid(65534, 65534, 65534)
if sys.argv[2] == "other":
    os.setresuid(65534, 65534, 65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
    end.connect("socket")
    end.send(b'{"do": "hello"}')
    print(end.recv(1000).decode())
"""


@pytest.mark.parametrize("who", ["other", "own"])
async def test_launcher_serves_only_its_own_user(
    direct: Direct, launcher: Path, tmp_path: Path, who: str
) -> None:
    await direct.list("x")
    (launcher / "socket").chmod(0o777)  # so that only the launcher itself can refuse
    for directory in (launcher, *launcher.parents):
        if directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o011)
    said = subprocess.run(
        [sys.executable, "-c", SAYS_HELLO, str(launcher), who],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    expected = "serves only its own user" if who == "other" else f'"version": {VERSION}'
    assert expected in said.stdout


async def test_directory_of_another_user_is_refused(launcher: Path, image: Image) -> None:
    launcher.mkdir(mode=0o700)
    os.chown(launcher, 65534, 65534)
    direct = Direct(launcher, open_store())
    with pytest.raises(direct_runtime.LauncherUnreachable, match="another user"):
        await direct.list("x")
    os.chown(launcher, 0, 0)
    launcher.chmod(0o777)
    with pytest.raises(direct_runtime.LauncherUnreachable, match="another user"):
        await direct.list("x")
    launcher.chmod(0o700)
    assert await direct.list("x") == []


@pytest.mark.parametrize(
    "request_", [b"{", b"[]", b'{"do": 1e999}', b"[" * 50_000, b'{"do": "launch", "plan": {}}', b""]
)
async def test_no_request_ends_the_launcher(
    direct: Direct, launcher: Path, request_: bytes
) -> None:
    await direct.list("x")
    pid = ask(launcher, "hello")["pid"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(str(launcher / "socket"))
        end.send(request_)
        end.settimeout(60)
        end.recv(10_000)
    assert ask(launcher, "hello")["pid"] == pid


# -- freezing, ends and takeovers --------------------------------------------------------------


async def test_frozen_sandbox_uses_no_processor_and_continues(direct: Direct, image: Image) -> None:
    async with started(direct, image) as container:
        await direct.pause(container.name)
        await direct.pause(container.name)
        assert (await direct.state(container.name)).is_paused
        pid = await pid_of(direct, container.name)
        children = [process.pid for process in psutil.Process(pid).children(recursive=True)]
        before = cpu_s([pid, *children])
        await anyio.sleep(1.5)  # the guest looks around several times a second
        assert cpu_s([pid, *children]) == before
        await direct.unpause(container.name)
        await direct.unpause(container.name)
        assert not (await direct.state(container.name)).is_paused
        assert (await python(container, "1 + 1")).result["value"] == 2


async def test_frozen_sandbox_can_be_removed(direct: Direct, image: Image, launcher: Path) -> None:
    async with started(direct, image) as container:
        pid = await pid_of(direct, container.name)
        await direct.pause(container.name)
        await direct.remove(container.name)
        assert not psutil.pid_exists(pid)
        with pytest.raises(RuntimeNotFound):
            await direct.state(container.name)
    assert groups_of(launcher) == []


async def test_end_of_a_guest_is_known_with_its_status(direct: Direct, image: Image) -> None:
    async with started(direct, image) as container:
        os.kill(await pid_of(direct, container.name), signal.SIGKILL)
        with anyio.fail_after(DEADLINE_S):
            while (state := await direct.state(container.name)).is_running:
                await anyio.sleep(0.02)
        assert (state.exit_code, state.out_of_memory) == (137, False)
        with pytest.raises(RuntimeConflict):
            await direct.pause(container.name)


@pytest.mark.row("S11", "D7")
async def test_sandbox_outlives_its_launcher_and_the_next_one_holds_it(
    direct: Direct, image: Image, launcher: Path
) -> None:
    async with started(direct, image) as container:
        await python(container, "x = 41")
        first = ask(launcher, "hello")["pid"]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(first), DEADLINE_S)
        assert (await python(container, "x + 1")).result["value"] == 42
        state = await direct.state(container.name)
        assert ask(launcher, "hello")["pid"] != first
        assert state.is_running
        assert state.image_id == image.id
        with pytest.raises(RuntimeConflict):
            await direct.launch(spec_of(image, name=container.name))
        await direct.remove(container.name)
        assert is_gone(state.pid)
    assert groups_of(launcher) == []


async def test_sandbox_whose_start_was_never_answered_is_removed_by_the_next_launcher(
    direct: Direct, image: Image, launcher: Path
) -> None:
    async with started(direct, image) as container:
        pid = await pid_of(direct, container.name)
        os.kill(ask(launcher, "hello")["pid"], signal.SIGKILL)
        (launcher / f"{container.name}.json").write_text("{")  # half of a record
        assert await direct.list("fumehood.engine") == []
        wait_until(lambda: is_gone(pid) and not groups_of(launcher), DEADLINE_S)


async def test_process_that_has_the_id_of_an_ended_sandbox_is_not_taken_for_it(
    direct: Direct, image: Image, launcher: Path
) -> None:
    async with started(direct, image) as container:
        record = launcher / f"{container.name}.json"
        found = json.loads(record.read_text())
        os.kill(ask(launcher, "hello")["pid"], signal.SIGKILL)
        record.write_text(json.dumps({**found, "began": found["began"] + 1}))
        state = await direct.state(container.name)
        assert (state.is_running, state.exit_code) == (False, 255)


async def test_two_engines_start_one_launcher(launcher: Path, image: Image) -> None:
    engines = [Direct(launcher, open_store()) for _ in range(8)]
    pids = set()

    async def look(engine: Direct) -> None:
        await engine.list("x")
        pids.add(ask(launcher, "hello")["pid"])

    async with anyio.create_task_group() as group:
        for engine in engines:
            group.start_soon(look, engine)
    assert len(pids) == 1


async def test_launcher_that_hangs_costs_an_error_and_not_the_engine(
    direct: Direct, launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await direct.list("x")
    monkeypatch.setattr(direct_runtime, "QUICK_S", 0.5)
    pid = ask(launcher, "hello")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises((RuntimeTimeout, direct_runtime.LauncherUnreachable)):
            await direct.list("x")
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert await direct.list("x") == []


async def test_launcher_without_sandboxes_ends_and_leaves_no_group(
    launcher: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.direct.ask.IDLE_S", 0.2)
    direct = Direct(launcher, open_store())
    async with started(direct, image):
        pid = ask(launcher, "hello")["pid"]
    wait_until(lambda: not psutil.pid_exists(pid), DEADLINE_S)
    wait_until(lambda: not groups_of(launcher, below=""), DEADLINE_S)


async def test_ended_sandbox_keeps_no_launcher_and_its_status_is_known_later(
    launcher: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.direct.ask.IDLE_S", 0.2)
    direct = Direct(launcher, open_store())
    async with started(direct, image) as container:
        pid = ask(launcher, "hello")["pid"]
        os.kill(await pid_of(direct, container.name), signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), DEADLINE_S)
        assert groups_of(launcher, below="") == []
        state = await direct.state(container.name)
        assert (state.is_running, state.exit_code) == (False, 137)


def test_launcher_that_another_process_starts_is_waited_for(
    launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has the lock, and will listen only later."""
    later = threading.Timer(0.5, ask_module._start, [launcher])
    begin = lambda directory: None if later.ident else later.start()  # noqa: E731
    monkeypatch.setattr(ask_module, "_start", begin)
    assert ask(launcher, "hello")["version"] == VERSION
    later.join()


# -- the wall and the daemon --------------------------------------------------------------------


async def test_host_that_is_unfit_refuses_calls_with_the_remedy(
    launcher: Path, image: Image
) -> None:
    identity = EngineIdentity(secrets.token_hex(16), secrets.token_hex(16))
    settings = ContainerSettings(pool_min=0, memory_mb=128, images=IMAGES, runtime="runsc")
    async with ContainerWall(settings, Direct(launcher, open_store()), identity) as wall:
        with pytest.raises(SandboxUnavailable, match="'runsc'"):
            async with wall.lease(TrustDomain("uid:1"), fresh=False, memory_mb=128):
                pass


@pytest.mark.row("S11")
@pytest.mark.parametrize("killed", ["engine", "engine and launcher"])
def test_session_continues_after_a_kill(
    killed: str, image: Image, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    directory = tmp_path / f"launcher-{VERSION}"
    variables = {
        "FUMEHOOD_LAUNCHER_DIRECTORY": str(tmp_path),
        "FUMEHOOD_CONTAINER__ENGINE": "direct",
    }
    settings = {"sessions__image": "python", "sessions__orphan_seconds": "600"}
    daemon = start_daemon(variables=variables, **settings)
    with Client(daemon.socket) as client:
        session = client.create_session().id
        assert client.call("run_python", {"code": "x = 41"}, session_id=session).success
    daemon.process.kill()
    daemon.process.wait(timeout=DEADLINE_S)
    if killed != "engine":
        pid = ask(directory, "hello")["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid), DEADLINE_S)
    again = start_daemon(variables=variables, **settings)
    with Client(again.socket) as client:
        envelope = client.call("run_python", {"code": "x + 1"}, session_id=session)
        assert envelope.success, envelope
        assert envelope.data["value"] == 42
        client.end_session(session)
    assert again.stop() == 0
    assert sandboxes_of(directory) == []
    os.kill(ask(directory, "hello")["pid"], signal.SIGKILL)


# -- images ------------------------------------------------------------------------------------


@pytest.fixture
def copied(image: Image, tmp_path: Path, launcher: Path) -> DirectoryStore:
    """A store of its own with the image, as `images load` fills it."""
    store = DirectoryStore(tmp_path / "layers", launcher)
    with tempfile_of(open_store(), image.id) as file:
        store.load(file)
    return store


def tempfile_of(store: DirectoryStore, layer: str) -> io.BytesIO:
    file = io.BytesIO()
    store.save(layer, file)
    file.seek(0)
    return file


async def test_image_that_was_saved_and_loaded_is_the_same(
    copied: DirectoryStore, image: Image, launcher: Path
) -> None:
    assert {layer.id for layer in copied.layers("fumehood.image")} >= {image.id}
    async with started(Direct(launcher, copied), image) as container:
        assert (await python(container, "1 + 1")).result["value"] == 2


async def test_archive_whose_content_was_changed_is_refused(
    image: Image, tmp_path: Path, launcher: Path
) -> None:
    changed = io.BytesIO()
    with (
        tarfile.open(fileobj=tempfile_of(open_store(), image.id)) as old,
        tarfile.open(fileobj=changed, mode="w") as new,
    ):
        for member in old:
            content = old.extractfile(member).read() if member.isreg() else b""  # type: ignore[union-attr]
            if member.name.endswith("/etc/hostname") or member.name.endswith("/etc/passwd"):
                content = b"evil:x:0:0::/:/bin/sh\n"
                member.size = len(content)
            new.addfile(member, io.BytesIO(content) if member.isreg() else None)
    changed.seek(0)
    store = DirectoryStore(tmp_path / "layers", launcher)
    with pytest.raises(LayerChanged):
        store.load(changed)


async def test_image_that_was_changed_by_hand_is_refused(
    copied: DirectoryStore, image: Image, launcher: Path
) -> None:
    lowest = copied.directories_of(image.id)[0]
    (lowest / "etc/passwd").write_text("evil:x:0:0::/:/bin/sh\n")
    again = DirectoryStore(copied._home, launcher)  # as another engine
    with pytest.raises(LayerChanged):
        await Direct(launcher, again).launch(spec_of(image))


def plain_archive(tmp_path: Path) -> Path:
    file = tmp_path / "archive"
    with tarfile.open(file, mode="w") as made:
        member = tarfile.TarInfo("program")
        member.size = 4
        made.addfile(member, io.BytesIO(b"good"))
    return file


def test_layer_that_was_changed_is_repaired_by_the_next_build(
    tmp_path: Path, launcher: Path
) -> None:
    home = tmp_path / "layers"
    layer = DirectoryStore(home, launcher).import_root(plain_archive(tmp_path), {"a": "b"})
    (home / layer.removeprefix("sha256:") / "files" / "program").write_bytes(b"evil")
    again = DirectoryStore(home, launcher)
    with pytest.raises(LayerChanged):
        again.directories_of(layer)
    assert again.import_root(plain_archive(tmp_path), {"a": "b"}) == layer
    assert (again.directories_of(layer)[0] / "program").read_bytes() == b"good"
    again.sweep()
    assert [path.name for path in home.iterdir()] == [layer.removeprefix("sha256:")]


@pytest.mark.parametrize("content", [b"no archive", b"\0" * 10_240])
def test_file_that_is_no_archive_adds_nothing(
    content: bytes, tmp_path: Path, launcher: Path
) -> None:
    with suppress(LayerChanged):
        DirectoryStore(tmp_path / "layers", launcher).load(io.BytesIO(content))
    assert [*(tmp_path / "layers").iterdir()] == []


async def test_build_step_of_a_killed_build_is_removed_after_its_deadline(
    copied: DirectoryStore, image: Image, launcher: Path
) -> None:
    direct, now, streams = Direct(launcher, copied), int(time.time()), []
    for deadline in (now - 1, now + 600):
        spec = spec_of(image, name=f"build-{deadline}-{secrets.token_hex(4)}")
        streams.append((await direct.launch(spec))[1])
    copied.sweep()
    (left,) = sandboxes_of(launcher)
    assert left["name"].startswith(f"build-{now + 600}-")
    for one in streams:
        one.close()


async def test_image_that_is_gone_is_refused(
    copied: DirectoryStore, image: Image, launcher: Path
) -> None:
    shutil.rmtree(copied.directories_of(image.id)[0].parent)
    with pytest.raises(RuntimeNotFound):
        await Direct(launcher, copied).launch(spec_of(image))


async def test_image_in_use_is_not_removed(
    copied: DirectoryStore, image: Image, launcher: Path
) -> None:
    direct = Direct(launcher, copied)
    async with started(direct, image) as container:
        assert copied.remove(image.id) is False
        assert copied.users_of(image.id) == [container.name]
        os.kill(ask(launcher, "hello")["pid"], signal.SIGKILL)
        await direct.state(container.name)  # the next launcher locks it again
        assert copied.remove(image.id) is False
    assert copied.remove(image.id) is True
    with pytest.raises(RuntimeNotFound):
        copied.directories_of(image.id)


async def test_image_in_use_is_not_removed_from_either_of_two_stores(
    direct: Direct, copied: DirectoryStore, image: Image, launcher: Path
) -> None:
    async with started(direct, image), started(Direct(launcher, copied), image):
        assert copied.remove(image.id) is False
    assert copied.remove(image.id) is True


def long_way_out(made: tarfile.TarFile) -> str:
    """Links whose expanded path is longer than the operating system follows (CVE-2025-4517)."""
    folder = "d" * 247
    place = ""
    for step in "abcdefghijklmnop":
        directory = tarfile.TarInfo(f"{place}{folder}")
        directory.type = tarfile.DIRTYPE
        made.addfile(directory)
        link = tarfile.TarInfo(f"{place}{step}")
        link.type, link.linkname = tarfile.SYMTYPE, folder
        made.addfile(link)
        place += f"{folder}/"
    link = tarfile.TarInfo("/".join("abcdefghijklmnop") + "/" + "l" * 254)
    link.type, link.linkname = tarfile.SYMTYPE, "../" * 16
    made.addfile(link)
    out = tarfile.TarInfo("out")
    out.type, out.linkname = tarfile.SYMTYPE, link.name + "/../../../.."
    made.addfile(out)
    return "out/escaped"


HOSTILE = [
    "parent",
    "absolute",
    "through a link",
    "by a long way",
    "hard link",
    "hard link to a device",
    "owner",
    "negative owner",
]


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archive_writes_and_reads_nothing_outside(
    case: str, tmp_path: Path, launcher: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as made:
        name = "escaped"
        if case == "parent":
            name = "../escaped"
        elif case == "absolute":
            name = f"{tmp_path}/escaped"
        elif case == "through a link":
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
            made.addfile(link)
            name = "link/escaped"
        elif case == "by a long way":
            name = long_way_out(made)
        member = tarfile.TarInfo(name)
        if case == "hard link":
            member = tarfile.TarInfo("stolen")
            member.type, member.linkname = tarfile.LNKTYPE, "../../../secret"
        elif case == "hard link to a device":
            device = tarfile.TarInfo("device")
            device.type = tarfile.CHRTYPE
            made.addfile(device)
            member = tarfile.TarInfo("stolen")
            member.type, member.linkname = tarfile.LNKTYPE, "device"
        elif "owner" in case:
            member.uid = 70_000 if case == "owner" else -FIRST_ID
            member.mode = 0o4755
        member.size = 4 if member.isreg() else 0
        made.addfile(member, io.BytesIO(b"evil"))
    file = tmp_path / "archive"
    file.write_bytes(archive.getvalue())
    store = DirectoryStore(tmp_path / "layers", launcher)
    with pytest.raises(LayerChanged):
        store.import_root(file, {"a": "b"})
    assert not [*tmp_path.rglob("escaped")]
    assert not [*tmp_path.rglob("stolen")]
    assert store.layers("a") == []


def rewritten(archive: Path, change: str, name: str) -> Path:
    """A saved layer, changed by somebody else. Its digest is right."""
    target = archive.with_name("rewritten")
    with tarfile.open(archive) as given, tarfile.open(target, "w") as made:
        for member in given:
            content = given.extractfile(member) if member.isreg() else None
            if change == "link" and member.name.startswith(f"{name}/files"):
                if member.name == f"{name}/files":
                    member.type, member.linkname = tarfile.SYMTYPE, "/etc"
                    made.addfile(member)
                continue
            if change == "description" and member.name == f"{name}/layer.json":
                about = json.loads(content.read() if content else b"")
                about["created"], about["size_bytes"] = float("nan"), 5
                data = json.dumps(about).encode()
                member.size, content = len(data), io.BytesIO(data)
            made.addfile(member, content)
    return target


@pytest.mark.parametrize("change", ["link", "description", "none"])
def test_layer_that_somebody_else_has_made_does_no_harm(
    change: str, tmp_path: Path, launcher: Path
) -> None:
    file, saved = tmp_path / "archive", tmp_path / "saved"
    with tarfile.open(file, mode="w") as made:
        made.addfile(tarfile.TarInfo("made"))
    store = DirectoryStore(tmp_path / "layers", launcher)
    layer = store.import_root(file, {"a": "b"})
    with saved.open("wb") as opened:
        store.save(layer, opened)
    other = DirectoryStore(tmp_path / "others", launcher)
    with rewritten(saved, change, layer.removeprefix("sha256:")).open("rb") as opened:
        if change == "link":
            with pytest.raises(LayerChanged):
                other.load(opened)
        else:
            other.load(opened)
    found = other.layers("a")
    assert [one.id for one in found] == ([] if change == "link" else [layer])
    assert [path.name for path in (tmp_path / "others").glob(".*")] == []


def test_folder_of_a_mount_that_is_a_link_is_refused(tmp_path: Path, launcher: Path) -> None:
    file, outside = tmp_path / "archive", tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(file, mode="w") as made:
        link = tarfile.TarInfo("run")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        made.addfile(link)
    store = DirectoryStore(tmp_path / "layers", launcher)
    with pytest.raises(LayerChanged):
        store.import_root(file, {"a": "b"})
    assert list(outside.iterdir()) == []


def test_twin_plain_archive_is_imported_and_nobody_gains_rights(
    tmp_path: Path, launcher: Path
) -> None:
    file = tmp_path / "archive"
    with tarfile.open(file, mode="w") as made:
        for name, mode in (("usr", 0o755), ("usr/program", 0o6755)):
            member = tarfile.TarInfo(name)
            member.mode, member.uid = mode, 5
            if name == "usr":
                member.type = tarfile.DIRTYPE
            made.addfile(member)
        link = tarfile.TarInfo("bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/usr"
        made.addfile(link)
    store = DirectoryStore(tmp_path / "layers", launcher)
    (files,) = store.directories_of(store.import_root(file, {"a": "b"}))
    found = (files / "usr/program").stat()
    assert (found.st_mode & 0o7777, found.st_uid) == (0o755, FIRST_ID + 5)
    assert (files / "bin").readlink() == Path("/usr")
    assert files.parent.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "layers").stat().st_mode & 0o777 == 0o700


def test_build_step_sees_no_network_and_what_fails_leaves_nothing(
    copied: DirectoryStore, image: Image
) -> None:
    def empty() -> io.BytesIO:
        file = io.BytesIO()
        tarfile.open(fileobj=file, mode="w").close()
        file.seek(0)
        return file

    before = {layer.id for layer in copied.layers("fumehood.image")}
    code = "import os; print(os.listdir('/sys/class/net'), os.getuid()); raise SystemExit(3)"
    command = ["/usr/bin/python3", "-I", "-c", code]
    with pytest.raises(ImageBuildError, match=r"It failed: \['lo'\] 0"):
        copied.add(image.id, empty(), command, labels={"x": "1"}, run_s=60, failed="It failed")
    assert {layer.id for layer in copied.layers("fumehood.image")} == before
    assert not [path for path in copied._home.iterdir() if path.name.startswith(".")]
    made = copied.add(
        image.id, empty(), ["/usr/bin/python3", "-c", "open('/made', 'w')"], labels={"x": "1"},
        run_s=60, failed="It failed",
    )  # fmt: skip
    top = copied.directories_of(made)[-1]
    assert [path.name for path in top.iterdir()] == ["made"]
    assert (top / "made").stat().st_uid == FIRST_ID


def test_store_is_in_a_directory_of_the_system() -> None:
    assert default_home() == Path("/var/lib/fumehood/layers")
