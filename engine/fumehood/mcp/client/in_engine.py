"""The MCP servers of one engine, as a part of it. They run as long as the engine does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fumehood.engine_part import EnginePart
from fumehood.mcp.client.servers import McpServer, McpServers
from fumehood.outgoing.in_engine import Outgoing

if TYPE_CHECKING:
    from fumehood.compose import Composition


class McpClient(EnginePart):
    """Keeps the configured MCP servers running. `servers` is empty until the engine starts."""

    servers: Mapping[str, McpServer] = {}

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Keep all servers running, and their tools registered, until the `async with` block
        ends.
        """
        settings = self.kernel.config.of("mcp_servers", dict) or {}
        services, upstreams = made.services, made.parts.part(Outgoing).upstreams
        all_servers = McpServers(
            settings, services.registry, made.sources.registrations, upstreams,
            services.redactor, made.walls.container, services.log, made.parts,
        )  # fmt: skip
        self.servers = all_servers.servers
        async with all_servers.run():
            yield
