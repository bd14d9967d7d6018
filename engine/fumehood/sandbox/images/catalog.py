"""The images in Docker: found by their labels, used by their ids, removed if nothing needs them.

Host side, between Docker and the container wall or the command line. Invariants: an image is this
engine's only if its labels have the current digests of recipe and guest, and it has a tag of our
repository (an image that somebody derives from ours inherits the labels but not the tag). An image
that a container uses, or on which another image is based, is never removed. A build also keeps
images that an engine of another version made in the last week.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, NotFound

from fumehood.sandbox.images.recipe import (
    Lock,
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
"""First part of the Docker repository name of every image that this package builds."""

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
"""Docker repository of layers: images that extend another image by packages that callers request.
"""

LAYER_BASE = "fumehood.packages-on"
"""Label: the id of the image to which a layer adds packages."""

PACKAGES_FROM = "fumehood.packages-from"
"""Label: when the packages were installed, in Unix seconds. An image's age counts from this time.
"""

NEW_S = 3600
"""Seconds for which an unneeded root file system is kept, because a running build may use it."""

FRESH_S = 300
"""Seconds for which a layer of packages is kept in any case, because the container for which it was
made may not have started yet."""

KEPT_S = 7 * 24 * 3600
"""Seconds for which another engine's image is kept, because that engine may need it again."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image that an engine has built. Use `id`, the digest, because names can be reassigned.

    `recipe` and `guest` are the digests of the recipe and of the guest's files that it was built
    from.
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
        """Whether this engine would now build the same image on the same base."""
        try:
            recipe = read_recipe(self.name, base=self.base, own=self.images_directory)
        except (UnknownImage, WrongRecipe):
            return False
        return self.guest == guest_digest() and self.recipe == recipe.digest


def find_image(client: docker.APIClient, name: str, *, own: Path | None = None) -> Image:
    """Return the newest image with this name that this engine would build in the same way now.

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
    """Return the first image in the list that this engine would build, or None if there is none.
    The newest image must come first in the list.
    """
    return next((image for image in found if image.is_own), None)


def list_images(
    client: docker.APIClient, name: str | None = None, *, own: Path | None = None
) -> list[Image]:
    """Return all images, or those with this name, that have our labels and tag, newest first. The
    result includes images of other engines.
    """
    label = f"{IMAGE}={name}" if name is not None else IMAGE
    rows = client.images(filters={"label": [label, GUEST]})
    parsed = (_parsed(row, own) for row in rows if _has_our_tag(row))
    images = [image for image in parsed if image is not None]
    return sorted(images, key=lambda image: (image.created, image.id), reverse=True)


def _has_our_tag(row: dict[str, Any]) -> bool:
    """Return whether a row of Docker's list is an image of ours, and not a layer of packages, which
    has inherited the image's labels.
    """
    if LAYER_BASE in (row.get("Labels") or {}):
        return False
    repository = f"{REPOSITORY}/{(row.get('Labels') or {}).get(IMAGE)}:"
    return any(str(tag).startswith(repository) for tag in row.get("RepoTags") or ())


def _parsed(row: dict[str, Any], own: Path | None) -> Image | None:
    """Return the image in a row of Docker's list. The image's labels are untrusted: return None if
    they are invalid.
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


def layer_tag(base: str, lock: Lock) -> str:
    """Return the tag of the layer that adds these packages to the image with the id `base`."""
    return hashlib.sha256(f"{base}\n{lock.text}".encode()).hexdigest()


def find_layer(client: docker.APIClient, base: str, lock: Lock) -> str | None:
    """Return the id of the layer that adds these packages to the image with the id `base`, or None
    if it does not exist.
    """
    try:
        return str(client.inspect_image(f"{LAYERS}:{layer_tag(base, lock)}")["Id"])
    except NotFound:
        return None


# -- removal --------------------------------------------------------------------------------


def replaced_by(client: docker.APIClient, recipe: Recipe) -> set[str]:
    """Return the ids of images and bases that a new build replaces: those that were built from the
    same sources, and images of the same name and root file systems that are over a week old.
    """
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
    """Return the ids of all images and bases that any engine has built under this name."""
    tops = {image.id for image in list_images(client, name)}
    return tops | {str(row["Id"]) for row in client.images(name=f"{REPOSITORY}/base-{name}")}


def useless(client: docker.APIClient, own: Path) -> set[str]:
    """Return the ids of images and bases that are over a week old and that this engine would not
    use.
    """
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


def old_layers(client: docker.APIClient, most_bytes: int, own: Path | None = None) -> set[str]:
    """Return the ids of layers of packages that are over a week old and whose image is not current.
    If the total size exceeds `most_bytes`, also return the ids of the oldest layers. Layers that
    were made in the last minutes are excluded.
    """
    current = {image.id: image.size_bytes for image in list_images(client, own=own) if image.is_own}
    rows = client.images(filters={"label": LAYER_BASE})
    found, total = set(), 0
    for row in sorted(rows, key=lambda row: int(row["Created"]), reverse=True):
        if not all(tag.startswith(f"{LAYERS}:") for tag in row["RepoTags"] or ()):
            continue  # an image that somebody made from a layer
        below = current.get(row["Labels"][LAYER_BASE])
        total += int(row["Size"]) - (below or 0)
        age_s = time.time() - int(row["Created"])
        is_left = below is None and age_s > KEPT_S
        if age_s > FRESH_S and (is_left or total > most_bytes or not row["RepoTags"]):
            found.add(str(row["Id"]))
    return found


def idle_roots(client: docker.APIClient, own: Path) -> set[str]:
    """Return the ids of root file systems that no recipe needs. Root file systems made in the last
    hour are excluded, because a running build may be using them.
    """
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
    """Remove images that nothing needs, and the layers of packages on them. Return the ids of those
    that were removed.

    An image is removed before its base. An image that a container or another image needs stays.
    """
    left = set(identifiers)
    layers = client.images(filters={"label": LAYER_BASE})
    left |= {str(row["Id"]) for row in layers if row["Labels"][LAYER_BASE] in left}
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
    """Return the names of containers made from these images, including stopped ones."""
    names = {
        str(container["Names"][0]).removeprefix("/")
        for identifier in identifiers
        for container in client.containers(all=True, filters={"ancestor": identifier})
    }
    return sorted(names)


def _remove(client: docker.APIClient, identifier: str) -> bool:
    """Remove an image unless a container uses it. Return whether it was removed."""
    try:
        if client.containers(all=True, quiet=True, filters={"ancestor": identifier}):
            return False
        for tag in client.inspect_image(identifier)["RepoTags"] or ():
            client.remove_image(tag)
        with suppress(NotFound):  # Docker may have removed it with its last tag
            client.remove_image(identifier)
    except APIError:
        return False
    return True
