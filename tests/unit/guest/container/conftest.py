"""An ordinary directory in the place of the workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood.guest.container import walk, workspace


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "workspace"
    place.mkdir()
    for module in (walk, workspace):
        monkeypatch.setattr(module, "WORKSPACE", str(place))
    return place
