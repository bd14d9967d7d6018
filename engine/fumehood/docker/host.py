"""The requirements on Docker and its host.

Host side, pure functions except `may_swap` and `is_installed`. Docker only warns about a limit that
the operating system cannot enforce. So these requirements are checked before containers are
created. A property that Docker does not report counts as missing.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.runtime import Unfit

DEFAULT_SOCKET = "/var/run/docker.sock"
"""The socket of a Docker daemon on this host."""

LIMITS = {"MemoryLimit": "memory", "CpuCfsQuota": "cpu", "PidsLimit": "pids"}
"""Field of Docker's system information → the cgroup controller that enforces the limit."""


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The result of checking one requirement on the host. `found` describes what the host has.
    `unfit` says why the host does not meet the requirement, or is None if it does.
    """

    name: str
    found: str
    unfit: Unfit | None = None


def is_installed() -> bool:
    """Return whether this user has a Docker, even if it does not run now: `DOCKER_HOST` names one,
    this user may open the socket, or the daemon is installed and its socket does not exist.
    """
    if os.environ.get("DOCKER_HOST"):
        return True
    if Path(DEFAULT_SOCKET).exists():
        return os.access(DEFAULT_SOCKET, os.R_OK | os.W_OK)
    return shutil.which("dockerd") is not None


def host_checks(
    info: JsonObject, *, runtime: str | None, has_swap: bool | None
) -> tuple[HostCheck, ...]:
    """Check all requirements on Docker's host, and return one result for each. `info` is Docker's
    system information, and `runtime` the configured OCI runtime. `has_swap` says whether the host
    has swap space; None means that this is unknown.

    *Source*: Docker Engine API 1.41, SystemInfo.
    """
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    return (
        _system(info),
        _control_groups(info, options),
        _swap(info, has_swap),
        _seccomp(options),
        _runtimes(info, runtime),
    )


def why_unfit(info: JsonObject, *, runtime: str | None, has_swap: bool | None) -> Unfit | None:
    """Return the first fault that `host_checks` finds with these arguments, or None if Docker's
    host meets all requirements.
    """
    checks = host_checks(info, runtime=runtime, has_swap=has_swap)
    return next((check.unfit for check in checks if check.unfit is not None), None)


def may_swap(*, is_local: bool) -> bool | None:
    """Return whether Docker's host has swap space. `is_local` says whether Docker's host is this
    machine. If it is not, the answer is unknown, and the result is None.
    """
    try:
        swaps = Path("/proc/swaps").read_text(encoding="ascii") if is_local else None
    except (OSError, UnicodeDecodeError):
        return None
    return len(swaps.splitlines()) > 1 if swaps is not None else None


def _system(info: JsonObject) -> HostCheck:
    unfit = Unfit("Docker does not run Linux containers.", "Use a Docker engine on Linux.")
    system = str(info.get("OSType"))
    return HostCheck("system", system, unfit if system != "linux" else None)


def _control_groups(info: JsonObject, options: list[str]) -> HostCheck:
    missing = [name for field, name in LIMITS.items() if info.get(field) is not True]
    version, driver = str(info.get("CgroupVersion") or "1"), info.get("CgroupDriver")
    unfit = None
    if any(option.startswith("name=rootless") for option in options):
        if missing or version != "2" or driver in (None, "", "none"):
            unfit = Unfit(
                "Rootless Docker may not limit anything here.",
                "Rootless Docker needs cgroup version 2 and systemd's delegation of the "
                "controllers cpu, memory and pids to its user; or use Docker with root.",
            )
    elif missing:
        unfit = Unfit(
            f"Docker cannot limit {', '.join(missing)} on this host.",
            "The kernel must offer these cgroup controllers (kernel parameter cgroup_enable=…), "
            "and Docker must be let use them: `docker info` says which are missing.",
        )
    return HostCheck("cgroups", f"v{version}, limits on memory, processes and CPU", unfit)


def _swap(info: JsonObject, has_swap: bool | None) -> HostCheck:
    if info.get("SwapLimit") is True:
        return HostCheck("swap", "is part of the memory limit")
    if has_swap is False:
        return HostCheck("swap", "there is none")
    there = "This host has swap space" if has_swap else "Whether this host has swap is unknown"
    unfit = Unfit(
        f"{there}, and Docker does not count it, so no memory limit would hold.",
        "Disable it (swapoff --all), or on cgroup v1 boot with swapaccount=1.",
    )
    return HostCheck("swap", there, unfit)


def _seccomp(options: list[str]) -> HostCheck:
    profiles = [option for option in options if option.startswith("name=seccomp")]
    if profiles and not any("profile=unconfined" in option for option in profiles):
        return HostCheck("seccomp", "Docker's profile is used")
    unfit = Unfit(
        "Docker runs containers without a filter of system calls.",
        "Use a kernel with seccomp, and start dockerd without seccomp-profile=unconfined.",
    )
    return HostCheck("seccomp", "no profile", unfit)


def _runtimes(info: JsonObject, runtime: str | None) -> HostCheck:
    known = info.get("Runtimes") or {}
    names = sorted(name for name in known if not name.startswith("io."))
    found = f"{', '.join(names)} (default: {info.get('DefaultRuntime')})"
    if runtime is None:
        return HostCheck("runtimes", found)
    unfit = Unfit(
        f"Docker knows no runtime {runtime!r}.",
        "Register it in Docker's configuration (daemon.json, runtimes), or set container.runtime "
        "to one that it knows.",
    )
    return HostCheck("runtimes", f"{found}, used: {runtime}", None if runtime in known else unfit)
