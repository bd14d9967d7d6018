"""The plan of a sandbox, and the filter in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fumehood.core.limits import MB
from fumehood.direct.plan import plan_of, step_plan
from fumehood.direct.sandbox import DEVICES
from fumehood.guest.core.syscalls import own_number
from fumehood.sandbox.container.spec import MASKED_PATHS, ContainerSpec, OperatorProgram

SPEC = ContainerSpec(
    name="fumehood-1", image_id="sha256:" + "a" * 64, image_name="python", engine_id="e",
    owner_id="o", memory_mb=512, cpus=1.5, lifetime_s=60, deadline=1, guest_mb=32,
)  # fmt: skip
LAYERS = [Path("/layers/a/files"), Path("/layers/b/files")]


def test_plan_has_every_limit_of_the_specification() -> None:
    plan = plan_of(SPEC, LAYERS, None, is_watched=False)
    assert (plan["memory_bytes"], plan["processes"], plan["cpus"]) == (544 * MB, 76, 1.5)
    assert plan["rlimits"] == {
        "CORE": 0, "FSIZE": 128 * MB, "MSGQUEUE": 0, "NOFILE": 1024, "SIGPENDING": 1024,
        "RTPRIO": 0, "NICE": 0, "MEMLOCK": 65_536,
    }  # fmt: skip
    assert plan["tmpfs"] == {
        "/workspace": [128, 4096, "1777"],
        "/tmp": [96, 3072, "1777"],
        "/dev/shm": [32, 1024, "1777"],
        "/run/fumehood": [1, 8, "0755"],
    }
    assert plan["masked"] == list(MASKED_PATHS)
    assert plan["capabilities"] == [5, 6, 8, 7]
    assert plan["user"] == 0
    assert plan["changes"] is None
    assert plan["disk"] is None
    assert plan["layers"] == ["/layers/a/files", "/layers/b/files"]
    assert json.loads(plan["command"][-1])["memory_bytes"] == 512 * MB
    json.dumps(plan)


def test_guest_watches_the_memory_if_the_host_does_not_limit_it() -> None:
    plans = [plan_of(SPEC, LAYERS, None, is_watched=one) for one in (False, True)]
    assert [plan["is_watched"] for plan in plans] == [False, True]
    assert [json.loads(plan["command"][-1])["is_watched"] for plan in plans] == [False, True]
    # SYS_PTRACE, to see how much memory processes share.
    assert [19 in plan["capabilities"] for plan in plans] == [False, True]


def test_build_step_limits_itself_if_the_host_does_not() -> None:
    new = Path("/new")
    limits = [
        step_plan("b", ["/bin/true"], LAYERS, upper=new, work=new, is_watched=one)["rlimits"]
        for one in (False, True)
    ]
    assert [("AS" in each, "NPROC" in each) for each in limits] == [(False, False), (True, True)]


def test_disk_takes_the_place_of_the_working_directory() -> None:
    plan = plan_of(
        replace(SPEC, disk=("fumehood-disk", 1000)), LAYERS, "/dev/loop7", is_watched=False
    )
    assert plan["disk"] == ["fumehood-disk", "/dev/loop7", "/workspace"]
    assert "/workspace" not in plan["tmpfs"]
    assert plan["rlimits"]["FSIZE"] == 1000 * MB


@pytest.mark.parametrize("has_network", [False, True])
def test_program_of_the_operator_has_no_rights(has_network: bool) -> None:
    program = OperatorProgram(("/usr/bin/server", "-x"), {"KEY": "value"}, has_network)
    plan = plan_of(replace(SPEC, program=program), LAYERS, None, is_watched=False)
    assert (plan["user"], plan["capabilities"]) == (10001, [])
    assert plan["directory"] == plan["env"]["HOME"] == "/workspace"
    assert plan["env"]["KEY"] == "value"
    if has_network:
        assert json.loads(plan["command"][-1])["command"] == ["/usr/bin/server", "-x"]
        assert plan["tmpfs"]["/run/fumehood"][2] == "1777"
    else:
        assert plan["command"] == ["/usr/bin/server", "-x"]


def test_build_step_is_root_without_rights_and_writes_only_into_its_layer() -> None:
    plan = step_plan(
        "build-1",
        ["/bin/true"],
        LAYERS,
        upper=Path("/new/files"),
        work=Path("/new/w"),
        is_watched=False,
    )
    assert plan["changes"] == ["/new/files", "/new/w"]
    assert (plan["user"], plan["capabilities"], plan["disk"]) == (0, [], None)
    assert 0 < plan["memory_bytes"] <= 1 << 30


def test_sandbox_has_no_device_that_reaches_the_host() -> None:
    assert set(DEVICES) == {"null", "zero", "full", "random", "urandom", "tty"}


def allowed_numbers(program: bytes) -> set[int]:
    """Numbers of the system calls for which a filter has a rule of its own."""
    rows = [program[start : start + 8] for start in range(0, len(program), 8)]
    equals = [row for row in rows if int.from_bytes(row[:2], "little") == 0x15]
    return {int.from_bytes(row[4:], "little") for row in equals}


def test_filter_of_a_sandbox_lets_nobody_leave_it() -> None:
    numbers = allowed_numbers(
        bytes.fromhex(plan_of(SPEC, LAYERS, None, is_watched=False)["filter"])
    )
    assert own_number("setresuid") in numbers  # the guest changes the user of its children
    refused = {
        "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308,
        "unshare": 272, "keyctl": 250, "add_key": 248, "bpf": 321, "userfaultfd": 323,
        "perf_event_open": 298, "io_uring_setup": 425, "process_vm_readv": 310, "kexec_load": 246,
        "init_module": 175, "open_by_handle_at": 304, "pidfd_getfd": 438, "open_tree": 428,
        "move_mount": 429, "mount_setattr": 442, "swapon": 167, "reboot": 169, "quotactl": 179,
        "sethostname": 170, "iopl": 172, "acct": 163, "settimeofday": 164, "shmget": 29,
    }  # fmt: skip
    import platform

    if platform.machine() == "x86_64":
        assert not numbers & set(refused.values())
