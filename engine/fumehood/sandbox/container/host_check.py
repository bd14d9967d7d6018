"""The requirements on Docker and its host for the container wall.

Host side, pure: from Docker's description of itself. Docker goes on without limits that its
kernel lacks, with no more than a warning; so they are checked first. Invariant: a fact that Docker
does not report counts as missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.core.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class Unfit:
    """The reason why a host cannot have this wall, and the remedy. For callers."""

    fault: str
    remedy: str
    heals: bool = False
    """Whether it may pass without an operator, so that repeating a call makes sense."""


def why_unfit(info: JsonObject, *, runtime: str | None, has_swap: bool) -> Unfit | None:
    """The first missing requirement, or None.

    `has_swap` says whether the host has any, or might have.

    *Source*: Docker Engine API 1.41, SystemInfo.
    """
    if info.get("OSType") != "linux":
        return Unfit("Docker does not run Linux containers.", "Use one that does.")
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    return (
        _rootless(info, options)
        or _limits(info, has_swap=has_swap)
        or _seccomp(options)
        or _runtime(info, runtime)
    )


def _rootless(info: JsonObject, options: list[str]) -> Unfit | None:
    is_rootless = any(option.startswith("name=rootless") for option in options)
    if not is_rootless:
        return None
    if str(info.get("CgroupVersion")) != "2" or info.get("CgroupDriver") in (None, "", "none"):
        return Unfit(
            "Rootless Docker may not limit anything here.",
            "Rootless Docker needs cgroup version 2 and systemd's delegation of the controllers "
            "cpu, memory and pids to its user; or use Docker with root.",
        )
    return None


def _limits(info: JsonObject, *, has_swap: bool) -> Unfit | None:
    needed = {"MemoryLimit": "memory", "CpuCfsQuota": "cpu", "PidsLimit": "pids"}
    missing = [name for field, name in needed.items() if info.get(field) is not True]
    if missing:
        return Unfit(
            f"Docker cannot limit {', '.join(missing)} on this host.",
            "The kernel must offer these cgroup controllers, and Docker must be let use them "
            "(`docker info` says which are missing).",
        )
    if has_swap and info.get("SwapLimit") is not True:
        return Unfit(
            "This host has swap space and does not count it, so no memory limit would hold.",
            "Boot with swapaccount=1, or switch the swap off.",
        )
    return None


def _seccomp(options: list[str]) -> Unfit | None:
    profiles = [option for option in options if option.startswith("name=seccomp")]
    if profiles and not any("profile=unconfined" in option for option in profiles):
        return None
    return Unfit(
        "Docker runs containers without a filter of system calls.",
        "The kernel must offer seccomp filters, and Docker must not be told to be unconfined.",
    )


def _runtime(info: JsonObject, runtime: str | None) -> Unfit | None:
    if runtime is None or runtime in (info.get("Runtimes") or {}):
        return None
    return Unfit(
        f"Docker knows no runtime {runtime!r}.",
        "Register it in Docker's configuration (daemon.json, runtimes), or set container.runtime "
        "to one that it knows.",
    )
