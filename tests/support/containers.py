"""An engine's containers as Docker or the launcher reports them, independent of the engine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound

from fumehood.direct.ask import ask_launcher, launcher_directory, sandboxes_of
from fumehood.docker.api import DockerError, open_docker
from fumehood.sandbox.container.spec import LABEL_OWNER
from fumehood.storage import directory

ENGINE = "FUMEHOOD_CONTAINER__ENGINE"
"""The variable that chooses what runs containers. It is set if the tests run with `--engine`."""

_BEGUN = datetime.now(UTC).isoformat()[:19]


def containers_of(label: str) -> list[dict[str, Any]]:
    """All containers with a label (`name=value`), running or not, as Docker inspects them.

    Without those that were made before these tests began: a process of theirs may have had the same id.
    Direct sandboxes have the same form, with fewer fields.
    """
    inspected = [_inspected(one) for one in _sandboxes(label)]
    if ENGINE in os.environ:
        return inspected
    with closing(open_docker(timeout_s=30)) as client:
        for one in client.containers(all=True, filters={"label": [label]}):
            with suppress(NotFound):  # it was removed since it was listed
                inspected.append(client.inspect_container(one["Id"]))
        return [one for one in inspected if one.get("Created", _BEGUN)[:19] >= _BEGUN]


def _sandboxes(label: str) -> list[dict[str, Any]]:
    name, _, value = label.partition("=")
    found = sandboxes_of(launcher_directory())
    return [one for one in found if one["labels"].get(name) == value]


def _inspected(sandbox: dict[str, Any]) -> dict[str, Any]:
    return {
        "Id": sandbox["name"],
        "Name": f"/{sandbox['name']}",
        "Image": sandbox["image_id"],
        "Config": {"Labels": sandbox["labels"]},
        "State": {
            "Pid": sandbox["pid"], "Running": sandbox["is_running"],
            "Paused": sandbox["is_paused"],
        },
    }  # fmt: skip


_OWNERS: set[str] = set()
"""Owner ids of engines that have stopped."""


def remove_containers_of(home: Path) -> None:
    """Remove the containers and attached disks with which sessions of a stopped engine would go on.
    The state of one or several engines is at or below the directory.
    """
    owners = set()
    for place, _, files in os.walk(home):
        if directory.FILE_NAME in files:
            with suppress(OSError):  # a damaged one, or it is of something else
                owners.add(directory.owner_id(Path(place)))
    _OWNERS.update(owners)
    _remove(owners, home)


def remove_late_containers() -> None:
    """Remove the containers of all those engines once more: one that was killed may have asked for
    a container that Docker made only afterwards.
    """
    _remove(_OWNERS)


def _remove(owners: set[str], home: Path | None = None) -> None:
    if not owners:
        return
    directory_ = launcher_directory()
    for one in sandboxes_of(directory_):
        if one["labels"].get(LABEL_OWNER) in owners:
            ask_launcher(directory_, {"do": "remove", "name": one["name"]}, [], 30)
    try:
        client = open_docker(timeout_s=30)
    except DockerError:  # this host has none
        return
    with closing(client):
        for one in client.containers(all=True, filters={"label": [LABEL_OWNER]}):
            if one["Labels"][LABEL_OWNER] in owners:
                with suppress(APIError):  # it is gone, or being removed
                    client.remove_container(one["Id"], v=True, force=True)
        for device, disk in loop_devices():
            if home is not None and disk.is_relative_to(home):
                with suppress(APIError):  # it has none
                    client.remove_volume(disk.name)
                subprocess.run(["losetup", "--detach", device], check=True)


def loop_devices() -> Iterator[tuple[str, Path]]:
    """All loop devices in use, with their files, which may be gone."""
    for shown in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it was freed meanwhile
            file = shown.read_text().removesuffix("\n").removesuffix(" (deleted)")
            yield f"/dev/{shown.parts[3]}", Path(file)


def kill_container(container_id: str) -> None:
    if ENGINE in os.environ:
        kill_init_of(container_id)
        return
    with closing(open_docker(timeout_s=30)) as client:
        client.kill(container_id, "SIGKILL")


def kill_init_of(container_id: str) -> None:
    """Kill a container's first process, as another program of the host would."""
    for one in sandboxes_of(launcher_directory()):
        if one["name"] == container_id:
            os.kill(one["pid"], signal.SIGKILL)
            return
    with closing(open_docker(timeout_s=30)) as client:
        os.kill(client.inspect_container(container_id)["State"]["Pid"], signal.SIGKILL)
