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


FILTERS = {machine: build_interpreter_filter(machine) for machine in MACHINES}


def _decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would answer to this call."""
    expected, _ = ARCHITECTURES[machine]
    return decide(
        FILTERS[machine],
        expected if architecture is None else architecture,
        number,
        *arguments,
    )


def _number(machine: str, name: str) -> int:
    return ARCHITECTURES[machine][1][name]


LISTED = {*ALLOWED, *REFUSED_GENTLY, *WITH_CONDITIONS}


@pytest.mark.row("S2")
@pytest.mark.parametrize("machine", MACHINES)
def test_listed_system_call_gets_its_verdict_and_any_other_kills_the_process(machine: str) -> None:
    name_of = {number: name for name, number in ARCHITECTURES[machine].numbers.items()}
    for number in range(600):
        name = name_of.get(number)
        expected = ALLOW if name in ALLOWED else REFUSE if name in REFUSED_GENTLY else KILL
        if name not in WITH_CONDITIONS:
            assert _decide(machine, number, 99, 0, 0) == expected, name


OTHERS = (0, 1, 2, 5, 2**32 + 3, 2**32 + 4, 2**64 - 1)
CONDITIONS: dict[str, tuple[str, int, list[tuple[int, ...]]]] = {
    "reading requests": ("read", ALLOW, [(REQUEST_FD,)]),
    "reading anything else": ("read", KILL, [(descriptor,) for descriptor in (*OTHERS, REPLY_FD)]),
    "writing replies": ("write", ALLOW, [(REPLY_FD,)]),
    "writing elsewhere": ("write", KILL, [(descriptor,) for descriptor in (*OTHERS, REQUEST_FD)]),
    "memory": ("mmap", ALLOW, [(0, 0, protection) for protection in range(4)]),
    "code": ("mmap", KILL, [(0, 0, protection) for protection in range(4, 8)]),
    "protecting memory": ("mprotect", ALLOW, [(0, 0, protection) for protection in range(4)]),
    "making code of memory": ("mprotect", KILL, [(0, 0, protection) for protection in range(4, 8)]),
}


@pytest.mark.row("S2")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("what", CONDITIONS)
def test_conditional_system_call_is_decided_by_its_arguments(machine: str, what: str) -> None:
    call, answer, given = CONDITIONS[what]
    assert {_decide(machine, _number(machine, call), *one) for one in given} == {answer}


@pytest.mark.row("S2")
@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_architecture_or_numbering_kills_the_process(machine: str) -> None:
    number = _number(machine, "getpid")
    for architecture in (0x40000003, 0, 0xFFFFFFFF):  # the first is 32-bit x86
        assert _decide(machine, number, architecture=architecture) == KILL
    for x32 in (0x40000000, 0x40000000 + number, 0xFFFFFFFF):
        assert _decide(machine, x32) == KILL


@pytest.mark.row("S2")
@pytest.mark.parametrize(
    "name",
    ["socket", "connect", "clone", "clone3", "fork", "vfork", "execve", "execveat", "ptrace",
     "kill", "tgkill", "prctl", "setrlimit", "prlimit64", "bpf", "io_uring_setup", "unshare",
     "mount", "openat2", "process_vm_writev", "memfd_create"],
)  # fmt: skip
def test_system_calls_that_reach_outside_are_not_listed(name: str) -> None:
    assert name not in LISTED  # so it kills the process, as above


@pytest.mark.parametrize("machine", MACHINES)
def test_system_call_numbers_are_unique_and_cover_every_listed_call(machine: str) -> None:
    numbers = ARCHITECTURES[machine].numbers
    assert len(set(numbers.values())) == len(numbers)
    if machine == "x86_64":
        assert set(numbers) >= LISTED
