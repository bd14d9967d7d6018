"""Whose images are built: those of the part that runs containers."""

from __future__ import annotations

import pytest

from fumehood.config import Config
from fumehood.core.part import Part
from fumehood.image_store import store as module
from fumehood.image_store.store import open_store
from fumehood.sandbox.container.runtime import RuntimeMissing


def test_store_is_that_of_the_part_that_runs_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Part(name="others"), Part(name="runs", image_store=f"{__name__}:opened")]
    monkeypatch.setattr(module, "parts", lambda: found)
    config = Config()
    assert open_store(config) == ("opened", config)
    found.pop()
    with pytest.raises(RuntimeMissing):
        open_store(config)


def opened(config: Config) -> tuple[str, Config]:
    return "opened", config
