"""The wall beneath the language tables: arbitrary code inside a sealed child.

Arbitrary code cannot be sent to the calculator, so these tests fork a child, seal it with the
engine's code, and run the attack in it. The control runs the same attack in an unsealed child and
shows that it works there.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.attacks import Harm

# The guest is found by path in production; a test may look inside.
own_filter = importlib.import_module("fumehood.guest.interpreter.filter")
pipes = importlib.import_module("fumehood.guest.core.pipes")
seccomp = importlib.import_module("fumehood.guest.core.seccomp")
kernel = importlib.import_module("fumehood.guest.core.kernel")
limits = importlib.import_module("fumehood.guest.core.limits")

WORKED, REFUSED = 10, 11
PARENT = os.getpid()
CANARY = Path("/proc/self/environ")


def _open_file() -> None:
    os.close(os.open("/etc/hostname", os.O_RDONLY))


def _write_file() -> None:
    os.close(os.open("/tmp/fumehood-canary", os.O_WRONLY | os.O_CREAT, 0o600))


def _list_directory() -> None:
    os.listdir("/")


def _read_environment() -> None:
    CANARY.read_bytes()


def _stat_file() -> None:
    os.stat("/etc/hostname")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _execute() -> None:
    os.execv("/bin/true", ["true"])


def _unix_socket() -> None:
    socket.socket(socket.AF_UNIX).close()


def _internet_socket() -> None:
    socket.socket(socket.AF_INET).close()


def _signal_parent() -> None:
    os.kill(PARENT, 0)


def _make_pipe() -> None:
    os.pipe()


def _duplicate() -> None:
    os.dup(pipes.REPLY_FD)


def _raise_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _read_other_descriptor() -> None:
    os.read(0, 1)


def _write_other_descriptor() -> None:
    os.write(1, b"")


def _write_channel_number_trick() -> None:
    # The kernel takes 64 bits; a filter that looks at half of them lets this through.
    ctypes.CDLL(None).syscall(1, ctypes.c_ulong((1 << 32) | pipes.REPLY_FD), b"", 0)


def _executable_memory() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def _syscall(number: int, *arguments: int) -> Callable[[], None]:
    def attack() -> None:
        if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) == -1:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    return attack


def _read_clock() -> None:
    import time

    time.monotonic()


def _take_memory() -> None:
    bytearray(1 << 20)


def _draw_randomness() -> None:
    os.getrandom(8)


@dataclass(frozen=True)
class WallAttack:
    """An attack that must be killed or refused in a sealed child and works in an unsealed one."""

    name: str
    harm: Harm
    run: Callable[[], None]
    ends: str
    works_unsealed: bool = True

    def __str__(self) -> str:
        return self.name


KILLED, EPERM = "killed", "refused"
# Numbers of x86-64; these system calls have no function in Python's library.
X86 = os.uname().machine == "x86_64"

ATTACKS = [
    WallAttack("open", Harm.HOST_LEAK, _open_file, EPERM),
    WallAttack("create", Harm.INTEGRITY, _write_file, EPERM),
    WallAttack("list", Harm.HOST_LEAK, _list_directory, EPERM),
    WallAttack("environment", Harm.HOST_LEAK, _read_environment, EPERM),
    WallAttack("stat", Harm.HOST_LEAK, _stat_file, EPERM),
    WallAttack("fork", Harm.HOST_DOS, _fork, KILLED),
    WallAttack("execve", Harm.ESCAPE, _execute, KILLED),
    WallAttack("unix-socket", Harm.LATERAL, _unix_socket, KILLED),
    WallAttack("internet-socket", Harm.EXFIL, _internet_socket, KILLED),
    WallAttack("kill", Harm.PEER_DOS, _signal_parent, KILLED),
    WallAttack("pipe", Harm.INTERNAL_ESC, _make_pipe, KILLED),
    WallAttack("dup", Harm.INTERNAL_ESC, _duplicate, KILLED),
    WallAttack("setrlimit", Harm.INTERNAL_ESC, _raise_limit, KILLED),
    WallAttack("read-elsewhere", Harm.INTERNAL_READ, _read_other_descriptor, KILLED),
    WallAttack("write-elsewhere", Harm.INTERNAL_ESC, _write_other_descriptor, KILLED),
    WallAttack("executable-memory", Harm.ESCAPE, _executable_memory, KILLED),
]
if X86:
    ATTACKS += [
        WallAttack("write-64-bit-trick", Harm.INTERNAL_ESC, _write_channel_number_trick, KILLED),
        WallAttack("ptrace", Harm.ESCAPE, _syscall(101, 0, 0, 0, 0), KILLED, False),
        WallAttack("process-vm-readv", Harm.INTERNAL_READ, _syscall(310, PARENT, 0, 0, 0, 0, 0),
                   KILLED, os.geteuid() == 0),
        WallAttack("io-uring", Harm.ESCAPE, _syscall(425, 1, 0), KILLED, False),
        WallAttack("userfaultfd", Harm.ESCAPE, _syscall(323, 0), KILLED, False),
        WallAttack("bpf", Harm.ESCAPE, _syscall(321, 0, 0, 0), KILLED, False),
        WallAttack("perf-event-open", Harm.ESCAPE, _syscall(298, 0, 0, -1, -1, 0), KILLED, False),
        WallAttack("unshare", Harm.ESCAPE, _syscall(272, 0), KILLED),
        WallAttack("keyctl", Harm.HOST_LEAK, _syscall(250, 0, 0), KILLED, False),
        WallAttack("shmget", Harm.LATERAL, _syscall(29, 0, 4096, 0o1000), KILLED),
        WallAttack("prctl", Harm.INTERNAL_ESC, _syscall(157, 38, 0), KILLED, False),
        WallAttack("x32-write", Harm.INTERNAL_ESC, _syscall(0x40000001, 1, 0, 0), KILLED, False),
    ]  # fmt: skip

TWINS = [_read_clock, _take_memory, _draw_randomness]


def _ends(attack: Callable[[], None], *, sealed: bool) -> tuple[int | None, int | None]:
    """Run an attack in a child; return its exit code or signal as reported by the kernel."""
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open("/dev/null", os.O_RDWR)
            for descriptor in (0, 1, pipes.REQUEST_FD, pipes.REPLY_FD):
                os.dup2(null, descriptor)
            if sealed:
                limits.limit_self()
                kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
                seccomp.install(own_filter.build_interpreter_filter())
            attack()
        except PermissionError:
            os._exit(REFUSED)
        except BaseException:
            os._exit(1)
        os._exit(WORKED)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


@pytest.mark.row("S2")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_inside_sealed_child_is_killed_or_refused(attack: WallAttack) -> None:
    expected = (None, signal.SIGSYS) if attack.ends == KILLED else (REFUSED, None)
    assert _ends(attack.run, sealed=True) == expected


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.works_unsealed], ids=str)
def test_control_same_attack_works_without_the_wall(attack: WallAttack) -> None:
    exit_code, signal_number = _ends(attack.run, sealed=False)
    assert signal_number is None
    assert exit_code in (WORKED, 0)  # 0: /bin/true took the process over
    Path("/tmp/fumehood-canary").unlink(missing_ok=True)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_twin_works_inside_sealed_child(twin: Callable[[], None]) -> None:
    assert _ends(twin, sealed=True) == (WORKED, None)


def test_sealed_child_has_only_null_and_two_pipe_descriptors(shared_daemon, client) -> None:
    """Read the running guest's descriptors from outside, through /proc."""
    from support.processes import guest_of, sealed_children_of

    assert client.calculate("1 + 1").body["success"]
    sealed = sealed_children_of(guest_of(shared_daemon.process.pid))
    assert sealed
    for child in sealed:
        if os.geteuid() != 0:  # nobody else may look: the process is not dumpable
            with pytest.raises(PermissionError):
                os.listdir(f"/proc/{child.pid}/fd")
            continue
        targets = {
            int(n): os.readlink(f"/proc/{child.pid}/fd/{n}")
            for n in os.listdir(f"/proc/{child.pid}/fd")
        }
        assert set(targets) == {0, 1, 2, 3, 4}
        assert {targets[0], targets[1], targets[2]} == {"/dev/null"}
        assert targets[3].startswith("pipe:")
        assert targets[4].startswith("pipe:")


@pytest.mark.row("S2", "S4")
def test_every_interpreter_child_is_sealed_according_to_the_kernel(shared_daemon, client) -> None:
    from support.processes import guest_of, sealed_children_of

    assert client.calculate("1 + 1").body["success"]
    guest = guest_of(shared_daemon.process.pid)
    sealed = sealed_children_of(guest)
    assert sealed
    for child in sealed:
        status = Path(f"/proc/{child.pid}/status").read_text()
        assert "\nSeccomp:\t2\n" in status
        assert "\nNoNewPrivs:\t1\n" in status
        assert "\nCapEff:\t0000000000000000\n" in status
        assert "\nCapPrm:\t0000000000000000\n" in status
        assert child.ppid() == guest.pid
        hard = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
        assert hard == (0, 0)
        assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (0, 0)
        assert resource.prlimit(child.pid, resource.RLIMIT_CORE) == (0, 0)


def test_guest_python_runs_isolated_without_site_packages(shared_daemon) -> None:
    from support.processes import guest_of

    command = guest_of(shared_daemon.process.pid).cmdline()
    assert command[1:4] == ["-I", "-S", "-B"]
