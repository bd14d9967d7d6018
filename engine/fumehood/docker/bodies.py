"""The body of the request that creates a container in Docker: every setting that protects the host,
in one place.

Host side, pure functions. The body is complete. So neither the defaults of a library nor the
configuration of the Docker client can change it.

Some of Docker's own defaults are used on purpose: its seccomp profile (so there is no `seccomp=`
option), its read-only paths below /proc and /sys, and its AppArmor profile if the host has one.
"""

from __future__ import annotations

import json

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
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
    OperatorProgram,
    guest_config,
    labels_of,
)


def create_body(spec: ContainerSpec) -> JsonObject:
    """Return the body of the request `POST /containers/create`.

    *Source*: Docker Engine API 1.41, ContainerCreate.
    """
    if spec.program is not None:
        return _program_body(spec, spec.program)
    return {
        **_body(spec),
        "Entrypoint": list(spec.command),
        "Cmd": [json.dumps(guest_config(spec), sort_keys=True)],
    }


def _body(spec: ContainerSpec) -> JsonObject:
    return {
        "Image": spec.image_id,
        "Hostname": "sandbox",
        "User": "0:0",  # with CAPABILITIES only; programs run as another user
        "WorkingDir": "/",
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
        "Labels": labels_of(spec),
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


def _program_body(spec: ContainerSpec, program: OperatorProgram) -> JsonObject:
    command = program.command
    if program.has_network:
        config = {"wall": "front", "import_paths": list(GUEST_IMPORT_PATHS), "command": command}
        command = (*spec.command, json.dumps(config, sort_keys=True))
    body = _body(spec)
    body["HostConfig"]["CapAdd"] = []
    if program.has_network:  # the front runs as the same user as the program
        body["HostConfig"]["Tmpfs"][TRUST_DIRECTORY] = _TRUST_TMPFS.format(mode="1777")
    own = [f"{name}={value}" for name, value in program.env.items()]
    env_before: list[str] = [f"HOME={WORKSPACE}", *body["Env"]]
    return {
        **body, "Entrypoint": list(command), "Cmd": [], "User": PROGRAM_USER,
        "WorkingDir": WORKSPACE, "Env": env_before + own,
    }  # fmt: skip


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
    # Its files can be executed. It is mounted with `nosuid` and `nodev` (see `Docker.attach_disk`).
    return {
        "Type": "volume", "Source": name, "Target": WORKSPACE, "ReadOnly": False,
        "VolumeOptions": {"NoCopy": True},
    }  # fmt: skip


def _ulimit(name: str, value: int) -> JsonObject:
    return {"Name": name, "Soft": value, "Hard": value}
