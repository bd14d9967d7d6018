"""Which images are of no use any more."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fumehood.docker.store import LAYERS, DockerStore
from fumehood.image_store.store import IMAGE, LAYER_BASE, ROOT
from fumehood.images.removal import FRESH_S, KEPT_S, idle_roots, old_layers, useless
from fumehood.sandbox.images.recipe import guest_digest, read_recipe
from support.docker_images import ListedImages, image_row

OLD = int(time.time() - KEPT_S - 60)
NEW = int(time.time())
OURS = {"recipe": read_recipe("python").digest, "guest": guest_digest()}


def listed(*rows: dict[str, Any]) -> DockerStore:
    return DockerStore(ListedImages(*rows))


def top(identifier: str, *, created: int, **changes: str) -> dict[str, Any]:
    return image_row(identifier, created=created, **(OURS | changes))


def root(identifier: str, digest: str, *, created: int) -> dict[str, Any]:
    return {
        "Id": identifier, "Size": 100, "Created": created,
        "Labels": {IMAGE: "root", ROOT: digest}, "RepoTags": [f"fumehood/root:{digest[:12]}"],
    }  # fmt: skip


def test_current_images_are_not_considered_unused() -> None:
    store = listed(
        top("sha256:ours", created=OLD),
        top("sha256:new", created=NEW, guest="0" * 64),
        top("sha256:old", created=OLD, guest="0" * 64),
        top("sha256:before", created=OLD, recipe="0" * 64),
    )
    assert useless(store, Path("/nonexistent")) == {"sha256:old", "sha256:before"}


def test_root_image_of_a_recipe_is_kept_for_the_next_build() -> None:
    store = listed(
        root("sha256:used", read_recipe("shell").root_digest, created=OLD),
        root("sha256:idle", "d" * 64, created=OLD),
        root("sha256:being-built-on", "e" * 64, created=NEW),
    )
    assert idle_roots(store, Path("/nonexistent")) == {"sha256:idle"}


def test_too_large_layers_go_from_the_oldest_but_not_before_a_container_can_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_800_000_000
    monkeypatch.setattr("time.time", lambda: float(now))

    def layer(identifier: str, age_s: int, *tags: str) -> dict[str, Any]:
        labels = {LAYER_BASE: "sha256:base"}
        tags = tags or (f"{LAYERS}:{identifier}",)
        return {
            "Id": identifier, "Size": 100, "Created": now - age_s, "Labels": labels,
            "RepoTags": [*filter(None, tags)],
        }  # fmt: skip

    store = listed(
        layer("old", FRESH_S + 2),
        layer("others", 9),
        layer("own", 0),
        layer("in making", 0, ""),
        layer("untagged", FRESH_S + 1, ""),
    )
    assert old_layers(store, 100) == {"old", "untagged"}
    assert old_layers(store, 500) == {"untagged"}
    now += FRESH_S  # the control: later all but the newest go
    assert old_layers(store, 100) == {"old", "others", "untagged"}
    now += 1
    assert old_layers(store, 100) == {"old", "others", "untagged", "in making"}
