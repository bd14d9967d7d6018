"""Programs without namespaces: as root, as an ordinary user, and in containers with Docker's own
filter. What holds them, what a harmless program may do, and what is left after each kill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood.guest.core.marks import marked
from fumehood.landlock.host import why_unfit
from fumehood.landlock.runtime import Landlock
from fumehood.landlock.sandboxes import Gone, Sandbox, Sandboxes
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.runtime import RuntimeNotFound
from integration.test_direct_in_container import in_docker, run_in_container
from support import without_namespaces
from support.ordinary_user import Host, ordinary_user
from support.without_namespaces import COUNTS, LEAVES, lives, run, spec_of, started

pytestmark = [pytest.mark.anyio, pytest.mark.needs("landlock"), pytest.mark.row("B13")]

CODES = {
    "user": "import os\n[os.getuid(), os.getgid(), os.getgroups()]",
    "answer": "6 * 7",
    "threads": "import threading, time\n"
    "threading.stack_size(1 << 16)\n"
    "for n in range(300):\n"
    "    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    "    except RuntimeError: break\n"
    "n + 1",
    "forks": "import os, time\n"
    "for n in range(300):\n"
    "    try: pid = os.fork()\n"
    "    except BlockingIOError: break\n"
    "    if pid == 0: time.sleep(60); os._exit(0)\n"
    "n + 1",
    "forks-again": "import os\n"
    "for n in range(300):\n"
    "    if os.fork() == 0: os._exit(0)\n"
    "    os.wait()\n"
    "n + 1",
    "memory": "import os, time\n"
    "for _ in range(8):\n"
    "    if os.fork() == 0:\n"
    "        held = [b'x' * (1 << 20) for _ in range(60)]\n"
    "        time.sleep(60)\n"
    "time.sleep(60)",
    "disk": "for n in range(256): open(f'f{n}', 'wb').write(bytes(1 << 20))\n"
    "import time\ntime.sleep(60)",
    "copy": "import os, shutil\n"
    "open('a', 'w').write('own')\n"
    "os.chmod('a', 0o640)\n"
    "os.utime('a', (1, 2))\n"
    "shutil.copy2('a', 'b')\n"
    "os.symlink('a', 'l')\n"
    "os.utime('l', (3, 4), follow_symlinks=False)\n"
    "with open('a') as file: os.fchmod(file.fileno(), 0o600)\n"
    "os.mkdir('d')\n"
    "inner = os.open('d', os.O_RDONLY)\n"
    "open('d/x', 'w').close()\n"
    "os.chmod('x', 0o400, dir_fd=inner)\n"
    "os.rename('b', 'd/b')\n"
    "[oct(os.stat('a').st_mode), os.stat('d/b').st_mtime, oct(os.stat('d/b').st_mode),\n"
    " os.lstat('l').st_mtime, oct(os.stat('d/x').st_mode)]",
    "signals": "import os, signal, subprocess, time\n"
    "one = subprocess.Popen(['sleep', '60'])\n"
    "group = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    "os.kill(one.pid, 0)\n"
    "one.terminate()\n"
    "os.killpg(group.pid, signal.SIGKILL)\n"
    "[one.wait(), group.wait()]",
    "chroot-links": "import os\n"
    "os.symlink('/etc/passwd', 'out')\n"
    "os.symlink('..', 'up')\n"
    "refused = []\n"
    "for path in ('out', 'up', 'up/tmp', '..', '/etc/passwd', os.getcwd() + '/../tmp/../log'):\n"
    "    for change in (lambda: os.chmod(path, 0o777), lambda: os.utime(path)):\n"
    "        try: change()\n"
    "        except PermissionError: refused.append(path)\n"
    "len(refused)",
    "descriptors": "import os\n"
    "refused = []\n"
    "for path in ('/usr/bin/python3', '/etc/passwd'):\n"
    "    with open(path) as file:\n"
    "        for change in (lambda: os.fchmod(file.fileno(), 0o777), lambda: os.utime(file.fileno()),\n"
    "                       lambda: os.chmod(f'/proc/self/fd/{file.fileno()}', 0o777)):\n"
    "            try: change()\n"
    "            except PermissionError: refused.append(path)\n"
    "len(refused)",
    "fork-chain": "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    end = time.monotonic() + 60\n"
    "    while time.monotonic() < end:\n"
    "        if os.fork(): os._exit(0)\n"
    "time.sleep(0.2)\n1",
    "sockets": "import asyncio, socket\n"
    "async def answer(): return 42\n"
    "refused = []\n"
    "for kind in (1, 2, 3, 5):\n"
    "    for family in (1, 2, 10, 16, 17, 40):\n"
    "        try: socket.socket(family, kind)\n"
    "        except PermissionError: refused.append(family)\n"
    "for kind in (2, 3):\n"
    "    try: socket.socketpair(1, kind)\n"
    "    except PermissionError: refused.append(kind)\n"
    "[len(refused), asyncio.run(answer())]",
}  # fmt: skip

ENDED = {
    "answer": ["ok", 42, []],
    "threads": ["ok", 64, ["processes"]],
    "forks": ["ok", 64, ["processes"]],
    "forks-again": ["ok", 300, []],
    "memory": ["memory", None, []],
    "disk": ["memory", None, ["disk"]],
    "copy": ["ok", ["0o100600", 2.0, "0o100640", 4.0, "0o100400"], []],
    "signals": ["ok", [-15, -9], []],
    "chroot-links": ["ok", 12, []],
    "descriptors": ["ok", 6, []],
    "fork-chain": ["ok", 1, []],
    "sockets": ["ok", [26, 42], []],
}


def assert_all_as_expected(said: dict[str, Any], user: int | None) -> None:
    ended = dict(said["ended"])
    kind, (uid, gid, groups), _ = ended.pop("user")
    assert (kind, groups in ([], [gid])) == ("ok", True)
    if user is not None:
        assert uid == user
    assert ended == ENDED
    told = said["lives"]
    assert (told["counted"], told["is_paused"], told["left"]) == ([1, 2, 3], True, [])
    assert told["grade"] == "process"
    watched = {limit for limit, held in told["held"].items() if held == "watched"}
    assert watched == {"cpu_time", "disk", "memory"}
    assert said["refused"] == (
        "GradeTooLow: Containers on this host have the grade process, not namespaces."
    )


def assert_all_held(card: dict[str, Any]) -> None:
    through = [line for line in card["attacks"] if line["verdict"] != "held"]
    assert (through, card["why"], card["grade"]) == ([], "", "process")
    assert len(card["attacks"]) >= 72


# -- hosts ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with ordinary_user("landlock", has_sub_ids=False) as host:
        yield host


@pytest.mark.needs("root")
def test_ordinary_user_runs_programs_with_all_limits(host: Host) -> None:
    script = host.home.parent / "driver.py"
    shutil.copyfile(without_namespaces.__file__, script)
    script.chmod(0o644)
    done = host.run(str(host.installation.python), str(script), json.dumps(CODES))
    assert done.returncode == 0, done.stderr
    assert_all_as_expected(json.loads(done.stdout), host.user.uid)


@pytest.mark.needs("root")
def test_all_attacks_of_an_ordinary_user_hold(host: Host) -> None:
    assert_all_held(host.attacked())


@pytest.mark.needs("root")
def test_doctor_names_the_grade_and_how_to_accept_it(host: Host) -> None:
    refused = host.findings()["landlock"]
    assert refused["verdict"] == "warning"
    assert 'set container.least_grade to "process"' in refused["cure"]
    accepted = host.findings(FUMEHOOD_CONTAINER__LEAST_GRADE="process")
    assert accepted["landlock"]["verdict"] == "ok"
    assert "the grade is process" in accepted["landlock"]["found"]
    assert accepted["landlock: image python-data"]["verdict"] == "warning"


@in_docker
@pytest.mark.parametrize("user", [0, 1000], ids=["root", "user"])
def test_container_with_the_default_filter_runs_programs(user: int) -> None:
    place = Path(tempfile.mkdtemp(prefix="fh-landlock-", dir="/tmp"))
    place.chmod(0o755)
    try:
        (own := place / "own").mkdir(mode=0o711)
        os.chown(own, user, user)
        shutil.copyfile(without_namespaces.__file__, place / "driver.py")
        options = [
            f"--user={user}:{user}", f"--volume={own}:/own",
            "--env=FUMEHOOD_LAUNCHER_DIRECTORY=/own/state",
        ]  # fmt: skip
        said = run_in_container(place, options, "/place/driver.py", json.dumps(CODES))
        assert_all_as_expected(json.loads(said), user or None)
        attack = [
            "-c",
            "from fumehood.cli.main import main; main()",
            "doctor",
            "--attack",
            "--runtime",
            "landlock",
            "--json",
        ]
        (card,) = json.loads(run_in_container(place, options, *attack, "--wall", "container"))[
            "walls"
        ]
        assert_all_held(card)
    finally:
        shutil.rmtree(place)


def test_host_is_fit_where_the_kernel_is() -> None:
    assert why_unfit(None) is None
    unfit = why_unfit("runsc")
    assert unfit is not None
    assert "no OCI runtime" in unfit.message


# -- what is left after a kill ---------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="fh-landlock-", dir="/tmp"))
    place.chmod(0o711)
    yield place / "sandboxes"
    sandboxes = Sandboxes(place / "sandboxes")
    for one in sandboxes.all():
        sandboxes.remove(one.name)
    shutil.rmtree(place)


@pytest.fixture
def runtime(home: Path) -> Landlock:
    return Landlock(home)


@pytest.fixture
async def session(runtime: Landlock) -> AsyncIterator[Container]:
    """A session's sandbox with variables, and with processes that a program has left."""
    spec = await spec_of(runtime)
    container = await started(runtime, spec)
    container.keep(1, 600)
    assert (await run(container, COUNTS, keep=True)).result["value"] == 1
    yield container
    container.end("the test is over")


def found(home: Path, container: Container) -> Sandbox:
    return Sandboxes(home).find(container.name)


def guest_of(sandbox: Sandbox) -> int:
    (guest,) = (
        pid
        for pid in marked(sandbox.mark)
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(sandbox.pid)
    )
    return guest


async def until_none_is_left(sandbox: Sandbox) -> None:
    while any(lives(pid) for pid in marked(sandbox.mark)):
        await anyio.sleep(0.01)


@pytest.mark.parametrize("killed", ["guest", "warden"])
async def test_killed_guest_or_warden_leaves_no_process(
    home: Path, runtime: Landlock, session: Container, killed: str
) -> None:
    sandbox = found(home, session)
    async with anyio.create_task_group() as group:
        group.start_soon(run, session, LEAVES)
        await anyio.sleep(0.3)
        os.kill(guest_of(sandbox) if killed == "guest" else sandbox.pid, signal.SIGKILL)
        await until_none_is_left(sandbox)
        group.cancel_scope.cancel()
    state = await runtime.state(session.name)
    assert (state.is_running, state.exit_code) == (False, 137 if killed == "guest" else 255)


async def test_killed_guest_and_warden_leave_no_process_after_the_next_look(
    home: Path, runtime: Landlock, session: Container
) -> None:
    sandbox = found(home, session)
    async with anyio.create_task_group() as group:
        group.start_soon(run, session, LEAVES)
        await anyio.sleep(0.3)
        guest = guest_of(sandbox)
        for pid in (sandbox.pid, guest):
            os.kill(pid, signal.SIGSTOP)  # so that neither acts on the other's end
        for pid in (sandbox.pid, guest):
            os.kill(pid, signal.SIGKILL)
        while lives(sandbox.pid) or lives(guest):
            await anyio.sleep(0.01)
        assert not (await runtime.state(session.name)).is_running
        await until_none_is_left(sandbox)
        group.cancel_scope.cancel()


async def test_frozen_sandbox_uses_no_time_and_can_be_removed(
    home: Path, runtime: Landlock, session: Container
) -> None:
    sandbox = found(home, session)
    await runtime.pause(session.name)
    for pid in marked(sandbox.mark):
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    await runtime.remove(session.name)
    assert not any(map(lives, marked(sandbox.mark)))
    with pytest.raises(Gone):
        found(home, session)
    with pytest.raises(RuntimeNotFound):
        await runtime.state(session.name)


async def test_two_sandboxes_cannot_reach_each_other(home: Path, runtime: Landlock) -> None:
    one, other = [await started(runtime, await spec_of(runtime)) for _ in range(2)]
    folder = home / one.name
    (first,) = [pid for pid in marked(found(home, one).mark) if pid == found(home, one).pid]
    code = (
        "import os\nrefused = 0\n"
        f"for attempt in (lambda: os.listdir({str(folder / 'workspace')!r}),\n"
        f"                lambda: open({str(folder / 'workspace' / 'x')!r}, 'w'),\n"
        f"                lambda: os.kill({first}, 0), lambda: os.kill({first}, 9),\n"
        f"                lambda: os.chmod({str(folder / 'workspace')!r}, 0o777),\n"
        f"                lambda: open('/proc/{first}/cmdline').read()):\n"
        "    try: attempt()\n"
        "    except PermissionError: refused += 1\n"
        "refused"
    )
    assert (await run(other, code)).result["value"] == 6
    assert (await run(one, "6 * 7")).result["value"] == 42
    for container in (one, other):
        container.end("the test is over")
        await runtime.remove(container.name)
