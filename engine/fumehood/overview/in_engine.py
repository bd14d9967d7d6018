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
    """Creates the `view` of an engine when the engine starts."""

    view: OperatorView

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Create the view of the started engine."""
        self.view = OperatorView(made)
        yield
