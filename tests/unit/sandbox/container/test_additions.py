"""Images with additions: found if they exist, otherwise made by a part, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from fumehood.core.errors import InvalidParams, SandboxUnavailable
from fumehood.image_store.find import layer_key
from fumehood.sandbox.container.additions import Additions, ImageMaker
from fumehood.sandbox.images.catalog import Image

pytestmark = pytest.mark.anyio

LOCK = f"tool==1.0 \\\n    --hash=sha256:{'a' * 64}\n"
BASE = Image(
    "python", "sha256:base", 1, datetime.fromtimestamp(0, UTC), "r", "g", 1,
    datetime.fromtimestamp(0, UTC),
)  # fmt: skip


class Layers:
    """A runtime with layers alone, by their keys."""

    def __init__(self) -> None:
        self.by_key: dict[str, str] = {}

    def put(self, base: str, lock: str) -> None:
        self.by_key[layer_key(base, lock)] = f"on {base}"

    async def find_layer(self, base: str, lock: str) -> str | None:
        return self.by_key.get(layer_key(base, lock))


class Maker(ImageMaker):
    """Locks what it is asked for. Makes it, unless it `forgets`."""

    def __init__(self, layers: Layers, *, forgets: bool = False) -> None:
        self.layers, self.forgets = layers, forgets
        self.made: list[str] = []
        self.swept = 0

    async def lock(self, image: Image, wanted: Sequence[str], principal_id: str) -> str:
        return "".join(f"{one}==1.0 {image.id} {principal_id}\n" for one in wanted)

    async def make(self, base: Image, lock: str) -> None:
        self.made.append(lock)
        if not self.forgets:
            self.layers.put(base.id, lock)

    async def sweep(self) -> None:
        self.swept += 1


def additions(layers: Layers, maker: ImageMaker | None = None) -> Additions:
    docker: Any = layers
    return Additions(docker, maker)


async def test_image_is_made_once_and_has_its_lock_in_its_name() -> None:
    layers = Layers()
    maker = Maker(layers)
    of_wall = additions(layers, maker)
    name = await of_wall.name_for(BASE, ["tool"], "uid:1")
    lock = "tool==1.0 sha256:base uid:1\n"
    assert of_wall.lock_text(name) == lock
    found = await of_wall.find(BASE, name)
    assert found == replace(BASE, name=name, id="on sha256:base", base="sha256:base")
    assert await of_wall.find(BASE, name) == found
    assert maker.made == [lock]
    upgraded = await of_wall.find(replace(BASE, id="sha256:new"), name)
    assert (upgraded.id, maker.made) == ("on sha256:new", [lock, lock])
    await of_wall.sweep()
    assert maker.swept == 1


async def test_name_is_that_of_earlier_versions() -> None:
    of_wall = additions(Layers())
    assert of_wall.add("python", LOCK) == "python+04f632084e03c8565ac96b9b1140621b"
    assert of_wall.add("python", "") == "python"
    assert layer_key("sha256:base", LOCK)[:12] == "34e1d0d64888"


async def test_nothing_is_added_without_a_maker() -> None:
    with pytest.raises(InvalidParams, match="leave 'tool>=1' out: the part of the engine"):
        await additions(Layers()).name_for(BASE, ["tool>=1", "other"], "uid:1")


async def test_image_that_exists_is_used_without_a_maker_and_a_missing_one_is_refused() -> None:
    layers = Layers()
    of_wall = additions(layers)
    name = of_wall.add("python", LOCK)
    with pytest.raises(SandboxUnavailable, match="the part of the engine that would make") as gone:
        await of_wall.find(BASE, name)
    assert not gone.value.may_retry
    assert name in gone.value.message
    layers.put(BASE.id, LOCK)
    assert (await of_wall.find(BASE, name)).id == "on sha256:base"
    await of_wall.sweep()


async def test_image_below_never_stands_in_for_one_that_was_not_made() -> None:
    layers = Layers()
    of_wall = additions(layers, Maker(layers, forgets=True))
    name = await of_wall.name_for(BASE, ["tool"], "uid:1")
    with pytest.raises(SandboxUnavailable, match="could not be found") as caught:
        await of_wall.find(BASE, name)
    assert caught.value.may_retry
    with pytest.raises(SandboxUnavailable, match="no longer known"):
        await of_wall.find(BASE, "python+unknown")
