"""The images in Docker: its image store, with a tag for each layer.

Host side, between Docker and the commands and parts that build images. Invariant: an image in
Docker counts as a layer of this store only if it has a tag of our repository that fits its labels.
(An image that somebody derives from ours inherits the labels but not the tag.)

Build steps run in containers. The name of each container contains a deadline, so that a later build
can remove the containers of a build that was killed.
"""

from __future__ import annotations

import io
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import docker
from docker.errors import APIError, BuildError, ImageNotFound, NotFound

from fumehood.docker.api import load_image, open_docker, save_image, typed_errors
from fumehood.image_store.faults import LINES_SEARCHED, ImageBuildError, build_error
from fumehood.image_store.store import (
    GUEST,
    IMAGE,
    LAYER_BASE,
    LAYER_KEY,
    RECIPE,
    ROOT,
    OnStep,
    StoredLayer,
)
from fumehood.sandbox.images.recipe import Recipe

REPOSITORY = "fumehood"
"""First part of the Docker repository name of every layer."""

LAYERS = f"{REPOSITORY}/packages"
"""Docker repository of layers of packages: images that extend another image by what callers
request.
"""

DEADLINE_S = 300
"""Maximum seconds for one request to Docker. The slowest request imports a root file system."""

BASE_DEADLINE_S = 900
"""Maximum seconds for installing packages into a base image."""

PACKAGES_NETWORK = "default"
"""The Docker network of the container that installs packages into a base. It must not be the host's
network, through which the base could reach everything that listens on loopback.
"""

PATH = "/usr/local/bin:/usr/bin:/bin"
SETTINGS = (f"ENV PATH={PATH} LANG=C.UTF-8", "WORKDIR /workspace")
"""The Dockerfile instructions that every layer has."""

BUILDER = "fumehood-builder-"
"""How the names of build containers begin. A deadline and a random part follow."""

LIFETIME_S = 600
"""Seconds after the deadline of a build container's command. Until then, no other build removes the
container.
"""

MEMORY = "1g"
PROCESSES = 64
"""The limits of a build container: `MEMORY` for its memory, and `PROCESSES` for the number of its
processes.
"""


class DockerStore:
    """The layers in Docker. `client` is connected to the daemon."""

    name = "Docker"

    def __init__(self, client: docker.APIClient) -> None:
        self._client = client

    @typed_errors()
    def layers(self, label: str) -> list[StoredLayer]:
        """Return the layers that have the label `label` (`name` or `name=value`), newest first."""
        name, _, value = label.partition("=")
        if name == LAYER_KEY:
            rows = self._client.images(filters={"reference": f"{LAYERS}:{value or '*'}"})
        else:
            rows = [row for row in self._client.images(filters={"label": label}) if _is_ours(row)]
        found = map(_layer, rows)
        return sorted(found, key=lambda layer: (layer.created, layer.id), reverse=True)

    @typed_errors()
    def import_root(self, archive: Path, labels: Mapping[str, str]) -> str:
        """Import a root file system from a tar file, and return the id of the new image.

        Raises:
            ImageBuildError: Docker did not import it.
        """
        (tag,) = _tags(labels)
        repository, version = tag.split(":")
        with archive.open("rb") as file:
            answer = self._client.import_image(
                src=file,
                repository=repository,
                tag=version,
                changes=[*SETTINGS, _label_line(labels)],
            )
        if '"error"' in str(answer):
            raise build_error("Docker did not import the root file system", [str(answer)])
        return str(self._client.inspect_image(tag)["Id"])

    def root_from_host(self, target: Path) -> None:
        """Refuse to use the files of this host.

        Raises:
            ImageBuildError: always.
        """
        raise ImageBuildError(
            "Docker's containers cannot have the programs of this host.",
            'Set container.engine to "direct", or build another image.',
        )

    @typed_errors()
    def root_from_base(self, recipe: Recipe, context: bytes, target: Path, on_step: OnStep) -> None:
        """Pull the base image of the recipe, install the packages into it with the Dockerfile in
        the tar archive `context`, and write the resulting file system to the tar file `target`.

        Raises:
            ImageBuildError: a step failed. The message names the remedy.
        """
        self._pull(recipe.base, on_step)
        on_step("installing packages into the base")
        output: deque[str] = deque(maxlen=LINES_SEARCHED)
        tag = f"{REPOSITORY}/building-{recipe.name}:{recipe.digest[:12]}"
        steps = self._client.build(
            fileobj=io.BytesIO(context), custom_context=True, tag=tag, rm=True,
            forcerm=True, buildargs={"BASE": recipe.base}, decode=True, timeout=BASE_DEADLINE_S,
            network_mode=PACKAGES_NETWORK,
        )  # fmt: skip
        failed = False
        for step in steps:
            output.extend(str(step.get("stream", step.get("error", ""))).splitlines())
            failed = failed or "error" in step
        if failed:
            raise build_error("The packages could not be installed into the base", output)
        try:
            on_step("flattening it into one layer")
            self._flatten(tag, target)
        finally:
            self._client.remove_image(tag, noprune=False)

    def _pull(self, base: str, on_step: OnStep) -> None:
        on_step(f"fetching {base[:60]}")
        try:
            for line in self._client.pull(base, stream=True, decode=True):
                if "error" in line:
                    raise build_error("The base cannot be fetched", [str(line["error"])])
            self._client.inspect_image(base)
        except (APIError, BuildError, ImageNotFound) as error:
            raise build_error("The base cannot be fetched", [str(error)]) from None

    def _flatten(self, tag: str, target: Path) -> None:
        """Write the file system of the image `tag` to the tar file `target`, as a single layer. The
        tar file therefore contains no files that an upper layer of the image has removed.
        """
        container = self._client.create_container(tag, command=["true"])["Id"]
        try:
            with target.open("wb") as file:
                file.writelines(self._client.export(container, chunk_size=1 << 20))
        finally:
            self._client.remove_container(container, force=True)

    @typed_errors()
    def add(
        self,
        below: str,
        files: IO[bytes],
        command: Sequence[str],
        *,
        labels: Mapping[str, str],
        run_s: float,
        failed: str,
    ) -> str:
        """Make an image on the image with the id `below`: unpack the tar archive `files`, run
        `command` in a build container, and keep the result. Return the id of the new image.

        Raises:
            ImageBuildError: the command failed. The message consists of `failed` and the cause. If
                the cause is unknown, it contains the last lines of the command's output instead.
        """
        first, *others = _tags(labels)
        repository, version = first.split(":")
        with self._builder(below, command, run_s=run_s) as container:
            self._client.put_archive(container, "/", files)
            self._client.start(container)
            if self._client.wait(container, timeout=run_s)["StatusCode"] != 0:
                said = self._client.logs(container, tail=5).decode("utf-8", "replace")
                raise build_error(failed, said.splitlines())
            changes = [*SETTINGS, "CMD []", _label_line(labels)]
            made = self._client.commit(
                container, repository=repository, tag=version, changes=changes
            )
        for tag in others:
            self._client.tag(made["Id"], *tag.split(":"))
        return str(made["Id"])

    @contextmanager
    def _builder(self, below: str, command: Sequence[str], *, run_s: float) -> Iterator[str]:
        """Create a build container from the image `below`, and yield the container's id. The
        container is not started. When it is started later, it runs `command`.

        `run_s` is the maximum duration of `command` in seconds. The container is removed when the
        `with` block ends. If this process is killed first, a later build removes the container
        after a deadline that is in the container's name.
        """
        host = self._client.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=MEMORY,
            pids_limit=PROCESSES,
        )
        made = self._client.create_container(
            below,
            command=list(command),
            host_config=host,
            name=f"{BUILDER}{int(time.time() + LIFETIME_S + run_s)}-{secrets.token_hex(4)}",
        )
        try:
            yield made["Id"]
        finally:
            self._client.remove_container(made["Id"], force=True)

    @typed_errors()
    def remove(self, layer: str) -> bool:
        """Remove an image, unless a container uses it or another image is based on it. Return
        whether it was removed.
        """
        try:
            if any(row.get("ParentId") == layer for row in self._client.images(all=True)):
                return False
            if self._client.containers(all=True, quiet=True, filters={"ancestor": layer}):
                return False
            for tag in self._client.inspect_image(layer)["RepoTags"] or ():
                self._client.remove_image(tag)
            with suppress(NotFound):  # Docker may have removed it with its last tag
                self._client.remove_image(layer)
        except APIError:
            return False
        return True

    @typed_errors()
    def users_of(self, layer: str) -> list[str]:
        """Return the names of the containers that were created from this image. Stopped containers
        count too.
        """
        found = self._client.containers(all=True, filters={"ancestor": layer})
        return [str(one["Names"][0]).removeprefix("/") for one in found]

    @typed_errors()
    def save(self, layer: str, file: IO[bytes]) -> None:
        """Write an image and its tag to `file`, from which another daemon can load them."""
        save_image(self._client, layer, file)

    @typed_errors()
    def load(self, file: IO[bytes]) -> None:
        """Load images from a file that `save` has written."""
        load_image(self._client, file)

    @typed_errors()
    def sweep(self) -> None:
        """Remove the build containers whose deadline has passed. A build that was killed leaves its
        containers behind.
        """
        for row in self._client.containers(all=True, filters={"name": BUILDER}):
            deadline = re.fullmatch(rf"/{BUILDER}(\d+)-[0-9a-f]+", row["Names"][0])
            if deadline is not None and int(deadline[1]) < time.time():
                self._client.remove_container(row["Id"], force=True)

    def close(self) -> None:
        """Close the connection to the daemon."""
        self._client.close()


def _repository(labels: Mapping[str, str]) -> str:
    """Return the Docker repository of a layer with these labels."""
    # A layer of packages inherits the labels of the image below it.
    return LAYERS if LAYER_BASE in labels else f"{REPOSITORY}/{labels.get(IMAGE)}"


def _tags(labels: Mapping[str, str]) -> list[str]:
    """Return the names of a new layer in Docker, as `REPOSITORY:TAG`. `labels` are its own
    labels.
    """
    repository = _repository(labels)
    if LAYER_BASE in labels:
        return [f"{repository}:{labels[LAYER_KEY]}"]
    recipe = labels.get(RECIPE) or labels[ROOT]
    if GUEST not in labels:
        return [f"{repository}:{recipe[:12]}"]
    # The second tag is needed because `latest` moves: engines of other versions, or other operators
    # with an image of the same name, may use this host. Images without a tag are not found.
    return [f"{repository}:latest", f"{repository}:{labels[GUEST][:12]}-{recipe[:12]}"]


def _is_ours(row: Mapping[str, Any]) -> bool:
    """Whether the tags of a row of Docker's list of images fit the row's labels. A layer of
    packages may also have no tag, because the tag moves to a newer layer with the same packages.
    """
    labels, tags = row["Labels"] or {}, row["RepoTags"] or ()
    are_ours = [str(tag).startswith(f"{_repository(labels)}:") for tag in tags]
    return all(are_ours) if LAYER_BASE in labels else any(are_ours)


def _layer(row: Mapping[str, Any]) -> StoredLayer:
    """Convert a row of Docker's list of images. The tag of a layer of packages is its key."""
    labels = dict(row["Labels"] or {})
    if LAYER_BASE in labels:
        for tag in row["RepoTags"] or ():
            if str(tag).startswith(f"{LAYERS}:"):
                labels[LAYER_KEY] = str(tag).removeprefix(f"{LAYERS}:")
    created = datetime.fromtimestamp(int(row["Created"]), UTC)
    return StoredLayer(str(row["Id"]), labels, created, int(row["Size"]))


def _label_line(labels: Mapping[str, str]) -> str:
    """Return the Dockerfile instruction that sets labels. The key of a layer of packages is not one
    of them, because its tag has the key.
    """
    kept = {name: value for name, value in labels.items() if name != LAYER_KEY}
    return "LABEL " + " ".join(f'"{name}"="{value}"' for name, value in kept.items())


def open_store() -> DockerStore:
    """Connect to the daemon at `DOCKER_HOST`, and return the store of its images.

    Raises:
        DockerError: Docker cannot be used.
    """
    return DockerStore(open_docker(timeout_s=DEADLINE_S))
