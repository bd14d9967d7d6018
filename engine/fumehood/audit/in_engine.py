"""The part object of one engine for the audit chain, which is anchored while the engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fumehood.audit.service import AuditService
from fumehood.audit.settings import AuditSettings
from fumehood.engine_part import EnginePart, Kernel


class Audit(EnginePart):
    """Anchors the chain. `service` also verifies it and rotates its key."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        settings = kernel.config.of("audit", AuditSettings)
        assert settings is not None
        self.service = AuditService(kernel, settings)

    @asynccontextmanager
    async def while_open(self) -> AsyncIterator[None]:
        """Anchor the chain from the engine's first row to its last."""
        async with self.service.anchored():
            yield
