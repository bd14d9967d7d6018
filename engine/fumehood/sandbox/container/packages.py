"""Packages that are requested for a session or a call: layers on top of the images.

Host side, for the container wall. The names are resolved to a lock with hashes, and the wheels are
unpacked once into a layer, which every later request with the same lock uses. An image with such
packages has a separate name, IMAGE+DIGEST, by which the wall treats it like any other image.
Invariants: only packages that the operator allows are installed on request; no code of a package
runs before a program imports it; a layer is made on the current image, so after an upgrade of the
image, a new layer is made.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from fumehood.core.errors import InvalidParams, SandboxUnavailable
from fumehood.core.fair_share import FairShare
from fumehood.core.limits import MB, remember
from fumehood.sandbox.bounded_threads import Answer, BoundedThreads
from fumehood.sandbox.container.docker_api import (
    QUICK_S,
    Docker,
    DockerError,
    open_docker,
    typed_errors,
)
from fumehood.sandbox.settings import PackageSettings
from fumehood.sandbox.wall import OnEvent, try_later

if TYPE_CHECKING:
    from fumehood.sandbox.images.catalog import Image
    from fumehood.sandbox.images.recipe import Lock

PLUS = "+"
"""Separates the name of an image and the digest of the packages added to it. Names of other images
do not contain it.
"""

EVERY = "*"
"""Entry in the list of allowed packages that allows all of them."""

LOCK_S = 24 * 3600.0
"""Seconds for which the resolved versions of a request are reused for identical requests."""

MAX_OF_ONE = 4
"""Maximum number of one principal's package requests that are waiting or being resolved."""

PIP_S = 120.0
"""Maximum seconds for one run of pip that resolves a request."""

MAKING_S = 240.0
"""Maximum seconds to resolve a request or to make a layer, and to wait while others do so."""


class PackageLayers:
    """Resolves requests for packages, and makes layers of packages, one at a time."""

    def __init__(
        self,
        docker: Docker,
        settings: PackageSettings,
        own: Path | None,
        cache: Path | None,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        """`own` is the folder of the operator's own recipes, and `cache` is the directory of
        wheels.
        """
        self._docker = docker
        self._settings = settings
        self._own = own
        self._cache = cache
        self._on_event = on_event
        self._threads = BoundedThreads(2, "packages")
        self._turn = anyio.Lock()
        self._waiting = FairShare(sys.maxsize, MAX_OF_ONE)
        self._locks: OrderedDict[str, Lock] = OrderedDict()
        """Name of an image with packages → the added packages."""
        self._resolved: OrderedDict[tuple[str, str], tuple[Lock, float]] = OrderedDict()
        """Image id and request → the resolved packages, and when the result expires, by the
        monotonic clock."""

    async def name_for(self, image: Image, packages: Sequence[str], principal_id: str) -> str:
        """Return the name of an image that has these packages in addition to those of `image`. The
        versions of `packages` are resolved on behalf of the principal.

        Raises:
            InvalidParams: a package is not allowed or not available.
            SandboxUnavailable: the index or pip failed, or too many requests wait.
        """
        asked = self._checked(packages)
        if "python" not in image.languages:
            raise _refused(f"The image {image.name} has no Python.")
        lock = self._known(image.id, asked)
        if lock is None:
            async with self._one_at_a_time(principal_id):
                lock = self._known(image.id, asked)
                if lock is None:
                    lock = await self._in_thread(
                        lambda: _resolve(image, asked, self._own, self._cache)
                    )
                    found = lock, time.monotonic() + LOCK_S
                    remember(self._resolved, (image.id, asked), found)
        return self.add(image.name, lock)

    def add(self, image: str, lock: Lock) -> str:
        """Return the name of an image with the packages of a lock added, and remember the lock."""
        if not lock.packages:
            return image
        name = f"{image}{PLUS}{hashlib.sha256(lock.text.encode()).hexdigest()[:32]}"
        remember(self._locks, name, lock)
        return name

    def add_text(self, image: str, text: str) -> str:
        """Do the same as `add` for a lock that is given as text."""
        from fumehood.sandbox.images.recipe import parse_lock

        return self.add(image, parse_lock(text))

    def lock_of(self, name: str) -> Lock | None:
        """Return the packages that were added to the image with this name, or None if there are
        none or they are no longer known.
        """
        return self._locks.get(name)

    async def find(self, base: Image, name: str) -> Image:
        """Return the image with this name, which adds packages to `base`. Make it if necessary.

        Raises:
            InvalidParams: the packages are no longer available.
            SandboxUnavailable: the image cannot be made now.
        """
        lock = self._locks.get(name)
        if lock is None:
            raise try_later("The packages are not known any more. Repeat the call.")
        layer = await self._find(base.id, lock)
        if layer is None:
            async with self._one_at_a_time(""):
                layer = await self._find(base.id, lock)
                if layer is None:
                    layer = await self._in_thread(lambda: self._make(base, lock))
        return replace(base, name=name, id=layer, base=base.id)

    async def _find(self, base: str, lock: Lock) -> str | None:
        from fumehood.sandbox.images.catalog import find_layer

        try:
            return await self._docker.ask(
                "find an image", lambda client: find_layer(client, base, lock), QUICK_S
            )
        except DockerError as error:
            raise try_later(f"{error.message} {error.remedy}") from None

    def _make(self, base: Image, lock: Lock) -> str:
        from fumehood.sandbox.images import build, catalog, index
        from fumehood.sandbox.images.recipe import read_recipe

        most_bytes = self._settings.max_mb * MB
        cache = self._cache or build.wheel_cache()
        with closing(open_docker(timeout_s=MAKING_S)) as client, typed_errors():
            build.sweep_builders(client)
            recipe = read_recipe(base.name, base=base.base, own=self._own)
            layer = build.add_layer(client, base, recipe, lock, cache)
            old = catalog.old_layers(client, most_bytes, own=self._own)
            catalog.remove_unused(client, old - {layer})
        index.trim(cache, most_bytes)
        return layer

    def _checked(self, packages: Sequence[str]) -> str:
        """Return the requested packages as a requirements file's text. Raises InvalidParams."""
        from fumehood.sandbox.images.recipe import (
            WrongRequirements,
            merged,
            normalized,
            parse_requirements,
        )

        try:
            asked = parse_requirements("\n".join(packages))
        except WrongRequirements as error:
            raise _refused(f"The list of packages: {error}") from None
        allowed = {name if name == EVERY else normalized(name) for name in self._settings.allow}
        refused = [] if EVERY in allowed else [name for name in asked if name not in allowed]
        if refused:
            raise _refused(
                f"The operator does not allow {', '.join(sorted(refused))}. "
                "Packages are allowed by packages.allow of the configuration."
            )
        return merged(asked, {})

    def _known(self, image_id: str, asked: str) -> Lock | None:
        lock, until = self._resolved.get((image_id, asked), (None, 0.0))
        return lock if time.monotonic() < until else None

    @asynccontextmanager
    async def _one_at_a_time(self, principal_id: str) -> AsyncIterator[None]:
        if principal_id and self._waiting.of(principal_id) >= self._waiting.most_of_one:
            raise try_later("Several requests of yours for packages wait. Repeat the call later.")
        self._waiting.add(principal_id)
        try:
            with anyio.move_on_after(MAKING_S) as waiting:
                await self._turn.acquire()
            if waiting.cancelled_caught:
                raise try_later("Packages are being installed for others. Repeat the call.")
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._waiting.give_back(principal_id)

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        """Run blocking work in a thread and return its result. Convert its errors to errors for
        callers.
        """
        from fumehood.sandbox.images.index import PackagesRefused
        from fumehood.sandbox.images.recipe import UnknownImage, WrongRecipe, WrongRequirements
        from fumehood.sandbox.images.rootfs import CAUSE_UNKNOWN, ImageBuildError

        try:
            return await self._threads.run(work, MAKING_S)
        except (PackagesRefused, WrongRequirements) as error:
            raise _refused(str(error)) from None
        except TimeoutError:
            raise try_later("Installing the packages took too long. Repeat the call.") from None
        except DockerError as error:
            raise try_later(f"{error.message} {error.remedy}") from None
        except ImageBuildError as error:
            if error.remedy == CAUSE_UNKNOWN:
                raise self._failed(error) from None
            raise try_later(f"The packages could not be installed. {error}") from None
        except (OSError, UnknownImage, WrongRecipe) as error:  # for example of an operator's image
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> SandboxUnavailable:
        """Log an error whose text may name paths of this host, and return an error for callers."""
        self._on_event("packages.failed", {"why": str(error)})
        return try_later("The packages could not be installed. The engine's log says why.")

    async def sweep(self) -> None:
        """Remove the containers of killed builds. Raises DockerError."""
        if self._settings.allow:
            from fumehood.sandbox.images.build import sweep_builders

            await self._docker.ask("list containers", sweep_builders, QUICK_S)


def _resolve(image: Image, asked: str, own: Path | None, cache: Path | None) -> Lock:
    from fumehood.sandbox.images import build, index
    from fumehood.sandbox.images.recipe import read_recipe

    recipe = read_recipe(image.name, base=image.base, own=own)
    cache = cache or build.wheel_cache()
    return index.resolve(
        asked, recipe.release, cache, lambda step: None, recipe.lock, deadline_s=PIP_S
    )


def _refused(words: str) -> InvalidParams:
    return InvalidParams(words, fields=["packages"])
