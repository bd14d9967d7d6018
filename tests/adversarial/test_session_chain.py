"""Attacks by a session's programs on the processes that keep its variables.

Everything in a session belongs to one caller. The tests therefore prevent harm to the guest (a
supervisor that hangs or lies), CPU use between calls, and false answers: `kept` means the new
variables, `rolled_back` the old ones, and `reset` none.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from fumehood.sandbox.images.catalog import Image
from support.containers import containers_of
from support.one_container import OneContainer, one_container, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S5", "S6")]

PYTHON_FRAME = "import os, struct\ndef frame(b): return struct.pack('>I', len(b)) + b\n"
KILL_ALL_BUT_ME = (
    "import os\n"
    "for name in os.listdir('/proc'):\n"
    "    if name.isdigit() and int(name) not in (1, os.getpid()):\n"
    "        try: os.kill(int(name), 9)\n"
    "        except OSError: pass\n"
)


@dataclass(frozen=True)
class Attack:
    """`code` runs in a session in which `x` was 'old', and sets it to 'new' first."""

    name: str
    code: str
    states: frozenset[str]
    wall_s: float = 2

    def __str__(self) -> str:
        return self.name


def attack(name: str, code: str, *states: str, wall_s: float = 2) -> Attack:
    return Attack(name, code, frozenset(states), wall_s)


ATTACKS = [
    attack("twin", "pass", "kept"),
    attack(
        "forges its done report and keeps running",
        PYTHON_FRAME + "os.write(4, frame(b'{\"stays\": true, \"exit_code\": 0}'))\nwhile True: pass",
        "rolled_back",
    ),
    attack(
        "forges a malformed done report and times out",
        PYTHON_FRAME + "os.write(4, frame(b'{\"stays\": 1}'))\nwhile True: pass",
        "rolled_back",
    ),
    attack("kills every other process", KILL_ALL_BUT_ME, "kept"),
    attack("kills every other process, then itself", KILL_ALL_BUT_ME + "os._exit(1)", "reset"),
    attack(
        "forges its successor's report",
        "import socket\nfor _ in range(200):\n"
        "    try: socket.socket(fileno=os.dup(5)).send(b'R', socket.MSG_DONTWAIT)\n"
        "    except OSError: break\n",
        "kept", "rolled_back", "reset",
    ),
    attack(
        "forges its successor's report from child processes",
        "import os, socket, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        socket.socket(fileno=5).send(b'R')\n"
        "        time.sleep(1000)\n",
        "kept", "rolled_back", "reset",
    ),
    attack("floods its own report socket", "import os\nos.set_blocking(5, False)\n"
           "try:\n    while True: os.write(5, b'R' * 1000)\nexcept OSError: pass\n",
           "kept", "rolled_back", "reset"),
    attack("closes its input descriptors", "import os\nfor fd in (3, 5, 6): os.close(fd)",
           "kept", "rolled_back", "reset"),
    attack("closes its output descriptor", "import os\nos.close(4)", "rolled_back"),
    attack(
        "becomes child subreaper and keeps running",
        "import ctypes, os\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\nwhile True: pass",
        "rolled_back",
    ),
    attack(
        "becomes child subreaper and ends",
        "import ctypes\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)",
        "kept",
    ),
    attack(
        "wakes the stopped processes repeatedly",
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    while True:\n"
        "        try: os.kill(-1, signal.SIGCONT)\n"
        "        except OSError: pass\n",
        "kept",
    ),
    attack("exhausts the process limit",
           "import os, time\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(1000)\n"
           "except OSError: pass\n", "kept", wall_s=10),
    attack("disables os.fork", "import os\nos.fork = None", "rolled_back", "reset"),
    attack("sleeps in its fork handler",
           "import os, time\nos.register_at_fork(before=lambda: time.sleep(100))",
           "rolled_back", wall_s=3),
    attack("exits in its fork handler",
           "import os\nos.register_at_fork(after_in_child=lambda: os._exit(0))",
           "rolled_back", "reset", "kept"),
]  # fmt: skip


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(
    scope="module", params=["runc", pytest.param("direct", marks=pytest.mark.needs("direct"))]
)
async def shared(
    request: pytest.FixtureRequest, python_image: Image
) -> AsyncIterator[OneContainer]:
    """One container for all attacks: it has to serve after each of them."""
    async with one_container(python_image, runtime=request.param) as box:
        yield box


on_both = pytest.mark.parametrize(
    "shared", ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))], indirect=True
)
"""For what depends on the kernel that programs see."""


@pytest.fixture
async def box(shared: OneContainer) -> AsyncIterator[OneContainer]:
    """A container without earlier variables and files, which must survive the test."""
    yield shared
    await shared.shell("kill -9 -1")
    await shared.shell("chmod -R u+rwX . 2>/dev/null; find . -mindepth 1 -delete")
    assert shared.ended is None, shared.ended


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
async def test_reported_variable_state_is_true_after_attack(
    box: OneContainer, attack: Attack
) -> None:
    await box.python("x = 'old'")
    attacked = await box.python(f"import os\nx = 'new'\n{attack.code}", wall_s=attack.wall_s)
    assert box.ended is None, box.ended
    assert attacked.state in attack.states
    seen = {"kept": "new", "rolled_back": "old", "reset": None}[attacked.state or ""]
    after = await box.python("globals().get('x')")
    assert box.ended is None, box.ended
    if after.state == "reset" or after.ended_by.value != "ok":  # it fell later, and says so
        assert attack.states > {"kept"}
        after = await box.python("globals().get('x')")
        seen = None
    assert value_of(after) == seen
    assert value_of(await box.python("y = 1\ny")) == 1
    assert box.ended is None


async def test_variables_roll_back_again_after_a_program_killed_the_session_processes(
    box: OneContainer,
) -> None:
    """A wake-up sent to the killed copy must not reach the copy of the next chain."""
    await box.python("x = 1")
    assert (await box.python(KILL_ALL_BUT_ME + "os._exit(1)")).state == "reset"
    assert (await box.python("x = 'old'")).state == "kept"
    assert (await box.python("import os\nx = 'new'\nos._exit(1)")).state == "rolled_back"
    assert value_of(await box.python("x")) == "old"


async def test_shell_command_killing_session_processes_reports_reset(
    box: OneContainer,
) -> None:
    await box.python("x = 1")
    assert (await box.shell("echo harmless")).state is None
    assert value_of(await box.python("x")) == 1
    assert (await box.shell("kill -9 -1")).state == "reset"
    assert value_of(await box.python("'x' in globals()")) is False


def cpu_ns(container: str) -> int:
    """CPU nanoseconds used by a container, from the host's cgroup counters (v1 or v2)."""
    (found,) = containers_of(f"fumehood.engine={container}")
    identifier = found["Id"]
    while True:
        try:
            for path in Path("/sys/fs/cgroup").glob(f"**/*{identifier}*/cpuacct.usage"):
                return int(path.read_text())
            (path,) = Path("/sys/fs/cgroup").glob(f"**/*{identifier}*/cpu.stat")
            return 1000 * int(path.read_text().split()[1])
        except FileNotFoundError:  # another container has gone during the walk
            assert containers_of(f"fumehood.engine={container}")


@pytest.mark.parametrize("how", ["SHUT_RD", "SHUT_WR", "SHUT_RDWR"])
async def test_supervisor_does_not_hang_on_a_shut_down_socket(
    python_image: Image, how: str
) -> None:
    """A read from a socket that was shut down returns end-of-file repeatedly. In a container of its
    own, whose chain is broken for good afterwards; what is said of it is so all the same.
    """
    async with one_container(python_image) as box:
        await box.python("x = 'old'")
        code = f"import socket\nx = 'new'\nsocket.socket(fileno=5).shutdown(socket.{how})"
        ended = await box.python(code, wall_s=5)
        assert box.ended is None, box.ended
        assert ended.ended_by.value in ("ok", "exception", "wall_time")
        assert (await box.shell("echo on")).stdout == "on\n"
        assert (await box.python("y = 1", wall_s=5)).state in ("reset", "rolled_back", "kept")
        assert box.ended is None


BLOCKED = """
import ctypes, os, struct, time
libc = ctypes.CDLL(None)
if {ticks} and os.fork() == 0:
    while True:
        time.sleep(0.02)
body = b'{{"stays": true, "exit_code": 0}}'
os.write(4, struct.pack(">I", len(body)) + body)
VFORK, PARENT = 0x4000, 0x8000
while True:
    if libc.syscall({clone}, VFORK | {flags}, 0, 0, 0, 0) == 0:
        while True:
            time.sleep({ticks} or 1000)
"""
"""The kernel shows who waits for the child of a vfork like who waits for a disk."""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of clone")
@pytest.mark.parametrize(("flags", "ticks"), [("0", "0"), ("PARENT", "0"), ("0", "0.02")])
async def test_attack_process_that_seems_to_wait_for_a_disk_does_not_hold_the_supervisor(
    box: OneContainer, flags: str, ticks: str
) -> None:
    """The host ended the container after a minute, and with it the session's files."""
    await box.python("x = 'old'")
    code = BLOCKED.format(clone=56, flags=flags, ticks=ticks)
    ended = await box.python(code, wall_s=1)
    assert (ended.state, box.ended) == ("rolled_back", None)
    assert value_of(await box.python("x")) == "old"


WAKE_UP = """\
import ctypes, os, signal, struct, time
libc = ctypes.CDLL(None)
def spin(*_):
    until = time.monotonic() + 3
    while time.monotonic() < until: pass
signal.signal(signal.SIGCONT, spin)
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("how", ctypes.c_int),
                ("rest", ctypes.c_char * 48)]
"""
WAKERS = {
    "a timer's signal": (
        "import platform\n"
        "create, settime = {'x86_64': (222, 223)}.get(platform.machine(), (107, 110))\n"
        "timer = ctypes.c_int()\n"
        "libc.syscall(create, 1, ctypes.byref(Event(None, signal.SIGCONT, 0)), "
        "ctypes.byref(timer))\n"
        "libc.syscall(settime, timer, 0, struct.pack('4q', 0, 50_000_000, 0, 800_000_000), None)\n"
    ),
    "a child's end": (
        "import platform\n"
        "clone = 56 if platform.machine() == 'x86_64' else 220\n"
        "if libc.syscall(clone, signal.SIGCONT, 0, 0, 0, 0) == 0: time.sleep(1000)\n"
    ),
    "a child that wakes it": (
        "parent = os.getpid()\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        while True: os.kill(parent, signal.SIGCONT)\n"
    ),
}


@pytest.mark.parametrize("waker", WAKERS.values(), ids=WAKERS)
async def test_woken_stopped_process_does_not_run_between_calls(
    box: OneContainer, waker: str
) -> None:
    kept = await box.python(f"{WAKE_UP}{waker}x = 1", wall_s=6)  # some never come to the end
    assert kept.state in ("kept", "rolled_back")
    await anyio.sleep(1.5)
    before = cpu_ns(box.name)
    await anyio.sleep(1.0)
    assert cpu_ns(box.name) - before < 60_000_000
    assert box.ended is None
    listed = await box.files(do="list", path="", recursive=False, most=10)  # says nothing of it
    assert listed["entries"] == []
    after = await box.python("'x' in globals()")
    if after.state == "kept":
        # Handlers can be nested until Python has no room for more: then it never came to `x = 1`.
        is_set = kept.state == "kept" and kept.ended_by.value == "ok"
        assert value_of(after) is is_set
    else:
        assert after.state == "reset"
    assert value_of(await box.python("2")) == 2


TERMINAL = """
import fcntl, os, signal, socket, termios, time
def act(*_):
    until = time.monotonic() + 3
    while time.monotonic() < until:
        open('/workspace/acted', 'a').write('x')
        time.sleep(0.002)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGCONT, act)
master, slave = os.openpty()
fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
"""
HANGUPS = {
    "collected later": """
one, other = socket.socketpair()
socket.send_fds(one, [b'x'], [master, one.fileno(), other.fileno()])
for end in (one, other): end.close()
os.close(master); os.close(slave)
""",
    "by a child": """
if os.fork() == 0:
    os.close(slave)
    time.sleep(1000)
os.close(master); os.close(slave)
""",
}


@pytest.mark.parametrize("hangup", HANGUPS.values(), ids=HANGUPS)
async def test_attack_stopped_process_is_woken_by_the_end_of_its_terminal(
    box: OneContainer, hangup: str
) -> None:
    """The kernel sends SIGCONT then, and that may be after the call."""
    await box.python("x = 1")
    await box.python(TERMINAL + hangup, wall_s=5)
    await box.shell("rm -f acted")
    await anyio.sleep(1.2)
    assert (await box.shell("ls")).stdout == ""
    assert value_of(await box.python("2")) == 2


BEATS = """\
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
    while True:
        open("/workspace/beat", "w").close()
        time.sleep(0.02)
time.sleep(0.3)
"""


@on_both
async def test_process_name_forging_a_status_line_does_not_avoid_kill(box: OneContainer) -> None:
    """A process chooses its own name, which is the first line of its status in /proc."""
    for name in (b"twin", b"a\nUid:\t0", b"a\nState:\tZ", b"a\nPPid:\t1"):
        await box.python(BEATS.format(name=name))
        after = await box.python(
            "import os, time\n"
            "os.remove('/workspace/beat')\n"
            "time.sleep(0.5)\n"
            "os.path.exists('/workspace/beat')"
        )
        assert value_of(after) is False, name
        assert box.ended is None, name


async def test_session_processes_use_no_cpu_between_calls(box: OneContainer) -> None:
    """A thread and a process that would run for ever."""
    await box.python(
        "import os, threading\n"
        "def spin():\n"
        "    while True: pass\n"
        "threading.Thread(target=spin, daemon=True).start()\n"
        "if os.fork() == 0: spin()\n"
    )
    await anyio.sleep(0.3)  # the next child is made meanwhile
    before = cpu_ns(box.name)
    await anyio.sleep(1.0)
    idle = cpu_ns(box.name) - before
    assert idle < 60_000_000
    spinning = await box.python("while True: pass", wall_s=3)  # the control: a call's is counted
    assert spinning.state == "rolled_back"
    assert cpu_ns(box.name) - before > 3 * idle + 100_000_000


REACH_MEMORY = """\
import glob, os
reached = []
for path in glob.glob('/proc/[0-9]*/mem'):
    try: os.close(os.open(path, os.O_RDONLY)); reached.append(path)
    except OSError: pass
reached == [f'/proc/{os.getpid()}/mem']
"""


@on_both
async def test_attack_program_reaches_the_memory_of_the_variables_copy(box: OneContainer) -> None:
    """The copy has the variables from before the call. Twin: the program's own memory."""
    await box.python("x = 1")
    assert value_of(await box.python(REACH_MEMORY)) is True
    assert (await box.python("import os; os._exit(1)")).state == "rolled_back"
    assert value_of(await box.python(REACH_MEMORY)) is True  # the copy's copy, too
    assert value_of(await box.python("x")) == 1
