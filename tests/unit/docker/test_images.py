"""Which image is this engine's."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import SandboxUnavailable
from fumehood.docker.store import DockerStore
from fumehood.image_store.find import find_image, list_images
from fumehood.image_store.store import LAYER_BASE
from fumehood.sandbox.images.catalog import guest_digest
from fumehood.sandbox.images.recipe import read_recipe
from support.docker_images import ListedImages, image_row

RECIPE = read_recipe("python").digest
GUEST = guest_digest()
BASE = "debian@sha256:" + "b" * 64


def listed(*rows: dict[str, Any]) -> DockerStore:
    return DockerStore(ListedImages(*rows))


def test_newest_image_of_this_engine_is_found() -> None:
    store = listed(
        image_row("sha256:old", recipe=RECIPE, guest=GUEST, created=1_700_000_000),
        image_row("sha256:new", recipe=RECIPE, guest=GUEST, created=1_700_000_009),
        image_row("sha256:other", recipe=RECIPE, guest="0" * 64, created=1_700_000_099),
    )
    image = find_image(store, "python")
    assert (image.id, image.packages, image.size_bytes) == ("sha256:new", 114, 117_000_000)


@pytest.mark.row("S10")
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is not built"),
        ([image_row("sha256:x", recipe=RECIPE, guest="0" * 64)], "another version"),
        ([image_row("sha256:x", recipe="0" * 64, guest=GUEST)], "another version"),
        ([image_row("sha256:x", recipe=RECIPE, guest=GUEST, base=BASE)], "another version"),
        ([image_row("sha256:x", recipe=RECIPE, guest=GUEST, base="a tag")], "another version"),
    ],
    ids=["none", "guest", "recipe", "base", "base without digest"],
)
def test_unusable_image_is_refused_with_the_build_command(
    rows: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(SandboxUnavailable) as refusal:
        find_image(listed(*rows), "python")
    assert words in refusal.value.message
    assert "fumehood images build python" in refusal.value.message
    assert not refusal.value.may_retry


@pytest.mark.row("S10")
def test_unknown_image_name_is_refused_with_the_known_names() -> None:
    with pytest.raises(SandboxUnavailable) as refusal:
        find_image(listed(), "pyhton")
    assert "image 'pyhton' does not exist" in refusal.value.message
    assert refusal.value.message.endswith(
        "Name one of these: host, node, python, python-data, python-science, shell."
    )


@pytest.mark.parametrize(
    ("tags", "labels"),
    [
        (None, {}),
        ([], {}),
        (["shop/derived:latest"], {}),
        (["shop/fumehood/python:latest"], {}),
        (["fumehood/python2:x"], {}),
        # A layer of packages: an image could be named as layers are tagged.
        (["fumehood/python:latest"], {LAYER_BASE: "sha256:ours"}),
    ],
)
def test_image_derived_from_an_engine_image_is_not_used(
    tags: list[str] | None, labels: dict[str, str]
) -> None:
    """It inherits every label; what else is in it nobody here knows."""
    ours = image_row("sha256:ours", recipe=RECIPE, guest=GUEST)
    derived = image_row("sha256:derived", recipe=RECIPE, guest=GUEST, created=1_800_000_000)
    derived["RepoTags"] = tags
    derived["Labels"] |= labels
    assert find_image(listed(derived, ours), "python").id == "sha256:ours"


@pytest.mark.parametrize(
    "label",
    [
        {"packages": "many"},
        {"guest_mb": "much"},
        {"packages_from": "soon"},
        {"packages_from": "9" * 30},
    ],
)
def test_image_with_malformed_labels_is_ignored(label: dict[str, str]) -> None:
    broken = image_row("sha256:x", recipe=RECIPE, guest=GUEST, **label)
    assert list_images(listed(broken)) == []
