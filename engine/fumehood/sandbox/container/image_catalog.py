"""The images that a wall uses: the present ones, and the errors for the missing ones.

Host side, below the wall. Invariant: a missing image affects its own containers only, and no
other image is used in its place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from fumehood.core.errors import SandboxUnavailable
from fumehood.sandbox.container.docker_api import Docker
from fumehood.sandbox.wall import ImageMissing

MAX_ASKED_FOR = 32
"""Images that sessions use and the configuration does not name."""

RETRY_AFTER_MS = 1000


class ImageFound(Protocol):
    """The facts of an image that a wall needs."""

    @property
    def id(self) -> str: ...
    @property
    def languages(self) -> tuple[str, ...]: ...
    @property
    def guest_mb(self) -> int: ...


FindImage = Callable[[Docker, str], Awaitable[ImageFound]]
"""From an image's name to the image. Raises DockerError or ImageMissing."""


class ImageCatalog:
    """Images by name. `by_language` has the image for each language."""

    def __init__(self, docker: Docker, find: FindImage, by_language: Mapping[str, str]) -> None:
        self._docker = docker
        self._find = find
        self._by_language = by_language
        self._names = dict.fromkeys(by_language.values())
        self._asked_for: dict[str, None] = {}
        """Found images that the configuration does not name, oldest first."""
        self._wanted: dict[str, None] = {}
        """Images for the next look."""
        self.found: dict[str, ImageFound] = {}
        self.missing: dict[str, ImageMissing] = {}

    def want(self, name: str) -> None:
        """Add an image to the next look, whether or not the configuration names it.

        Raises:
            SandboxUnavailable: too many are wanted already.
        """
        if name in self._names or name in self._wanted:
            return
        if len(self._wanted) >= MAX_ASKED_FOR:
            raise SandboxUnavailable(
                "Too many images are being looked for. Repeat the call.",
                retry_after_ms=RETRY_AFTER_MS,
            )
        self._wanted[name] = None

    async def look(self) -> None:
        """Look for all of them. An image that the configuration does not name is looked for again
        only if it was found. Raises DockerError.
        """
        wanted, self._wanted = self._wanted, {}
        for name in self.missing.keys() - self._names.keys():
            del self.missing[name]
        for name in dict.fromkeys([*self._names, *self._asked_for, *wanted]):
            await self._look_for(name)

    async def _look_for(self, name: str) -> None:
        try:
            found = await self._find(self._docker, name)
        except ImageMissing as error:
            self.found.pop(name, None)
            self._asked_for.pop(name, None)
            self.missing[name] = error
            return
        self.missing.pop(name, None)
        self.found[name] = found
        if name not in self._names:
            self._asked_for.pop(name, None)
            self._asked_for[name] = None
            if len(self._asked_for) > MAX_ASKED_FOR:
                oldest = next(iter(self._asked_for))
                del self._asked_for[oldest], self.found[oldest]

    @property
    def has_any(self) -> bool:
        """Whether any image of the configuration is there."""
        return any(name in self.found for name in self._names)

    @property
    def ids(self) -> frozenset[str]:
        """The digests of the present images."""
        return frozenset(found.id for found in self.found.values())

    @property
    def faults(self) -> tuple[str, ...]:
        """A sentence for each missing image, in the order of the configuration."""
        return tuple(dict.fromkeys(self.missing[name].message for name in self.lacking))

    @property
    def lacking(self) -> tuple[str, ...]:
        """The missing images of the configuration, in its order."""
        return tuple(name for name in self._names if name in self.missing)

    def name_for(self, language: str) -> str:
        """The image for a language, whether or not it is there.

        Raises:
            SandboxUnavailable: none was chosen for it.
        """
        name = self._by_language.get(language)
        if name is None:
            raise SandboxUnavailable(
                f"This engine has no image for {language}, and uses no other wall instead.",
                retryable=False,
            )
        return name

    def must_run(self, name: str, language: str) -> None:
        """Raises SandboxUnavailable where the image is there and has no such language."""
        found = self.found.get(name)
        if found is not None and language not in found.languages:
            raise SandboxUnavailable(
                f"The image {name} has no {language}. Set container.images.{language} to one that "
                "has it.",
                retryable=False,
            )
