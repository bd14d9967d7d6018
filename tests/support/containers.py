"""An engine's containers as Docker reports them, independent of the engine."""

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

from fumehood.docker.api import DockerError, open_docker
from fumehood.sandbox.container.spec import LABEL_OWNER
from fumehood.storage import directory

_BEGUN = datetime.now(UTC).isoformat()[:19]


def containers_of(label: str) -> list[dict[str, Any]]:
    """All containers with a label (`name=value`), running or not, as Docker inspects them.

    Without those that were made before these tests began: a process of theirs may have had the same id.
    """
    with closing(open_docker(timeout_s=30)) as client:
        inspected = []
        for one in client.containers(all=True, filters={"label": [label]}):
            with suppress(NotFound):  # it was removed since it was listed
                inspected.append(client.inspect_container(one["Id"]))
        return [one for one in inspected if one["Created"][:19] >= _BEGUN]


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
    with closing(open_docker(timeout_s=30)) as client:
        client.kill(container_id, "SIGKILL")


def kill_init_of(container_id: str) -> None:
    """Kill a container's first process, as another program of the host would."""
    with closing(open_docker(timeout_s=30)) as client:
        os.kill(client.inspect_container(container_id)["State"]["Pid"], signal.SIGKILL)
