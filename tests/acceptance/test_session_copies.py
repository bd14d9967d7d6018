"""Snapshots and forks of sessions with a disk: complete, separate, and never left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon, StartDaemon, running_daemon
from fumehood import Client, FumehoodError
from fumehood.sandbox.images.catalog import Image
from support.own_docker import OwnDocker
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.needs("docker", "disks"), pytest.mark.row("S11", "B14")]

READ = "print(open('a').read())"


class Copies:
    """A session with a disk of 16 MB whose file `a` says "first", and which has a variable."""

    def __init__(self, daemon: Daemon, home: Path) -> None:
        self.daemon = daemon
        self.home = home
        self.client = Client(daemon.socket)
        self.id = self.client.create_session(memory_mb=128, disk_mb=16).id
        self.run("variable = 1\nopen('a', 'w').write('first')")

    def run(self, code: str, session_id: str | None = None) -> Any:
        answer = self.client.call("run_python", {"code": code}, session_id=session_id or self.id)
        assert answer.error is None, answer.error
        return answer.data["stdout"]

    def restart(self, start: StartDaemon) -> None:
        """Kill the daemon and start it again."""
        self.client.close()
        self.daemon.process.send_signal(signal.SIGKILL)
        self.daemon.process.wait(timeout=DEADLINE_S)
        self.daemon = start(self.home)
        self.client = Client(self.daemon.socket)

    def refusal(self, call: Callable[[], object]) -> tuple[str, str]:
        with pytest.raises(FumehoodError) as caught:
            call()
        return caught.value.code, caught.value.message

    @property
    def devices(self) -> list[str]:
        """The loop devices of this state directory."""
        listed = subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=True)
        return [line for line in listed.stdout.splitlines() if str(self.home) in line]

    @property
    def disks(self) -> int:
        return len(os.listdir(self.home / "disks"))


@contextmanager
def own_session(daemon: Daemon) -> Iterator[Copies]:
    """It is ended, and nothing of it is left; its daemon may be another one by then."""
    copies = Copies(daemon, daemon.home)
    try:
        yield copies
        for one in copies.client.sessions():
            copies.client.end_session(one.id)
        wait_until(lambda: copies.disks == 0)
        assert copies.devices == []
    finally:
        copies.client.close()


@pytest.fixture(scope="module")
def runc(python_image: object) -> Iterator[Daemon]:
    """The daemon of all tests that do not kill it."""
    with running_daemon(container__runtime="runc") as daemon:
        yield daemon


@pytest.fixture
def copies(runc: Daemon) -> Iterator[Copies]:
    with own_session(runc) as made:
        yield made


@pytest.fixture
def own_copies(start_daemon: StartDaemon, home: Path, python_image: object) -> Iterator[Copies]:
    """The same, of a daemon that the test may kill."""
    with own_session(start_daemon()) as made:
        yield made


def test_restore_brings_back_the_files_of_the_snapshot(copies: Copies) -> None:
    made = copies.client.snapshot_session(copies.id, "before")
    assert 0 < made.bytes < 16 << 20
    copies.run("open('a', 'w').write('second'); open('b', 'w').close()")
    restored = copies.client.restore_session(copies.id, "before")
    assert (restored.state.value, restored.why) == (
        "stopped",
        "Its files were restored from the snapshot before.",
    )
    answer = copies.client.call(
        "run_python", {"code": "import os; print(open('a').read(), os.path.exists('b'))"},
        session_id=copies.id,
    )  # fmt: skip
    assert answer.data["stdout"] == "first False\n"
    assert answer.data["session"]["state"] == "restarted"
    assert copies.client.snapshots(copies.id) == (made,)


def test_forks_begin_equal_and_are_separate(copies: Copies) -> None:
    assert_forks_are_separate(copies)


@pytest.mark.soak  # Docker and this host copy them; a disk on gVisor is in test_session_disks.py
@pytest.mark.needs("runsc")
def test_forks_on_gvisor_begin_equal_and_are_separate(python_image: object) -> None:
    with running_daemon(container__runtime="runsc") as daemon, own_session(daemon) as copies:
        assert_forks_are_separate(copies)


def assert_forks_are_separate(copies: Copies) -> None:
    first, second = copies.client.fork_session(copies.id, name="try", count=2)
    assert (first.name, second.name, first.state.value) == ("try-1", "try-2", "stopped")
    copies.run("open('a', 'w').write('changed')", first.id)
    assert copies.run(READ, second.id) == copies.run(READ) == "first\n"
    assert copies.run("print(variable)") == "1\n"  # the source runs on
    copies.client.end_session(copies.id)
    assert copies.run(READ, first.id) == "changed\n"


def test_best_of_several_answers_keeps_its_fork(copies: Copies) -> None:
    inputs = [{"code": f"open('a', 'a').write('{n}'); {n}"} for n in (3, 7, 5)]
    inputs.append({"code": "1 / 0"})
    found = copies.client.map_forks(
        copies.id, "run_python", inputs, best=lambda answer: answer.data["value"]
    )
    assert [answer.data.get("value") for answer in found.answers] == [3, 7, 5, None]
    assert found.best == 1
    assert copies.run(READ, found.session.id) == "first7\n"
    alive = {one.id for one in copies.client.sessions() if not one.state.is_over}
    assert alive == {copies.id, found.session.id}
    assert copies.run(READ) == "first\n"
    nothing = copies.client.map_forks(copies.id, "run_python", inputs[:1])
    assert (nothing.best, nothing.session) == (None, None)


def test_copies_survive_the_engine(own_copies: Copies, start_daemon: StartDaemon) -> None:
    copies = own_copies
    copies.client.snapshot_session(copies.id, "kept")
    copies.client.snapshot_session(copies.id, "deleted")
    (fork,) = copies.client.fork_session(copies.id)
    copies.client.delete_snapshot(copies.id, "deleted")
    copies.run("open('a', 'w').write('second')")
    copies.restart(start_daemon)
    assert [one.name for one in copies.client.snapshots(copies.id)] == ["kept"]
    assert copies.run(READ, fork.id) == "first\n"
    copies.client.restore_session(copies.id, "kept")
    assert copies.run(READ) == "first\n"
    wait_until(lambda: copies.disks == 3)


def test_snapshot_of_a_lost_session_can_be_forked(
    own_copies: Copies, start_daemon: StartDaemon
) -> None:
    copies = own_copies
    copies.client.snapshot_session(copies.id, "kept")
    copies.client.stop_session(copies.id)
    wait_until(lambda: copies.devices == [])
    (copies.home / "disks" / f"fumehood-{copies.id}").unlink()
    answer = copies.client.call("run_python", {"code": READ}, session_id=copies.id)
    assert answer.error is not None
    assert copies.client.session(copies.id).state.value == "lost"
    copies.restart(start_daemon)
    (fork,) = copies.client.fork_session(copies.id, "kept")
    assert copies.run(READ, fork.id) == "first\n"
    assert "is lost" in copies.refusal(lambda: copies.client.fork_session(copies.id))[1]
    for old in copies.home.joinpath("disks").glob("snap_*"):
        old.unlink()


def test_what_cannot_be_copied_is_refused(copies: Copies) -> None:
    client, mine = copies.client, copies.id
    in_memory = client.create_session(memory_mb=128).id
    refused = copies.refusal
    assert refused(lambda: client.snapshot_session(in_memory))[0] == "INVALID_PARAMS"
    assert "in memory" in refused(lambda: client.fork_session(in_memory))[1]
    client.snapshot_session(mine, "one")
    assert "already" in refused(lambda: client.snapshot_session(mine, "one"))[1]
    assert refused(lambda: client.restore_session(mine, "two"))[0] == "RESOURCE_NOT_FOUND"
    assert refused(lambda: client.restore_session(in_memory, "one"))[0] == "RESOURCE_NOT_FOUND"
    assert refused(lambda: client.delete_snapshot(mine, "two"))[0] == "RESOURCE_NOT_FOUND"
    assert refused(lambda: client.fork_session("sess_0"))[0] == "RESOURCE_NOT_FOUND"
    assert refused(lambda: client.fork_session(mine, name="new"))[0] == "INVALID_PARAMS"
    client.fork_session(mine, name="taken")
    assert "already" in refused(lambda: client.fork_session(mine, name="taken"))[1]
    assert refused(lambda: client.fork_session(mine, count=49))[0] == "QUOTA_EXCEEDED"
    wait_until(lambda: copies.disks == 3)  # the session's, its snapshot, its fork
    with pytest.raises(ValueError, match="from 1 to 50"):
        client.map_forks(mine, "run_python", [])


def test_program_cannot_make_its_snapshots_unusable(copies: Copies) -> None:
    """Neither with the name that a file system keeps for its check, nor by using up its room."""
    fill = (
        "import os\nopen('lost+found', 'w').close()\n"
        "try:\n    for n in range(100_000): open(f'f{n}', 'w').close()\n"
        "except OSError: pass"
    )
    copies.run(fill)
    copies.client.snapshot_session(copies.id, "full")
    (fork,) = copies.client.fork_session(copies.id)
    assert copies.run(READ, fork.id) == "first\n"
    copies.client.restore_session(copies.id, "full")
    assert copies.run(READ) == "first\n"
    twin = copies.client.create_session(memory_mb=128, disk_mb=16)
    (fork,) = copies.client.fork_session(twin.id)
    assert copies.run("import os; print(os.listdir('.'))", fork.id) == "[]\n"


def test_fork_has_the_rights_of_its_source_only(copies: Copies) -> None:
    """Programs of a fork run with its own limits, and its size is enforced like its source's."""
    (fork,) = copies.client.fork_session(copies.id)
    fill = "with open('large', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"
    answer = copies.client.call("run_python", {"code": fill}, session_id=fork.id)
    assert "No space left" in answer.error.message
    assert copies.run(READ) == "first\n"


KILLS = 3


@pytest.mark.needs("root")
def test_docker_killed_at_any_moment_loses_no_file(
    start_daemon: StartDaemon, home: Path, python_image: Image
) -> None:
    """As at a restart of the host: all containers are gone, whatever was going on."""
    chance = random.Random(2)
    for name in ("docker", "engine"):
        (home / name).mkdir(mode=0o700)
    with OwnDocker(home / "docker") as docker:
        docker.copy_image(python_image.id)
        variables = {"DOCKER_HOST": docker.address}
        copies = Copies(start_daemon(home / "engine", variables=variables), home / "engine")
        client, mine = copies.client, copies.id
        client.snapshot_session(mine, "first")
        acts: list[Callable[[Client], object]] = [
            lambda client: client.restore_session(mine, "first"),
            lambda client: client.fork_session(mine, count=2),
            lambda client: client.create_session(memory_mb=128, disk_mb=16),
        ]
        for number in range(KILLS):
            act = acts[number % len(acts)]
            thread = threading.Thread(target=tried, args=(act, copies.daemon))
            thread.start()
            time.sleep(chance.uniform(0, 0.3))
            docker.kill()
            docker.start()
            thread.join()
            wait_until(lambda: reads_first(copies))
        for one in client.sessions():
            if not one.state.is_over and one.id != mine and one.disk_mb:
                wait_until(lambda one=one: reads_first(copies, one.id))
        for one in client.sessions():
            client.end_session(one.id)
        wait_until(lambda: copies.disks == 0)
        wait_until(lambda: docker.containers() == [])
        assert copies.devices == []
        client.close()
        assert copies.daemon.stop() == 0


def tried(act: Callable[[Client], object], daemon: Daemon) -> None:
    with suppress(FumehoodError), Client(daemon.socket) as client:
        act(client)


def reads_first(copies: Copies, session_id: str | None = None) -> bool:
    """Whether the session's file has its content. Made in vain, it has none at all."""
    code = "import os\nopen('a').read() if os.path.exists('a') else None"
    answer = copies.client.call("run_python", {"code": code}, session_id=session_id or copies.id)
    if answer.error is not None:
        assert answer.error.retryable, answer.error
        return False
    return (
        answer.data["value"] in ("first", None) if session_id else answer.data["value"] == "first"
    )
