"""Images with additions: an image, and what callers add to it for a session or a call.

Host side, for the container wall. An image with additions has a separate name, IMAGE+DIGEST, by
which the wall treats it like any other image. The digest is that of a lock. A lock is a text that
names exactly what is added, so another engine or node can make the same image from it. The kernel
finds such an image if it exists. The `ImageMaker` of a part writes the lock and makes the image.
Invariants: without a maker, nothing can be added, and an image that is missing is refused, never
replaced by the image below. An image with additions is made on the current image, so after an
upgrade of the image, a new one is made.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fumehood.core.errors import InvalidParams, SandboxUnavailable
from fumehood.core.limits import remember
from fumehood.sandbox.container.docker_api import QUICK_S, Docker, DockerError
from fumehood.sandbox.wall import OnEvent, try_later

if TYPE_CHECKING:
    from fumehood.sandbox.images.catalog import Image

PLUS = "+"
"""Separates the name of an image and the digest of what is added to it. Names of other images do
not contain it.
"""


class ImageMaker(ABC):
    """Makes images with additions, for one container wall.

    A maker decides what may be added. It never runs the code of an addition; that code only runs
    when a program uses it.
    """

    @abstractmethod
    async def lock(self, image: Image, wanted: Sequence[str], principal_id: str) -> str:
        """Return the lock for additions to an image. `wanted` contains the principal's wishes, and
        the lock names exactly what fulfils them. Return "" if nothing has to be added.

        Raises:
            InvalidParams: a wish is not allowed or cannot be fulfilled.
            SandboxUnavailable: the lock cannot be written now.
        """

    @abstractmethod
    async def make(self, base: Image, lock: str) -> None:
        """Make an image that adds the contents of a lock to the image `base`. `find_layer` of the
        catalog then finds the new image.

        Raises:
            InvalidParams: a content of the lock is no longer available.
            SandboxUnavailable: the image cannot be made now.
        """

    @abstractmethod
    async def sweep(self) -> None:
        """Remove what interrupted work of the maker has left behind. Called regularly. Raises
        DockerError.
        """


NewImageMaker = Callable[[Docker, Path, Path | None, OnEvent], ImageMaker]
"""Creates the maker of a container wall, given Docker, the folder of the operator's own recipes,
the directory for the engine's state, and a receiver of events. It can be pickled, because the nodes
of an engine create their own."""


class Additions:
    """The images with additions of one container wall. Without a `maker`, only images that already
    exist can be used.
    """

    def __init__(self, docker: Docker, maker: ImageMaker | None = None) -> None:
        self._docker = docker
        self._maker = maker
        self._locks: OrderedDict[str, str] = OrderedDict()
        """Name of an image with additions → its lock."""

    async def name_for(self, image: Image, wanted: Sequence[str], principal_id: str) -> str:
        """Return the name of the image that adds these wishes to `image`. The image need not exist
        yet.

        Raises the same errors as `ImageMaker.lock`.
        """
        if self._maker is None:
            raise InvalidParams(
                f"Nothing can be added to images here, so leave {wanted[0][:80]!r} out: the part "
                "of the engine that does this is not installed."
            )
        return self.add(image.name, await self._maker.lock(image, wanted, principal_id))

    def add(self, image: str, lock: str) -> str:
        """Remember a lock, and return the name of the image that adds the lock's contents to
        `image`. If the lock is empty, return `image`.
        """
        if not lock:
            return image
        name = f"{image}{PLUS}{hashlib.sha256(lock.encode()).hexdigest()[:32]}"
        remember(self._locks, name, lock)
        return name

    def lock_text(self, name: str) -> str:
        """Return the lock of the image with this name. Return "" if the image has no additions, or
        if its lock is no longer remembered.
        """
        return self._locks.get(name, "")

    async def find(self, base: Image, name: str) -> Image:
        """Return the image with this name, whose additions are made on top of `base`. If the image
        does not exist, make it.

        Raises:
            InvalidParams: an addition is no longer available.
            SandboxUnavailable: the image does not exist and cannot be made, now or at all.
        """
        lock = self._locks.get(name)
        if lock is None:
            raise try_later("The additions to the image are no longer known. Repeat the call.")
        layer = await self._find(base.id, lock)
        if layer is None:
            if self._maker is None:
                raise SandboxUnavailable(
                    f"The image {name} does not exist, and the part of the engine that would make "
                    "it is not installed.",
                    retryable=False,
                )
            await self._maker.make(base, lock)
            layer = await self._find(base.id, lock)
            if layer is None:  # it was removed at once
                raise try_later(f"The image {name} could not be found. Repeat the call.")
        return replace(base, name=name, id=layer, base=base.id)

    async def _find(self, base: str, lock: str) -> str | None:
        # Imported here, because it loads Docker's package, which an engine without Docker must not.
        from fumehood.sandbox.images.catalog import find_layer

        try:
            return await self._docker.ask(
                "find an image", lambda client: find_layer(client, base, lock), QUICK_S
            )
        except DockerError as error:
            raise try_later(f"{error.message} {error.remedy}") from None

    async def sweep(self) -> None:
        """Remove what interrupted work of the maker has left behind. Raises DockerError."""
        if self._maker is not None:
            await self._maker.sweep()
