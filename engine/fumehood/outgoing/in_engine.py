"""The connections of one engine to other services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fumehood.engine_part import EnginePart
from fumehood.outgoing.upstreams import Upstreams

if TYPE_CHECKING:
    from fumehood.compose import Composition


class Outgoing(EnginePart):
    """The part that opens an engine's connections to other services. `upstreams` is set while the
    engine runs.
    """

    upstreams: Upstreams

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Create the connections when the engine starts, and close them when it stops."""
        config = self.kernel.config
        self.upstreams = Upstreams(config.rest, made.services.registry.secrets, web=config.web)
        try:
            yield
        finally:
            await self.upstreams.close()
