"""Images that nobody needs any more: what a build replaced, and what is old.

Host side. Invariant: what a container uses or another image stands on is left alone, and so is
what an engine of another version made in the last week.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import docker
from docker.errors import APIError

from fumehood.sandbox.images.catalog import RECIPE, REPOSITORY, ROOT, list_images
from fumehood.sandbox.images.recipe import (
    Recipe,
    WrongRecipe,
    guest_digest,
    image_names,
    read_recipe,
)

NEW_S = 3600
KEPT_S = 7 * 24 * 3600
"""So long an image of another engine is left alone, which may just have no container."""


def replaced_by(client: docker.APIClient, recipe: Recipe) -> set[str]:
    """What can go once the new image is there: earlier builds of it, and old ones of others."""
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
    """What no engine of this version uses, and what it stood on, where both are old."""
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
    """Root file systems of no recipe that there is. A new one may be somebody's who builds now."""
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
    """Remove them; which of them are gone. The ones that others stand on come last."""
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
    """The names of the containers made of them, also those that have stopped."""
    names = {
        str(container["Names"][0]).removeprefix("/")
        for identifier in identifiers
        for container in client.containers(all=True, filters={"ancestor": identifier})
    }
    return sorted(names)


def _remove(client: docker.APIClient, identifier: str) -> bool:
    """An image that a container needs stays."""
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
    """With its last name it may be gone already."""
    try:
        client.remove_image(identifier)
    except APIError as error:
        if error.status_code != 404:
            raise
