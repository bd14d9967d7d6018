"""A cluster in this process: real nodes with real containers, reached without Ray."""

from __future__ import annotations

import asyncio
import inspect
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fumehood.cluster.model import Terms, Ticket
from fumehood.cluster.node import MakeWall, Node, NodeHome
from fumehood.cluster.wall import ClusterWall, NodeGone, NodePort
from fumehood.config import Config
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.docker.api import new_docker
from fumehood.sandbox.container.additions import NewImageMaker
from fumehood.sandbox.settings import WallSettings
from fumehood.sandbox.walls import container_wall


def wall_settings() -> WallSettings:
    """Those of one small image, and no container is made ahead."""
    images = dict.fromkeys(("python", "shell", "javascript"), "python")
    config = Config.model_validate({"container": {"images": images, "pool_min": 0}})
    return WallSettings(
        jail=config.jail, container=config.container,
        own_images=config.own_images, longest_session_s=600,
        longest_with_disk_s=600, orphan_s=60, runtime=new_docker,
    )  # fmt: skip


def usual_wall(settings: WallSettings, state: Path, on_event: Any) -> Any:
    return container_wall(settings, state, on_event, eager=True)


class LocalPort:
    """Reaches a node in this process. `lose` cuts it off, as a dead machine or network does."""

    def __init__(self, node: Node) -> None:
        self.key = secrets.token_hex(8)
        self.node = node
        self.cut = asyncio.Event()
        self.is_silent = False
        """Whether it swallows everything, instead of failing."""

    def lose(self) -> None:
        self.cut.set()

    async def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        async def answer() -> Any:
            result = getattr(self.node, method)(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        return await self._unless_cut(answer())

    def tell(self, method: str, *arguments: Any) -> None:
        async def begin() -> None:
            await asyncio.sleep(random.random() / 500)  # Ray does not keep the order, either
            with suppress(EngineError):
                result = getattr(self.node, method)(*arguments)
                if inspect.isawaitable(result):
                    await result

        if not (self.cut.is_set() or self.is_silent):
            asyncio.ensure_future(begin())  # noqa: RUF006

    async def pass_piece(self, ticket: Ticket, transfer: str, to: NodePort, its: Ticket) -> None:
        await to.call("write_image", its, transfer, await self.call("read_image", ticket, transfer))

    async def _unless_cut(self, asked: Any) -> Any:
        answer = asyncio.ensure_future(asked)
        cut = asyncio.ensure_future(self.cut.wait())
        try:
            await asyncio.wait((answer, cut), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the node continues, but its answer is not needed
            cut.cancel()
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        if self.is_silent:
            answer.cancel()
            await asyncio.Event().wait()
        if cut.done():
            answer.cancel()
            raise NodeGone("it was cut off")
        cut.cancel()
        return answer.result()


class LocalMembership:
    """Nodes in this process, each below a directory of its own."""

    def __init__(self, directory: Path, make_wall: MakeWall = usual_wall) -> None:
        self._directory = directory
        self._make_wall = make_wall
        self.found: list[LocalPort] = []

    def add(self, slots: int = 2) -> LocalPort:
        """Start a node. It takes the lowest directory that no other one uses."""
        port = LocalPort(Node(NodeHome(self._directory / "nodes"), slots, self._make_wall))
        self.found.append(port)
        return port

    async def remove(self, port: LocalPort, *, is_lost: bool = True) -> None:
        """Cut a node off and end it. Its sessions' containers wait for the next."""
        self.found.remove(port)
        if is_lost:
            port.lose()
        await port.node.close()

    async def ports(self) -> Sequence[NodePort]:
        return list(self.found)

    async def close(self) -> None:
        pass


def make_cluster(
    membership: LocalMembership,
    *,
    owner: str = "",
    epoch: int = 1,
    lost_s: float = 30,
    told: list[tuple[str, JsonObject]] | None = None,
    image_maker: NewImageMaker | None = None,
) -> ClusterWall:
    return ClusterWall(
        Terms(replace(wall_settings(), image_maker=image_maker)), membership, owner=owner or secrets.token_hex(16),
        epoch=epoch, lost_s=lost_s, keeps_sessions=True, open_program=lambda: None,
        on_event=lambda event, values: (told if told is not None else []).append((event, values)),
    )  # fmt: skip


@asynccontextmanager
async def cluster_wall(
    directory: Path, make_wall: MakeWall = usual_wall, nodes: int = 2
) -> AsyncIterator[ClusterWall]:
    """A wall with nodes that have joined."""
    membership = LocalMembership(directory, make_wall)
    for _ in range(nodes):
        membership.add()
    async with make_cluster(membership) as wall:
        await wall.until_host_is_known()
        yield wall
    for port in membership.found:
        await port.node.close()
