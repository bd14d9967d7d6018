"""The checks of Docker and its images in `fumehood doctor`.

Without Docker, everything except containers works, so no finding about Docker has the verdict
`missing`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from fumehood.cli.findings import Finding
from fumehood.config import Config
from fumehood.core.limits import MB
from fumehood.docker.api import DockerError, docker_host, open_docker, typed_errors
from fumehood.docker.faults import faults_of, known_faults
from fumehood.docker.host import HostCheck, host_checks, may_swap
from fumehood.docker.store import DockerStore
from fumehood.image_store.find import list_images, newest_own
from fumehood.parts import container_part
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import HOST_IMAGE, image_names

COMPONENTS = ("containerd", "runc")
"""Components of Docker whose versions are shown."""

MAX_IMAGE_AGE = timedelta(days=30)
CONTAINER_BYTES = (512 + 32) * MB
"""The memory that a container with default limits can use, including the guest's overhead."""


def check(config: Config) -> Iterator[Finding]:
    """Check Docker and its host. If Docker is unavailable, yield only one finding with the reason.
    If the configuration chooses another engine for containers, yield nothing.
    """
    if not _is_used(config):
        return
    try:
        with closing(open_docker()) as client, typed_errors():
            version, info = client.version(), client.info()
    except DockerError as error:
        words = f"{error} Containers are unavailable."
        yield Finding("docker", "warning", words, error.remedy)
        return
    local = docker_host().startswith("unix://")
    has_swap = may_swap(is_local=local)
    system, *others = host_checks(info, runtime=config.container.runtime, has_swap=has_swap)
    yield _host_finding("docker", replace(system, found=_engine(version)))
    yield from (_host_finding(f"docker: {check.name}", check) for check in others)
    yield _known_faults(version, info, config.container.runtime, is_local=local)
    if local:
        yield _memory()


def _is_used(config: Config) -> bool:
    """Return whether Docker runs the containers."""
    part = container_part(config.container.engine)
    return part is not None and part.name == "docker"


def check_images(config: Config) -> Iterator[Finding]:
    """Check the images, and the names of images in the configuration. If Docker is unavailable or
    does not describe itself, yield nothing, because `check` reports that.
    """
    if not _is_used(config):
        return
    own, is_well = config.own_images, False
    try:
        with closing(open_docker()) as client, typed_errors():
            client.info()
            is_well = True
            store = DockerStore(client)
            images = {name: list_images(store, name, own=own) for name in image_names(own=own)}
    except DockerError as error:
        if is_well:
            yield Finding("image", "warning", f"The images cannot be listed. {error}", error.remedy)
        return
    used = {f"container.images.{language}": name for language, name in config.container.images}
    used["sessions.image"] = config.sessions.image
    for name, found_images in images.items():
        is_used = name in used.values()
        if name == HOST_IMAGE and not is_used:  # it cannot be had with Docker
            continue
        yield image_finding(name, found_images, datetime.now(UTC), is_used=is_used)
    for setting, name in used.items():
        if name not in images:
            remedy = f"Set {setting} to an existing image: {', '.join(images)}."
            yield Finding(f"image: {name}", "warning", "no image has this name", remedy)


def _host_finding(name: str, check: HostCheck) -> Finding:
    if check.unfit is None:
        return Finding(name, "ok", check.found)
    return Finding(name, "warning", check.unfit.message, check.unfit.remedy)


def _engine(version: Mapping[str, Any]) -> str:
    parts = {str(part.get("Name")): part.get("Version") for part in version.get("Components") or ()}
    known = "".join(f", {name} {parts[name]}" for name in COMPONENTS if parts.get(name))
    return f"{version.get('Version')}, API {version.get('ApiVersion')}{known}"


def _known_faults(
    version: Mapping[str, Any], info: Mapping[str, Any], runtime: str | None, *, is_local: bool
) -> Finding:
    """Return a finding on the known faults of Docker and of what starts its containers. `runtime`
    is the configured OCI runtime. `is_local` says whether Docker is on this host. What another host
    says names no program of this one.
    """
    versions, is_hybrid = dict(_components(version)), False
    if is_local:
        runtimes = info.get("Runtimes") or {}
        for name in {runtime, info.get("DefaultRuntime")} - {None, "runc"}:
            path = str((runtimes.get(name) or {}).get("path") or "")
            versions[str(name).split("-")[0]] = _version_of(path)
        is_hybrid = info.get("CgroupVersion") == "1" and Path("/sys/fs/cgroup/unified").exists()
    words = [
        f"{program if program != 'Engine' else 'Docker'} {number} has {fault.name}: {fault.words}"
        for program, number in versions.items()
        for fault in faults_of(program, number, is_hybrid=is_hybrid)
    ]
    check, day = "docker: known faults", known_faults()[0]
    if not words:
        return Finding(check, "ok", f"none of the list of {day}, as far as the versions say")
    remedy = (
        "Upgrade it with your distribution or from its makers, or let the engine start containers "
        'itself: container.engine = "direct".'
    )
    return Finding(check, "warning", f"{'; '.join(words)} (list of {day})", remedy)


def _components(version: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the version of each component, or of its package if a distribution has made it."""
    for part in version.get("Components") or ():
        package = str((part.get("Details") or {}).get("GitCommit") or "")
        is_package = "+" in package or "~" in package
        yield str(part.get("Name")), package if is_package else str(part.get("Version"))


def _version_of(path: str) -> str:
    """Return the last word of the first line that a program prints about its version, or ""."""
    try:
        asked = [path, "--version"]  # as Docker's own configuration names it
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10)  # noqa: S603
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return said.stdout.partition("\n")[0].rpartition(" ")[2]


def image_finding(
    name: str, images: list[Image], now: datetime, *, is_used: bool = True
) -> Finding:
    """Return a finding on whether an image exists, fits this engine's version, and is not too old.

    If `is_used` is False, the configuration does not use the image, so a missing image is no
    problem.
    """
    check, build = f"image: {name}", f"fumehood images build {name}"
    own = newest_own(images)
    if own is None:
        found = "built by another version of the engine" if images else "not built"
        if not is_used:
            return Finding(
                check, "ok", f"{found}, not used by the configuration", f"To build it: {build}"
            )
        return Finding(check, "warning", found, f"Build it: {build}")
    age = now - own.packages_from
    words = f"{own.id[:19]}, {own.packages} packages, {max(0, age.days)} days old"
    if age > MAX_IMAGE_AGE:
        return Finding(
            check, "warning", f"{words}; security updates are missing", f"{build} --force"
        )
    return Finding(check, "ok", words)


def _memory() -> Finding:
    check, free = "docker: memory", psutil.virtual_memory().available
    room, found = free // CONTAINER_BYTES, f"{free // MB} MB free"
    if room >= 1:
        return Finding(check, "ok", f"{found}: room for {room} containers of 512 MB at their limit")
    remedy = "Free memory, or use smaller memory limits."
    return Finding(check, "warning", f"{found}: not enough for one container of 512 MB", remedy)
