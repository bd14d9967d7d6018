"""Removes images that nothing needs, the images on which they are based, and the layers on top of
them.

Host side. Invariant: an image is never removed if a container uses it, or if another image is based
on it. A build also keeps those images that an engine of another version made in the last week.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fumehood.image_store.find import list_images
from fumehood.image_store.store import (
    IMAGE,
    LAYER_BASE,
    LAYER_KEY,
    RECIPE,
    ROOT,
    ImageStore,
    StoredLayer,
)
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import (
    Recipe,
    WrongRecipe,
    guest_digest,
    image_names,
    read_recipe,
)

NEW_S = 3600
"""Seconds for which a root file system is kept although nothing needs it, because a running build
may use it.
"""

FRESH_S = 300
"""Seconds for which a layer of packages is kept in any case, because the container for which it was
made may not have started yet.
"""

KEPT_S = 7 * 24 * 3600
"""Seconds for which an image of another engine is kept, because that engine may need it again."""


def replaced_by(store: ImageStore, recipe: Recipe) -> set[str]:
    """Return the ids of the images that are no longer needed after a new build of this recipe.

    Three kinds of images are considered: the images with the recipe's name, their base images, and
    all root file systems. An image is included in two cases:

    * It is over a week old.
    * It was built from the present recipe and, if it contains a guest, from the present guest.

    The result can include images that the new build uses. The caller must keep these images.
    """
    guest = guest_digest()
    tops = {
        image.id
        for image in list_images(store, recipe.name)
        if (image.recipe, image.guest) == (recipe.digest, guest) or _age_s(image) > KEPT_S
    }
    below = {
        layer.id
        for name, label, digest in (
            (f"base-{recipe.name}", RECIPE, recipe.digest),
            ("root", ROOT, recipe.root_digest),
        )
        for layer in store.layers(f"{IMAGE}={name}")
        if layer.labels.get(label) == digest or _age_s(layer) > KEPT_S
    }
    return tops | below


def images_of(store: ImageStore, name: str) -> set[str]:
    """Return the ids of all images with this name and of their bases, whichever engine built
    them.
    """
    tops = {image.id for image in list_images(store, name)}
    return tops | {layer.id for layer in store.layers(f"{IMAGE}=base-{name}")}


def useless(store: ImageStore, own: Path) -> set[str]:
    """Return the ids of the images and base images that are over a week old and that this engine
    does not use. `own` is the folder with the operator's own recipes.
    """
    tops = list_images(store, own=own)
    used = {image.recipe for image in tops if image.is_own}
    bases = {
        layer.id
        for layer in store.layers(RECIPE)
        if layer.labels.get(IMAGE, "").startswith("base-")
        and layer.labels[RECIPE] not in used
        and _age_s(layer) > KEPT_S
    }
    return bases | {image.id for image in tops if not image.is_own and _age_s(image) > KEPT_S}


def old_layers(store: ImageStore, most_bytes: int, own: Path | None = None) -> set[str]:
    """Return the ids of the package layers that can be removed. These are:

    * layers that are over a week old and whose image this engine no longer uses
    * layers without a key, which have been made again
    * the oldest layers, as many as are needed to bring the total size down to `most_bytes`

    A layer that was made in the last `FRESH_S` seconds is never included. `own` is the folder with
    the recipes that the operator wrote.
    """
    current = {image.id: image.size_bytes for image in list_images(store, own=own) if image.is_own}
    found, total = set(), 0
    for layer in store.layers(LAYER_BASE):
        below = current.get(layer.labels[LAYER_BASE])
        total += layer.size_bytes - (below or 0)
        age_s = _age_s(layer)
        is_left = below is None and age_s > KEPT_S
        if age_s > FRESH_S and (is_left or total > most_bytes or LAYER_KEY not in layer.labels):
            found.add(layer.id)
    return found


def idle_roots(store: ImageStore, own: Path) -> set[str]:
    """Return the ids of the root file systems that no recipe needs. Those that were made in the
    last hour are left out, because a running build may use them.
    """
    wanted = set()
    for name in image_names(own=own):
        with suppress(WrongRecipe):
            wanted.add(read_recipe(name, own=own).root_digest)
    return {
        layer.id
        for layer in store.layers(f"{IMAGE}=root")
        if layer.labels.get(ROOT) not in wanted and _age_s(layer) > NEW_S
    }


def remove_unused(store: ImageStore, identifiers: Iterable[str]) -> set[str]:
    """Remove images and the package layers on top of them. Keep those that a container uses, or on
    which another image is based. Return the ids of everything that was removed.

    An image is removed before the image on which it is based.
    """
    left = set(identifiers)
    left |= {each.id for each in store.layers(LAYER_BASE) if each.labels[LAYER_BASE] in left}
    gone: set[str] = set()
    while done := {identifier for identifier in left if store.remove(identifier)}:
        gone |= done
        left -= done
    return gone


def _age_s(layer: StoredLayer | Image) -> float:
    return time.time() - layer.created.timestamp()
