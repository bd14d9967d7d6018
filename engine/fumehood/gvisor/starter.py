"""Starts and changes a sandbox of gVisor with the program runsc.

Host side, standard library only: the launcher imports this module. Each function returns a command
for the launcher to run, or looks at a running sandbox. Everything of a sandbox is in a directory of
its own, which the launcher removes: the bundle, the state and the log of runsc. A bundle describes
a container in the form of OCI. Invariant: what a caller or a program chooses is only in the
environment and the arguments of the first process.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from fumehood.direct.sandbox import PLACE

PROGRAM = "runsc"

ROOT, DISK, FOLDER = (f"{PLACE}/{name}" for name in ("root", "disk", "folder"))
"""Where a command finds the root file system, the disk and the directory of a sandbox. *Source*:
`direct/launcher.py`.
"""

BUNDLE, STATE, PID_FILE, ENTERED, LOG = "bundle", "state", "pid", "entered", "log"
"""What is in the directory of a sandbox."""

RUNSC = (
    PROGRAM, "--rootless", f"--root={FOLDER}/{STATE}", f"--log={FOLDER}/{LOG}", "--network=none",
    "--ignore-cgroups", "--host-uds=none", "--overlay2=none",
)  # fmt: skip
"""The beginning of each command. The launcher sets the limits itself."""

LAST_WORDS_BYTES = 1000
"""Maximum length of what an error quotes from the log of runsc."""

MEMORY = "/memfd:runsc-memory"
"""How the name of the file begins in which gVisor keeps the memory of its programs. *Source*:
gVisor, runsc/boot/loader.go, createMemoryFile.
"""

RUNNING, PAUSED = b'"status": "running"', b'"status": "paused"'
"""Words in the state of a sandbox that runs or is frozen."""

CAPABILITIES = {5: "CAP_KILL", 6: "CAP_SETGID", 7: "CAP_SETUID", 8: "CAP_SETPCAP"}
"""*Source*: <linux/capability.h>."""

RLIMITS = ("CORE", "FSIZE", "NOFILE", "SIGPENDING", "MEMLOCK")
"""The limits of a plan that gVisor's own kernel has."""


def prepare(plan: dict[str, Any], folder: str) -> None:
    """Write the bundle of a plan to the directory `folder`."""
    os.mkdir(f"{folder}/{BUNDLE}", 0o700)
    with open(f"{folder}/{BUNDLE}/config.json", "w", encoding="utf-8") as file:
        json.dump(bundle_of(plan), file)


def start_command(name: str) -> list[str]:
    """Return the command that starts a sandbox. It ends when the sandbox runs."""
    files = [f"--bundle={FOLDER}/{BUNDLE}", f"--pid-file={FOLDER}/{PID_FILE}"]
    return [*RUNSC, "run", "--detach", *files, name]


def freeze_command(name: str, *, frozen: bool) -> list[str]:
    """Return the command that freezes or thaws a sandbox."""
    return [*RUNSC, "pause" if frozen else "resume", name]


def state_command(name: str) -> list[str]:
    """Return the command that prints the state of a sandbox. It contains `RUNNING` or `PAUSED`."""
    return [*RUNSC, "state", name]


def enter_command(name: str, command: list[str]) -> list[str]:
    """Return the command that runs `command` as root in a sandbox, and ends when it has begun."""
    # It waits for this file, which it would do without a name for it also.
    return [*RUNSC, "exec", "--detach", f"--pid-file={FOLDER}/{ENTERED}", name, *command]


def pid_of(folder: str) -> int:
    """Return the process id of a sandbox that was started. Raises OSError or ValueError."""
    with open(f"{folder}/{PID_FILE}", encoding="ascii") as file:
        return int(file.read())


def last_words(folder: str) -> str:
    """Return the end of what runsc has written to its log."""
    try:
        with open(f"{folder}/{LOG}", "rb") as file:
            return file.read()[-LAST_WORDS_BYTES:].decode("utf-8", "replace").strip()
    except OSError:
        return ""


def memory_bytes(pid: int) -> int:
    """Return the memory in bytes that a sandbox uses: that of its programs and files, and that of
    gVisor's own kernel.

    Raises:
        OSError: it is unknown, also if the sandbox has ended.
    """
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        shown = dict(line.split(":", 1) for line in file if ":" in line)
    own = sum(int(shown.get(name, "0 kB").split()[0]) for name in ("RssAnon", "VmSwap", "VmPTE"))
    files = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(path).startswith(MEMORY):
                found = os.stat(path)
                files[found.st_ino] = found.st_blocks * 512
    if not files:
        raise OSError("gVisor's memory is not found")
    return own * 1024 + sum(files.values())


def is_of(command: list[str], name: str) -> bool:
    """Return whether a process with this command line starts or runs the sandbox `name`."""
    return command[-1:] == [name] and f"--root={FOLDER}/{STATE}" in command


def bundle_of(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a plan's container. *Source*: OCI Runtime Specification 1.0."""
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
    ]
    for path, (size_mb, _, mode) in plan["tmpfs"].items():
        options = ["nosuid", "nodev", "noexec", f"size={size_mb}m", f"mode={mode}"]
        mounts.append({"destination": path, "type": "tmpfs", "source": "tmpfs", "options": options})
    if plan["disk"]:
        mounts.append(
            {"destination": plan["disk"][2], "type": "bind", "source": DISK,
             "options": ["rw", "nosuid", "nodev"]}
        )  # fmt: skip
    capabilities = [CAPABILITIES[number] for number in plan["capabilities"]]
    kinds = ("bounding", "effective", "permitted")
    limits = [(name, plan["rlimits"][name]) for name in RLIMITS if name in plan["rlimits"]]
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": ROOT, "readonly": plan["changes"] is None},
        "mounts": mounts,
        "process": {
            "terminal": False,
            "user": {"uid": plan["user"], "gid": plan["user"]},
            "args": plan["command"],
            "env": [f"{name}={value}" for name, value in plan["env"].items()],
            "cwd": plan["directory"],
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(kinds, capabilities),
            "rlimits": [
                {"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in limits
            ],
        },
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
        },
    }
