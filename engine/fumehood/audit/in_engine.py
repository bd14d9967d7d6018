"""The part object of one engine for the audit chain, which is anchored while the engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fumehood.audit.service import AuditService
from fumehood.audit.settings import AuditSettings
from fumehood.engine_part import EnginePart, Kernel


class Audit(EnginePart):
    """The part that gives the engine its `service` for the audit chain. While the engine is open,
    the part also anchors the chain, that is, it regularly copies the newest row's `mac` out of the
    database.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        settings = kernel.config.of("audit", AuditSettings)
        assert settings is not None
        self.service = AuditService(kernel, settings)

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[None]:
        """While the engine is open, regularly anchor the audit chain: copy the newest row's `mac`
        out of the database. The first and the last anchor are made when the engine starts and ends.
        """
        async with self.service.anchored():
            yield
