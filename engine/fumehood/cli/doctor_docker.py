"""Docker's part of `fumehood doctor`: what containers would miss here, each with its cure.

Without Docker everything but containers works, so nothing here is `missing`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from docker.errors import DockerException
from requests.exceptions import RequestException

from fumehood.cli.finding import Finding
from fumehood.config import ContainerConfig, SessionsConfig
from fumehood.core.limits import MB
from fumehood.sandbox.container.reach import DockerUnreachable, docker_address, open_docker
from fumehood.sandbox.images.catalog import Image, list_images, newest_own
from fumehood.sandbox.images.recipe import image_names

JsonMapping = Mapping[str, Any]

MAX_IMAGE_AGE = timedelta(days=30)
CONTAINER_BYTES = (512 + 32) * MB
"""A container of the default class and what the guest adds."""

MIN_DISK_BYTES = 1 << 30
"""An image while it is built."""

COMPONENTS = ("containerd", "runc")
"""Parts of Docker shown with their versions."""

UNIFIED = Path("/sys/fs/cgroup/unified")


def docker_findings(
    settings: ContainerConfig, sessions: SessionsConfig, own: Path | None = None
) -> Iterator[Finding]:
    """Everything about Docker and the images, and whether it has what the configuration names;
    or why it is not there. `own` is where the operator's own images are.
    """
    try:
        client = open_docker()
    except DockerUnreachable as error:
        words = f"{error.found} Containers are unavailable."
        yield Finding("docker", "warning", words, error.cure)
        return
    try:
        version, info = client.version(), client.info()
        images = {name: list_images(client, name, own=own) for name in image_names(own=own)}
    except (DockerException, RequestException) as error:
        found = f"it answers, then fails ({type(error).__name__})"
        yield Finding("docker", "warning", found, "See the log of dockerd.")
        return
    finally:
        client.close()
    local = docker_address().startswith("unix://")
    yield _engine(version, info)
    yield _control_groups(info, hybrid=local and UNIFIED.is_dir())
    yield _swap(info, swap_bytes=psutil.swap_memory().total if local else None)
    yield _seccomp(info)
    yield _runtimes(info, settings.runtime)
    used = {f"container.images.{language}": name for language, name in settings.images}
    used["sessions.image"] = sessions.image
    for name, found_images in images.items():
        is_used = name in used.values()
        yield image_finding(name, found_images, datetime.now(UTC), is_used=is_used)
    for setting, name in used.items():
        if name not in images:
            cure = f"Set {setting} to one that there is: {', '.join(images)}."
            yield Finding(f"image: {name}", "warning", "there is none of this name", cure)
    yield _memory(info, available=psutil.virtual_memory().available if local else None)
    if local:
        yield _disk(Path(str(info.get("DockerRootDir") or "/")))


def _engine(version: JsonMapping, info: JsonMapping) -> Finding:
    rootless = ", rootless" if _has_option(info, "rootless") else ""
    parts = {str(part.get("Name")): part.get("Version") for part in version.get("Components") or ()}
    known = "".join(f", {name} {parts[name]}" for name in COMPONENTS if parts.get(name))
    found = f"{version.get('Version')}, API {version.get('ApiVersion')}{known}{rootless}"
    if info.get("OSType") != "linux":
        cure = "Use a Docker engine on Linux."
        return Finding("docker", "warning", f"{found}, runs {info.get('OSType')} containers", cure)
    return Finding("docker", "ok", found)


def _control_groups(info: JsonMapping, *, hybrid: bool) -> Finding:
    check = "docker: cgroups"
    version = str(info.get("CgroupVersion") or "1")
    kind = "v1 and v2 (hybrid; limits are v1)" if hybrid and version == "1" else f"v{version}"
    lacking = [
        name
        for name, key in (("memory", "MemoryLimit"), ("pids", "PidsLimit"), ("cpu", "CpuCfsQuota"))
        if not info.get(key)
    ]
    if not lacking:
        return Finding(check, "ok", f"{kind}, limits on memory, processes and CPU")
    cure = (
        "Rootless Docker needs cgroup v2 with delegation: see Docker's page on rootless mode."
        if _has_option(info, "rootless")
        else "Switch these controllers on (kernel parameter cgroup_enable=…)."
    )
    words = f"{kind}, no limit on {', '.join(lacking)}: containers are refused"
    return Finding(check, "warning", words, cure)


def _swap(info: JsonMapping, *, swap_bytes: int | None) -> Finding:
    """Swap that is not accounted for is memory beyond the limit."""
    check = "docker: swap"
    if info.get("SwapLimit"):
        return Finding(check, "ok", "is part of the memory limit")
    if swap_bytes == 0:
        return Finding(check, "ok", "there is none")
    there = "there is swap" if swap_bytes else "whether the engine's host has swap is not known"
    return Finding(
        check,
        "warning",
        f"it cannot be limited, and {there}: containers are refused",
        "Switch it off (swapoff --all), or on cgroup v1 boot with swapaccount=1.",
    )


def _seccomp(info: JsonMapping) -> Finding:
    check = "docker: seccomp"
    if _has_option(info, "seccomp"):
        return Finding(check, "ok", "Docker's profile is used")
    cure = "Use a kernel with seccomp, and start dockerd without seccomp-profile=unconfined."
    return Finding(check, "warning", "Docker does not filter system calls", cure)


def _runtimes(info: JsonMapping, configured: str | None) -> Finding:
    names = sorted(name for name in info.get("Runtimes") or {} if not name.startswith("io."))
    default = info.get("DefaultRuntime")
    found = f"{', '.join(names)} (default: {default})"
    if configured is not None and configured not in (info.get("Runtimes") or {}):
        return Finding(
            "docker: runtimes",
            "warning",
            f"{found}; {configured!r} of the configuration is none of them",
            "Register it in Docker's configuration (daemon.json, runtimes), or set "
            "container.runtime to one of them.",
        )
    used = "" if configured is None else f", used: {configured}"
    return Finding("docker: runtimes", "ok", f"{found}{used}")


def image_finding(
    name: str, images: list[Image], now: datetime, *, is_used: bool = True
) -> Finding:
    """Whether an image is there, this engine's, and not too old. One that nothing of the
    configuration names may be missing.
    """
    check, build = f"image: {name}", f"fumehood images build {name}"
    own = newest_own(images)
    if own is None:
        found = "built by another version of the engine" if images else "not built"
        if not is_used:
            return Finding(
                check, "ok", f"{found}, and not in the configuration", f"To have it: {build}"
            )
        return Finding(check, "warning", found, f"Build it: {build}")
    age = now - own.packages_from
    words = f"{own.id[:19]}, {own.packages} packages, {max(0, age.days)} days old"
    if age > MAX_IMAGE_AGE:
        return Finding(
            check, "warning", f"{words}; security updates are missing", f"{build} --force"
        )
    return Finding(check, "ok", words)


def _memory(info: JsonMapping, *, available: int | None) -> Finding:
    check = "docker: memory"
    free = available if available is not None else int(info.get("MemTotal") or 0)
    room = free // CONTAINER_BYTES
    found = f"{free // MB} MB {'free' if available is not None else 'in all'}"
    if room >= 1:
        return Finding(check, "ok", f"{found}: room for {room} containers of 512 MB at their limit")
    cure = "Free memory, or use smaller memory limits."
    return Finding(check, "warning", f"{found}: less than one container of 512 MB may use", cure)


def _disk(root: Path) -> Finding:
    """The directory may be closed to this user; then the nearest open one tells."""
    check = "docker: disk"
    while not os.access(root, os.X_OK) and root != root.parent:
        root = root.parent
    free = shutil.disk_usage(root).free
    found = f"{free / 1e9:.1f} GB free where Docker keeps images"
    if free >= MIN_DISK_BYTES:
        return Finding(check, "ok", found)
    return Finding(check, "warning", found, "Make room: an image needs 1 GB while it is built.")


def _has_option(info: JsonMapping, name: str) -> bool:
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    return any(f"name={name}" in option.split(",") for option in options) and not any(
        option.startswith(f"name={name},profile=unconfined") for option in options
    )
