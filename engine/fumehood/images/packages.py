"""Adds packages of the Python index to images, if callers ask for them for a session or a call.

Host side. The names of the packages are resolved to a lock with hashes. The wheels are unpacked
once into a layer on top of the image. All later requests with the same lock use this layer.
Invariants: only packages that the operator allows are installed; no code of a package runs before a
program imports it.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from fumehood.core.errors import InvalidParams, SandboxUnavailable
from fumehood.core.fair_share import FairShare
from fumehood.core.limits import MB, remember
from fumehood.image_store.store import HasImageStore
from fumehood.images.settings import PackageSettings
from fumehood.sandbox.bounded_threads import Answer, BoundedThreads
from fumehood.sandbox.container.additions import ImageMaker
from fumehood.sandbox.container.runtime import (
    Runtime,
    RuntimeFault,
    RuntimeMissing,
    RuntimeTimeout,
)
from fumehood.sandbox.wall import OnEvent, try_later

if TYPE_CHECKING:
    from fumehood.image_store.store import ImageStore
    from fumehood.sandbox.images.catalog import Image
    from fumehood.sandbox.images.recipe import Lock

EVERY = "*"
"""The entry in the list of allowed packages that allows every package."""

LOCK_S = 24 * 3600.0
"""Seconds for which the resolved versions are used again for identical requests."""

MAX_OF_ONE = 4
"""Maximum number of package requests of one principal that wait or are in progress."""

PIP_S = 120.0
"""Maximum seconds for one run of pip that resolves a request."""

MAKING_S = 240.0
"""Maximum seconds to resolve a request or to make a layer. Also the maximum seconds to wait for
other requests before that.
"""

SWEEP_S = 15.0
"""Maximum seconds to remove what killed builds have left behind."""


def new_layers(
    settings: PackageSettings, runtime: Runtime, own: Path, state: Path | None, on_event: OnEvent
) -> PackageLayers:
    """Return a new `PackageLayers` for one container wall.

    `own` is the folder with the recipes that the operator wrote. `state` is the engine's state
    directory, in which wheels are cached, or None. `on_event` logs an event. If `settings` is bound
    with `partial`, this function has the type `NewImageMaker`.
    """
    cache = state / "wheels" if state is not None else None
    return PackageLayers(settings, runtime, own, cache, on_event)


class PackageLayers(ImageMaker):
    """Finds versions for the packages that callers request, and makes image layers that contain
    these packages. Only one request is processed at a time.

    `own` is the folder with the recipes that the operator wrote. `cache` is the directory of
    downloaded wheels, or None for the default directory of the engine's user.
    """

    def __init__(
        self,
        settings: PackageSettings,
        runtime: Runtime,
        own: Path,
        cache: Path | None,
        on_event: OnEvent,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._own = own
        self._cache = cache
        self._on_event = on_event
        self._threads = BoundedThreads(2, "packages")
        self._turn = anyio.Lock()
        self._waiting = FairShare(sys.maxsize, MAX_OF_ONE)
        self._resolved: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()
        """Image id and requirements → the lock, and the time at which it expires, by the monotonic
        clock.
        """

    async def lock(self, image: Image, wanted: Sequence[str], principal_id: str) -> str:
        """Find versions of the packages `wanted`, and of all their dependencies, that fit together.
        Return the text of a lock that pins these versions.

        `principal_id` is the id of the caller. Each caller can have only a few requests in
        progress. A lock is reused for `LOCK_S` seconds. After that, the newest versions are looked
        up.

        Raises:
            InvalidParams: a package is not allowed or not available, or the image has no Python.
            SandboxUnavailable: the index or pip failed, requests of others took too long, or this
                caller has too many requests in progress.
        """
        asked = self._checked(wanted)
        if "python" not in image.languages:
            raise _refused(f"The image {image.name} has no Python.")
        lock = self._known(image.id, asked)
        if lock is None:
            async with self._one_at_a_time(principal_id):
                lock = self._known(image.id, asked)
                if lock is None:
                    found = await self._in_thread(
                        lambda: _resolve(image, asked, self._own, self._cache)
                    )
                    lock = found.text
                    remember(self._resolved, (image.id, asked), (lock, time.monotonic() + LOCK_S))
        return lock

    async def make(self, base: Image, lock: str) -> None:
        """Make the layer that adds the packages of `lock` to the image `base`. Do nothing if the
        layer exists.

        Raises:
            InvalidParams: the packages are no longer available.
            SandboxUnavailable: the layer cannot be made now.
        """
        async with self._one_at_a_time(""):
            await self._in_thread(lambda: self._make(base, lock))

    def _make(self, base: Image, text: str) -> None:
        from fumehood.image_store.find import find_layer
        from fumehood.images import build, index, removal
        from fumehood.sandbox.images.recipe import parse_lock, read_recipe

        most_bytes = self._settings.max_mb * MB
        cache = self._cache or build.wheel_cache()
        with closing(self._open_store()) as store:
            if find_layer(store, base.id, text) is not None:
                return
            store.sweep()
            recipe = read_recipe(base.name, base=base.base, own=self._own)
            layer = build.add_layer(store, base, recipe, parse_lock(text), cache)
            old = removal.old_layers(store, most_bytes, own=self._own)
            removal.remove_unused(store, old - {layer})
        index.trim(cache, most_bytes)

    def _open_store(self) -> ImageStore:
        if not isinstance(self._runtime, HasImageStore):
            raise RuntimeMissing
        return self._runtime.open_store()

    def _checked(self, packages: Sequence[str]) -> str:
        """Check the requested packages, and return them as the text of a requirements file.

        Raises InvalidParams if a package is invalid or not allowed.
        """
        from fumehood.images.requirements import merged, parse_requirements
        from fumehood.sandbox.images.recipe import WrongRequirements, normalized

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

    def _known(self, image_id: str, asked: str) -> str | None:
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
        """Run the blocking function `work` in a thread, and return its result.

        The known errors of `work` are replaced by errors for callers. These reveal nothing
        confidential.

        Raises:
            InvalidParams: the packages or requirements were refused.
            SandboxUnavailable: `work` failed for another known reason, or took too long.
        """
        from fumehood.image_store.faults import CAUSE_UNKNOWN, ImageBuildError
        from fumehood.images.index import PackagesRefused
        from fumehood.sandbox.images.recipe import UnknownImage, WrongRecipe, WrongRequirements

        try:
            return await self._threads.run(work, MAKING_S)
        except (PackagesRefused, WrongRequirements) as error:
            raise _refused(str(error)) from None
        except TimeoutError:
            raise try_later("Installing the packages took too long. Repeat the call.") from None
        except RuntimeFault as error:
            raise try_later(f"{error.message} {error.remedy}") from None
        except ImageBuildError as error:
            if error.remedy == CAUSE_UNKNOWN:
                raise self._failed(error) from None
            raise try_later(f"The packages could not be installed. {error}") from None
        except (OSError, UnknownImage, WrongRecipe) as error:  # for example of an operator's image
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> SandboxUnavailable:
        """Log an error, and return a different error for callers. The log contains the text of
        `error`; the returned error does not, because the text may contain paths of this host.
        """
        self._on_event("packages.failed", {"why": str(error)})
        return try_later("The packages could not be installed. The engine's log says why.")

    async def sweep(self) -> None:
        """Remove what killed builds have left behind. Raises RuntimeFault."""
        if not self._settings.allow:
            return
        try:
            await self._threads.run(self._sweep, SWEEP_S)
        except TimeoutError:
            raise RuntimeTimeout from None

    def _sweep(self) -> None:
        with closing(self._open_store()) as store:
            store.sweep()


def _resolve(image: Image, asked: str, own: Path, cache: Path | None) -> Lock:
    from fumehood.images import build, index
    from fumehood.sandbox.images.recipe import read_recipe

    recipe = read_recipe(image.name, base=image.base, own=own)
    cache = cache or build.wheel_cache()
    return index.resolve(
        asked, recipe.release, cache, lambda step: None, recipe.lock, deadline_s=PIP_S
    )


def _refused(words: str) -> InvalidParams:
    return InvalidParams(words, fields=["packages"])
