"""Which image is this engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from docker.errors import DockerException

from fumehood.core.errors import SandboxUnavailable
from fumehood.sandbox.images.catalog import find_image, guest_digest, list_images
from fumehood.sandbox.images.recipe import read_recipe
from support.docker_images import ListedImages, image_row

pytestmark = pytest.mark.anyio

RECIPE = read_recipe("python").digest
GUEST = guest_digest()
BASE = "debian@sha256:" + "b" * 64


async def test_newest_of_this_engine_is_found_by_its_id() -> None:
    docker = ListedImages(
        image_row("sha256:old", recipe=RECIPE, guest=GUEST, created=1_700_000_000),
        image_row("sha256:new", recipe=RECIPE, guest=GUEST, created=1_700_000_009),
        image_row("sha256:other", recipe=RECIPE, guest="0" * 64, created=1_700_000_099),
    )
    image = await find_image(docker, "python")
    assert (image.id, image.packages, image.size_bytes) == ("sha256:new", 114, 117_000_000)


def test_languages_and_memory_of_the_guest_are_read_from_the_labels() -> None:
    row = image_row(
        "sha256:x", recipe=RECIPE, guest=GUEST, languages="python,javascript", guest_mb="96"
    )
    (image,) = list_images(ListedImages(row))
    assert (image.languages, image.guest_mb) == (("python", "javascript"), 96)


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
async def test_any_other_image_is_refused_with_the_build_command(
    rows: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(SandboxUnavailable) as refusal:
        await find_image(ListedImages(*rows), "python")
    assert words in refusal.value.message
    assert "fumehood images build python" in refusal.value.message
    assert not refusal.value.may_retry


@pytest.mark.row("S10")
async def test_image_that_no_command_builds_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(SandboxUnavailable) as refusal:
        await find_image(ListedImages(), "pyhton")
    assert "image 'pyhton' does not exist" in refusal.value.message
    assert refusal.value.message.endswith("Name one of these: node, python, python-data, shell.")


@pytest.mark.parametrize(
    "tags",
    [None, [], ["shop/derived:latest"], ["shop/fumehood/python:latest"], ["fumehood/python2:x"]],
)
async def test_image_derived_from_ours_is_not_ours(tags: list[str] | None) -> None:
    """It inherits every label; what else is in it nobody here knows."""
    ours = image_row("sha256:ours", recipe=RECIPE, guest=GUEST)
    derived = image_row("sha256:derived", recipe=RECIPE, guest=GUEST, created=1_800_000_000)
    derived["RepoTags"] = tags
    assert (await find_image(ListedImages(derived, ours), "python")).id == "sha256:ours"


async def test_image_from_a_named_base_is_ours_where_its_recipe_says_so() -> None:
    recipe = read_recipe("python", base=BASE).digest
    row = image_row("sha256:x", recipe=recipe, guest=GUEST, base=BASE)
    assert (await find_image(ListedImages(row), "python")).base == BASE


@pytest.mark.parametrize(
    "label",
    [
        {"packages": "many"},
        {"guest_mb": "much"},
        {"packages_from": "soon"},
        {"packages_from": "9" * 30},
    ],
)
async def test_labels_that_cannot_be_read_are_no_image_of_ours(label: dict[str, str]) -> None:
    broken = image_row("sha256:x", recipe=RECIPE, guest=GUEST, **label)
    assert list_images(ListedImages(broken)) == []


class SilentDocker:
    def images(self, *, filters: Mapping[str, Any]) -> list[dict[str, Any]]:
        raise DockerException("/var/run/docker.sock went away")


async def test_docker_that_fails_is_no_sandbox_and_its_words_stay_here() -> None:
    with pytest.raises(SandboxUnavailable) as refusal:
        await find_image(SilentDocker(), "python")
    assert "fumehood doctor" in refusal.value.message
    assert "docker.sock" not in refusal.value.message
    assert refusal.value.may_retry
