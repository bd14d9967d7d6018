"""The images that are there: found by their labels, used by their ids.

Host side. Above it the wall's pool and the command line; below it Docker. Invariant: an image is
this engine's only if its labels carry both digests of `recipe`, and a tag of our repository is on
it: images that somebody derives from ours inherit the labels, and not the tag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fumehood.sandbox.images import settings as image_settings
from fumehood.sandbox.images.recipe import (
    UnknownImage,
    WrongRecipe,
    guest_digest,
    image_names,
    read_recipe,
)
from fumehood.sandbox.wall import ImageMissing

REPOSITORY = "fumehood"
IMAGE = "fumehood.image"
RECIPE = "fumehood.recipe"
GUEST = "fumehood.guest"
BASE = "fumehood.base"
ROOT = "fumehood.root"
"""Which root file system it is; empty on what stands on one."""

PACKAGES = "fumehood.packages"
LANGUAGES = "fumehood.languages"
GUEST_MB = "fumehood.guest-mb"
PACKAGES_FROM = "fumehood.packages-from"
"""When the packages were installed, in seconds since 1970: what an image's age means."""

__all__ = ["DockerImages", "Image", "find_image", "guest_digest", "list_images", "newest_own"]


class DockerImages(Protocol):
    """As much of Docker's client as finding an image needs."""

    def images(self, *, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Images as the engine lists them."""
        ...


@dataclass(frozen=True, slots=True)
class Image:
    """One image of ours. `id` is its digest; nothing else names it for good."""

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
    guest_mb: int = image_settings.GUEST_MB
    """What the guest needs in it, on top of a container's memory class."""
    images_directory: Path | None = field(default=None, compare=False, repr=False)
    """Where an operator's own recipes are."""

    @property
    def is_own(self) -> bool:
        """Whether it is what this engine would build now, from the same base."""
        try:
            recipe = read_recipe(self.name, base=self.base, own=self.images_directory)
        except (UnknownImage, WrongRecipe):
            return False
        return self.guest == guest_digest() and self.recipe == recipe.digest


def find_image(docker: DockerImages, name: str, *, own: Path | None = None) -> Image:
    """The newest image of this name that is this engine's. `own` has the operator's recipes.

    Raises:
        ImageMissing: with the command that builds it, or with the known names where there is no
            recipe of this name.
    """
    found = list_images(docker, name, own=own)
    newest = newest_own(found)
    if newest is not None:
        return newest
    if name not in image_names(own=own):
        known = ", ".join(image_names(own=own))
        raise ImageMissing.of(repr(name), "does not exist", f"Name one of these: {known}.")
    fault = "was built by another version of the engine" if found else "is not built"
    raise ImageMissing.of(name, fault, f"Build it: fumehood images build {name}")


def newest_own(found: Sequence[Image]) -> Image | None:
    """Out of a list that is sorted newest first."""
    return next((image for image in found if image.is_own), None)


def list_images(
    docker: DockerImages, name: str | None = None, *, own: Path | None = None
) -> list[Image]:
    """All images that carry our labels, newest first; other engines' too."""
    label = f"{IMAGE}={name}" if name is not None else IMAGE
    rows = docker.images(filters={"label": [label, GUEST]})
    parsed = (_parsed(row, own) for row in rows if _has_our_tag(row))
    images = [image for image in parsed if image is not None]
    return sorted(images, key=lambda image: (image.created, image.id), reverse=True)


def _has_our_tag(row: dict[str, Any]) -> bool:
    repository = f"{REPOSITORY}/{(row.get('Labels') or {}).get(IMAGE)}:"
    return any(str(tag).startswith(repository) for tag in row.get("RepoTags") or ())


def _parsed(row: dict[str, Any], own: Path | None) -> Image | None:
    """Labels are anybody's words: what cannot be read is no image of ours."""
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
            guest_mb=int(labels.get(GUEST_MB, image_settings.GUEST_MB)),
            images_directory=own,
        )
    except (KeyError, ValueError, OverflowError, OSError):
        return None
