"""The images that containers start from: what an image is, and when it is current.

Host side. Invariant: an image is current only if it was built from the present recipe and guest.
"""

from __future__ import annotations

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
