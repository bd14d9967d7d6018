"""The operators' view of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fumehood.engine_part import EnginePart
from fumehood.overview.service import OperatorView

if TYPE_CHECKING:
    from fumehood.compose import Composition


class EngineOverview(EnginePart):
    """The part that provides the operators' view of an engine's calls, state and rules. `view` is
    set while the engine runs.
    """

    view: OperatorView

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Set `view` to a new `OperatorView` of the engine, which has started."""
        self.view = OperatorView(made)
        yield
