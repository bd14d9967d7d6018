"""Which images are of no use any more, and in which order they go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from docker.errors import APIError

from fumehood.sandbox.images.catalog import KEPT_S, idle_roots, remove_unused, useless
from fumehood.sandbox.images.recipe import guest_digest, read_recipe
from support.docker_images import ListedImages, image_row

OLD = int(time.time() - KEPT_S - 60)
NEW = int(time.time())
OURS = {"recipe": read_recipe("python").digest, "guest": guest_digest()}


class Store(ListedImages):
    """Images that stand on each other, and containers that use some."""

    def __init__(self, *rows: dict[str, Any], used: tuple[str, ...] = ()) -> None:
        super().__init__(*rows)
        self.used = used
        self.removed: list[str] = []

    def images(self, name: str = "", **how: Any) -> list[dict[str, Any]]:
        found = super().images(filters=how["filters"]) if "filters" in how else self.rows
        return (
            [r for r in found if any(str(t).startswith(f"{name}:") for t in r["RepoTags"])]
            if name
            else found
        )

    def containers(self, *, filters: dict[str, str], **_: Any) -> list[str]:
        return [each for each in self.used if each == filters["ancestor"]]

    def inspect_image(self, identifier: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["Id"] == identifier)

    def remove_image(self, what: str) -> None:
        if any(row.get("ParentId") == what for row in self.rows):
            raise APIError("conflict")
        self.rows = [row for row in self.rows if row["Id"] != what]
        if what.startswith("sha256:"):
            self.removed.append(what)


def top(identifier: str, *, created: int, parent: str = "", **changes: str) -> dict[str, Any]:
    row = image_row(identifier, created=created, **(OURS | changes))
    return {**row, "ParentId": parent}


def root(identifier: str, digest: str, *, created: int) -> dict[str, Any]:
    return {
        "Id": identifier, "Created": created, "Labels": {"fumehood.root": digest},
        "RepoTags": [f"fumehood/root:{digest[:12]}"], "ParentId": "",
    }  # fmt: skip


def test_dependent_image_is_removed_before_its_parent() -> None:
    store = Store(
        root("sha256:root", "d" * 64, created=OLD),
        top("sha256:top", created=OLD, parent="sha256:root"),
    )
    assert remove_unused(store, ["sha256:root", "sha256:top"]) == {"sha256:root", "sha256:top"}
    assert store.removed == ["sha256:top", "sha256:root"]


def test_image_in_use_is_kept_with_its_parent() -> None:
    store = Store(
        root("sha256:root", "d" * 64, created=OLD),
        top("sha256:top", created=OLD, parent="sha256:root"),
        used=("sha256:top",),
    )
    assert remove_unused(store, ["sha256:root", "sha256:top"]) == set()
    assert store.removed == []


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
