"""The seam between the part that builds images and the part that runs containers: a store of
layers.

Host side. An image is a stack of layers, each of which is based on the one below it. The store of
each container runtime keeps the layers in its own way, and identifies them by their labels.
Invariants: the labels of a layer are set together with its content, so an interrupted step leaves
nothing that looks complete; a layer is never removed if a container uses it, or if another layer is
based on it; a build step has no network, no capabilities and no files of another user, and its
memory and number of processes are limited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, runtime_checkable

from fumehood.parts import runtime_of
from fumehood.sandbox.container.runtime import RuntimeMissing

if TYPE_CHECKING:
    from fumehood.config import Config
    from fumehood.sandbox.images.recipe import Recipe

IMAGE = "fumehood.image"
"""Label: the image's name, or the name of its layer: `root` for a root file system, and `base-NAME`
for the packages of the image NAME.
"""

RECIPE = "fumehood.recipe"
"""Label: the digest of the recipe."""

GUEST = "fumehood.guest"
"""Label: the digest of the guest's files."""

BASE = "fumehood.base"
"""Label: the existing image from which the root file system was made, or empty."""

HOST = "fumehood.host"
"""Label: not empty if the image has the programs and libraries of its host."""

ROOT = "fumehood.root"
"""Label: the digest of a root file system's sources; empty on images that are based on a root file
system.
"""

PACKAGES = "fumehood.packages"
"""Label: the number of installed packages."""

PACKAGES_FROM = "fumehood.packages-from"
"""Label: when the packages were installed, in Unix seconds. An image's age counts from this time.
"""

LANGUAGES = "fumehood.languages"
"""Label: the programming languages that the image supports, separated by commas."""

GUEST_MB = "fumehood.guest-mb"
"""Label: MB of memory for the guest."""

LAYER_BASE = "fumehood.packages-on"
"""Label: the id of the image that a layer of packages extends."""

LAYER_KEY = "fumehood.packages-key"
"""Label: identifies what a layer of packages adds, and to which image (`find.layer_key`). Only the
newest layer with a key needs to have this label.
"""

OnStep = Callable[[str], None]
"""A function that receives a short description of each step when the step begins."""


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer in a store, with its own labels and those that it has from the layers below it."""

    id: str
    labels: Mapping[str, str]
    created: datetime
    size_bytes: int
    """The total size of this layer and of all layers below it."""


class ImageStore(Protocol):
    """The layers of one container runtime. All methods block, and may raise RuntimeFault."""

    name: str
    """The name for people, such as "Docker"."""

    def layers(self, label: str) -> list[StoredLayer]:
        """Return the layers that have the label `label` (`name` or `name=value`), newest first.
        The result contains only layers that this store has made, not what others derived from them.
        """

    def import_root(self, archive: Path, labels: Mapping[str, str]) -> str:
        """Make a layer from a root file system, and return the layer's id. `archive` is a tar file
        without compression.

        Raises:
            ImageBuildError: the file system cannot be imported.
        """

    def root_from_base(self, recipe: Recipe, context: bytes, target: Path, on_step: OnStep) -> None:
        """Install the packages of the recipe into its base image, and write the resulting file
        system to the tar file `target`. `context` is a tar archive of the recipe's files, one of
        which is a Dockerfile.

        Raises:
            ImageBuildError: a step failed, or this store cannot fetch images from a registry.
        """

    def root_from_host(self, target: Path) -> None:
        """Write a root file system of this host's programs and libraries to the tar file `target`.

        Raises:
            ImageBuildError: this store cannot use them, or they do not suffice.
        """

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
        """Make a layer on the layer with the id `below`, and return the new layer's id.

        The tar archive `files` is unpacked at the root of the file system. Then `command` runs as
        root in an isolated build step, for at most `run_s` seconds. If a step fails, nothing is
        kept.

        The new layer has the labels of the layer below, which `labels` overrides.

        Raises:
            ImageBuildError: the command failed. The message consists of `failed` and the cause.
        """

    def remove(self, layer: str) -> bool:
        """Remove the layer with this id, unless a container uses it or another layer is based on
        it. Return whether it was removed. Stopped containers count too.
        """

    def users_of(self, layer: str) -> list[str]:
        """Return the names of the containers that use this layer. Stopped containers count too."""

    def save(self, layer: str, file: IO[bytes]) -> None:
        """Write a layer and all layers below it to `file`, from which `load` loads them."""

    def load(self, file: IO[bytes]) -> None:
        """Load layers from a file that `save` of the same kind of store has written. Raises
        RuntimeFault if the file is invalid.
        """

    def sweep(self) -> None:
        """Remove what killed builds have left behind. Steps that may still be running are kept."""

    def close(self) -> None:
        """Release the connection to the runtime. The layers stay."""


@runtime_checkable
class HasImageStore(Protocol):
    """A container runtime whose images can be built here."""

    def open_store(self) -> ImageStore:
        """Open the store of the runtime's images. Blocks, and may raise RuntimeFault."""


def open_store(config: Config) -> ImageStore:
    """Open the store of what runs the containers, by the setting `container.engine`.

    Raises:
        RuntimeMissing: no part runs containers, or its images cannot be built here.
        RuntimeFault: the store cannot be used.
        PartError: the setting names no such part.
    """
    new = runtime_of(config.container.engine)
    runtime = None if new is None else new(config.own_images)
    if not isinstance(runtime, HasImageStore):
        raise RuntimeMissing
    return runtime.open_store()
