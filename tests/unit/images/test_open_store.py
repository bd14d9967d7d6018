"""Whose images are built: those of the part that runs containers."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from fumehood import parts as module
from fumehood.config import Config
from fumehood.core.part import Part
from fumehood.image_store.store import open_store
from fumehood.sandbox.container.runtime import RuntimeMissing


class Opens:
    """A runtime with a store."""

    def __init__(self, own_images: Path) -> None:
        self.own_images = own_images

    def open_store(self) -> object:
        return ("opened", self.own_images)


def cannot_build(own_images: Path) -> object:
    return object()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    found = [
        Part(name="others"),
        Part(name="first", runtime=f"{__name__}:Opens"),
        Part(name="second", runtime=f"{__name__}:cannot_build"),
    ]
    monkeypatch.setattr(module, "parts", lambda: found)
    return found


def config_with(engine: str) -> Config:
    return Config.model_validate({"container": {"engine": engine}})


def test_store_is_that_of_the_first_part_that_runs_containers(found: list[Part]) -> None:
    config = config_with("auto")
    assert open_store(config) == ("opened", config.own_images)  # type: ignore[comparison-overlap]
    del found[1:]
    with pytest.raises(RuntimeMissing):
        open_store(config)


def test_setting_chooses_the_part(found: list[Part]) -> None:
    assert open_store(config_with("first"))
    with pytest.raises(RuntimeMissing):
        open_store(config_with("second"))


def test_part_that_runs_nothing_cannot_be_chosen(found: list[Part]) -> None:
    words = "'others' cannot run containers. Use one of auto, first, second"
    with pytest.raises(ValidationError, match=words):
        config_with("others")
    assert config_with("second").container.engine == "second"
