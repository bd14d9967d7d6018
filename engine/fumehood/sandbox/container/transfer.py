"""Images from one machine's Docker to another's: saved and loaded in pieces.

Host side, used by the wall for `sandbox/cluster`. Each goes through a temporary file, so that
neither side waits for the other with a request to Docker open.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import anyio
import anyio.to_thread

from fumehood.core.errors import SandboxUnavailable
from fumehood.sandbox.container.docker_api import Docker

if TYPE_CHECKING:
    from fumehood.sandbox.images.catalog import Image

PIECE_BYTES = 1 << 20
"""Bytes of one piece."""

MAX_IMAGE_BYTES = 16 << 30
"""Largest image that is passed on, in bytes."""

TRANSFER_S = 600.0
"""Deadline in seconds for saving or loading an image."""


@asynccontextmanager
async def saved_image(docker: Docker, image: Image) -> AsyncIterator[AsyncIterator[bytes]]:
    """Save an image with its tag; the block gets its pieces. Raises DockerError."""

    async def pieces() -> AsyncIterator[bytes]:
        file.seek(0)
        while piece := await anyio.to_thread.run_sync(file.read, PIECE_BYTES):
            yield piece

    with tempfile.TemporaryFile() as file:
        await docker.ask(lambda client: _save(client, image.id, file), TRANSFER_S)
        yield pieces()


def _save(client: Any, image_id: str, file: BinaryIO) -> None:
    tags = client.inspect_image(image_id).get("RepoTags") or [image_id]
    file.writelines(client.get_image(tags[0]))


async def load_image(docker: Docker, pieces: AsyncIterator[bytes]) -> None:
    """Load an image that `saved_image` has saved.

    Raises:
        DockerError: Docker failed.
        SandboxUnavailable: it is too large.
    """
    with tempfile.TemporaryFile() as file:
        async for piece in pieces:
            if file.tell() + len(piece) > MAX_IMAGE_BYTES:
                raise SandboxUnavailable("An image of another node is too large.", retryable=False)
            await anyio.to_thread.run_sync(file.write, piece)
        file.seek(0, os.SEEK_SET)
        await docker.ask(lambda client: list(client.load_image(file)), TRANSFER_S)
