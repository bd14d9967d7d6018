"""Images with additions: an image, and what callers add to it for a session or a call.

Host side, for the container wall. An image with additions has its own name, IMAGE+DIGEST, and the
wall treats it like any other image. The digest is that of a lock. A lock is a text that names
exactly what is added, so another engine or node can make the same image from it. This module finds
such an image if it exists. The `ImageMaker` of a part of the engine writes locks and makes images.
Invariants: without a maker, nothing can be added; an image that is missing is refused, and never
replaced by the image below; an image with additions is made on the current image, so after an
upgrade of that image, a new one is made.
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
from fumehood.sandbox.container.runtime import Runtime, RuntimeFault
from fumehood.sandbox.wall import OnEvent, try_later

if TYPE_CHECKING:
    from fumehood.sandbox.images.catalog import Image

PLUS = "+"
"""Separates the name of an image from the digest of what is added to the image. Names of other
images do not contain it.
"""


class ImageMaker(ABC):
    """Makes images that contain an existing image and additions, such as packages. A maker belongs
    to one container wall.

    A maker decides what may be added. It never runs the code of an addition; that code only runs
    when a program uses it.
    """

    @abstractmethod
    async def lock(self, image: Image, wanted: Sequence[str], principal_id: str) -> str:
        """Return the lock for additions to an image. A lock is a text that names exactly what is
        added, for example each package with its version. `wanted` is what the principal wants to
        add. Return "" if nothing has to be added.

        Raises:
            InvalidParams: something wanted is not allowed or not available.
            SandboxUnavailable: the lock cannot be written now.
        """

    @abstractmethod
    async def make(self, base: Image, lock: str) -> None:
        """Make an image that adds what `lock` names to the image `base`. Afterwards,
        `Runtime.find_layer` finds the new image.

        Raises:
            InvalidParams: something that the lock names is no longer available.
            SandboxUnavailable: the image cannot be made now.
        """

    @abstractmethod
    async def sweep(self) -> None:
        """Remove what is left of the maker's interrupted work. The wall calls this regularly.
        Raises RuntimeFault.
        """


NewImageMaker = Callable[[Runtime, Path, Path | None, OnEvent], ImageMaker]
"""Creates the maker for a container wall. It receives the runtime, the folder of the recipes that
the operator wrote, the directory for the engine's state, and a receiver of events. It can be
pickled, because each node of an engine creates its own maker.
"""


class Additions:
    """Names, finds and makes images with additions, such as packages, for one container wall. If
    `maker` is None, no image can be made, and only images that already exist can be used.
    """

    def __init__(self, runtime: Runtime, maker: ImageMaker | None = None) -> None:
        self._runtime = runtime
        self._maker = maker
        self._locks: OrderedDict[str, str] = OrderedDict()
        """Name of an image with additions → its lock."""

    async def name_for(self, image: Image, wanted: Sequence[str], principal_id: str) -> str:
        """Return the name of the image that consists of `image` and the additions in `wanted`, such
        as packages. The image need not exist yet.

        Raises the same errors as `ImageMaker.lock`.
        """
        if self._maker is None:
            raise InvalidParams(
                f"Nothing can be added to images here, so leave {wanted[0][:80]!r} out: the part "
                "of the engine that does this is not installed."
            )
        return self.add(image.name, await self._maker.lock(image, wanted, principal_id))

    def add(self, image: str, lock: str) -> str:
        """Remember a lock, which is a text that names additions to the image `image`. Return the
        name of the image with these additions. If the lock is empty, return `image`.
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
        """Return the image `name`, which consists of the image `base` and additions. If the image
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
        try:
            return await self._runtime.find_layer(base, lock)
        except RuntimeFault as error:
            raise try_later(f"{error.message} {error.remedy}") from None

    async def sweep(self) -> None:
        """Remove what is left of the maker's interrupted work. Raises RuntimeFault."""
        if self._maker is not None:
            await self._maker.sweep()
