"""The images in Docker: found by their labels, used by their ids.

Host side, between Docker and the container wall or the command line. Invariant: an image counts as
this engine's only if it is current (`Image.is_own`) and has a tag of our repository. (An image that
somebody derives from ours inherits the labels but not the tag.)
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker
from docker.errors import NotFound

from fumehood.sandbox.images.catalog import (
    BASE,
    GUEST,
    GUEST_MB,
    IMAGE,
    LANGUAGES,
    LAYER_BASE,
    LAYERS,
    PACKAGES,
    PACKAGES_FROM,
    RECIPE,
    REPOSITORY,
    Image,
    layer_tag,
    newest_own,
)
from fumehood.sandbox.images.recipe import image_names
from fumehood.sandbox.settings import GUEST_MB as DEFAULT_GUEST_MB
from fumehood.sandbox.wall import ImageMissing


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


def find_layer(client: docker.APIClient, base: str, lock: str) -> str | None:
    """Return the id of the layer that adds packages to the image with the id `base`, or None if
    there is no such layer. `lock` is the text that lists the packages with their exact versions.
    """
    try:
        return str(client.inspect_image(f"{LAYERS}:{layer_tag(base, lock)}")["Id"])
    except NotFound:
        return None
