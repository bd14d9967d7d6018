"""The jail's system-call filters, run here by a small machine for their instructions."""

from __future__ import annotations

import os
import socket

import pytest

from fumehood.guest.core.syscalls import ARCHITECTURES
from fumehood.guest.process.filters import (
    JAIL_ALLOWED,
    JAIL_CONDITIONAL,
    JAIL_REFUSED,
    UNTIL_NARROWED,
    build_interpreter_filter,
    build_jail_filter,
    build_second_filter,
)
from support.bpf_machine import decide

KILL, EPERM, EACCES, ALLOW = 0x80000000, 0x00050001, 0x0005000D, 0x7FFF0000
MACHINES = sorted(ARCHITECTURES)
LISTED = {*JAIL_ALLOWED, *JAIL_CONDITIONAL, *UNTIL_NARROWED, *JAIL_REFUSED}
NUMBERS = {
    machine: {name: number for name, number in numbers.items() if name in LISTED}
    for machine, (_, numbers) in ARCHITECTURES.items()
}
HIGH = 1 << 32
FILTERS = {machine: build_jail_filter(machine) for machine in MACHINES}


def _decide(machine: str, name: str, *arguments: int) -> int:
    architecture, _ = ARCHITECTURES[machine]
    return decide(FILTERS[machine], architecture, NUMBERS[machine][name], *arguments)


@pytest.mark.row("S1")
@pytest.mark.parametrize("machine", MACHINES)
def test_each_listed_system_call_gets_its_verdict(machine: str) -> None:
    checked = 0
    for name in NUMBERS[machine]:
        if name in JAIL_CONDITIONAL:
            continue
        expected = EPERM if name in JAIL_REFUSED else ALLOW
        assert _decide(machine, name, 99, 99, 99) == expected, name
        checked += 1
    assert checked > 90


@pytest.mark.row("S1")
@pytest.mark.parametrize("machine", MACHINES)
def test_unlisted_system_call_kills_the_process(machine: str) -> None:
    architecture, _ = ARCHITECTURES[machine]
    program = FILTERS[machine]
    others = [number for number in range(600) if number not in NUMBERS[machine].values()]
    assert len(others) > 400
    assert {decide(program, architecture, number) for number in others} == {KILL}
    assert decide(program, 0x40000003, 1) == KILL  # 32-bit x86
    assert decide(program, architecture, 0x40000000 + NUMBERS[machine]["getpid"]) == KILL


@pytest.mark.row("S1")
@pytest.mark.parametrize(
    "name",
    ["socket", "connect", "bind", "listen", "accept", "accept4", "sendmsg", "sendmmsg", "recvmsg",
     "clone", "clone3", "fork", "vfork", "execve", "execveat", "ptrace", "kill", "tkill", "tgkill",
     "rt_sigqueueinfo", "pidfd_open", "pidfd_send_signal", "pidfd_getfd", "process_vm_readv",
     "process_vm_writev", "prctl", "arch_prctl", "bpf", "io_uring_setup", "unshare", "setns",
     "mount", "openat2", "open_by_handle_at", "memfd_create", "userfaultfd", "perf_event_open",
     "setpgid", "setsid", "setuid", "capset", "chroot", "pipe", "pipe2", "pwrite64", "writev",
     "shmget", "mq_open", "keyctl", "personality", "pkey_mprotect"],
)  # fmt: skip
def test_system_calls_that_reach_outside_are_not_listed(name: str) -> None:
    assert name not in LISTED  # so it kills the process, as above


READING = (os.O_RDONLY, os.O_CLOEXEC, os.O_DIRECTORY, os.O_PATH, os.O_NOFOLLOW)
WRITING = (os.O_WRONLY, os.O_RDWR, 3, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE, 0o100 | HIGH)
UNIX, STREAM = socket.AF_UNIX, socket.SOCK_STREAM
FCNTL = {0, 1, 2, 3, 4, 1030}
CONDITIONS: dict[str, tuple[str, int, list[tuple[int, ...]]]] = {
    "reading files": ("openat", ALLOW, [(0, 0, flags) for flags in READING]),
    "writing files": ("openat", EACCES, [(0, 0, flags) for flags in WRITING]),
    "pairs of streams": ("socketpair", ALLOW, [
        (UNIX, kind, 0)
        for kind in (STREAM, STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, STREAM | HIGH)
    ]),
    "other pairs": ("socketpair", KILL, [
        (UNIX, socket.SOCK_DGRAM, 0), (UNIX, socket.SOCK_SEQPACKET, 0), (UNIX, STREAM | 0o20, 0),
        (socket.AF_INET, STREAM, 0), (0, STREAM, 0),
    ]),
    "sending": ("sendto", ALLOW, [(5, 1, 1, 0, 0, 0)]),
    "sending to an address": ("sendto", KILL, [
        (5, 1, 1, 0, address, 2) for address in (1, HIGH, HIGH | 1, 2**64 - 1)
    ]),
    "harmless commands": ("fcntl", ALLOW, [(5, command) for command in FCNTL]),
    "owners of signals": ("fcntl", EPERM, [(5, command) for command in {*range(1100)} - FCNTL]),
    "harmless codes": ("ioctl", ALLOW, [(5, code) for code in (0x5421, 0x5450, 0x5451)]),
    "signals and the terminal": ("ioctl", EPERM, [
        (5, code) for code in (0x8901, 0x8902, 0x5401, 0x5412, 0x541B)
    ]),
    "memory": ("mmap", ALLOW, [(0, 0, protection) for protection in range(6)]),
    "writable code": ("mmap", EPERM, [(0, 0, 6), (0, 0, 7)]),
    "protecting memory": ("mprotect", ALLOW, [(0, 0, protection) for protection in range(4)]),
    "making code of memory": ("mprotect", EPERM, [(0, 0, protection) for protection in range(4, 8)]),
}  # fmt: skip


@pytest.mark.row("S1")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("what", CONDITIONS)
def test_conditional_system_call_is_decided_by_its_arguments(machine: str, what: str) -> None:
    call, answer, given = CONDITIONS[what]
    assert {_decide(machine, call, *one) for one in given} == {answer}


@pytest.mark.row("S1")
@pytest.mark.parametrize("machine", MACHINES)
def test_second_filter_removes_calls_needed_only_for_setup(machine: str) -> None:
    architecture, _ = ARCHITECTURES[machine]
    second = build_second_filter(machine)
    assert _decide(machine, "seccomp", 1, 0) == ALLOW
    for operation, flags in ((0, 0), (2, 0), (1, 8)):  # 8 would hand out a listener
        assert _decide(machine, "seccomp", operation, flags) == KILL
    for name in (*UNTIL_NARROWED, "seccomp"):
        assert decide(second, architecture, NUMBERS[machine][name], 1, 0) == KILL
    for name in ("read", "openat", "exit_group"):
        assert decide(second, architecture, NUMBERS[machine][name]) == ALLOW
    assert decide(second, 0x40000003, NUMBERS[machine]["read"]) == KILL


def test_unknown_machine_has_no_filter() -> None:
    for build in (build_jail_filter, build_second_filter, build_interpreter_filter):
        with pytest.raises(OSError, match="no system-call filter"):
            build("riscv64")
