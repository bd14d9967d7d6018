"""The images that containers start from: what an image is, and the labels that it has.

Host side. Images are found by their labels, and used by their ids. Invariant: an image counts as
this engine's only if its labels have the current digests of recipe and guest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from fumehood.sandbox.images.recipe import (
    UnknownImage,
    WrongRecipe,
    guest_digest,
    read_recipe,
)
from fumehood.sandbox.settings import GUEST_MB as DEFAULT_GUEST_MB

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


def newest_own(found: Sequence[Image]) -> Image | None:
    """Return the first image in a list that is current (`Image.is_own`), or None if there is none.
    The list must begin with the newest image.
    """
    return next((image for image in found if image.is_own), None)


def layer_tag(base: str, lock: str) -> str:
    """Return the tag of a layer, an image that adds packages to another image. `base` is the id of
    the other image, and `lock` the text that lists the packages with their exact versions.
    """
    return hashlib.sha256(f"{base}\n{lock}".encode()).hexdigest()
