"""The specification of a container: what a runtime must enforce, and the guest's configuration.

Host side, pure functions and values. Invariant: a call or a tool chooses only the image and the
memory class; all other values are fixed, derived or set by the operator.
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
    Grade,
    container_writable_mb,
)
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
class OperatorProgram:
    """A program that the operator configured. It runs as an unprivileged user without capabilities,
    and without a guest.

    `command` and `env` are the program's command and environment variables. If `has_network` is
    True, the container starts a front instead of the program. A front is a process of this software
    that provides network connections and starts the program.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    has_network: bool


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
    """Name of the OCI runtime. None means the default of the container runtime."""
    engine_pid: int | None = None
    """Process id of the engine. It is noted on the container for information only."""
    command: tuple[str, ...] = GUEST_COMMAND
    """The command that starts a process of this software in the container."""
    program: OperatorProgram | None = None
    """A program that runs instead of a guest, or None."""

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
        """Whether the runtime is gVisor."""
        return grade_of(self.runtime) is Grade.KERNEL

    @property
    def writable_mb(self) -> dict[str, int]:
        """Path of each writable file system → its size in MB."""
        sizes = container_writable_mb(self.memory_mb)
        return {**sizes, **({WORKSPACE: self.disk[1]} if self.disk is not None else {})}


def grade_of(runtime: str | None) -> Grade:
    """Return the grade of containers that the OCI runtime with this registered name starts, if all
    limits are enforced. The name of gVisor is `runsc` or `runsc-…`, and `landlock` means no
    namespaces.
    """
    return _GRADES.get((runtime or "").split("-")[0], Grade.NAMESPACES)


_GRADES = {"runsc": Grade.KERNEL, "landlock": Grade.PROCESS}


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
        "is_watched": False,
        "watched_outside": [],
    }


def relay_command(epoch: int) -> tuple[str, ...]:
    """Return the command that connects an engine to the guest of a container that already runs. The
    engine must run this command in the container. The command then passes data between its own
    standard streams and the guest.

    `epoch` is the number of the engine among the engines that the container's session has had.
    """
    config = {"wall": "relay", "import_paths": list(GUEST_IMPORT_PATHS), "epoch": epoch}
    return (*GUEST_COMMAND, json.dumps(config, sort_keys=True))


def labels_of(spec: ContainerSpec) -> dict[str, str]:
    """Return the labels by which engines recognize a container, and know when it is lost."""
    return {
        LABEL_ENGINE: spec.engine_id,
        LABEL_OWNER: spec.owner_id,
        LABEL_DEADLINE: str(spec.deadline),
        LABEL_IMAGE: spec.image_name,
        LABEL_PID: str(spec.engine_pid or ""),
    }
