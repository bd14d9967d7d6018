"""The specification of a container: every Docker setting that protects the host, in one place.

Host side, pure functions and values. This module builds the complete body of the request that
creates a container. So neither the defaults of a library nor the configuration of the Docker client
can change it. Invariant: a call or a tool chooses only the image and the memory class; all other
values are fixed, derived or set by the operator.

Some of Docker's own defaults are used on purpose: its seccomp profile (so there is no `seccomp=`
option), its read-only paths below /proc and /sys, and its AppArmor profile if the host has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import (
    CONTAINER_OPEN_FILES,
    CONTAINER_PROCESSES,
    MB,
    container_writable_mb,
)
from fumehood.protocol.framing import TRUST_DIRECTORY
from fumehood.sandbox.settings import GUEST_MB

GUEST_COMMAND = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "/opt/fumehood/fumehood/guest")
GUEST_IMPORT_PATHS = ("/opt/fumehood",)
CAPABILITIES = ("KILL", "SETGID", "SETPCAP", "SETUID")
"""Capabilities of the guest, which it needs to change the user of a child and to kill it. A child
keeps none. The guest uses SETPCAP only at its start, to empty the bounding set, and then drops it.
"""

GUEST_PROCESSES = 12
"""Number of processes that the guest itself needs: the supervisor, the zygotes, and ready
children.
"""

SPARES = 2
"""Number of ready children of the zygote without preloaded modules. One is for the next call, and
one for a call that arrives while a new child is being created.
"""

GVISOR_MEMORY_MB = 128
GVISOR_PROCESSES = 1024
"""Memory in MB and number of processes that gVisor's own kernel needs. They count against the
container's limits.
"""

WORKSPACE = "/workspace"
PROGRAM_USER = "10001:10001"
"""User id and group id of a program that the operator configured. Such a program runs without a
guest.
"""

MASKED_PATHS = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
    "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list",
    "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
    "/proc/pressure",
)  # fmt: skip
"""Paths that programs find empty. They are Docker's own list, because a list in the request
replaces it (*Source*: Moby 28, oci/defaults.go), and `/proc/pressure`. The latter shows the load of
the host, which otherwise any process could read and make the operating system monitor.
"""

INODES_PER_MB = 32
"""Number of files that are allowed for each MB of a file system. An empty file takes about a
kilobyte of memory that the size limit does not count.
"""

LABEL_ENGINE = "fumehood.engine"
LABEL_OWNER = "fumehood.owner"
LABEL_DEADLINE = "fumehood.deadline"
LABEL_IMAGE = "fumehood.image"
LABEL_PID = "fumehood.pid"


GUEST_OPEN_FILES = 1024
"""Maximum number of open files of the guest. It needs them for the connections of a program with
network. The guest lowers the limit of each child to `CONTAINER_OPEN_FILES`.
"""


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The settings in which one container differs from another."""

    name: str
    image_id: str
    """The image's id, `sha256:…`. A name is not used, because it could be given to another
    image.
    """
    image_name: str
    engine_id: str
    owner_id: str
    memory_mb: int
    """The memory class, in MB. This is the memory limit of a program."""
    cpus: float
    """Maximum number of processors for programs and guest together."""
    lifetime_s: float
    """Seconds after which the guest ends itself, even if the engine is gone."""
    deadline: int
    """The time when `lifetime_s` is over, in seconds since 1970. Other engines that find the
    container use it.
    """
    guest_mb: int = GUEST_MB
    """Memory for the guest, in MB. It depends on the modules that the image preloads."""
    disk: tuple[str, int] | None = None
    """The volume of the working directory and its size in MB. None if the working directory is in
    memory.
    """
    runtime: str | None = None
    """Name of the OCI runtime. None means the default of the Docker daemon."""
    engine_pid: int | None = None
    """Process id of the engine. It is noted on the container for information only."""

    @property
    def memory_bytes(self) -> int:
        """The memory limit of the whole container, in bytes."""
        return (self.memory_mb + self.guest_mb + GVISOR_MEMORY_MB * self.is_gvisor) * MB

    @property
    def processes(self) -> int:
        """Maximum number of processes and threads in the whole container."""
        return CONTAINER_PROCESSES + GUEST_PROCESSES + GVISOR_PROCESSES * self.is_gvisor

    @property
    def is_gvisor(self) -> bool:
        """Whether the runtime is gVisor. This is recognized by the runtime's registered name,
        `runsc` or `runsc-…`.
        """
        return self.runtime is not None and self.runtime.split("-")[0] == "runsc"

    @property
    def writable_mb(self) -> dict[str, int]:
        """Path of each writable file system → its size in MB."""
        sizes = container_writable_mb(self.memory_mb)
        return {**sizes, **({WORKSPACE: self.disk[1]} if self.disk is not None else {})}


def create_body(spec: ContainerSpec, command: tuple[str, ...] = GUEST_COMMAND) -> JsonObject:
    """Return the body of the request `POST /containers/create` for a container with a guest.

    *Source*: Docker Engine API 1.41, ContainerCreate.
    """
    return {
        "Image": spec.image_id,
        "Entrypoint": list(command),
        "Cmd": [json.dumps(guest_config(spec), sort_keys=True)],
        "Hostname": "sandbox",
        "User": "0:0",  # with CAPABILITIES only; programs run as another user
        "WorkingDir": "/",
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
        "Labels": _labels(spec),
        "Healthcheck": {"Test": ["NONE"]},
        # The channel consists of three streams. Stdin closes when the engine disconnects.
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "NetworkDisabled": True,
        "HostConfig": _host_config(spec),
    }


def program_body(
    spec: ContainerSpec, command: tuple[str, ...], env: Mapping[str, str], *, has_network: bool
) -> JsonObject:
    """Return the body of the request `POST /containers/create` for a container that runs a program
    of the operator. `command` and `env` are the program's command and environment variables.

    The program runs as an unprivileged user without capabilities, and without a guest. If
    `has_network` is True, the container starts a front instead of the program. A front is a process
    of this software that provides network connections and starts the program.
    """
    if has_network:
        config = {"wall": "front", "import_paths": list(GUEST_IMPORT_PATHS), "command": command}
        command = (*GUEST_COMMAND, json.dumps(config, sort_keys=True))
    body = create_body(spec, command)
    body["HostConfig"]["CapAdd"] = []
    if has_network:  # the front runs as the same user as the program
        body["HostConfig"]["Tmpfs"][TRUST_DIRECTORY] = _TRUST_TMPFS.format(mode="1777")
    own = [f"{name}={value}" for name, value in env.items()]
    env_before: list[str] = [f"HOME={WORKSPACE}", *body["Env"]]
    return {
        **body, "Cmd": [], "User": PROGRAM_USER, "WorkingDir": WORKSPACE, "Env": env_before + own,
    }  # fmt: skip


def guest_config(spec: ContainerSpec) -> JsonObject:
    """Return the configuration of a container's guest. No value in it comes from a call."""
    return {
        "wall": "container",
        "import_paths": list(GUEST_IMPORT_PATHS),
        "spares": SPARES,
        "lifetime_s": spec.lifetime_s,
        "memory_bytes": spec.memory_mb * MB,
        "guest_bytes": spec.guest_mb * MB,
        "nofile": CONTAINER_OPEN_FILES,
        "processes": CONTAINER_PROCESSES,
        "fsize_bytes": spec.writable_mb[WORKSPACE] * MB,
        "disk_bytes": spec.disk[1] * MB if spec.disk is not None else 0,
    }


def relay_command(epoch: int, command: tuple[str, ...] = GUEST_COMMAND) -> tuple[str, ...]:
    """Return the command that connects an engine to the guest of a container that already runs. The
    engine must run this command in the container. The command then passes data between its own
    standard streams and the guest.

    `epoch` is the number of the engine among the engines that the container's session has had.
    `command` is the command that starts a guest.
    """
    config = {"wall": "relay", "import_paths": list(GUEST_IMPORT_PATHS), "epoch": epoch}
    return (*command, json.dumps(config, sort_keys=True))


def _labels(spec: ContainerSpec) -> dict[str, str]:
    return {
        LABEL_ENGINE: spec.engine_id,
        LABEL_OWNER: spec.owner_id,
        LABEL_DEADLINE: str(spec.deadline),
        LABEL_IMAGE: spec.image_name,
        LABEL_PID: str(spec.engine_pid or ""),
    }


_TRUST_TMPFS = "rw,nosuid,nodev,noexec,size=1m,nr_inodes=8,mode={mode}"


def _host_config(spec: ContainerSpec) -> JsonObject:
    config: JsonObject = {
        # Isolation: no shared namespaces.
        "Privileged": False,
        "NetworkMode": "none",
        "IpcMode": "none",  # private, without Docker's /dev/shm, whose inodes are unlimited
        "PidMode": "",
        "UTSMode": "",
        "CgroupnsMode": "private",
        # Privileges.
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges:true"],
        "MaskedPaths": list(MASKED_PATHS),
        "Devices": [],
        # Resources.
        "Memory": spec.memory_bytes,
        "MemorySwap": spec.memory_bytes,  # the total of memory and swap: so no swap
        "OomKillDisable": False,
        "NanoCpus": round(spec.cpus * 1_000_000_000),
        "PidsLimit": spec.processes,
        "Ulimits": [
            _ulimit("core", 0),
            _ulimit("fsize", spec.writable_mb[WORKSPACE] * MB),
            _ulimit("msgqueue", 0),
            _ulimit("nofile", GUEST_OPEN_FILES),
        ],
        # Writable places.
        "ReadonlyRootfs": True,
        "Tmpfs": {
            **{
                path: _tmpfs(size)
                for path, size in spec.writable_mb.items()
                if spec.disk is None or path != WORKSPACE
            },
            # For the file with trusted certificates, which the guest writes and programs read.
            TRUST_DIRECTORY: _TRUST_TMPFS.format(mode="0755"),
        },
        "Binds": [],
        "LogConfig": {"Type": "none", "Config": {}},  # otherwise Docker logs the channel to disk
        # Start it only once. The engine removes it after reading how it ended.
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": False,
        "Init": False,
    }
    if spec.disk is not None:
        config["Mounts"] = [_volume(spec.disk[0])]
    if spec.runtime is not None:
        config["Runtime"] = spec.runtime
    return config


def _tmpfs(size_mb: int) -> str:
    # Owned by root with the sticky bit, like /tmp: a program can write here, but cannot change the
    # directory's mode, which would lock out the next program.
    return f"rw,nosuid,nodev,noexec,size={size_mb}m,nr_inodes={size_mb * INODES_PER_MB},mode=1777"


def _volume(name: str) -> JsonObject:
    # Its files can be executed. It is mounted with `nosuid` and `nodev` (see `disks`).
    return {
        "Type": "volume", "Source": name, "Target": WORKSPACE, "ReadOnly": False,
        "VolumeOptions": {"NoCopy": True},
    }  # fmt: skip


def _ulimit(name: str, value: int) -> JsonObject:
    return {"Name": name, "Soft": value, "Hard": value}
