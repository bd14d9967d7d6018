"""The interpreter's system-call filter, run here by a small machine for its instructions."""

from __future__ import annotations

import pytest

from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD
from fumehood.guest.core.syscalls import ARCHITECTURES
from fumehood.guest.process.filters import INTERPRETER_ALLOWED as ALLOWED
from fumehood.guest.process.filters import INTERPRETER_REFUSED as REFUSED_GENTLY
from fumehood.guest.process.filters import build_interpreter_filter
from support.bpf_machine import decide

KILL, REFUSE, ALLOW = 0x80000000, 0x00050001, 0x7FFF0000
MACHINES = sorted(ARCHITECTURES)
WITH_CONDITIONS = {"read", "write", "mmap", "mprotect"}


def _decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would answer to this call."""
    expected, _ = ARCHITECTURES[machine]
    return decide(
        build_interpreter_filter(machine),
        expected if architecture is None else architecture,
        number,
        *arguments,
    )


def _number(machine: str, name: str) -> int:
    return ARCHITECTURES[machine][1][name]


LISTED = {*ALLOWED, *REFUSED_GENTLY, *WITH_CONDITIONS}
CALLS = [(m, name) for m in MACHINES for name in sorted(LISTED & set(ARCHITECTURES[m].numbers))]


@pytest.mark.row("S2")
@pytest.mark.parametrize(("machine", "name"), CALLS)
def test_each_listed_system_call_gets_its_verdict(machine: str, name: str) -> None:
    answer = _decide(machine, _number(machine, name), 99, 0, 0)
    if name in ALLOWED:
        assert answer == ALLOW
    elif name in REFUSED_GENTLY:
        assert answer == REFUSE
    elif name in ("mmap", "mprotect"):
        assert answer == ALLOW
    else:  # read and write of another descriptor
        assert name in ("read", "write")
        assert answer == KILL


@pytest.mark.row("S2")
@pytest.mark.parametrize("machine", MACHINES)
def test_unlisted_system_call_kills_the_process(machine: str) -> None:
    listed = {number for name, number in ARCHITECTURES[machine].numbers.items() if name in LISTED}
    others = [number for number in range(600) if number not in listed]
    assert len(others) > 500
    assert {_decide(machine, number) for number in others} == {KILL}


@pytest.mark.row("S2")
@pytest.mark.parametrize("machine", MACHINES)
def test_only_the_two_channel_descriptors_can_be_read_and_written(machine: str) -> None:
    read, write = _number(machine, "read"), _number(machine, "write")
    assert _decide(machine, read, REQUEST_FD) == ALLOW
    assert _decide(machine, write, REPLY_FD) == ALLOW
    for descriptor in (0, 1, 2, 5, 2**32 + 3, 2**32 + 4, 2**64 - 1):
        assert _decide(machine, read, descriptor) == KILL
        assert _decide(machine, write, descriptor) == KILL
    assert _decide(machine, read, REPLY_FD) == KILL
    assert _decide(machine, write, REQUEST_FD) == KILL


@pytest.mark.row("S2")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["mmap", "mprotect"])
def test_memory_never_becomes_executable(machine: str, name: str) -> None:
    number = _number(machine, name)
    assert {_decide(machine, number, 0, 0, protection) for protection in range(4)} == {ALLOW}
    assert {_decide(machine, number, 0, 0, protection | 4) for protection in range(4)} == {KILL}


@pytest.mark.row("S2")
@pytest.mark.parametrize("machine", MACHINES)
def test_system_call_of_another_architecture_kills_the_process(machine: str) -> None:
    number = _number(machine, "getpid")
    for architecture in (0x40000003, 0, 0xFFFFFFFF):  # the first is 32-bit x86
        assert _decide(machine, number, architecture=architecture) == KILL


@pytest.mark.row("S2")
def test_x32_system_call_numbers_kill_the_process() -> None:
    for number in (0x40000000, 0x40000000 + _number("x86_64", "getpid"), 0xFFFFFFFF):
        assert _decide("x86_64", number) == KILL


@pytest.mark.parametrize("machine", ["riscv64", "i686", "", "X86_64"])
def test_unknown_machine_has_no_filter(machine: str) -> None:
    with pytest.raises(OSError, match="no system-call filter"):
        build_interpreter_filter(machine or "none")


def test_system_call_lists_are_disjoint() -> None:
    assert not set(ALLOWED) & set(REFUSED_GENTLY)
    assert not (set(ALLOWED) | set(REFUSED_GENTLY)) & WITH_CONDITIONS
    assert len(set(ALLOWED)) == len(ALLOWED)
    assert len(set(REFUSED_GENTLY)) == len(REFUSED_GENTLY)


@pytest.mark.row("S2")
@pytest.mark.parametrize(
    "name",
    ["socket", "connect", "clone", "clone3", "fork", "vfork", "execve", "execveat", "ptrace",
     "kill", "tgkill", "prctl", "setrlimit", "prlimit64", "bpf", "io_uring_setup", "unshare",
     "mount", "openat2", "process_vm_writev", "memfd_create"],
)  # fmt: skip
def test_system_calls_that_reach_outside_are_not_listed(name: str) -> None:
    assert name not in ALLOWED
    assert name not in REFUSED_GENTLY
    numbers = {
        m: ARCHITECTURES[m].numbers[name] for m in MACHINES if name in ARCHITECTURES[m].numbers
    }
    assert {_decide(machine, number) for machine, number in numbers.items()} <= {KILL}


@pytest.mark.parametrize("machine", MACHINES)
def test_system_call_numbers_are_unique_and_cover_every_listed_call(machine: str) -> None:
    numbers = ARCHITECTURES[machine].numbers
    assert len(set(numbers.values())) == len(numbers)
    if machine == "x86_64":
        assert set(numbers) >= LISTED
