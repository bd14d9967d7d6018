"""The specification: all of a container's defences, compared whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fumehood.core.limits import CONTAINER_MEMORY_CLASSES, MB
from fumehood.docker.bodies import create_body
from fumehood.sandbox.container.spec import ContainerSpec, OperatorProgram

SPEC = ContainerSpec(
    name="fumehood-0123abcd-1",
    image_id="sha256:" + "a" * 64,
    image_name="python",
    engine_id="0123abcd" * 4,
    owner_id="feed" * 8,
    memory_mb=512,
    cpus=1.0,
    lifetime_s=4260.0,
    deadline=1_800_000_000,
    engine_pid=42,
)

WHOLE: dict[str, Any] = {
    "Image": "sha256:" + "a" * 64,
    "Entrypoint": [
        "/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "/opt/fumehood/fumehood/guest",
    ],
    "Cmd": [
        ('{"disk_bytes": 0, "fsize_bytes": 134217728, "guest_bytes": 33554432, "import_paths": ["/opt/fumehood"], '
         '"is_watched": false, "lifetime_s": 4260.0, '
        '"memory_bytes": 536870912, "nofile": 256, "processes": 64, "spares": 2, "wall": "container", '
         '"watched_outside": []}')
    ],
    "Hostname": "sandbox",
    "User": "0:0",
    "WorkingDir": "/",
    "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
    "Labels": {
        "fumehood.engine": "0123abcd" * 4,
        "fumehood.owner": "feed" * 8,
        "fumehood.deadline": "1800000000",
        "fumehood.image": "python",
        "fumehood.pid": "42",
    },
    "Healthcheck": {"Test": ["NONE"]},
    "OpenStdin": True,
    "StdinOnce": True,
    "AttachStdin": True,
    "AttachStdout": True,
    "AttachStderr": True,
    "Tty": False,
    "NetworkDisabled": True,
    "HostConfig": {
        "Privileged": False,
        "NetworkMode": "none",
        "IpcMode": "none",
        "PidMode": "",
        "UTSMode": "",
        "CgroupnsMode": "private",
        "CapDrop": ["ALL"],
        "CapAdd": ["KILL", "SETGID", "SETPCAP", "SETUID"],
        "SecurityOpt": ["no-new-privileges:true"],
        "MaskedPaths": [
            "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
            "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
            "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
            "/proc/pressure",
        ],
        "Devices": [],
        "Memory": 544 * MB,
        "MemorySwap": 544 * MB,
        "OomKillDisable": False,
        "NanoCpus": 1_000_000_000,
        "PidsLimit": 76,
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": 128 * MB, "Hard": 128 * MB},
            {"Name": "msgqueue", "Soft": 0, "Hard": 0},
            {"Name": "nofile", "Soft": 1024, "Hard": 1024},
        ],
        "ReadonlyRootfs": True,
        "Tmpfs": {
            "/workspace": "rw,nosuid,nodev,noexec,size=128m,nr_inodes=4096,mode=1777",
            "/tmp": "rw,nosuid,nodev,noexec,size=96m,nr_inodes=3072,mode=1777",
            "/dev/shm": "rw,nosuid,nodev,noexec,size=32m,nr_inodes=1024,mode=1777",
            "/run/fumehood": "rw,nosuid,nodev,noexec,size=1m,nr_inodes=8,mode=0755",
        },
        "Binds": [],
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": False,
        "Init": False,
    },
}  # fmt: skip


def test_create_request_is_exactly_the_expected_body() -> None:
    assert create_body(SPEC) == WHOLE


@pytest.mark.parametrize("memory_mb", CONTAINER_MEMORY_CLASSES)
def test_writable_mounts_take_half_of_the_memory_in_every_size_class(memory_mb: int) -> None:
    spec = replace(SPEC, memory_mb=memory_mb)
    assert sum(spec.writable_mb.values()) == memory_mb // 2
    assert all(size > 0 for size in spec.writable_mb.values())
    config = create_body(spec)["HostConfig"]
    assert config["Memory"] == config["MemorySwap"] == (memory_mb + 32) * MB
    assert json.loads(create_body(spec)["Cmd"][0])["memory_bytes"] == memory_mb * MB


def test_disk_takes_the_place_of_the_workspace_in_memory() -> None:
    body = create_body(replace(SPEC, disk=("fumehood-sess_1", 1024)))
    config = body["HostConfig"]
    assert sorted(config["Tmpfs"]) == ["/dev/shm", "/run/fumehood", "/tmp"]
    assert config["Mounts"] == [
        {"Type": "volume", "Source": "fumehood-sess_1", "Target": "/workspace", "ReadOnly": False,
         "VolumeOptions": {"NoCopy": True}},
    ]  # fmt: skip
    guest = json.loads(body["Cmd"][0])
    assert guest["disk_bytes"] == guest["fsize_bytes"] == 1024 * MB
    assert config["Memory"] == create_body(SPEC)["HostConfig"]["Memory"]


@pytest.mark.row("S3", "S4")
@pytest.mark.parametrize(
    ("runtime", "guest_mb", "memory_mb", "processes"),
    [
        (None, 32, 544, 76),
        (None, 150, 512 + 150, 76),
        ("runc", 32, 544, 76),
        ("runscx", 32, 544, 76),
        ("runsc", 32, 672, 1100),
        ("runsc-kvm", 32, 672, 1100),
    ],
)
def test_guest_and_gvisor_raise_the_limits_of_the_container_but_not_of_the_program(
    runtime: str | None, guest_mb: int, memory_mb: int, processes: int
) -> None:
    body = create_body(replace(SPEC, runtime=runtime, guest_mb=guest_mb))
    host = body["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == memory_mb << 20
    assert host["PidsLimit"] == processes
    assert json.loads(body["Cmd"][0])["memory_bytes"] == 512 * MB


@pytest.mark.parametrize("has_network", [False, True])
def test_program_of_the_operator_runs_without_a_guest_and_capabilities(
    has_network: bool,
) -> None:
    program = OperatorProgram(("server", "--stdio"), {"TOKEN": "t"}, has_network=has_network)
    body = create_body(replace(SPEC, program=program))
    entry, tmpfs = ["server", "--stdio"], dict(WHOLE["HostConfig"]["Tmpfs"])
    if has_network:
        front = {
            "wall": "front", "import_paths": ["/opt/fumehood"], "command": ["server", "--stdio"],
        }  # fmt: skip
        entry = [*WHOLE["Entrypoint"], json.dumps(front, sort_keys=True)]
        tmpfs["/run/fumehood"] = tmpfs["/run/fumehood"].replace("mode=0755", "mode=1777")
    assert body == {
        **WHOLE,
        "Entrypoint": entry,
        "Cmd": [],
        "User": "10001:10001",
        "WorkingDir": "/workspace",
        "Env": ["HOME=/workspace", *WHOLE["Env"], "TOKEN=t"],
        "HostConfig": {**WHOLE["HostConfig"], "CapAdd": [], "Tmpfs": tmpfs},
    }
