"""The images in Docker: found by their labels, used by their ids, removed if nothing needs them.

Host side. Above it the wall's pool and the command line; below it Docker. Invariants: an image is
this engine's only if its labels carry both digests of `recipe`, and a tag of our repository is on
it: images that somebody derives from ours inherit the labels, and not the tag. An image that a
container uses or another image is based on is never removed, nor is one that an engine of another
version made in the last week.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError

from fumehood.sandbox.images.recipe import (
    Recipe,
    UnknownImage,
    WrongRecipe,
    guest_digest,
    image_names,
    read_recipe,
)
from fumehood.sandbox.settings import GUEST_MB as DEFAULT_GUEST_MB
from fumehood.sandbox.wall import ImageMissing

REPOSITORY = "fumehood"
IMAGE = "fumehood.image"
RECIPE = "fumehood.recipe"
GUEST = "fumehood.guest"
BASE = "fumehood.base"
ROOT = "fumehood.root"
"""The root file system's digest; empty on images based on one."""

PACKAGES = "fumehood.packages"
LANGUAGES = "fumehood.languages"
GUEST_MB = "fumehood.guest-mb"
PACKAGES_FROM = "fumehood.packages-from"
"""Time of the packages' installation, in seconds since 1970: the basis of an image's age."""

NEW_S = 3600
KEPT_S = 7 * 24 * 3600
"""Seconds that an image of another engine is kept, because it may have no container at the moment.
"""


@dataclass(frozen=True, slots=True)
class Image:
    """An image built by an engine. Only its digest, `id`, identifies it for good."""

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
    """The guest's memory, on top of a container's memory class."""
    images_directory: Path | None = field(default=None, compare=False, repr=False)
    """The folder of an operator's own recipes."""

    @property
    def is_own(self) -> bool:
        """Whether this engine would build the same image now, from the same base."""
        try:
            recipe = read_recipe(self.name, base=self.base, own=self.images_directory)
        except (UnknownImage, WrongRecipe):
            return False
        return self.guest == guest_digest() and self.recipe == recipe.digest


def find_image(client: docker.APIClient, name: str, *, own: Path | None = None) -> Image:
    """The newest image of this name that this engine built. `own` is the folder of the operator's
    recipes.

    Raises:
        ImageMissing: with the command that builds it, or with the known names where there is no
            recipe of this name.
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
    """The newest image of this engine, from a list sorted newest first."""
    return next((image for image in found if image.is_own), None)


def list_images(
    client: docker.APIClient, name: str | None = None, *, own: Path | None = None
) -> list[Image]:
    """All images with our labels, newest first, including those of other engines."""
    label = f"{IMAGE}={name}" if name is not None else IMAGE
    rows = client.images(filters={"label": [label, GUEST]})
    parsed = (_parsed(row, own) for row in rows if _has_our_tag(row))
    images = [image for image in parsed if image is not None]
    return sorted(images, key=lambda image: (image.created, image.id), reverse=True)


def _has_our_tag(row: dict[str, Any]) -> bool:
    repository = f"{REPOSITORY}/{(row.get('Labels') or {}).get(IMAGE)}:"
    return any(str(tag).startswith(repository) for tag in row.get("RepoTags") or ())


def _parsed(row: dict[str, Any], own: Path | None) -> Image | None:
    """Parse an image's labels, which are untrusted. None if they are invalid."""
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


# -- removal --------------------------------------------------------------------------------


def replaced_by(client: docker.APIClient, recipe: Recipe) -> set[str]:
    """Images that the new one replaces: earlier builds of it, and old ones of other engines."""
    guest, now = guest_digest(), time.time()
    tops = {
        image.id
        for image in list_images(client, recipe.name)
        if (image.recipe, image.guest) == (recipe.digest, guest)
        or now - image.created.timestamp() > KEPT_S
    }
    below = {
        str(row["Id"])
        for name, label, digest in (
            (f"base-{recipe.name}", RECIPE, recipe.digest),
            ("root", ROOT, recipe.root_digest),
        )
        for row in client.images(name=f"{REPOSITORY}/{name}")
        if (row["Labels"] or {}).get(label) == digest or now - row["Created"] > KEPT_S
    }
    return tops | below


def images_of(client: docker.APIClient, name: str) -> set[str]:
    """Everything that was built for the image of this name, by any engine."""
    tops = {image.id for image in list_images(client, name)}
    return tops | {str(row["Id"]) for row in client.images(name=f"{REPOSITORY}/base-{name}")}


def useless(client: docker.APIClient, own: Path) -> set[str]:
    """Old images that no engine of this version uses, and their old bases."""
    tops = list_images(client, own=own)
    used = {image.recipe for image in tops if image.is_own}
    now = time.time()
    bases = {
        str(row["Id"])
        for row in client.images(filters={"label": [RECIPE]})
        if any(str(tag).startswith(f"{REPOSITORY}/base-") for tag in row["RepoTags"] or ())
        and row["Labels"][RECIPE] not in used
        and now - row["Created"] > KEPT_S
    }
    return bases | {
        image.id for image in tops if not image.is_own and now - image.created.timestamp() > KEPT_S
    }


def idle_roots(client: docker.APIClient, own: Path) -> set[str]:
    """Root file systems without a recipe. A new one may belong to a running build."""
    wanted = set()
    for name in image_names(own=own):
        with suppress(WrongRecipe):
            wanted.add(read_recipe(name, own=own).root_digest)
    return {
        str(row["Id"])
        for row in client.images(name=f"{REPOSITORY}/root")
        if (row["Labels"] or {}).get(ROOT) not in wanted and time.time() - row["Created"] > NEW_S
    }


def remove_unused(client: docker.APIClient, identifiers: Iterable[str]) -> set[str]:
    """Remove images, and return the removed ones. Bases come last."""
    left = set(identifiers)
    gone: set[str] = set()
    while left:
        below = {str(row.get("ParentId")) for row in client.images(all=True)}
        done = {identifier for identifier in left - below if _remove(client, identifier)}
        gone |= done
        left -= done
        if not done:
            break
    return gone


def users_of(client: docker.APIClient, identifiers: Iterable[str]) -> list[str]:
    """The names of the containers made from these images, including stopped ones."""
    names = {
        str(container["Names"][0]).removeprefix("/")
        for identifier in identifiers
        for container in client.containers(all=True, filters={"ancestor": identifier})
    }
    return sorted(names)


def _remove(client: docker.APIClient, identifier: str) -> bool:
    """Remove an image, unless a container needs it."""
    try:
        if client.containers(all=True, quiet=True, filters={"ancestor": identifier}):
            return False
        for tag in client.inspect_image(identifier)["RepoTags"] or ():
            client.remove_image(tag)
        _remove_nameless(client, identifier)
    except APIError:
        return False
    return True


def _remove_nameless(client: docker.APIClient, identifier: str) -> None:
    """Remove an image without a name. It may be gone together with its last name."""
    try:
        client.remove_image(identifier)
    except APIError as error:
        if error.status_code != 404:
            raise
