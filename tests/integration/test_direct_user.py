"""Sandboxes without Docker and without root: what holds the programs of an ordinary user.

The user has subordinate ids, and no control group. So the guest watches memory and CPU time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from fumehood.core.limits import MB
from support import direct_as_user
from support.direct import ready_direct_image
from support.ordinary_user import (
    Host,
    assert_all_held,
    assert_doctor_names_the_grade,
    ordinary_user,
)

pytestmark = [
    pytest.mark.needs("direct"), pytest.mark.needs("subids"), pytest.mark.row("B13"),
]  # fmt: skip

MEMORY_MB = 128

FORKS_THAT_EAT = """
import os, time
for _ in range({count}):
    if os.fork() == 0:
        eaten = bytearray({mb} << 20)
        for i in range(0, len(eaten), 4096):
            eaten[i] = 1
        time.sleep({s})
        os._exit(0)
for _ in range({count}):
    os.wait()
"""

FORKS = """
import os, time
n = 0
while n < {most}:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError as error:
        time.sleep(1)
        break
    n += 1
n
"""

SHARED = """
import mmap
try:
    len(mmap.mmap(-1, 1 << 20))
except OSError as error:
    found = error.errno
else:
    found = 0
found
"""

FILE = """
import mmap
with open("{path}", "w+b") as file:
    file.truncate(1 << 20)
    mapped = mmap.mmap(file.fileno(), 1 << 20)
    mapped[:4] = b"made"
open("{path}", "rb").read(4) == b"made"
"""

DEAD_FIRST_THREAD = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
EXIT = {{"x86_64": 60, "aarch64": 93}}[os.uname().machine]
def eat():
    eaten = bytearray(b"x") * ({mb} << 20)
    time.sleep(60)
    os._exit(0)
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=eat).start()
        libc.syscall(EXIT, 0)
time.sleep({s})
"""

ACCEPT_QUEUE = """
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0full")
listener.listen(4096)
for _ in range({count}):
    end = socket.socket(socket.AF_UNIX)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    end.connect("\\0full")
    end.setblocking(False)
    try:
        while True:
            end.send(bytes(65536))
    except BlockingIOError:
        pass
    end.close()
import time
time.sleep({s})
"""

SPAWNS = """
import subprocess
kept = bytearray(b"x") * (80 << 20)
for _ in range(150):
    subprocess.run(["/bin/true"], check=True)
len(kept) >> 20
"""

HOLDS_PAGES = """
import ctypes, errno, os, tempfile
libc = ctypes.CDLL(None, use_errno=True)
found = []
r, w = os.pipe()
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 4096)
    file.flush()
    for call in (lambda: os.sendfile(w, file.fileno(), 0, 4096),
                 lambda: os.splice(file.fileno(), w, 4096)):
        try:
            call()
            found.append(0)
        except OSError as error:
            found.append(error.errno)
NUMBERS = {{"x86_64": (278, 276), "aarch64": (75, 77)}}[os.uname().machine]
for number in NUMBERS:
    ctypes.set_errno(0)
    libc.syscall(number, w, 0, 0, 0)
    found.append(ctypes.get_errno())
found
""".replace("{{", "{").replace("}}", "}")

COPIES_FILES = """
import shutil
with open("a", "wb") as file:
    file.write(b"x" * 1_000_000)
shutil.copyfile("a", "b")
import os
os.path.getsize("b")
"""

CODES = {
    "dead-thread": DEAD_FIRST_THREAD.format(mb=60, s=30),
    "dead-thread-twin": DEAD_FIRST_THREAD.format(mb=10, s=1),
    "queue": ACCEPT_QUEUE.format(count=900, s=30),
    "queue-twin": ACCEPT_QUEUE.format(count=50, s=0),
    "spawns": SPAWNS,
    "pages": HOLDS_PAGES,
    "copies-files": COPIES_FILES,
    "children": FORKS_THAT_EAT.format(count=6, mb=40, s=30),
    "children-twin": FORKS_THAT_EAT.format(count=6, mb=8, s=0.2),
    "copies": FORKS.format(most=40),  # they share the memory of the first process
    "forks": FORKS.format(most=1000),
    "alone": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "alone-twin": "len(bytearray(60 << 20))",
    "shared": SHARED,
    "shared-twin": FILE.format(path="/dev/shm/x"),
    "memory-file": "import os\ntry: os.memfd_create('x')\nexcept OSError as e: n = e.errno\nn",
    "zero": "import os\nos.path.exists('/dev/zero')",
    "files": "for d in ('/tmp/f', '/dev/shm/f', 'f'):\n"
             "    try:\n        with open(d, 'wb') as f:\n            while True: f.write(bytes(1 << 20))\n"
             "    except OSError: pass\nb = b'x' * (90 << 20)\nimport time\ntime.sleep(30)",
    "files-twin": "b = b'x' * (90 << 20)\nlen(b)",
    "cpu": "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass\n"
           "time.sleep(600)",
    "user": "import os\n[os.getuid(), open('/proc/self/uid_map').read().split(), os.listdir('/sys/fs/cgroup')]",
    "pool": "from multiprocessing import Pool\nwith Pool(4) as p: n = sum(p.map(abs, range(100)))\nn",
}  # fmt: skip


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with ordinary_user("direct", has_sub_ids=True) as host:
        yield host


@pytest.fixture(scope="module")
def said(host: Host) -> dict[str, Any]:
    """What the user's program has printed, after its sandbox has run all codes."""
    file = host.home.parent / "image.tar"
    ready_direct_image("python")
    saved = subprocess.run(
        [FUMEHOOD, "images", "save", "python", file], capture_output=True, text=True, timeout=600,
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_CONTAINER__ENGINE": "direct"}, check=False,
    )  # fmt: skip
    assert (saved.returncode, [*file.parent.glob(".image*")]) == (0, []), saved.stderr
    script = host.home.parent / "driver.py"
    shutil.copyfile(direct_as_user.__file__, script)
    for path in (file, script):
        path.chmod(0o644)
    request = json.dumps({"image": str(file), "codes": CODES})
    done = host.run(str(host.installation.python), str(script), request)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def ended(said: dict[str, Any], name: str) -> tuple[str, Any]:
    found = said["ended"][name]
    return found["ended_by"], found["value"]


def test_guest_watches_the_memory_of_all_processes_together(said: dict[str, Any]) -> None:
    assert ended(said, "children")[0] == "memory"
    assert said["ended"]["children"]["peak"] > MEMORY_MB * MB
    assert ended(said, "children-twin")[0] == "ok"


def test_process_whose_first_thread_has_ended_is_counted(said: dict[str, Any]) -> None:
    assert ended(said, "dead-thread")[0] == "memory"
    assert ended(said, "dead-thread-twin")[0] == "ok"


def test_data_in_sockets_counts_as_memory(said: dict[str, Any]) -> None:
    assert ended(said, "queue")[0] == "memory"
    assert ended(said, "queue-twin")[0] == "ok"


def test_program_that_starts_many_processes_is_not_counted_twice(said: dict[str, Any]) -> None:
    assert ended(said, "spawns") == ("ok", 80)


def test_pages_cannot_be_left_in_pipes(said: dict[str, Any]) -> None:
    assert ended(said, "pages") == ("ok", [22, 22, 22, 22])  # EINVAL
    assert ended(said, "copies-files") == ("ok", 1_000_000)


def test_memory_that_processes_share_is_counted_once(said: dict[str, Any]) -> None:
    assert ended(said, "copies") == ("ok", 40)


def test_process_limit_is_enforced_and_named(said: dict[str, Any]) -> None:
    assert ended(said, "forks")[0] == "ok"
    assert 40 < ended(said, "forks")[1] <= 64
    assert said["ended"]["forks"]["hit"] == ["processes"]
    assert said["ended"]["copies"]["hit"] == []


def test_memory_of_one_process_is_limited(said: dict[str, Any]) -> None:
    assert ended(said, "alone")[0] == "memory"
    assert ended(said, "alone-twin") == ("ok", 60 * MB)


def test_memory_that_cannot_be_counted_is_refused(said: dict[str, Any]) -> None:
    assert ended(said, "shared") == ("ok", 1)  # EPERM
    assert ended(said, "memory-file") == ("ok", 38)  # ENOSYS
    assert ended(said, "zero") == ("ok", False)
    assert ended(said, "shared-twin") == ("ok", True)
    assert ended(said, "pool") == ("ok", 4950)


def test_shell_and_standard_input_work_without_files_in_memory(said: dict[str, Any]) -> None:
    assert said["shell"] == "given 42\n"


def test_files_in_memory_count_as_memory(said: dict[str, Any]) -> None:
    assert ended(said, "files")[0] == "memory"
    assert ended(said, "files-twin") == ("ok", 90 * MB)


def test_cpu_time_of_all_processes_together_is_limited(said: dict[str, Any]) -> None:
    assert ended(said, "cpu")[0] == "cpu_time"


def test_program_and_guest_are_nobody_on_the_host(said: dict[str, Any], host: Host) -> None:
    kind, (uid, uid_map, groups) = ended(said, "user")
    assert (kind, uid, uid_map, groups) == ("ok", 10001, ["0", "1", "65536"], [])
    lines = said["lives"]["status"].splitlines()
    (users,) = ({*line.split()[1:]} for line in lines if line.startswith("Uid:"))
    (user,) = users
    assert int(user) not in (0, host.user.uid)


def test_session_outlives_its_launcher_and_its_engine(said: dict[str, Any]) -> None:
    lives = said["lives"]
    assert lives["counted"] == [1, 2, 3, 4]
    assert lives["held"] is True
    assert lives["grade"] == "watched"
    assert (lives["gone"], lives["left"]) == (True, [])


def test_paused_sandbox_has_no_running_process_and_later_goes_on(said: dict[str, Any]) -> None:
    assert said["lives"]["paused"] == ["T"]
    assert said["lives"]["kept_paused"] is True  # by the next launcher
    assert set(said["lives"]["before"]) - {"T"}  # the control: before, some were not stopped


def test_grade_is_refused_unless_the_operator_names_it(said: dict[str, Any]) -> None:
    assert said["refused"] == (
        "GradeTooLow: Containers on this host have the grade watched, not namespaces."
    )


def test_program_without_a_guest_is_refused(said: dict[str, Any]) -> None:
    assert "watch the program's memory" in said["program"]


@pytest.mark.usefixtures("said")
def test_images_are_loaded_from_files_and_invalid_files_are_refused(host: Host) -> None:
    def load(file: Path) -> tuple[int, str]:
        done = host.run(*host.installation.command, "images", "load", str(file))
        return done.returncode, done.stderr

    place = host.home.parent
    assert load(place / "image.tar") == (0, "Nothing is new in it.\n")  # the program has loaded it
    shutil.rmtree(host.home / ".local/share/fumehood/layers")
    status, words = load(place / "image.tar")
    assert (status, words.startswith("python: loaded, sha256:")) == (0, True)
    (place / "wrong.tar").write_bytes((place / "image.tar").read_bytes()[:100_000])
    status, words = load(place / "wrong.tar")
    assert (status, "could not load the image" in words) == (4, True), words
    assert "cannot be read" in load(place / "missing.tar")[1]
    layers = host.home / ".local/share/fumehood/layers"
    assert not [path for path in layers.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("said")
def test_all_attacks_hold_and_the_grade_is_shown(host: Host) -> None:
    assert_all_held(host.attacked())


def test_programs_of_the_host_run_where_no_image_can_be_built(host: Host) -> None:
    """The user has neither mmdebstrap nor an image, and all attacks hold."""
    variables = {
        "PATH": str(without_mmdebstrap(host.home.parent / "bin")),
        "XDG_DATA_HOME": str(host.home / "data"),
    }
    fumehood = host.installation.command
    refused = host.run(*fumehood, "images", "build", "python", **variables)
    assert refused.returncode == 4
    assert "mmdebstrap is not installed" in refused.stderr
    assert "fumehood images build host" in refused.stderr
    built = host.run(*fumehood, "images", "build", "host", **variables)
    assert built.returncode == 0, built.stderr
    assert '[container.images] python = "host"' in built.stderr
    assert_all_held(host.attacked(**variables))


def without_mmdebstrap(folder: Path) -> Path:
    """A folder with the programs of this host, except mmdebstrap."""
    folder.mkdir(mode=0o755)
    for path in [*Path("/usr/sbin").iterdir(), *Path("/usr/bin").iterdir()]:
        if path.name != "mmdebstrap" and not (folder / path.name).is_symlink():
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.usefixtures("said")
def test_doctor_names_the_grade_and_how_to_accept_it(host: Host) -> None:
    assert_doctor_names_the_grade(host)
