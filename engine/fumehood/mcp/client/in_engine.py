"""The connection between one engine and its MCP servers, which run as long as the engine does."""

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
    """Keeps the MCP servers of the configuration running. `servers` is empty before the engine
    starts.
    """

    servers: Mapping[str, McpServer] = {}

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Keep every server running, and its tools registered, until the context is left."""
        settings = self.kernel.config.of("mcp_servers", dict) or {}
        services, upstreams = made.services, made.parts.part(Outgoing).upstreams
        all_servers = McpServers(
            settings, services.registry, made.sources.registrations, upstreams,
            services.redactor, made.walls.container, services.log, made.parts,
        )  # fmt: skip
        self.servers = all_servers.servers
        async with all_servers.run():
            yield
