"""Building an image: the root file system, packages of the Python index, and the guest on top.

Host side. Above it the command line; below it `layers`. What is there already and carries the
right labels is not built again: a root file system takes half a minute and seldom changes, and
images with the same Debian packages share one. Invariant: an image gets its labels together with
its content, so a build that was broken off leaves nothing that looks finished.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import docker

from fumehood.sandbox.container.docker_api import DockerError, typed_errors
from fumehood.sandbox.images import layers
from fumehood.sandbox.images.builder import sweep_builders
from fumehood.sandbox.images.catalog import Image, list_images
from fumehood.sandbox.images.errors import trouble_in
from fumehood.sandbox.images.leftovers import remove_unused, replaced_by
from fumehood.sandbox.images.recipe import Recipe, guest_digest
from fumehood.sandbox.images.rootfs import OnStep

DEADLINE_S = 300
"""For one answer of Docker: it unpacks a root file system in the longest of them."""


@dataclass(frozen=True, slots=True)
class Built:
    """What came of it: which image, and what had to be made for it."""

    image: Image
    made_base: bool
    made_guest: bool


def build_image(
    client: docker.APIClient,
    recipe: Recipe,
    on_step: OnStep,
    *,
    force: bool = False,
    since: float = math.inf,
    cache: Path | None = None,
    own: Path | None = None,
) -> Built:
    """Build what is missing or out of date; everything with `force`, but a root file system that
    was made after the moment `since`, which another image of this run stands on.

    Wheels are kept in `cache`; `own` is where an operator's own recipes are.

    Raises:
        ImageTrouble: with the cure. What was there before is still there.
    """
    try:
        with typed_errors():
            sweep_builders(client)
            ready = None if force else _ready(client, recipe, own)
            if ready is not None:
                return Built(ready, made_base=False, made_guest=False)
            replaced = replaced_by(client, recipe)
            base = None if force else layers.find_base(client, recipe)
            made_base = base is None
            if base is None:
                newer_than = since if force else 0.0
                base = layers.make_base(client, recipe, on_step, newer_than, cache or wheel_cache())
            identifier = layers.add_guest(client, recipe, base, on_step)
            found = list_images(client, recipe.name, own=own)
            image = next(i for i in found if i.id == identifier)
            remove_unused(client, replaced - {identifier, base})
            return Built(image, made_base=made_base, made_guest=True)
    except DockerError as error:
        raise trouble_in("The build", [str(error)]) from None
    except OSError as error:
        raise trouble_in("The image cannot be written", [str(error)]) from None


def wheel_cache() -> Path:
    """Where downloaded packages of the Python index are kept, to be used again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "fumehood" / "wheels"


def _ready(client: docker.APIClient, recipe: Recipe, own: Path | None) -> Image | None:
    """The recipe that is asked for decides, and not one that lies in a folder by now."""
    wanted = (recipe.digest, guest_digest())
    found = list_images(client, recipe.name, own=own)
    return next((image for image in found if (image.recipe, image.guest) == wanted), None)
