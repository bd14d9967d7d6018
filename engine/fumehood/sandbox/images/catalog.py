"""The images in Docker: found by their labels, used by their ids.

Host side, between Docker and the container wall or the command line. Invariant: an image counts as
this engine's only if its labels have the current digests of recipe and guest, and it has a tag of
our repository. (An image that somebody derives from ours inherits the labels but not the tag.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker
from docker.errors import NotFound

from fumehood.sandbox.images.recipe import (
    UnknownImage,
    WrongRecipe,
    guest_digest,
    image_names,
    read_recipe,
)
from fumehood.sandbox.settings import GUEST_MB as DEFAULT_GUEST_MB
from fumehood.sandbox.wall import ImageMissing

REPOSITORY = "fumehood"
"""First part of the Docker repository name of every image that the engine uses."""

IMAGE = "fumehood.image"
"""Label: the image's name, or the name of its layer."""

RECIPE = "fumehood.recipe"
"""Label: the digest of the recipe."""

GUEST = "fumehood.guest"
"""Label: the digest of the guest's files."""

BASE = "fumehood.base"
"""Label: the existing image from which the root file system was made, or empty."""

ROOT = "fumehood.root"
"""Label: the digest of a root file system's sources; empty on images that are based on a root file
system.
"""

PACKAGES = "fumehood.packages"
"""Label: the number of installed packages."""

LANGUAGES = "fumehood.languages"
"""Label: the programming languages that the image supports, separated by commas."""

GUEST_MB = "fumehood.guest-mb"
"""Label: MB of memory for the guest."""

LAYERS = f"{REPOSITORY}/packages"
"""Docker repository of layers: images that extend another image by what callers request."""

LAYER_BASE = "fumehood.packages-on"
"""Label: the id of the image that a layer extends."""

PACKAGES_FROM = "fumehood.packages-from"
"""Label: when the packages were installed, in Unix seconds. An image's age counts from this time.
"""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that an engine has built. Refer to the image by `id`, its digest, because a name can
    be reassigned.

    `recipe` is the digest of the recipe from which the image was built, and `guest` that of the
    guest's files.
    """

    name: str
    id: str
    size_bytes: int
    created: datetime
    recipe: str
    guest: str
    packages: int
    packages_from: datetime
    base: str = ""
    languages: tuple[str, ...] = ("python", "shell")
    guest_mb: int = DEFAULT_GUEST_MB
    """MB of memory for the guest, in addition to a container's memory class."""
    images_directory: Path | None = field(default=None, compare=False, repr=False)
    """The folder of the operator's own recipes."""

    @property
    def is_own(self) -> bool:
        """Whether the image is current: this engine would build the same image from the recipe and
        the guest that exist now.
        """
        try:
            recipe = read_recipe(self.name, base=self.base, own=self.images_directory)
        except (UnknownImage, WrongRecipe):
            return False
        return self.guest == guest_digest() and self.recipe == recipe.digest


def find_image(client: docker.APIClient, name: str, *, own: Path | None = None) -> Image:
    """Return the newest image with this name that is current (`Image.is_own`).

    `own` is the folder of the operator's own recipes.

    Raises:
        ImageMissing: there is no such image. The message names the command that builds it or, if no
            recipe has this name, the known names.
    """
    known = image_names(own=own)
    if name not in known:
        remedy = f"Name one of these: {', '.join(known)}."
        raise ImageMissing.of(repr(name), "does not exist", remedy)
    found = list_images(client, name, own=own)
    newest = newest_own(found)
    if newest is not None:
        return newest
    fault = "was built by another version of the engine" if found else "is not built"
    raise ImageMissing.of(name, fault, f"Build it: fumehood images build {name}")


def newest_own(found: Sequence[Image]) -> Image | None:
    """Return the first image in a list that is current (`Image.is_own`), or None if there is none.
    The list must begin with the newest image.
    """
    return next((image for image in found if image.is_own), None)


def list_images(
    client: docker.APIClient, name: str | None = None, *, own: Path | None = None
) -> list[Image]:
    """Return all images in Docker that have our labels and tag, newest first. If `name` is given,
    only images with this name are returned. The result includes images that are not current.
    """
    label = f"{IMAGE}={name}" if name is not None else IMAGE
    rows = client.images(filters={"label": [label, GUEST]})
    parsed = (_parsed(row, own) for row in rows if _has_our_tag(row))
    images = [image for image in parsed if image is not None]
    return sorted(images, key=lambda image: (image.created, image.id), reverse=True)


def _has_our_tag(row: dict[str, Any]) -> bool:
    """Whether a row of Docker's list of images has a tag of our repository that matches the row's
    labels. If the row is a layer with packages, the result is False.
    """
    if LAYER_BASE in (row.get("Labels") or {}):  # it inherits the labels of the image below it
        return False
    repository = f"{REPOSITORY}/{(row.get('Labels') or {}).get(IMAGE)}:"
    return any(str(tag).startswith(repository) for tag in row.get("RepoTags") or ())


def _parsed(row: dict[str, Any], own: Path | None) -> Image | None:
    """Convert a row of Docker's list to an image. The labels are untrusted, so return None if they
    are invalid.
    """
    labels = row.get("Labels") or {}
    try:
        return Image(
            name=labels[IMAGE],
            id=str(row["Id"]),
            size_bytes=int(row["Size"]),
            created=datetime.fromtimestamp(int(row["Created"]), UTC),
            recipe=labels[RECIPE],
            guest=labels[GUEST],
            packages=int(labels[PACKAGES]),
            packages_from=datetime.fromtimestamp(int(labels[PACKAGES_FROM]), UTC),
            base=labels.get(BASE, ""),
            languages=tuple(labels.get(LANGUAGES, "python,shell").split(",")),
            guest_mb=int(labels.get(GUEST_MB, DEFAULT_GUEST_MB)),
            images_directory=own,
        )
    except (KeyError, ValueError, OverflowError, OSError):
        return None


def layer_tag(base: str, lock: str) -> str:
    """Return the tag of a layer, an image that adds packages to another image. `base` is the id of
    the other image, and `lock` the text that lists the packages with their exact versions.
    """
    return hashlib.sha256(f"{base}\n{lock}".encode()).hexdigest()


def find_layer(client: docker.APIClient, base: str, lock: str) -> str | None:
    """Return the id of the layer that adds packages to the image with the id `base`, or None if
    there is no such layer. `lock` is the text that lists the packages with their exact versions.
    """
    try:
        return str(client.inspect_image(f"{LAYERS}:{layer_tag(base, lock)}")["Id"])
    except NotFound:
        return None
