"""The plan of a sandbox: everything that the launcher must know to start it.

Host side, pure functions. Invariant: all limits and rights of a sandbox are in its plan.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.direct.filter import build_outer_filter
from fumehood.protocol.framing import TRUST_DIRECTORY
from fumehood.sandbox.container.spec import (
    CAPABILITIES,
    GUEST_IMPORT_PATHS,
    GUEST_OPEN_FILES,
    INODES_PER_MB,
    MASKED_PATHS,
    PROGRAM_USER,
    WORKSPACE,
    ContainerSpec,
    guest_config,
    labels_of,
)

READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Paths that nobody in a sandbox can write to. *Source*: Moby 28, oci/defaults.go."""

CAPABILITY_NUMBERS = {"KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8, "SYS_PTRACE": 19}
"""*Source*: <linux/capability.h>."""

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}

_COMMON: JsonObject = {
    "masked": list(MASKED_PATHS),
    "read_only": list(READ_ONLY_PATHS),
}

MOUNT_POINTS = ("dev", "proc", "sys", "tmp", WORKSPACE[1:], TRUST_DIRECTORY[1:])
"""Directories that a root file system must have, because something is mounted there."""

SIGNALS = 1024
"""Maximum number of signals that wait for the processes of a sandbox."""

STEP_MEMORY_BYTES = 1 << 30
STEP_PROCESSES = 64
"""The limits of a build step: those of its memory, and of the number of its processes."""

WATCHED_STEP_PROCESSES = 16
"""The number of processes of a build step whose processes have no common limit on memory."""

_NO_PRIORITY: JsonObject = {"RTPRIO": 0, "NICE": 0, "MEMLOCK": 65_536}
"""Limits that the engine's user may have raised for desktop programs."""


def plan_of(
    spec: ContainerSpec,
    layers: Sequence[Path],
    device: str | None,
    *,
    is_watched: bool,
    with_host: bool = False,
    starter: str | None = None,
) -> JsonObject:
    """Return the plan of a sandbox. `layers` are the directories of its image's layers, and
    `device` is the block device of its disk. `with_host` says whether the sandbox has the programs
    and libraries of the host. `is_watched` says that the host has no control groups, so that the
    guest must watch the memory itself. With a `starter` (the name of a module), the launcher
    watches it.
    """
    tmpfs: JsonObject = {
        path: [size, size * INODES_PER_MB, "1777"]
        for path, size in spec.writable_mb.items()
        if spec.disk is None or path != WORKSPACE
    }
    has_front = spec.program is not None and spec.program.has_network
    tmpfs[TRUST_DIRECTORY] = [1, 8, "1777" if has_front else "0755"]
    return {
        "name": spec.name,
        "starter": starter,
        "labels": labels_of(spec),
        "image_id": spec.image_id,
        "layers": [str(layer) for layer in layers],
        "with_host": with_host,
        "changes": None,
        "rlimits": {
            "CORE": 0,
            "FSIZE": spec.writable_mb[WORKSPACE] * MB,
            "MSGQUEUE": 0,
            "NOFILE": GUEST_OPEN_FILES,
            **_NO_PRIORITY,
            # They count for the host's root also, because its launcher makes the user namespace.
            "SIGPENDING": SIGNALS,
        },
        "tmpfs": tmpfs,
        "disk": [spec.disk[0], device, WORKSPACE] if spec.disk is not None else None,
        **_COMMON,
        "filter": build_outer_filter(may_compare=is_watched).hex() if starter is None else "",
        "memory_bytes": spec.memory_bytes,
        "processes": spec.processes,
        "cpus": spec.cpus,
        "is_watched": is_watched,
        **_command_of(spec, is_watched=is_watched, is_looked_at=starter is not None),
    }


def step_plan(
    name: str,
    command: Sequence[str],
    layers: Sequence[Path],
    *,
    upper: Path,
    work: Path,
    is_watched: bool,
    with_host: bool = False,
    starter: str | None = None,
) -> JsonObject:
    """Return the plan of a build step, which runs `command` as root without capabilities. What it
    changes in the root file system gets into the directory `upper`. `work` is an empty directory on
    the same file system, for overlayfs.
    """
    return {
        "name": name,
        "starter": starter,
        "labels": {},
        "image_id": name,
        "layers": [str(layer) for layer in layers],
        "with_host": with_host,
        "changes": [str(upper), str(work)],
        "rlimits": {
            "CORE": 0,
            "MSGQUEUE": 0,
            "SIGPENDING": SIGNALS,
            **_NO_PRIORITY,
            **({"AS": STEP_MEMORY_BYTES, "NPROC": WATCHED_STEP_PROCESSES} if is_watched else {}),
        },
        "tmpfs": {"/tmp": [256, 65_536, "1777"], "/dev/shm": [64, 1024, "1777"]},  # noqa: S108
        "disk": None,
        **_COMMON,
        "filter": build_outer_filter(counts_memory=is_watched).hex(),
        "memory_bytes": STEP_MEMORY_BYTES,
        "processes": STEP_PROCESSES,
        "cpus": float(os.cpu_count() or 1),
        "is_watched": is_watched,
        "command": list(command),
        "env": ENVIRONMENT,
        "directory": "/",
        "user": 0,
        "capabilities": [],
    }


def _command_of(spec: ContainerSpec, *, is_watched: bool, is_looked_at: bool) -> JsonObject:
    """Return what runs in the sandbox, and with which privileges. `is_looked_at` says that the
    launcher watches the memory if anybody must.
    """
    program = spec.program
    if program is None:
        config: JsonObject = {**guest_config(spec), "is_watched": is_watched and not is_looked_at}
        if is_watched and is_looked_at:
            config["watched_outside"] = ["memory"]
        is_watched = config["is_watched"]
        return {
            "command": [*spec.command, json.dumps(config, sort_keys=True)],
            "env": ENVIRONMENT,
            "directory": "/",
            "user": 0,
            "capabilities": [
                CAPABILITY_NUMBERS[name]
                for name in (*CAPABILITIES, *(["SYS_PTRACE"] if is_watched else []))
            ],
        }
    command = list(program.command)
    if program.has_network:
        config = {"wall": "front", "import_paths": list(GUEST_IMPORT_PATHS), "command": command}
        command = [*spec.command, json.dumps(config, sort_keys=True)]
    return {
        "command": command,
        "env": {"HOME": WORKSPACE, **ENVIRONMENT, **program.env},
        "directory": WORKSPACE,
        "user": int(PROGRAM_USER.partition(":")[0]),
        "capabilities": [],
    }
