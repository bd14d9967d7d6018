"""The walls of an engine start together, or not at all."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest

from fumehood.config import Config
from fumehood.core.part import PartError
from fumehood.sandbox.walls import EngineWalls, WallSettings
from fumehood.testing import FakeWall

pytestmark = pytest.mark.anyio


class Started:
    """Notes its start and its end, and fails at the start if it is told to."""

    def __init__(self, noted: list[str], name: str, *, fails: bool = False) -> None:
        self._noted, self._name, self._fails = noted, name, fails

    async def __aenter__(self) -> None:
        if self._fails:
            raise OSError("no room")
        self._noted.append(f"{self._name} starts")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._noted.append(f"{self._name} ends")


@pytest.mark.parametrize("fails", [True, False])
async def test_wall_that_has_started_ends_if_a_later_one_does_not_start(fails: bool) -> None:
    config = Config()
    settings = WallSettings(
        jail=config.jail, container=config.container,
        own_images=config.own_images, longest_session_s=60,
        longest_with_disk_s=60, orphan_s=60,
    )  # fmt: skip
    noted = list[str]()
    added: Any = Started(noted, "added", fails=fails)
    walls: Any = EngineWalls(
        settings, frozenset(), state=None, on_event=lambda event, values: None,
        container=FakeWall(), of_parts=lambda own: {"another": added},
    )  # fmt: skip
    walls._own = Started(noted, "own")
    if fails:
        with pytest.raises(PartError, match="The wall 'another' could not be started: no room"):
            await walls.__aenter__()
        assert noted == ["own starts", "own ends"]
    else:
        async with walls:
            assert noted == ["own starts", "added starts"]
        assert noted[2:] == ["added ends", "own ends"]
