"""The container's boundary: each attack by a program, and how it ends.

Programs go through the socket, as an agent's would. Their effects are checked from outside: in the
host's process table, Docker's own list and the host's files. One daemon serves all of them, so most
programs run in a container that has run others before, which also tests that nothing was left
behind.
"""

from __future__ import annotations

import base64
import os
import platform
import signal
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon, launch, wait_until_ready
from fumehood import Client
from fumehood.attack.attack import Topic
from fumehood.attack.corpus import attacks_on
from fumehood.attack.corpus.container import LOOK_FOR_PROCESSES
from fumehood.attack.run import named, status_of
from fumehood.core.envelope import Envelope
from fumehood.storage.directory import owner_id
from support.attacks import BAIT, Harm, ending_of
from support.wait import wait_until

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("S3", "S4")]

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, python_image: Any) -> Iterator[Daemon]:
    """A separate daemon, because these tests count its containers."""
    home = Path("/tmp") / f"fh-wall-{os.getpid()}"
    home.mkdir(mode=0o700)
    daemon = wait_until_ready(launch(home))
    yield daemon
    assert daemon.stop() == 0, daemon.log
    left = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label=fumehood.owner={owner_id(home)}"],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert left.stdout == ""


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


def run(client: Client, code: str, **options: Any) -> Envelope:
    """Run one program with default limits, and time enough unless the test sets it."""
    options.setdefault("timeout_seconds", TIMEOUT_S)
    return client.call("run_python", {"code": code}, **options)


def code_of(envelope: Envelope) -> str | None:
    return None if envelope.error is None else envelope.error.code


def details(envelope: Envelope) -> dict[str, Any]:
    assert envelope.error.details is not None
    return envelope.error.details


@dataclass(frozen=True)
class Try:
    """An attack: how it ends, the type of the program's exception, and its harmless twin."""

    name: str
    harm: Harm
    code: str
    twin: str
    raises: str = "PermissionError"

    def __str__(self) -> str:
        return self.name


def syscall(number: int, *arguments: str) -> str:
    """A program that makes one system call and raises the kernel's error."""
    called = ", ".join([str(number), *arguments])
    return (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"result = libc.syscall({called})\n"
        "if result == -1:\n    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        "result"
    )


HARMLESS_CALL = syscall(39)  # getpid


def of_corpus() -> Iterator[Try]:
    """Corpus rows refused with an exception; if several are listed, the first is runc's."""
    for row in attacks_on("container"):
        _, ended_by, kind = ending_of(row)
        if ended_by == "exception" and row.topic is not Topic.FLOOD and BAIT not in row.code:
            yield Try(f"corpus-{row.id}", row.harm, row.code, row.twin, kind)


ESCAPES = [
    *of_corpus(),
    Try("read-channel", Harm.INTERNAL_READ, "open('/proc/1/fd/0', 'rb')",
        "open('/proc/self/fd/0', 'rb').close()"),
    Try("stop-supervisor", Harm.INTERNAL_ESC, "import os\nos.kill(1, 19)",
        "import os\nos.kill(os.getpid(), 0)"),
    Try("stop-parent", Harm.INTERNAL_ESC, "import os\nos.kill(os.getppid(), 19)",
        "import os\nos.kill(os.getpid(), 0)"),
    Try("system-v-queue", Harm.LATERAL, syscall(68, "0", "0o1666"), HARMLESS_CALL),
    Try("posix-queue-through-its-file-system", Harm.LATERAL, "open('/dev/mqueue/left', 'w')",
        "import os\nos.listdir('/dev/mqueue')", raises="OSError"),
    Try("kernel-algorithms", Harm.ESCAPE, "import socket\nsocket.socket(38, socket.SOCK_SEQPACKET)",
        "import socket\nsocket.socket(socket.AF_INET).close()"),
    Try("lower-niceness", Harm.PEER_DOS, "import os\nos.nice(-5)", "import os\nos.nice(1)"),
    Try("change-the-interpreter", Harm.INTERNAL_ESC,
        "import os\nopen(os.__file__, 'a')", "import os\nopen(os.__file__).close()"),
    Try("find-the-guest", Harm.INTERNAL_READ, "import fumehood", "import json",
        raises="ModuleNotFoundError"),
]  # fmt: skip


@pytest.mark.parametrize("attempt", ESCAPES, ids=str)
def test_escape_attempt_is_refused_and_its_twin_works(client: Client, attempt: Try) -> None:
    envelope = run(client, attempt.code)
    assert code_of(envelope) == "EXECUTION_ERROR", envelope
    said = details(envelope)
    assert said["ended_by"] == "exception"
    assert said["exception"]["type"] == attempt.raises, said["exception"]
    # Twin: the nearest harmless program passes, in the same container.
    assert code_of(run(client, attempt.twin)) is None


def test_control_refused_system_calls_succeed_without_the_guests_filter(python_image: Any) -> None:
    """Docker's own profile allows several of them; only the child's filter stops them."""
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(libc.syscall(29, 0, 4096, 0o1666) >= 0, libc.syscall(64, 0, 1, 0o1666) >= 0,"
        " libc.syscall(294, 0) >= 0)"
    )
    out = _docker_run(python_image, program, user="10001:10001")
    assert out.split() == ["True", "True", "True"]


PID_1 = """
import os, sys
sys.stdout.write("honest\\n"); sys.stdout.flush()
if os.fork() == 0:
    try:
        open("/proc/1/mem", "rb").close()
        with open("/proc/1/fd/1", "w") as out:
            out.write("forged\\n")
    except OSError as error:
        print(type(error).__name__)
    os._exit(0)
os.wait()
"""


@pytest.mark.row("S3")
def test_control_pid_1_of_the_same_user_can_be_read_and_forged(
    python_image: Any,
) -> None:
    assert _docker_run(python_image, PID_1, user="10001:10001").split() == ["honest", "forged"]


def _docker_run(image: Any, program: str, *, user: str) -> str:
    done = subprocess.run(
        ["docker", "run", "--rm", "--network=none", "--read-only", "--cap-drop=ALL",
         "--security-opt=no-new-privileges", f"--user={user}", "--entrypoint=/usr/bin/python3",
         image.id, "-c", program],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return done.stdout


# -- nothing passes from one call to the next ------------------------------------------------

SIBLING = """
import ctypes, os, time
CLONE_PARENT = 0x8000
if ctypes.CDLL(None).syscall(56, CLONE_PARENT | 17, 0, 0, 0, 0) == 0:
    time.sleep(60)
    os._exit(0)
"""
"""A program that leaves a process whose parent is the zygote, as if the zygote had forked it."""


@pytest.mark.row("S5")
def test_leftover_process_reparented_to_zygote_is_killed(
    client: Client,
) -> None:
    for _ in range(3):
        assert code_of(run(client, SIBLING)) is None
        answer = run(client, LOOK_FOR_PROCESSES)
        assert (code_of(answer), answer.data["value"]) == (None, 0), answer


HEADLESS = """
import ctypes, os, threading, time
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    ctypes.CDLL(None).syscall(60, 0)
time.sleep(0.2)
"""
"""A program that leaves a process reported as a zombie while its second thread still runs."""

LEAPS = """
import base64, ctypes, os, platform, time
ELF = base64.b64decode("{elf}")
def seen():
    return {{int(name) for name in os.listdir("/proc") if name.isdigit()}}
program = os.memfd_create("leaps")
os.write(program, ELF)
if platform.machine() == "x86_64" and ctypes.CDLL(None).syscall(56, {flags}, 0, 0, 0, 0) == 0:
    os.execv(f"/proc/self/fd/{{program}}", ["leaps"])
time.sleep(0.1)
first = max(seen())
time.sleep(0.02)
max(seen()) - first
"""


def leaps(spin: int, flags: int) -> str:
    """A program that leaves a chain of processes, each of which forks and exits.

    A scan therefore finds only process ids that no longer exist. It pauses briefly between forks,
    or its own dead processes would reach the limit.
    """
    flags |= signal.SIGCHLD
    leap = (
        b"\xb9" + struct.pack("<I", spin) + b"\xff\xc9\x75\xfc"  # mov ecx, spin; dec ecx; jnz
        b"\xbf" + struct.pack("<I", flags) + b"\x31\xf6\x31\xd2\x45\x31\xd2\x45\x31\xc0"
        b"\xb8\x38\0\0\0\x0f\x05\x85\xc0"  # clone(flags)
    )
    leap += b"\x7e" + struct.pack("b", -len(leap) - 2)  # the child, and where it was refused: again
    code = b"\xb8\x70\0\0\0\x0f\x05" + leap + b"\xb8\x3c\0\0\0\x31\xff\x0f\x05"  # setsid; exit
    base, start = 0x400000, 120
    size = start + len(code)
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header = struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    program = base64.b64encode(ident + header + segment + code).decode()
    return LEAPS.format(elf=program, flags=flags)


@pytest.mark.row("S5")
@pytest.mark.parametrize(
    "code",
    [HEADLESS, *(leaps(spin, flags) for spin in (20_000, 60_000) for flags in (0, 0x8000))],
    ids=[
        "zombie-leader",
        "fork-chain",
        "fork-chain-sibling",
        "slow-fork-chain",
        "slow-fork-chain-sibling",
    ],
)
def test_leftover_process_that_looks_dead_or_keeps_forking_is_killed(
    client: Client, code: str
) -> None:
    moved = 0
    for _ in range(4):
        left = run(client, code)
        assert code_of(left) is None, left
        moved += left.data["value"] or 0
        answer = run(client, LOOK_FOR_PROCESSES)
        assert (code_of(answer), answer.data["value"]) == (None, 0), answer
    # Not vacuous: it did leap, while its program looked.
    assert moved > 0 or code == HEADLESS or platform.machine() != "x86_64"


@pytest.mark.row("S5")
def test_each_program_has_different_random_state(client: Client) -> None:
    code = "import random, uuid, os\n[random.random(), str(uuid.uuid4()), os.urandom(4).hex()]"
    drawn = [tuple(run(client, code).data["value"]) for _ in range(5)]
    assert len(set(drawn)) == 5


# -- floods: the program is ended, the next one is not harmed --------------------------------


@dataclass(frozen=True)
class Flood:
    """A program that exhausts a resource, and how it must end."""

    name: str
    code: str
    ends: tuple[str | None, str]
    hits: str | None = None

    def __str__(self) -> str:
        return self.name


def floods_of_corpus() -> Iterator[Flood]:
    for row in attacks_on("container"):
        if row.topic is Topic.FLOOD:
            code = row.code.replace("@MARK@", "flood")
            yield Flood(f"corpus-{row.id}", code, ending_of(row)[:2], row.expected.hits)


FLOODS = [
    *floods_of_corpus(),
    Flood("sessions-bomb",
          "import os\nwhile True:\n    try: os.fork() or os.setsid()\n    except OSError: pass",
          ("TIMEOUT", "wall_time"), "processes"),
    Flood("stops-itself", "import os\nos.kill(os.getpid(), 19)", ("TIMEOUT", "wall_time")),
    Flood("thread-bomb",
          "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep,"
          " args=(60,)).start()\n    except RuntimeError: pass", ("TIMEOUT", "wall_time"),
          "processes"),
    Flood("memory-at-once", "bytearray(1 << 40)", ("MEMORY_LIMIT_EXCEEDED", "memory")),
    Flood("errors", "import sys\nwhile True: sys.stderr.write('x' * 1000)",
          ("OUTPUT_LIMIT_EXCEEDED", "output")),
    Flood("output-of-children",
          "import os\nos.fork()\nos.fork()\nwhile True: os.write(1, b'x' * 4096)",
          ("OUTPUT_LIMIT_EXCEEDED", "output")),
    Flood("disk-and-go-on",
          "try:\n    while True: open('f', 'ab').write(bytes(1 << 20))\nexcept OSError: pass\n'on'",
          (None, "ok")),
    Flood("claims", "import os\nwhile True: os.write(4, b'x' * 65536)", ("TIMEOUT", "wall_time")),
    Flood("zombies",
          "import os\nwhile True:\n    try:\n        if os.fork() == 0: os._exit(0)\n"
          "    except OSError: pass", ("TIMEOUT", "wall_time"), "processes"),
]  # fmt: skip


@pytest.mark.row("S4", "P8")
@pytest.mark.parametrize("flood", FLOODS, ids=str)
def test_resource_flood_ends_with_its_own_code_and_next_program_works(
    client: Client, flood: Flood
) -> None:
    limit_s = 2 if flood.ends[0] == "TIMEOUT" else TIMEOUT_S
    code = f"print('begun')\n{flood.code}"
    envelope = run(client, code, timeout_seconds=limit_s, memory_limit_mb=128)
    said = envelope.data if envelope.error is None else details(envelope)
    assert (code_of(envelope), said["ended_by"]) == flood.ends, envelope
    assert said["stdout"].startswith("begun\n")
    if flood.hits is not None:
        assert flood.hits in said["limits_hit"]
    after = run(client, "21 * 2")
    assert (code_of(after), after.data["value"]) == (None, 42)


# -- the channel ------------------------------------------------------------------------------


@pytest.mark.row("S4")
@pytest.mark.parametrize("code", [
    "import os\nos.closerange(0, 256)",
    "import os\nfor n in range(3, 200):\n    try: os.dup2(1, n)\n    except OSError: pass",
    "import os\nos.write(4, b'\\xff\\xff\\xff\\xff' + b'x' * 100)",
    "import os\nos.write(4, b'\\x00\\x00\\x00\\x02[]')",
    "import os, sys\nos.fork()\nprint('both')",
    "import os\nos._exit(0)",
])  # fmt: skip
def test_program_that_corrupts_its_reply_channel_loses_only_its_value(
    client: Client, code: str
) -> None:
    envelope = run(client, f"{code}\n")
    assert (code_of(envelope), envelope.data["value"]) == (None, None)
    after = run(client, "6 * 7")
    assert after.data["value"] == 42


CLAIMS = """
import json, os, signal, struct
def claim(words):
    body = json.dumps(words).encode()
    os.write(4, struct.pack("!I", len(body)) + body)
"""


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("code", "ended_by"),
    [
        ("claim({'ready': False, 'fault': 'forged'})\nos._exit(70)", "exit"),
        ("claim({'ready': False, 'fault': 'forged'})\nos._exit(70)\n#" + "x" * 300_000, "exit"),
        ("claim({'result': {'value': 1, 'has_value': True, 'value_repr': '1'}})\nos._exit(3)",
         "exit"),
        ("os.kill(os.getpid(), signal.SIGXCPU)", "signal"),
    ],
    ids=["guest-failure", "guest-failure-of-long-program", "success", "cpu-limit-signal"],
)  # fmt: skip
def test_program_cannot_forge_a_guest_failure_or_success(
    client: Client, code: str, ended_by: str
) -> None:
    envelope = run(client, CLAIMS + code)
    assert code_of(envelope) == "EXECUTION_ERROR"
    assert details(envelope)["ended_by"] == ended_by
    assert code_of(run(client, CLAIMS + "claim({'ready': False})\n1")) is None  # the twin


EATS_ELSEWHERE = """
import ctypes, os, time
end, done = os.pipe()
if ctypes.CDLL(None).syscall(56, {flags} | 17, 0, 0, 0, 0) == 0:
    eaten = bytearray(150 << 20)
    os.write(done, b"x")
    os._exit(0)
os.read(end, 1)
time.sleep(0.5)
"""


@pytest.mark.row("S4")
@pytest.mark.parametrize("flags", [0x8000, 0], ids=["sibling", "child"])
def test_memory_of_child_and_sibling_processes_is_measured(client: Client, flags: int) -> None:
    envelope = run(client, EATS_ELSEWHERE.format(flags=flags))
    assert code_of(envelope) is None, envelope
    assert (envelope.metadata.resources.peak_memory_mb or 0) > 150


@pytest.mark.row("E7")
def test_file_too_deep_to_list_is_counted_as_left_out(client: Client) -> None:
    deep = "import os\nfor _ in range({}): os.mkdir('d'); os.chdir('d')\nopen('f', 'w').close()"
    assert run(client, deep.format(100)).data["files_left_out"] == 1
    assert len(run(client, deep.format(10)).data["files"]) == 1


@pytest.mark.row("S3")
def test_program_runs_as_unprivileged_user_under_two_seccomp_filters(client: Client) -> None:
    """Docker's profile and the child's own filter; the corpus covers the rest."""
    mark = f"mark-{os.getpid()}"
    code = f"import time\nopen('/proc/self/comm', 'w').write('{mark}')\ntime.sleep(1.5)"
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(run, client, code)
        wait_until(lambda: bool(named(mark)))
        (pid,) = named(mark)
        seen = status_of(pid)
        running.result()
    assert (seen["Uid"].split(), seen["Gid"].split()) == (["10001"] * 4, ["10001"] * 4)
    assert seen["Groups"] == ""
    assert int(seen["Seccomp_filters"]) >= 2


@pytest.mark.row("E1")
def test_error_answers_contain_no_host_or_guest_paths(client: Client) -> None:
    for code in ("1/0", "import nothing_like_this", "x = = 1", "raise SystemExit('x')"):
        text = run(client, code).model_dump_json()
        for leak in ("/opt/fumehood", "languages/python", str(Path.home()), "/var/lib/docker"):
            assert leak not in text
