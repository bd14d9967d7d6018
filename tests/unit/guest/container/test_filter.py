"""The filter of a container's programs, run here by a small machine for its instructions."""

from __future__ import annotations

import pytest

from fumehood.guest.container.filter import ALLOWED, DECIDED, build_container_filter
from fumehood.guest.core.syscalls import ARCHITECTURES, HIGHEST_KNOWN
from support.bpf_machine import decide

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
NUMBERS = {machine: numbers for machine, (_, numbers) in ARCHITECTURES.items()}
MACHINES = sorted(NUMBERS)

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


FILTERS = {machine: build_container_filter(machine) for machine in MACHINES}


def _answer(machine: str, number: int, *arguments: int) -> int:
    architecture, _ = ARCHITECTURES[machine]
    return decide(FILTERS[machine], architecture, number, *arguments)


@pytest.mark.row("S3")
@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_get_their_verdict_and_unknown_ones_look_missing(machine: str) -> None:
    allowed = {NUMBERS[machine][name] for name in ALLOWED if name in NUMBERS[machine]}
    decided = {NUMBERS[machine][name] for name in DECIDED}
    assert len(allowed) > 150
    for number in range(700):
        if number in decided:
            continue
        expected = ENOSYS if number > HIGHEST_KNOWN else EPERM
        assert _answer(machine, number) == (ALLOW if number in allowed else expected), number


@pytest.mark.row("S3")
def test_system_calls_that_reach_out_of_a_container_are_refused() -> None:
    assert not set(FORBIDDEN) & {*ALLOWED, *DECIDED}
    assert len(FORBIDDEN) > 60


@pytest.mark.row("S3")
@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_architecture_or_numbering_kills_the_process(machine: str) -> None:
    other = next(ARCHITECTURES[name][0] for name in MACHINES if name != machine)
    assert decide(build_container_filter(machine), other, NUMBERS[machine]["read"]) == KILL
    assert _answer(machine, 0x40000000 | NUMBERS[machine]["read"]) == KILL


NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
SOCKETS = {1, 2, 10}  # of this host, and of IP
CONDITIONS: dict[str, tuple[str, int, list[tuple[int, ...]]]] = {
    "new namespaces": ("clone", EPERM, [(17 | flag,) for flag in NAMESPACES]),
    "processes and threads": ("clone", ALLOW, [(17,), (0x3D0F00,)]),
    "a structure that nobody can look into": ("clone3", ENOSYS, [()]),
    "a child that wakes its parent when it ends": ("clone", EPERM, [(18,)]),
    "a parent that wakes its child when it ends": ("prctl", EPERM, [(1, 18)]),
    "other wishes": ("prctl", ALLOW, [(1, 9), (15, 18), (18, 1)]),
    "a file that wakes its process": ("fcntl", EPERM, [(3, 10, 18)]),
    "a timer that wakes its process": ("timer_create", ENOSYS, [(1, 0, 0)]),
    "other uses of a file": ("fcntl", ALLOW, [(3, 10, 29), (3, 4, 18), (10, 1, 18)]),
    "sockets": ("socket", ALLOW, [(family, 1) for family in SOCKETS]),
    "other sockets": ("socket", EPERM, [(family, 1) for family in {*range(64)} - SOCKETS]),
    "socket pairs": ("socketpair", ALLOW, [(family, 1) for family in SOCKETS]),
    "other pairs": ("socketpair", EPERM, [(family, 1) for family in {*range(64)} - SOCKETS]),
    "reading the personality": ("personality", ALLOW, [(0,), (0xFFFFFFFF,)]),
    "no address space randomisation": ("personality", EPERM, [(0x0040000,)]),
}


@pytest.mark.row("S3")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("what", CONDITIONS)
def test_conditional_system_call_is_decided_by_its_arguments(machine: str, what: str) -> None:
    call, answer, given = CONDITIONS[what]
    assert {_answer(machine, NUMBERS[machine][call], *one) for one in given} == {answer}
