"""The longer checks of `fumehood doctor`: authority, Docker and images.

Authority covers approvers, policy, webhook and audit key. These checks read the state directory and
the configured files directly, with or without a running engine, and write nothing. Another user
than the engine's learns only that nothing could be read.

Without Docker everything but containers works, so no Docker finding is `missing`.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from fumehood.cli.options import counted
from fumehood.config import Config, ConfigError
from fumehood.core.limits import MB
from fumehood.sandbox.container.docker_api import (
    DockerError,
    docker_host,
    open_docker,
    typed_errors,
)
from fumehood.sandbox.container.host_check import HostCheck, host_checks, may_swap
from fumehood.sandbox.container.settings import ContainerSettings
from fumehood.sandbox.images.catalog import Image, list_images, newest_own
from fumehood.sandbox.images.recipe import image_names
from fumehood.sandbox.settings import SessionSettings

if TYPE_CHECKING:
    from fumehood.core.tool import ToolDefinition

Verdict = Literal["ok", "warning", "missing"]

CHECKS = ("approvers", "policy", "webhook", "audit key")

JsonMapping = Mapping[str, Any]

MAX_IMAGE_AGE = timedelta(days=30)
CONTAINER_BYTES = (512 + 32) * MB
"""A container of the default class, with the guest's overhead."""

MIN_DISK_BYTES = 1 << 30
"""Space for an image during its build."""

COMPONENTS = ("containerd", "runc")
"""Parts of Docker shown with their versions."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing checked: the result, and a remedy if it needs one."""

    check: str
    verdict: Verdict
    found: str
    cure: str = ""


def authority_findings(config: Config) -> Iterator[Finding]:
    """Check all four; the policy yields one finding per fault."""
    whose = _whose(config.state_directory)
    if whose is not None:
        found = f"cannot be read by this user: {config.state_directory} is {whose}'s"
        remedy = f"Run it as that user: sudo -u {whose} fumehood doctor"
        yield from (Finding(check, "warning", found, remedy) for check in CHECKS)
        return
    yield _approvers(config)
    yield from _policy(config)
    yield _webhook(config)
    yield _audit_key(config.state_directory)


def _whose(state: Path) -> str | None:
    """The owner of the state directory, or None if it is this user."""
    try:
        owner = state.stat().st_uid
    except FileNotFoundError:
        return None
    except OSError:
        return "another user"
    if owner == os.geteuid():
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"#{owner}"


def _approvers(config: Config) -> Finding:
    from fumehood.core.identity import Scope
    from fumehood.identity import store as identities
    from fumehood.identity.approvers import cure_of_none
    from fumehood.storage.database import reading
    from fumehood.storage.errors import StoreError

    decides = config.webhook is not None and config.webhook.may_decide
    if not _has_database(config.state_directory):
        found = "none: dangerous calls will be refused"
        if decides:
            return Finding("approvers", "ok", "none; the webhook may decide")
        return Finding("approvers", "warning", found, f"Make one: {cure_of_none(any_there=False)}.")
    try:
        with reading(config.state_directory) as connection:
            rows = identities.all_approvers(connection)
            tokens = identities.all_tokens(connection)
    except StoreError as error:
        return Finding("approvers", "warning", str(error), "Repair the state directory.")
    there = {row["name"]: row["scopes"] for row in rows if row["removed_at"] is None}
    approving = [name for name, scopes in there.items() if Scope.APPROVE in scopes]
    others = sum(_approves(token) for token in tokens)
    told = [*approving, *([f"{others} tokens"] if others else []), *(["the webhook"] * decides)]
    if told:
        return Finding("approvers", "ok", ", ".join(told))
    found = "none: dangerous calls are refused"
    return Finding(
        "approvers", "warning", found, f"Make one: {cure_of_none(any_there=bool(there))}."
    )


def _approves(token: dict[str, object]) -> bool:
    """Whether a row is a valid token that may approve calls."""
    from fumehood.core.identity import Scope

    scopes, expires = token["scopes"], token["expires_at"]
    return (
        isinstance(scopes, list)
        and Scope.APPROVE in scopes
        and token["revoked_at"] is None
        and (expires is None or datetime.now(UTC) < datetime.fromisoformat(str(expires)))
    )


def _policy(config: Config) -> Iterator[Finding]:
    from fumehood.cli.policy_offline import Offline
    from fumehood.policy.loader import load_policy
    from fumehood.policy.model import PolicyError

    path = config.policy_file
    if path is None:
        found = "none is configured: dangerous tools ask, others are allowed"
        yield Finding("policy", "ok", found)
        return
    # The check of the tools reports those that are left out.
    offline = Offline(config, config.tools_directory, warn=lambda _: None)
    tools = [*offline.definitions(), *_registered(config.state_directory)]
    try:
        policy = load_policy(path, tools)
    except PolicyError as refused:
        remedy = "Fix it, then run: fumehood policy check. No engine starts with it."
        yield from (Finding("policy", "missing", fault, remedy) for fault in refused.shown)
        return
    rules = counted(len(policy.rules), "rule")
    yield Finding("policy", "ok", f"{path}: {rules}, version {policy.version}")


def _registered(state: Path) -> Iterator[ToolDefinition]:
    """Yield the tools registered over the control socket, as far as they can be read."""
    from fumehood.core.errors import EngineError
    from fumehood.registry.definitions import parse_definition
    from fumehood.registry.registrations import all_definitions
    from fumehood.storage.database import reading
    from fumehood.storage.errors import StoreError

    if not _has_database(state):
        return
    documents = []
    with suppress(StoreError), reading(state) as connection:
        documents = all_definitions(connection)
    for document in documents:
        with suppress(EngineError, ValueError):
            yield parse_definition(document)


def _webhook(config: Config) -> Finding:
    chosen = config.webhook
    if chosen is None:
        return Finding("webhook", "ok", "none is configured")
    from fumehood.approvals.channels.webhook import read_secret

    try:
        read_secret(chosen.secret_file)
    except ConfigError as error:
        remedy = "Fix the secret's file; no engine starts with it."
        return Finding("webhook", "missing", str(error), remedy)
    may = "may" if chosen.may_decide else "may not"
    return Finding("webhook", "ok", f"its secret can be read; a signed callback {may} decide")


def _audit_key(state: Path) -> Finding:
    from fumehood.audit.chain import head_of, key_id_after
    from fumehood.audit.keys import CURRENT, all_keys
    from fumehood.storage.database import reading
    from fumehood.storage.errors import StoreError

    if not _has_database(state):
        return Finding("audit key", "ok", "will be created by `fumehood serve`")
    try:
        known = all_keys(state)
        with reading(state) as connection:
            head = head_of(connection)
    except StoreError as error:
        return Finding(
            "audit key", "missing", str(error), "Repair it; no engine starts without it."
        )
    wanted = key_id_after(head) if head is not None else None
    if wanted is None and not known:
        return Finding("audit key", "ok", "will be created by `fumehood serve`")
    if wanted is not None and wanted not in known:
        found = f"the chain continues under the key {wanted[:40]}, which is not in {state}"
        return Finding("audit key", "missing", found, "Restore it from a copy.")
    return Finding("audit key", "ok", f"{state / CURRENT}, private; a backup needs it, too")


def _has_database(state: Path) -> bool:
    from fumehood.storage.database import FILE_NAME

    return (state / FILE_NAME).exists()


__all__ = ["authority_findings"]


def docker_findings(
    settings: ContainerSettings, sessions: SessionSettings, own: Path | None = None
) -> Iterator[Finding]:
    """Check Docker, its images and what the configuration names; or say why Docker is unavailable.

    `own` is the directory of the operator's own images.
    """
    try:
        client = open_docker()
    except DockerError as error:
        words = f"{error} Containers are unavailable."
        yield Finding("docker", "warning", words, error.remedy)
        return
    try:
        with typed_errors():
            version, info = client.version(), client.info()
            images = {name: list_images(client, name, own=own) for name in image_names(own=own)}
    except DockerError as error:
        found = f"it answers and then fails ({type(error).__name__})"
        yield Finding("docker", "warning", found, "See the log of dockerd.")
        return
    finally:
        client.close()
    local = docker_host().startswith("unix://")
    system, *others = host_checks(info, runtime=settings.runtime, has_swap=may_swap(is_local=local))
    yield _host_finding("docker", replace(system, found=_engine(version, info)))
    yield from (_host_finding(f"docker: {check.name}", check) for check in others)
    used = {f"container.images.{language}": name for language, name in settings.images}
    used["sessions.image"] = sessions.image
    for name, found_images in images.items():
        is_used = name in used.values()
        yield image_finding(name, found_images, datetime.now(UTC), is_used=is_used)
    for setting, name in used.items():
        if name not in images:
            remedy = f"Set {setting} to an existing image: {', '.join(images)}."
            yield Finding(f"image: {name}", "warning", "no image has this name", remedy)
    yield _memory(info, available=psutil.virtual_memory().available if local else None)
    if local:
        yield _disk(Path(str(info.get("DockerRootDir") or "/")))


def _host_finding(name: str, check: HostCheck) -> Finding:
    if check.unfit is None:
        return Finding(name, "ok", check.found)
    return Finding(name, "warning", check.unfit.message, check.unfit.remedy)


def _engine(version: JsonMapping, info: JsonMapping) -> str:
    options = [str(option) for option in info.get("SecurityOptions") or ()]
    rootless = ", rootless" if any(one.startswith("name=rootless") for one in options) else ""
    parts = {str(part.get("Name")): part.get("Version") for part in version.get("Components") or ()}
    known = "".join(f", {name} {parts[name]}" for name in COMPONENTS if parts.get(name))
    return f"{version.get('Version')}, API {version.get('ApiVersion')}{known}{rootless}"


def image_finding(
    name: str, images: list[Image], now: datetime, *, is_used: bool = True
) -> Finding:
    """Check that an image exists, belongs to this engine version, and is not too old.

    An image that the configuration does not use may be missing.
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


def _memory(info: JsonMapping, *, available: int | None) -> Finding:
    check = "docker: memory"
    free = available if available is not None else int(info.get("MemTotal") or 0)
    room = free // CONTAINER_BYTES
    found = f"{free // MB} MB {'free' if available is not None else 'in all'}"
    if room >= 1:
        return Finding(check, "ok", f"{found}: room for {room} containers of 512 MB at their limit")
    remedy = "Free memory, or use smaller memory limits."
    return Finding(check, "warning", f"{found}: not enough for one container of 512 MB", remedy)


def _disk(root: Path) -> Finding:
    """Check free space, in the nearest parent directory that this user can enter."""
    check = "docker: disk"
    while not os.access(root, os.X_OK) and root != root.parent:
        root = root.parent
    free = shutil.disk_usage(root).free
    found = f"{free / 1e9:.1f} GB free where Docker keeps images"
    if free >= MIN_DISK_BYTES:
        return Finding(check, "ok", found)
    return Finding(check, "warning", found, "Free space: an image needs 1 GB during its build.")
