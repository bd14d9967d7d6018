"""Which images are of no use any more."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fumehood.sandbox.images.catalog import KEPT_S, idle_roots, useless
from fumehood.sandbox.images.recipe import guest_digest, read_recipe
from support.docker_images import ListedImages, image_row

OLD = int(time.time() - KEPT_S - 60)
NEW = int(time.time())
OURS = {"recipe": read_recipe("python").digest, "guest": guest_digest()}


class Store(ListedImages):
    """Images, also by the name of their tags."""

    def images(self, name: str = "", **how: Any) -> list[dict[str, Any]]:
        found = super().images(filters=how["filters"]) if "filters" in how else self.rows
        return (
            [r for r in found if any(str(t).startswith(f"{name}:") for t in r["RepoTags"])]
            if name
            else found
        )


def top(identifier: str, *, created: int, **changes: str) -> dict[str, Any]:
    return image_row(identifier, created=created, **(OURS | changes))


def root(identifier: str, digest: str, *, created: int) -> dict[str, Any]:
    return {
        "Id": identifier, "Created": created, "Labels": {"fumehood.root": digest},
        "RepoTags": [f"fumehood/root:{digest[:12]}"],
    }  # fmt: skip


def test_current_images_are_not_considered_unused() -> None:
    store = Store(
        top("sha256:ours", created=OLD),
        top("sha256:new", created=NEW, guest="0" * 64),
        top("sha256:old", created=OLD, guest="0" * 64),
        top("sha256:before", created=OLD, recipe="0" * 64),
    )
    assert useless(store, Path("/nonexistent")) == {"sha256:old", "sha256:before"}


def test_root_image_of_a_recipe_is_kept_for_the_next_build() -> None:
    store = Store(
        root("sha256:used", read_recipe("shell").root_digest, created=OLD),
        root("sha256:idle", "d" * 64, created=OLD),
        root("sha256:being-built-on", "e" * 64, created=NEW),
    )
    assert idle_roots(store, Path("/nonexistent")) == {"sha256:idle"}
