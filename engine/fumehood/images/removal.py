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

import docker
from docker.errors import APIError, NotFound

from fumehood.docker.images import list_images
from fumehood.sandbox.images.catalog import (
    LAYER_BASE,
    LAYERS,
    RECIPE,
    REPOSITORY,
    ROOT,
)
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


def replaced_by(client: docker.APIClient, recipe: Recipe) -> set[str]:
    """Return the ids of the images that are no longer needed after a new build of this recipe.

    Three kinds of images are considered: the images with the recipe's name, their base images, and
    all root file systems. An image is included in two cases:

    * It is over a week old.
    * It was built from the present recipe and, if it contains a guest, from the present guest.

    The result can include images that the new build uses. The caller must keep these images.
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
    """Return the ids of all images with this name and of their bases, whichever engine built
    them.
    """
    tops = {image.id for image in list_images(client, name)}
    return tops | {str(row["Id"]) for row in client.images(name=f"{REPOSITORY}/base-{name}")}


def useless(client: docker.APIClient, own: Path) -> set[str]:
    """Return the ids of the images and base images that are over a week old and that this engine
    does not use. `own` is the folder with the operator's own recipes.
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
    """Return the ids of the package layers that can be removed. These are:

    * layers that are over a week old and whose image this engine no longer uses
    * layers without a tag
    * the oldest layers, as many as are needed to bring the total size down to `most_bytes`

    A layer that was made in the last `FRESH_S` seconds is never included. `own` is the folder with
    the recipes that the operator wrote.
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
    """Return the ids of the root file systems that no recipe needs. Those that were made in the
    last hour are left out, because a running build may use them.
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
    """Remove images and the package layers on top of them. Keep those that a container uses, or on
    which another image is based. Return the ids of everything that was removed.

    An image is removed before the image on which it is based.
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
    """Return the names of the containers that were created from these images. Stopped containers
    count too.
    """
    names = {
        str(container["Names"][0]).removeprefix("/")
        for identifier in identifiers
        for container in client.containers(all=True, filters={"ancestor": identifier})
    }
    return sorted(names)


def _remove(client: docker.APIClient, identifier: str) -> bool:
    """Remove an image, unless a container uses it. Return whether it was removed."""
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
