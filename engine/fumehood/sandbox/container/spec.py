"""The specification of a container: every defence that Docker gives, in one readable place.

Host side, pure. From it comes the body of the one call that makes a container, whole: no
default of a library or of the Docker client's configuration is mixed in. Invariant: a value
here may be smaller for a smaller container, and nothing in it can be chosen by a call or a
tool but its memory class.

What Docker itself adds is meant: its default seccomp profile (so no `seccomp=` option), its
masked and read-only paths below /proc and /sys, its AppArmor profile where there is one.
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
from fumehood.sandbox.settings import GUEST_MB

GUEST_COMMAND = ("/usr/bin/python3", "-I", "-S", "-B", "-X", "utf8", "/opt/fumehood/fumehood/guest")
GUEST_IMPORT_PATHS = ("/opt/fumehood",)
CAPABILITIES = ("KILL", "SETGID", "SETPCAP", "SETUID")
"""Capabilities of the guest, to change a child's user and to kill it. The child keeps none. SETPCAP
empties the bounding set, and is given up before anything else.
"""

GUEST_MEMORY_MB = GUEST_MB
"""The memory of the guest itself beside a program, on top of the memory class, where the image
preloads nothing.
"""

GUEST_PROCESSES = 12
"""Processes of the guest: the supervisor, the zygotes, and the children that are ready."""

SPARES = 2
"""Children of the thin zygote that are ready: one for the next call, one for the call after it,
which comes while the next child is still being made."""

GVISOR_MEMORY_MB = 128
GVISOR_PROCESSES = 1024
"""Additional processes and memory of gVisor's kernel, which is inside the container's limits."""

WORKSPACE = "/workspace"
PROGRAM_USER = "10001:10001"
"""Priority of the guest's children."""

INODES_PER_MB = 32
MIN_INODES = 1024
"""Minimum number of inodes. An empty file takes about a kilobyte that no size limit counts."""

LABEL_ENGINE = "fumehood.engine"
LABEL_OWNER = "fumehood.owner"
LABEL_DEADLINE = "fumehood.deadline"
LABEL_IMAGE = "fumehood.image"
LABEL_PID = "fumehood.pid"
LABEL_HOST = "fumehood.host"


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """The values that differ between containers."""

    name: str
    image_id: str
    """`sha256:…`: a name could mean another image tomorrow."""
    image_name: str
    engine_id: str
    owner_id: str
    memory_mb: int
    """The memory class: the limit of a program."""
    cpus: float
    """CPUs of programs and guest together."""
    lifetime_s: float
    """Seconds after which the guest ends itself, even if the engine is gone."""
    deadline: int
    """The same deadline in seconds since 1970, for other engines that find the container."""
    guest_mb: int = GUEST_MEMORY_MB
    """The memory of this image's guest, with its preloaded modules."""
    runtime: str | None = None
    """None is the Docker daemon's default."""
    engine_pid: int | None = None
    """Informational, like `engine_host`: a process id means nothing on another host."""
    engine_host: str = ""

    @property
    def memory_bytes(self) -> int:
        """The limit of the container as a whole."""
        return (self.memory_mb + self.guest_mb + GVISOR_MEMORY_MB * self.is_gvisor) * MB

    @property
    def processes(self) -> int:
        """How many processes and threads the container as a whole may have."""
        return CONTAINER_PROCESSES + GUEST_PROCESSES + GVISOR_PROCESSES * self.is_gvisor

    @property
    def is_gvisor(self) -> bool:
        """Whether the runtime is gVisor, by the name under which it is registered: `runsc`, or
        `runsc-…` where there are several.
        """
        return self.runtime is not None and self.runtime.split("-")[0] == "runsc"

    @property
    def writable_mb(self) -> dict[str, int]:
        """The sizes of the file systems that can be written, by path."""
        return container_writable_mb(self.memory_mb)


def create_body(spec: ContainerSpec, command: tuple[str, ...] = GUEST_COMMAND) -> JsonObject:
    """The body of `POST /containers/create`.

    *Source*: Docker Engine API 1.41, ContainerCreate.
    """
    return {
        "Image": spec.image_id,
        "Entrypoint": list(command),
        "Cmd": [json.dumps(guest_config(spec), sort_keys=True)],
        "Hostname": "sandbox",
        "User": "0:0",  # with these capabilities; programs are another user, without any
        "WorkingDir": "/",
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
        "Labels": _labels(spec),
        "Healthcheck": {"Test": ["NONE"]},
        # The channel: three streams, and the end of the first when the engine is gone.
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
    spec: ContainerSpec, command: tuple[str, ...], env: Mapping[str, str]
) -> JsonObject:
    """The body for a program that the operator configured, without the guest: it is an
    unprivileged user without capabilities from the start."""
    body = create_body(spec, command)
    body["HostConfig"]["CapAdd"] = []
    own = [f"{name}={value}" for name, value in env.items()]
    env_before: list[str] = [f"HOME={WORKSPACE}", *body["Env"]]
    return {
        **body, "Cmd": [], "User": PROGRAM_USER, "WorkingDir": WORKSPACE, "Env": env_before + own,
    }  # fmt: skip


def guest_config(spec: ContainerSpec) -> JsonObject:
    """The guest's configuration. Nothing in it comes from a call."""
    return {
        "wall": "container",
        "import_paths": list(GUEST_IMPORT_PATHS),
        "spares": SPARES,
        "lifetime_s": spec.lifetime_s,
        "memory_bytes": spec.memory_mb * MB,
        "guest_bytes": spec.guest_mb * MB,
        "nofile": CONTAINER_OPEN_FILES,
        "fsize_bytes": spec.writable_mb[WORKSPACE] * MB,
    }


def _labels(spec: ContainerSpec) -> dict[str, str]:
    return {
        LABEL_ENGINE: spec.engine_id,
        LABEL_OWNER: spec.owner_id,
        LABEL_DEADLINE: str(spec.deadline),
        LABEL_IMAGE: spec.image_name,
        LABEL_PID: str(spec.engine_pid or ""),
        LABEL_HOST: spec.engine_host,
    }


def _host_config(spec: ContainerSpec) -> JsonObject:
    config: JsonObject = {
        # Its identity: no relatives, and no shared namespace.
        "Privileged": False,
        "NetworkMode": "none",
        "IpcMode": "none",  # a private one, without Docker's own /dev/shm, which has no inode cap
        "PidMode": "",
        "UTSMode": "",
        "CgroupnsMode": "private",
        # What it may do.
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges:true"],
        "Devices": [],
        # What it may use.
        "Memory": spec.memory_bytes,
        "MemorySwap": spec.memory_bytes,  # memory and swap together: so no swap
        "OomKillDisable": False,
        "NanoCpus": round(spec.cpus * 1_000_000_000),
        "PidsLimit": spec.processes,
        "Ulimits": [
            _ulimit("core", 0),
            _ulimit("fsize", spec.writable_mb[WORKSPACE] * MB),
            _ulimit("msgqueue", 0),
            _ulimit("nofile", CONTAINER_OPEN_FILES),
        ],
        # What it may write.
        "ReadonlyRootfs": True,
        "Tmpfs": {path: _tmpfs(size) for path, size in spec.writable_mb.items()},
        "Binds": [],
        "LogConfig": {"Type": "none", "Config": {}},  # else the channel is written to the disk
        # How it lives: once. It is removed by the engine, which first asks how it ended.
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "AutoRemove": False,
        "Init": False,
    }
    if spec.runtime is not None:
        config["Runtime"] = spec.runtime
    return config


def _tmpfs(size_mb: int) -> str:
    inodes = max(MIN_INODES, size_mb * INODES_PER_MB)
    # Root's, like /tmp anywhere: a program may write, but not close its successor's workspace.
    return f"rw,nosuid,nodev,noexec,size={size_mb}m,nr_inodes={inodes},mode=1777"


def _ulimit(name: str, value: int) -> JsonObject:
    return {"Name": name, "Soft": value, "Hard": value}
