"""Finds images in a store: by their labels, so that they can be used by their ids.

Host side. Invariant: an image counts as this engine's only if it is current (`Image.is_own`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from fumehood.image_store.store import (
    BASE,
    GUEST,
    GUEST_MB,
    IMAGE,
    LANGUAGES,
    LAYER_BASE,
    LAYER_KEY,
    PACKAGES,
    PACKAGES_FROM,
    RECIPE,
    ImageStore,
    StoredLayer,
)
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import image_names
from fumehood.sandbox.settings import GUEST_MB as DEFAULT_GUEST_MB
from fumehood.sandbox.wall import ImageMissing


def find_image(store: ImageStore, name: str, *, own: Path | None = None) -> Image:
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
    found = list_images(store, name, own=own)
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
    store: ImageStore, name: str | None = None, *, own: Path | None = None
) -> list[Image]:
    """Return all images in a store, newest first. If `name` is given, only images with this name
    are returned. The result includes images that are not current.
    """
    layers = store.layers(f"{IMAGE}={name}" if name is not None else IMAGE)
    # A layer of packages has the labels of the image below it.
    parsed = (_parsed(layer, own) for layer in layers if LAYER_BASE not in layer.labels)
    return [image for image in parsed if image is not None]


def _parsed(layer: StoredLayer, own: Path | None) -> Image | None:
    """Convert a layer to an image. Return None if the layer has no guest, or if its labels, which
    are untrusted, are invalid.
    """
    labels = layer.labels
    try:
        return Image(
            name=labels[IMAGE],
            id=layer.id,
            size_bytes=layer.size_bytes,
            created=layer.created,
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


def find_layer(store: ImageStore, base: str, lock: str) -> str | None:
    """Return the id of the layer that adds packages to the image with the id `base`, or None if
    there is no such layer. `lock` is the text that lists the packages with their exact versions.
    """
    found = store.layers(f"{LAYER_KEY}={layer_key(base, lock)}")
    return found[0].id if found else None


def layer_key(base: str, lock: str) -> str:
    """Return the key of a layer that adds packages to an image (`LAYER_KEY`). `base` is the id of
    the image, and `lock` the text that lists the packages with their exact versions.
    """
    return hashlib.sha256(f"{base}\n{lock}".encode()).hexdigest()
