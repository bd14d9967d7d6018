"""A build's objects in Docker: containers to work in, and a note for engines.

Host side. The containers have no network, no capabilities and no files of another user. The note
is a volume without contents that names the images being built: Docker is what a build and an engine
have in common, whoever runs them. Invariant: each has a deadline in its name or label, so that
the next build removes what a killed one left behind, and no engine believes an old note.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import docker

from fumehood.sandbox.container.docker_api import DockerError, typed_errors
from fumehood.sandbox.images.errors import build_error

NAME = "fumehood-builder-"
"""The beginning of their names, before a deadline and a random part."""

BUILDING = "fumehood.building"
"""Label of a note: the images, separated by spaces."""

UNTIL = "fumehood.until"
"""Label of a note: its deadline, in seconds since 1970."""

NOTE_LIFETIME_S = 1200
"""All five images take 10 minutes on a slow host."""

LIFETIME_S = 600
MEMORY = "1g"
PROCESSES = 64


@contextmanager
def builder(
    client: docker.APIClient, image: str, command: Sequence[str], *, run_s: float
) -> Iterator[str]:
    """A container, not yet started, for a command that takes `run_s` at most."""
    host = client.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit=MEMORY,
        pids_limit=PROCESSES,
    )
    made = client.create_container(
        image,
        command=list(command),
        host_config=host,
        name=f"{NAME}{int(time.time() + LIFETIME_S + run_s)}-{secrets.token_hex(4)}",
    )
    try:
        yield made["Id"]
    finally:
        client.remove_container(made["Id"], force=True)


def run(client: docker.APIClient, container: str, *, run_s: float, failed: str) -> None:
    """Run its command to the end.

    Raises:
        ImageBuildError: `failed`, and the last lines of its output.
    """
    client.start(container)
    status = client.wait(container, timeout=run_s)["StatusCode"]
    if status != 0:
        said = client.logs(container, tail=5).decode("utf-8", "replace")
        raise build_error(failed, said.splitlines())


@contextmanager
def building_noted(client: docker.APIClient, names: Sequence[str]) -> Iterator[None]:
    """Notify engines that these images are being built. A build continues without it."""
    note = f"{NAME}{secrets.token_hex(8)}"
    labels = {BUILDING: " ".join(names), UNTIL: str(int(time.time()) + NOTE_LIFETIME_S)}
    with suppress(DockerError), typed_errors():
        client.create_volume(note, labels=labels)
    try:
        yield
    finally:
        with suppress(DockerError), typed_errors():
            client.remove_volume(note)


def is_being_built(client: docker.APIClient, name: str) -> bool:
    """Whether a build has noted this image."""
    return any(
        name in labels[BUILDING].split() and not _is_over(labels)
        for labels in _notes(client).values()
    )


def _notes(client: docker.APIClient) -> dict[str, dict[str, str]]:
    """The labels of each note, by the name of its volume."""
    found = client.volumes(filters={"label": [BUILDING]}).get("Volumes") or ()
    return {one["Name"]: one["Labels"] for one in found}


def _is_over(labels: dict[str, str]) -> bool:
    until = labels.get(UNTIL, "")
    return not re.fullmatch(r"\d{1,12}", until, re.ASCII) or int(until) < time.time()


def sweep_builders(client: docker.APIClient) -> None:
    """Remove the containers and notes that a killed build left behind."""
    for note, labels in _notes(client).items():
        if _is_over(labels):
            client.remove_volume(note)
    for row in client.containers(all=True, filters={"name": NAME}):
        deadline = re.fullmatch(rf"/{NAME}(\d+)-[0-9a-f]+", row["Names"][0])
        if deadline is not None and int(deadline[1]) < time.time():
            client.remove_container(row["Id"], force=True)
