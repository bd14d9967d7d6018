"""The jail's boundary: each attack by an untrusted sandboxed function, and how it ends.

The code runs where a tool's own code would: inside a sealed child, after its import. The control
runs the same code in an ordinary Python process and shows that it works there.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import cloudpickle
import psutil
import pytest

from fumehood import Config, Engine
from fumehood.attack.attack import Attack
from fumehood.attack.corpus import attacks_on
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EndedBy
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limits
from fumehood.sandbox.process.wall import JailWall
from support import jailed_tools
from support.attacks import Harm, ending_of
from support.processes import children_of_guest
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.needs("landlock")]

TESTS = Path(__file__).parents[1]
CANARY = "canary-7f3a91"
LIBRARY = importlib.import_module("_ctypes").__file__
ENGINE = os.getpid()
CANARIES = [
    Path("/tmp/fumehood-jail-canary"),
    Path("/dev/shm/fumehood-jail-canary"),
    TESTS / "fumehood_jail_canary.py",
]

KILLED = ("SANDBOX_VIOLATION", "policy", None)
"""The ending of a process killed by the seccomp filter."""


def refused(kind: str = "PermissionError") -> tuple[str, str, str]:
    """The ending of an operation that the kernel refused with an exception."""
    return ("EXECUTION_ERROR", "exception", kind)


@dataclass(frozen=True)
class JailAttack:
    """An attack whose `code` must end as `ends`: code, `ended_by`, exception type.

    `{outside}` is a directory that the test may write and the function must not see.
    """

    name: str
    harm: Harm
    code: str
    ends: tuple[str, str, str | None]
    control: bool = True
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return self.name


def reads(name: str, path: str, control: bool = True) -> JailAttack:
    return JailAttack(
        f"read-{name}", Harm.HOST_LEAK, f"open({path!r}, 'rb').read(1)", refused(), control
    )


def changes(
    name: str, code: str, kind: str = "PermissionError", control: bool = True
) -> JailAttack:
    return JailAttack(
        f"change-{name}", Harm.INTEGRITY, "import os\n" + code, refused(kind), control
    )


def opens(name: str, code: str, control: bool = True) -> JailAttack:
    return JailAttack(f"socket-{name}", Harm.EXFIL, "import socket\n" + code, KILLED, control)


def starts(name: str, code: str, control: bool = True) -> JailAttack:
    return JailAttack(f"start-{name}", Harm.HOST_DOS, "import os\n" + code, KILLED, control)


def touches(name: str, code: str, control: bool = False) -> JailAttack:
    return JailAttack(
        f"touch-{name}",
        Harm.LATERAL,
        "import os, ctypes\nc = ctypes.CDLL(None)\n" + code,
        KILLED,
        control,
    )


FILES = [
    reads("passwd", "/etc/passwd"),
    reads("own-environment", "/proc/self/environ"),
    reads("engines-environment", f"/proc/{ENGINE}/environ"),
    reads("engines-memory", f"/proc/{ENGINE}/mem", control=False),
    reads("own-memory-map", "/proc/self/maps"),
    reads("kernel-settings", "/proc/sys/kernel/hostname"),
    reads("sys", "/sys/kernel/mm/transparent_hugepage/enabled", control=False),
    reads("device", "/dev/zero"),
    reads("dot-dot", "{path}/../{up}{outside}/secret", control=False),
    reads("engines-state", "{home}/state"),
    JailAttack("list-root", Harm.HOST_LEAK, "import os; os.listdir('/')", refused()),
    JailAttack("list-proc", Harm.HOST_LEAK, "import os; os.listdir('/proc')", refused()),
    JailAttack("walk-descriptors", Harm.HOST_LEAK, "import os; os.listdir('/proc/self/fd')", refused()),
    JailAttack("import-from-outside", Harm.ESCAPE, "import sys; sys.path.insert(0, '{outside}'); import evil",
               refused("ModuleNotFoundError")),
    JailAttack("load-from-outside", Harm.ESCAPE, "import ctypes; ctypes.CDLL('{outside}/libevil.so')",
               refused("OSError")),
    JailAttack("run-path", Harm.ESCAPE, "import runpy; runpy.run_path('{outside}/evil.py')", refused()),
    JailAttack("read-as-a-library", Harm.HOST_LEAK,
               "import ctypes; f = ctypes.CDLL(None).open; assert f(b'{outside}/secret', 0) >= 0, 'no'",
               refused("AssertionError")),
]  # fmt: skip

CHANGES = [
    changes("create-in-tmp", "open('/tmp/fumehood-jail-canary', 'w')"),
    changes("create-in-shared-memory", "open('/dev/shm/fumehood-jail-canary', 'w')"),
    changes("create-in-import-path", "open('{path}/fumehood_jail_canary.py', 'w')"),
    changes("overwrite-a-library", "open(os.__file__, 'r+')"),
    changes("truncate", "os.truncate('{outside}/secret', 0)"),
    changes("open-and-truncate", "os.open('{path}/support/attacks.py', os.O_RDONLY | os.O_TRUNC)", control=False),
    changes("without-name", "os.open('/tmp', os.O_TMPFILE | os.O_RDWR)", control=False),
    changes("temporary-file", "import tempfile; tempfile.TemporaryFile()", "FileNotFoundError"),
    changes("directory", "os.mkdir('{outside}/directory')"),
    changes("remove-directory", "os.rmdir('{outside}/empty')"),
    changes("rename", "os.rename('{outside}/secret', '{outside}/other')"),
    changes("link", "os.link('{outside}/secret', '{outside}/link')"),
    changes("symbolic-link", "os.symlink('/etc/passwd', '{outside}/link')"),
    changes("mode", "os.chmod('{outside}/secret', 0o777)"),
    changes("owner", "os.chown('{outside}/secret', -1, -1)"),
    changes("times", "os.utime('{outside}/secret', (0, 0))"),
    changes("named-pipe", "os.mkfifo('{outside}/pipe')"),
    changes("working-directory", "os.chdir('{outside}')"),
    changes("own-limit", "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "ValueError", control=False),
    changes("engines-limit", f"import resource as r; r.prlimit({ENGINE}, r.RLIMIT_NOFILE)"),
    changes("owner-of-signals",
            f"import fcntl, socket; a, b = socket.socketpair(); fcntl.fcntl(a, fcntl.F_SETOWN, {ENGINE})"),
    changes("executable-memory", "import mmap; mmap.mmap(-1, 4096, prot=7)"),
    changes("memory-made-executable",
            "import ctypes, mmap; m = mmap.mmap(-1, 4096); a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
            "assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(a), 4096, 5) == 0, 'no'", "AssertionError"),
]  # fmt: skip

SOCKETS = [
    opens("unix", "socket.socket(socket.AF_UNIX)"),
    opens("internet", "socket.socket(socket.AF_INET)"),
    opens("datagram-pair", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"),
    opens("packet-pair", "socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)"),
    opens(
        "pair-to-an-address",
        "a, b = socket.socketpair(); a.sendto(b'x', '/run/nobody')",
        control=False,
    ),
    opens(
        "message-with-descriptors", "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])"
    ),
    opens("resolve", "socket.getaddrinfo('localhost', 80)"),
]

PROCESSES = [
    starts("shell", "os.system('true')"),
    starts("spawn", "os.posix_spawn('/bin/true', ['true'], {{}})"),
    starts("memory-file", "os.memfd_create('x')"),
]

OTHERS = [
    touches("engine-signal", f"os.kill({ENGINE}, 0)", control=True),
    touches("group-signal", "os.killpg(0, 0)", control=True),
    touches("broadcast-signal", "os.kill(-1, 0)"),
    touches("own-signal", "os.kill(os.getpid(), 0)", control=True),
    touches("thread-signal", f"c.syscall(234, {ENGINE}, {ENGINE}, 0)"),
    touches("process-descriptor", f"os.pidfd_open({ENGINE})", control=True),
    touches("write-memory", f"c.process_vm_writev({ENGINE}, 0, 0, 0, 0, 0)"),
    touches("death-signal", "c.prctl(1, 0, 0, 0, 0)"),
    touches("session", "os.setsid()"),
    touches("priority", "os.setpriority(os.PRIO_PROCESS, 0, 5)", control=True),
    touches("groups", "os.setgroups([])"),
    touches("another-view", "c.syscall(444, 0, 0, 1)"),
    touches("abort", "os.abort()"),
]
if os.uname().machine != "x86_64":  # the numbers above are those of x86-64
    OTHERS = [attack for attack in OTHERS if "syscall" not in attack.code]

QUICK = (("timeout_seconds", 0.3),)
BOMBS = [
    JailAttack("memory-at-once", Harm.HOST_DOS, "bytearray(1 << 40)", ("MEMORY_LIMIT_EXCEEDED", "memory", None), False),
    JailAttack("memory-swallowed", Harm.HOST_DOS,
               "a = []\nwhile True:\n    try: a.append(bytearray(1 << 20))\n    except MemoryError: pass",
               ("TIMEOUT", "wall_time", None), False, QUICK),
    JailAttack("swallow-everything", Harm.PEER_DOS, "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
               ("TIMEOUT", "wall_time", None), False, QUICK),
    JailAttack("print-for-ever", Harm.HOST_DOS, "while True: print('x' * 1000)", ("TIMEOUT", "wall_time", None), False, QUICK),
    JailAttack("progress-for-ever", Harm.HOST_DOS, "import fumehood\nwhile True: fumehood.progress(1, 'x' * 200)",
               ("TIMEOUT", "wall_time", None), False, QUICK),
    JailAttack("progress-past-the-counter", Harm.HOST_DOS,
               "import os, json\nb = json.dumps(dict(progress=dict(percent=1, message='x' * 200))).encode()\n"
               "while True: os.write(4, len(b).to_bytes(4, 'big') + b)",
               ("OUTPUT_LIMIT_EXCEEDED", "output", None), False),
    JailAttack("recursion", Harm.SELF_DOS, "f = lambda: f()\nf()", refused("RecursionError"), False),
    JailAttack("crash", Harm.SELF_DOS, "import ctypes; ctypes.string_at(0)", ("EXECUTION_ERROR", "signal", None), False),
    JailAttack("exit", Harm.SELF_DOS, "import sys; sys.exit(0)", refused("SystemExit"), False),
    JailAttack("exit-at-once", Harm.SELF_DOS, "import os; os._exit(3)", ("EXECUTION_ERROR", "exit", None), False),
    JailAttack("interrupt", Harm.SELF_DOS, "raise KeyboardInterrupt", refused("KeyboardInterrupt"), False),
    JailAttack("exception-whose-str-raises", Harm.SELF_DOS,
               "class E(Exception):\n    def __str__(self): raise ValueError\nraise E", refused("E"), False),
    JailAttack("exception-whose-str-interrupts", Harm.SELF_DOS,
               "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise E", refused("E"), False),
    JailAttack("long-name", Harm.HOST_DOS, "raise type('E' * 100000, (Exception,), {{}})('x' * 100000)", refused("E" * 100), False),
]  # fmt: skip

FORGED = [
    JailAttack("forged-length", Harm.HOST_DOS, "import os; os.write(4, b'\\xff' * 4096)",
               ("OUTPUT_LIMIT_EXCEEDED", "output", None), False),
]  # fmt: skip

LOOKED_AT = {"reach-loopback", "reach-abstract-socket", "run-host-file", "end-host-process"}
"""Corpus rows whose bait exists only in `doctor --attack`."""

WITH_CONTROL = {
    "read-host-file", "list-host", "reopen-by-descriptor", "host-processes",
    "write-outside-workspace", "change-host-file", "remove-host-file", "netlink", "fork-bomb",
    "thread-flood", "execute",
}  # fmt: skip
"""Corpus rows that an ordinary process is allowed to do."""

OPTIONS: dict[str, tuple[tuple[str, float], ...]] = {
    "wall_time": QUICK,
    "memory": (("memory_limit_mb", 64),),
}


def of_corpus(attack: Attack) -> JailAttack:
    """A corpus row with the engine and the outside directory as its bait."""
    code = attack.code.replace("{", "{{").replace("}", "}}")
    for bait, here in (
        ("@FILE@", "{outside}/secret"),
        ("@DIRECTORY@", "{outside}"),
        ("@PID@", str(ENGINE)),
    ):
        code = code.replace(bait, here)
    error, ended_by, kind = ending_of(attack)
    return JailAttack(
        f"corpus-{attack.id}", attack.harm, code, (error, ended_by, kind or None),
        attack.id in WITH_CONTROL, OPTIONS.get(ended_by, ()),
    )  # fmt: skip


CORPUS = [
    of_corpus(attack)
    for attack in attacks_on("jail")
    if ending_of(attack)[0] and attack.id not in LOOKED_AT
]
ATTACKS = [*CORPUS, *FILES, *CHANGES, *SOCKETS, *PROCESSES, *OTHERS, *BOMBS, *FORGED]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host directory with a secret, a module and a library that do not belong to the tool."""
    directory = tmp_path_factory.mktemp("outside").resolve()
    (directory / "secret").write_text(CANARY)
    (directory / "evil.py").write_text(f"print({CANARY!r})")
    (directory / "empty").mkdir()
    shutil.copy(LIBRARY, directory / "libevil.so")
    return directory


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """One shared engine, because each call runs in its own process, which ends with the call."""
    home = tmp_path_factory.mktemp("home")
    (home / "state").write_text(CANARY)
    os.environ["FUMEHOOD_TEST_CANARY"] = CANARY
    try:
        async with Engine(tools=[jailed_tools.run_code], config=Config(home=home)) as running:
            yield running
    finally:
        del os.environ["FUMEHOOD_TEST_CANARY"]


def fill(code: str, outside: Path, home: Path) -> str:
    up = "../" * 20
    return code.format(outside=outside, home=home, path=TESTS, up=up)


def listing(directory: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mode, status.st_mtime_ns)
    return found


@pytest.mark.row("S1", "S2", "S4")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
async def test_attack_ends_with_its_code_and_changes_nothing(
    attack: JailAttack, engine: Engine, outside: Path
) -> None:
    before = listing(outside)
    code = fill(attack.code, outside, engine.config.state_directory)
    with anyio.fail_after(DEADLINE_S):
        envelope = await engine.call("run_code", {"code": code}, **dict(attack.options))
    assert ending(envelope) == attack.ends
    assert listing(outside) == before
    assert not [place for place in CANARIES if place.exists()]
    assert CANARY not in envelope.model_dump_json()
    assert psutil.Process(ENGINE).status() != psutil.STATUS_STOPPED


def ending(envelope: Envelope) -> tuple[str, str, str | None]:
    assert envelope.error is not None, envelope.data
    details = envelope.error.details or {}
    return envelope.error.code, envelope.metadata.sandbox.ended_by.value, details.get("type")


CONTROLS = [attack for attack in ATTACKS if attack.control]


@pytest.mark.parametrize("attack", CONTROLS, ids=str)
def test_control_same_code_works_without_the_wall(attack: JailAttack, tmp_path: Path) -> None:
    """Runs in a copy of everything that it may harm."""
    home = tmp_path / "home"
    for directory in (home, tmp_path / "empty", tmp_path / "support"):
        directory.mkdir()
    for name in ("secret", "home/state", "support/attacks.py"):
        (tmp_path / name).write_text(CANARY)
    (tmp_path / "evil.py").touch()
    shutil.copy(LIBRARY, tmp_path / "libevil.so")
    code = attack.code.replace("{path}", str(tmp_path)).replace("os.__file__", "'evil.py'")
    done = subprocess.run(
        [sys.executable, "-c", fill(code, tmp_path, home)],
        cwd=tmp_path, capture_output=True, timeout=600,
    )  # fmt: skip
    for place in CANARIES:
        place.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr.decode()


def test_attack_and_control_tables_are_large_enough_and_unique() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert len(ATTACKS) > 110
    assert len(CONTROLS) > 55


TWINS = {
    "read-own-module": "out = open('{path}/support/jailed_tools.py').read(3)",
    "read-a-library": "import os; out = len(open(os.__file__).read(3))",
    "list-import-path": "import os; out = 'support' in os.listdir('{path}')",
    "import-late": "import wave, colorsys; out = 1",
    "import-from-import-path": "import support.attacks; out = 1",
    "stream-pair": "import socket; a, b = socket.socketpair(); a.send(b'x'); out = b.recv(1).decode()",
    "event-loop": "import asyncio; asyncio.run(asyncio.sleep(0)); out = 1",
    "loop-with-a-signal-handler": "import signal; signal.signal(2, signal.SIG_DFL); out = 1",
    "some-memory": "out = len(bytearray(64 << 20))",
    "some-descriptors": "import os; a = [open(os.__file__) for _ in range(40)]; out = len(a)",
    "native-function": "import ctypes; out = ctypes.CDLL(None).abs(-3)",
    "who-am-i": "import os; out = [os.getpid() > 0, os.getppid() > 0, os.getuid() >= 0]",
    "some-progress": "import fumehood; fumehood.progress(10, 'x'); out = 1",
    "long-print": "print('x' * 1000000); out = 1",
    "sleep-a-little": "import time; time.sleep(0.001); out = 1",
    "randomness": "import secrets; out = len(secrets.token_hex(4))",
}


@pytest.mark.row("S1")
@pytest.mark.parametrize("name", TWINS)
async def test_twin_works_in_the_jail(name: str, engine: Engine) -> None:
    envelope = await engine.call("run_code", {"code": TWINS[name].format(path=TESTS)})
    assert envelope.error is None
    assert envelope.data["value"]


async def test_jailed_function_has_no_environment_or_extra_descriptors(engine: Engine) -> None:
    code = """
import os
out = {'environment': sorted(os.environ), 'descriptors': [], 'directory': os.getcwd()}
for number in range(4096):
    try: os.fstat(number)
    except OSError: continue
    out['descriptors'].append(number)
"""
    data = (await engine.call("run_code", {"code": code})).data
    assert data["environment"] == ["MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert data["descriptors"] == [0, 1, 2, 3, 4]
    assert data["directory"] == "/"


def forge(reply: str) -> str:
    return (
        f"import os, json\nb = json.dumps({reply}).encode()\n"
        "os.write(4, len(b).to_bytes(4, 'big') + b)"
    )


REPORTS = {
    "twin": "50",
    "more-than-a-double": "10**400",
    "less-than-a-double": "-(10**400)",
    "as-many-digits-as-json-allows": "10**4299",
}


@pytest.mark.row("S4")
@pytest.mark.parametrize("name", REPORTS)
async def test_forged_progress_number_does_not_crash_the_supervisor(
    name: str, engine: Engine
) -> None:
    """Regression: a number too large for a double crashed the supervisor and all other runs."""
    assert (await engine.call("run_code", {"code": "out = 1"})).data == {"value": 1}
    guest = engine.walls["jail"]["guest_pid"]
    report = forge(f"dict(progress=dict(percent={REPORTS[name]}, message=''))")
    assert (await engine.call("run_code", {"code": f"{report}\nout = 2"})).data == {"value": 2}
    assert engine.walls["jail"]["guest_pid"] == guest
    assert psutil.pid_exists(guest)


FORGERIES = {
    "engines-code": "dict(error=dict(kind='tool_error', code='UNAUTHORIZED', message='', details=None, retryable=True, retry_after_ms=None))",
    "lower-case-code": "dict(error=dict(kind='tool_error', code='no', message='', details=None, retryable=True, retry_after_ms=None))",
    "extra-key": "dict(error=dict(kind='tool_error', code='A_CODE', message='', details=None, retryable=True, retry_after_ms=None, cls='os.system'))",
    "negative-wait": "dict(error=dict(kind='tool_error', code='A_CODE', message='', details=None, retryable=True, retry_after_ms=-1))",
    "failure-without-message": "dict(error=dict(kind='exception'))",
    "other-type": "dict(error=dict(kind=['policy'], message=3))",
    "wide-traceback": "dict(error=dict(kind='exception', type='E', message='', traceback=['x' * 201]))",
}  # fmt: skip


@pytest.mark.row("E1")
@pytest.mark.parametrize("name", FORGERIES)
async def test_malformed_failure_report_is_replaced_by_generic_error(
    name: str, engine: Engine
) -> None:
    envelope = await engine.call("run_code", {"code": forge(FORGERIES[name])})
    assert envelope.error.code == "EXECUTION_ERROR"
    assert envelope.error.message == "The function failed and gave no reason."
    assert envelope.error.retryable is False


RESULTS = {
    "result-without-data": "dict(result=dict(value=1))",
    "negative-tokens": "dict(result=dict(data=1, tokens_used=-1, cost='0'))",
    "boolean-tokens": "dict(result=dict(data=1, tokens_used=True, cost='0'))",
    "infinite-cost": "dict(result=dict(data=1, tokens_used=0, cost='1e999'))",
    "nan-cost": "dict(result=dict(data=1, tokens_used=0, cost='NaN'))",
    "negative-cost": "dict(result=dict(data=1, tokens_used=0, cost='-1'))",
    "number-as-cost": "dict(result=dict(data=1, tokens_used=0, cost=1.5))",
}


@pytest.mark.row("E3")
@pytest.mark.parametrize("name", RESULTS)
async def test_malformed_result_is_treated_as_lost_sandbox(name: str, engine: Engine) -> None:
    envelope = await engine.call("run_code", {"code": forge(RESULTS[name])})
    assert ending(envelope) == ("SANDBOX_UNAVAILABLE", "sandbox_lost", None)
    assert envelope.metadata.usage.cost == "0.000000"


async def test_twin_well_formed_result_is_accepted(
    engine: Engine,
) -> None:
    code = forge("dict(result=dict(data=dict(a=1), tokens_used=2, cost='0.5'))")
    envelope = await engine.call("run_code", {"code": code})
    assert envelope.data == {"a": 1}
    assert (envelope.metadata.usage.tokens_used, envelope.metadata.usage.cost) == (2, "0.500000")


@pytest.mark.row("S1")
async def test_function_can_read_only_its_own_import_path(tmp_path: Path) -> None:
    """The symbolic link is on the import path, but its target is not."""
    paths = []
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / f"{name}.py").write_text(
            "from fumehood import tool\n@tool\ndef read(path: str) -> str:\n"
            "    'Read.'\n    return open(path).read(4)\n"
        )
        (directory / "data").write_text(f"data of {name}")
        (directory / "link").symlink_to("/etc/passwd")
        (directory / "link-inside").symlink_to("data")
        paths.append(str(directory))
    limits = Limits(5, 5, 64, 65536)
    async with JailWall(paths) as wall:

        async def read(path: str) -> tuple[EndedBy, object]:
            call = {"module": "one", "name": "read", "import_path": paths[0]}
            async with wall.lease(TrustDomain("a"), fresh=True) as lease:
                ran = await lease.run("function", {**call, "arguments": {"path": path}}, limits)
            claim = ran.claimed_error or {}
            return ran.ended_by, claim.get("type") or (ran.result or {}).get("data")

        assert await read(f"{paths[0]}/data") == (EndedBy.OK, "data")
        assert await read(f"{paths[0]}/link-inside") == (EndedBy.OK, "data")
        assert await read(f"{paths[0]}/link") == (EndedBy.EXCEPTION, "PermissionError")
        assert await read(f"{paths[1]}/data") == (EndedBy.EXCEPTION, "PermissionError")
        assert await read(f"{paths[0]}/../two/data") == (EndedBy.EXCEPTION, "PermissionError")
        assert await read(f"{paths[0]}/none") == (EndedBy.EXCEPTION, "FileNotFoundError")


async def test_import_path_unknown_to_the_wall_is_not_importable(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("raise AssertionError")
    async with JailWall([str(TESTS)]) as wall, wall.lease(TrustDomain("a"), fresh=True) as lease:
        call = {"module": "late", "name": "x", "import_path": str(tmp_path), "arguments": {}}
        ran = await lease.run("function", call, Limits(5, 5, 64, 65536))
        assert ran.ended_by is EndedBy.EXCEPTION
        assert ran.claimed_error["type"] == "ModuleNotFoundError"


READER = """from fumehood import tool
@tool
def read(path: str) -> str:
    'Read.'
    return open(path).read(4)
"""


@pytest.mark.row("S1")
async def test_pickled_function_can_read_only_the_libraries(tmp_path: Path) -> None:
    """Neither its program's file nor other tools' import paths are readable."""
    program = tmp_path / "program.py"
    program.write_text(READER)
    limits = Limits(5, 5, 64, 65536)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(READER, namespace)
    by_value = {
        "module": "__main__",
        "import_path": "",
        "pickled": base64.b64encode(cloudpickle.dumps(namespace["read"])).decode(),
    }
    by_path = {"module": "program", "import_path": str(tmp_path)}
    async with JailWall([str(tmp_path), ""]) as wall:

        async def read(path: Path | str, where: dict[str, object]) -> tuple[EndedBy, object]:
            call = {**where, "name": "read", "arguments": {"path": str(path)}}
            async with wall.lease(TrustDomain("a"), fresh=True) as lease:
                ran = await lease.run("function", call, limits)
            claim = ran.claimed_error or {}
            return ran.ended_by, claim.get("type") or (ran.result or {}).get("data")

        for path in (program, f"{tmp_path}/../{tmp_path.name}/program.py", "/etc/passwd"):
            assert await read(path, by_value) == (EndedBy.EXCEPTION, "PermissionError")
        assert await read(os.__file__, by_value) == (EndedBy.OK, 'r"""')  # twin
        assert await read(program, by_path) == (EndedBy.OK, "from")  # control


ESCAPES = {
    "import-the-program": ("import program; out = 1", "ModuleNotFoundError"),
    "import-from-the-directory": ("import sys; sys.path.insert(0, '{path}'); import program",
                                  "ModuleNotFoundError"),
    "run-the-program": ("import runpy; runpy.run_path('{path}/program.py')", "PermissionError"),
    "read-the-program": ("open('{path}/program.py')", "PermissionError"),
    "list-the-directory": ("import os; os.listdir('{path}')", "PermissionError"),
    "look-in-main": ("import __main__; __main__.SECRET", "AttributeError"),
    "look-in-the-globals": ("globals()['SECRET']", "KeyError"),
    "look-in-all-modules": (
        "import sys; [m.SECRET for m in list(sys.modules.values()) if hasattr(m, 'SECRET')][0]",
        "IndexError"),
    "ask-for-the-source": ("import inspect; inspect.getsource({name}.function)", "OSError"),
}  # fmt: skip
CONTROL = "what it names"
PROGRAM = """
import asyncio, json, os
from fumehood import Config, Engine, tool
SECRET = {canary!r}
print("the program runs", flush=True)

{functions}

@tool(sandboxed=False)
def act_on_the_host() -> object:
    'Act.'
    return os.getpid()

async def main():
    tools = [{names}, act_on_the_host]
    async with Engine(tools=tools, config=Config(home={home!r})) as engine:
        jailed = [await engine.call(tool.definition.name) for tool in tools[:-1]]
        on_the_host = await engine.call("act_on_the_host")
        other_process = on_the_host.data.get("value", os.getpid()) != os.getpid()
    print(json.dumps([[one.model_dump(mode="json") for one in jailed], other_process]))

asyncio.run(main())  # on purpose without a guard: no process runs the program a second time
"""
FUNCTION = """
@tool
def {name}() -> object:
    'Act.'
    {code}
    return 1
"""


async def run_program(place: Path, codes: dict[str, str], cwd: Path) -> dict[str, Envelope]:
    """Run one program with a function per code, and return the answers to their calls."""
    names = [f"act_{number}" for number in range(len(codes))]
    functions = "".join(
        FUNCTION.format(name=name, code=code.format(path=place, name=name))
        for name, code in zip(names, codes.values(), strict=True)
    )
    text = PROGRAM.format(
        canary=CANARY, functions=functions, names=", ".join(names), home=str(place / "home")
    )
    (place / "program.py").write_text(text)
    done = await anyio.run_process(
        [sys.executable, str(place / "program.py")], cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    first, answers = done.stdout.decode().splitlines()
    assert first == "the program runs"
    jailed, was_another_process = json.loads(answers)
    assert was_another_process
    found = (Envelope.model_validate_json(json.dumps(one)) for one in jailed)
    return dict(zip(codes, found, strict=True))


@pytest.fixture(scope="module")
async def escapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Envelope]:
    """All escapes and the control, in one program in its working directory."""
    place = tmp_path_factory.mktemp("program").resolve()
    codes = {name: code for name, (code, _) in ESCAPES.items()}
    return await run_program(place, {**codes, CONTROL: "return SECRET"}, place)


@pytest.mark.row("S1", "T7")
@pytest.mark.parametrize("name", ESCAPES)
async def test_jailed_function_cannot_reach_its_program(
    name: str, escapes: dict[str, Envelope]
) -> None:
    assert ending(escapes[name]) == refused(ESCAPES[name][1])
    assert CANARY not in escapes[name].model_dump_json()


async def test_control_global_named_by_a_function_is_sent_to_it(
    escapes: dict[str, Envelope],
) -> None:
    assert escapes[CONTROL].data == {"value": CANARY}


@pytest.mark.row("S1", "T7")
async def test_twin_functions_of_a_program_run_in_the_jail(tmp_path: Path) -> None:
    codes = (
        "import wave",
        "assert json.loads('[1]') == [1]",
        "assert {name}.definition.name == '{name}'",
    )
    answers = await run_program(tmp_path, {code: code for code in codes}, Path("/"))
    assert [answer.data for answer in answers.values()] == [{"value": 1}] * len(codes)


async def test_call_cannot_name_the_self_check_as_its_program() -> None:
    async with JailWall([str(TESTS)]) as wall, wall.lease(TrustDomain("a"), fresh=True) as lease:
        ran = await lease.run("probe", {"probe": "spin"}, Limits(5, 5, 64, 65536))
        assert ran.ended_by is EndedBy.SANDBOX_LOST


async def test_spare_jail_child_is_sealed_according_to_the_kernel(engine: Engine) -> None:
    assert (await engine.call("run_code", {"code": "out = 1"})).success
    guest = psutil.Process(engine.walls["jail"]["guest_pid"])

    def spares() -> list[psutil.Process]:
        return children_of_guest(guest)[1:]

    def is_sealed(child: psutil.Process) -> bool:
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
        except OSError:
            return False
        return "\nSeccomp:\t2\n" in status and "\nCapEff:\t0000000000000000\n" in status

    await anyio.to_thread.run_sync(wait_until, lambda: any(map(is_sealed, spares())))


@pytest.mark.row("S5")
async def test_guest_keeps_only_zygote_and_one_spare_after_attacks(engine: Engine) -> None:
    guest = psutil.Process(engine.walls["jail"]["guest_pid"])
    await anyio.to_thread.run_sync(wait_until, lambda: len(guest.children(recursive=True)) == 2)
    assert guest.status() != psutil.STATUS_ZOMBIE
