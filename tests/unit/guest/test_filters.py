"""The system-call filters of all walls, run here by a small machine for their instructions."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

from fumehood.guest.container.filter import ALLOWED, DECIDED, build_container_filter
from fumehood.guest.core.pipes import REPLY_FD, REQUEST_FD
from fumehood.guest.core.syscalls import ARCHITECTURES, HIGHEST_KNOWN
from fumehood.guest.interpreter.filter import CONDITIONAL, REFUSED, build_interpreter_filter
from fumehood.guest.process.filters import (
    COMMON_ALLOWED,
    JAIL_ALLOWED,
    JAIL_CONDITIONAL,
    JAIL_REFUSED,
    UNTIL_NARROWED,
    build_jail_filter,
    build_second_filter,
)
from support.bpf_machine import decide

KILL, EPERM, EACCES, ENOSYS = 0x80000000, 0x00050001, 0x0005000D, 0x00050026
ALLOW = 0x7FFF0000
HIGH = 1 << 32
MACHINES = sorted(ARCHITECTURES)
Conditions = dict[str, tuple[str, int, list[tuple[int, ...]]]]

FORBIDDEN = (
    "add_key", "bpf", "delete_module", "fanotify_init", "finit_module", "init_module",
    "inotify_add_watch", "inotify_init", "inotify_init1", "io_setup", "io_uring_enter",
    "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_load", "keyctl",
    "mbind", "memfd_secret", "migrate_pages", "modify_ldt", "mount", "mount_setattr",
    "move_mount", "mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive", "mq_timedsend",
    "mq_unlink", "msgctl", "msgget", "msgrcv", "msgsnd", "name_to_handle_at", "nfsservctl",
    "open_by_handle_at", "open_tree", "perf_event_open", "pidfd_getfd", "pivot_root",
    "process_madvise", "process_vm_readv", "process_vm_writev", "ptrace", "quotactl", "reboot",
    "request_key", "semctl", "semget", "semop", "semtimedop", "set_mempolicy", "setfsuid",
    "setgid", "sethostname", "setns", "setreuid", "setuid", "shmat", "shmctl", "shmdt",
    "shmget", "swapoff", "swapon", "syslog", "umount2", "unshare", "userfaultfd", "vhangup",
)  # fmt: skip
"""What Docker's default profile refuses to a container without capabilities, and what this
wall refuses besides."""

OTHERS = (0, 1, 2, 5, 2**32 + 3, 2**32 + 4, 2**64 - 1)
IN_INTERPRETER: Conditions = {
    "reading requests": ("read", ALLOW, [(REQUEST_FD,)]),
    "reading anything else": ("read", KILL, [(descriptor,) for descriptor in (*OTHERS, REPLY_FD)]),
    "writing replies": ("write", ALLOW, [(REPLY_FD,)]),
    "writing elsewhere": ("write", KILL, [(descriptor,) for descriptor in (*OTHERS, REQUEST_FD)]),
    "memory": ("mmap", ALLOW, [(0, 0, protection) for protection in range(4)]),
    "code": ("mmap", KILL, [(0, 0, protection) for protection in range(4, 8)]),
    "protecting memory": ("mprotect", ALLOW, [(0, 0, protection) for protection in range(4)]),
    "making code of memory": ("mprotect", KILL, [(0, 0, protection) for protection in range(4, 8)]),
}

READING = (os.O_RDONLY, os.O_CLOEXEC, os.O_DIRECTORY, os.O_PATH, os.O_NOFOLLOW)
WRITING = (os.O_WRONLY, os.O_RDWR, 3, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE, 0o100 | HIGH)
UNIX, STREAM = socket.AF_UNIX, socket.SOCK_STREAM
FCNTL = {0, 1, 2, 3, 4, 1030}
IN_JAIL: Conditions = {
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

NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
SOCKETS = {1, 2, 10}  # of this host, and of IP
IN_CONTAINER: Conditions = {
    "new namespaces": ("clone", EPERM, [(17 | flag,) for flag in NAMESPACES]),
    "processes and threads": ("clone", ALLOW, [(17,), (0x3D0F00,)]),
    "a structure that nobody can look into": ("clone3", ENOSYS, [()]),
    "a child that wakes its parent when it ends": ("clone", EPERM, [(18,)]),
    "a parent that wakes its child when it ends": ("prctl", EPERM, [(1, 18)]),
    "other wishes": ("prctl", ALLOW, [(1, 9), (15, 18), (18, 1)]),
    "a file that wakes its process": ("fcntl", EPERM, [(3, 10, 18)]),
    "a timer that wakes its process": ("timer_create", ENOSYS, [(1, 0, 0)]),
    "other uses of a file": ("fcntl", ALLOW, [(3, 10, 29), (3, 4, 18), (10, 1, 18)]),
    "contents that change without a trace": (
        "ioctl",
        EPERM,
        [
            (3, 0xC028660F),
            (3, 0xC028660F | 1 << 32),
        ],
    ),
    "other commands": ("ioctl", ALLOW, [(3, 0x5401), (3, 0x8028660F), (0xC028660F, 0x5413)]),
    "sockets": ("socket", ALLOW, [(family, 1) for family in SOCKETS]),
    "other sockets": ("socket", EPERM, [(family, 1) for family in {*range(64)} - SOCKETS]),
    "socket pairs": ("socketpair", ALLOW, [(family, 1) for family in SOCKETS]),
    "other pairs": ("socketpair", EPERM, [(family, 1) for family in {*range(64)} - SOCKETS]),
    "reading the personality": ("personality", ALLOW, [(0,), (0xFFFFFFFF,)]),
    "no address space randomisation": ("personality", EPERM, [(0x0040000,)]),
}


@dataclass(frozen=True)
class Wall:
    """A filter with its lists, and calls that must be in none of them."""

    build: Callable[[str], bytes]
    allowed: Collection[str]
    refused: Collection[str]
    decided: Collection[str]
    conditions: Conditions
    forbidden: Collection[str]
    otherwise: int = KILL

    def answer(self, machine: str, name: str, *arguments: int) -> int:
        architecture, numbers = ARCHITECTURES[machine]
        return decide(self.build(machine), architecture, numbers[name], *arguments)


WALLS = {
    "interpreter": Wall(
        build_interpreter_filter, COMMON_ALLOWED, REFUSED, CONDITIONAL,
        IN_INTERPRETER,
        ["socket", "connect", "clone", "clone3", "fork", "vfork", "execve", "execveat", "ptrace",
     "kill", "tgkill", "prctl", "setrlimit", "prlimit64", "bpf", "io_uring_setup", "unshare",
     "mount", "openat2", "process_vm_writev", "memfd_create"],
    ),
    "jail": Wall(
        build_jail_filter, (*JAIL_ALLOWED, *UNTIL_NARROWED), JAIL_REFUSED, JAIL_CONDITIONAL, IN_JAIL,
        ["socket", "connect", "bind", "listen", "accept", "accept4", "sendmsg", "sendmmsg", "recvmsg",
     "clone", "clone3", "fork", "vfork", "execve", "execveat", "ptrace", "kill", "tkill", "tgkill",
     "rt_sigqueueinfo", "pidfd_open", "pidfd_send_signal", "pidfd_getfd", "process_vm_readv",
     "process_vm_writev", "prctl", "arch_prctl", "bpf", "io_uring_setup", "unshare", "setns",
     "mount", "openat2", "open_by_handle_at", "memfd_create", "userfaultfd", "perf_event_open",
     "setpgid", "setsid", "setuid", "capset", "chroot", "pipe", "pipe2", "pwrite64", "writev",
     "shmget", "mq_open", "keyctl", "personality", "pkey_mprotect"],
    ),
    "container": Wall(
        build_container_filter, ALLOWED, (), DECIDED, IN_CONTAINER, FORBIDDEN, otherwise=EPERM
    ),
}  # fmt: skip

on_each_machine = pytest.mark.parametrize("machine", MACHINES)
in_each_wall = pytest.mark.parametrize("wall", WALLS)


@pytest.mark.row("S1", "S2", "S3")
@on_each_machine
@in_each_wall
def test_each_system_call_gets_its_verdict(wall: str, machine: str) -> None:
    the, (architecture, numbers) = WALLS[wall], ARCHITECTURES[machine]
    name_of = {number: name for name, number in numbers.items()}
    program = the.build(machine)
    for number in range(700):
        name = name_of.get(number, "")
        if name in the.allowed:
            expected = ALLOW
        elif the.otherwise == EPERM and number > HIGHEST_KNOWN:
            expected = ENOSYS
        else:
            expected = EPERM if name in the.refused else the.otherwise
        if name not in the.decided:
            assert decide(program, architecture, number, 99, 99, 99) == expected, (number, name)


@pytest.mark.row("S1", "S2", "S3")
@on_each_machine
@pytest.mark.parametrize(
    ("wall", "what"), [(wall, what) for wall, the in WALLS.items() for what in the.conditions]
)
def test_conditional_system_call_is_decided_by_its_arguments(
    wall: str, what: str, machine: str
) -> None:
    call, answer, given = WALLS[wall].conditions[what]
    assert {WALLS[wall].answer(machine, call, *one) for one in given} == {answer}


@pytest.mark.row("S1", "S2", "S3")
@on_each_machine
@in_each_wall
def test_foreign_architecture_or_numbering_kills_the_process(wall: str, machine: str) -> None:
    program, (architecture, numbers) = WALLS[wall].build(machine), ARCHITECTURES[machine]
    for foreign in (0x40000003, 0, 0xFFFFFFFF):  # the first is 32-bit x86
        assert decide(program, foreign, numbers["getpid"]) == KILL
    for x32 in (0x40000000, 0x40000000 + numbers["getpid"], 0xFFFFFFFF):
        assert decide(program, architecture, x32) == KILL


@pytest.mark.row("S1", "S2", "S3")
@in_each_wall
def test_system_calls_that_reach_outside_are_not_listed(wall: str) -> None:
    the = WALLS[wall]
    assert not {*the.forbidden} & {*the.allowed, *the.refused, *the.decided}


@pytest.mark.row("S1")
@on_each_machine
def test_second_filter_removes_calls_needed_only_for_setup(machine: str) -> None:
    architecture, numbers = ARCHITECTURES[machine]
    second, jail = build_second_filter(machine), WALLS["jail"]
    assert jail.answer(machine, "seccomp", 1, 0) == ALLOW
    for operation, flags in ((0, 0), (2, 0), (1, 8)):  # 8 would hand out a listener
        assert jail.answer(machine, "seccomp", operation, flags) == KILL
    for name in (*UNTIL_NARROWED, "seccomp"):
        assert decide(second, architecture, numbers[name], 1, 0) == KILL
    for name in ("read", "openat", "exit_group"):
        assert decide(second, architecture, numbers[name]) == ALLOW
    assert decide(second, 0x40000003, numbers["read"]) == KILL


def test_unknown_machine_has_no_filter() -> None:
    for build in (*(wall.build for wall in WALLS.values()), build_second_filter):
        with pytest.raises(OSError, match="no system-call filter"):
            build("riscv64")


@on_each_machine
def test_system_call_numbers_are_unique_and_cover_every_listed_call(machine: str) -> None:
    numbers = ARCHITECTURES[machine].numbers
    assert len(set(numbers.values())) == len(numbers)
    for wall in WALLS.values() if machine == "x86_64" else ():
        assert numbers.keys() >= {*wall.allowed, *wall.refused, *wall.decided}
