"""The runtime `direct`: sandboxes that a launcher of this software starts on this host.

Host side, between the container wall and the launcher. Invariants: what a caller, a tool or a guest
has sent reaches the launcher only through a `ContainerSpec`; the event loop never blocks; every
request has a deadline. If no launcher runs, a request starts one. The launcher outlives this
engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.direct.ask import ask_launcher, launcher_directory
from fumehood.direct.host import why_unfit
from fumehood.direct.pipes import PipeStreams
from fumehood.direct.plan import plan_of
from fumehood.direct.store import DirectoryStore, open_store
from fumehood.image_store.find import find_image, find_layer
from fumehood.sandbox.bounded_threads import Answer, BoundedThreads
from fumehood.sandbox.container.runtime import (
    ContainerState,
    LimitsRefused,
    ListedContainer,
    RuntimeConflict,
    RuntimeFault,
    RuntimeHost,
    RuntimeNotFound,
    RuntimeTimeout,
    RuntimeUnreachable,
    Unfit,
)
from fumehood.sandbox.container.spec import ContainerSpec, relay_command
from fumehood.sandbox.images.recipe import HOST_IMAGE
from fumehood.sandbox.wall import HostSize

if TYPE_CHECKING:
    from collections.abc import Callable

    from fumehood.sandbox.images.catalog import Image

THREADS = 16
"""Maximum number of concurrent requests to the launcher."""

QUICK_S = 15.0
"""Deadline in seconds of requests. This is enough for a busy host."""

LAUNCH_S = 25.0
"""Deadline in seconds of a request that starts a process."""

FILES_S = 60.0
"""Deadline in seconds for checking the files of an image."""

TRANSFER_S = 600.0
"""Deadline in seconds for saving or loading an image."""

FAULTS: Mapping[str, type[RuntimeFault]] = {
    "missing": RuntimeNotFound, "conflict": RuntimeConflict, "limits": LimitsRefused,
}  # fmt: skip
"""How the launcher refuses → the error."""


class LauncherUnreachable(RuntimeUnreachable):
    """The launcher cannot be started or reached."""

    message = "The launcher of sandboxes cannot be reached."
    remedy = "Its log is in the directory that `fumehood doctor` names."


class LauncherFault(RuntimeFault):
    """The launcher could not carry out a request."""

    message = "The launcher could not start or change a sandbox."
    remedy = "The engine's log says why."


class Direct:
    """The runtime of the launcher in `directory`, with the images in `store`. Creating this object
    starts nothing. `own_images` is the folder with the operator's own image recipes.
    """

    id = "direct"
    name = "The launcher"
    is_local = True
    starter: str | None = None
    """Name of the module that starts the sandboxes, or None if the launcher does."""
    oci_runtime = ""
    """The name of the OCI runtime that starts the sandboxes, or "" if the launcher does."""

    def __init__(
        self, directory: Path, store: DirectoryStore, own_images: Path | None = None
    ) -> None:
        self._directory = directory
        self._store = store
        self._own_images = own_images
        self._threads = BoundedThreads(THREADS, "launcher")
        self._is_watched: bool | None = None
        """Whether guests watch their memory, because the launcher has no control groups. None if
        this is not known yet.
        """
        self._devices: dict[str, str] = {}
        """Name of each attached disk → its block device."""
        self.failure: RuntimeUnreachable | None = None

    async def examine_host(self, oci_runtime: str | None) -> RuntimeHost:
        """Examine this host. If it can run sandboxes, start the launcher."""
        unfit = await self._in_thread(lambda: self._why_unfit(oci_runtime))
        if unfit is None:
            await self._look()
        memory_mb = psutil.virtual_memory().total // MB
        return RuntimeHost(HostSize(memory_mb, len(os.sched_getaffinity(0))), unfit)

    def _why_unfit(self, oci_runtime: str | None) -> Unfit | None:
        return why_unfit(oci_runtime)

    async def launch(self, spec: ContainerSpec) -> tuple[str, PipeStreams]:
        """Start a sandbox. Return its name, and the streams of its first process.

        Raises:
            LimitsRefused: a limit cannot be set; nothing was started.
        """
        device = None
        if spec.disk is not None:
            device = self._devices.get(spec.disk[0])
            if device is None:
                raise RuntimeNotFound("The disk is not attached.")
        is_watched = self._is_watched if self._is_watched is not None else await self._look()
        if is_watched and spec.program is not None:
            raise LimitsRefused("Nothing in its container would watch the program's memory.")
        layers = await self._in_thread(lambda: self._store.directories_of(spec.image_id), FILES_S)
        # A label alone is not enough, because whoever makes an archive chooses the labels in it.
        with_host = spec.image_name == HOST_IMAGE and self._store.has_host(spec.image_id)
        plan = plan_of(
            spec, layers, device, is_watched=is_watched, with_host=with_host, starter=self.starter
        )
        return spec.name, await self._with_streams({"do": "launch", "plan": plan}, 3)

    async def _look(self) -> bool:
        """Ask the launcher whether guests must watch their memory, and return the answer."""
        self._is_watched = not (await self._ask({"do": "hello"}, QUICK_S))["cgroups"]
        return self._is_watched

    async def take_over(self, name: str, epoch: int) -> PipeStreams:
        """Connect to the guest of a running sandbox whose engine is gone.

        Raises:
            RuntimeNotFound, RuntimeConflict: the sandbox is gone, or not running.
        """
        request = {"do": "take_over", "name": name, "epoch": epoch}
        if self.starter is None:
            return await self._with_streams(request, 2)
        command = list(relay_command(epoch))
        return await self._with_streams({**request, "command": command}, 3)

    async def _with_streams(self, request: JsonObject, count: int) -> PipeStreams:
        """Send a request together with the first `count` of the sandbox's ends of new streams.
        Return our ends.
        """
        streams, theirs = PipeStreams.pair()
        try:
            await self._ask(request, LAUNCH_S, theirs[:count])
        except BaseException:
            streams.close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return streams

    async def state(self, name: str) -> ContainerState:
        """Return the state of a sandbox. Raises RuntimeNotFound if it does not exist, or if it is
        of another kind than those of this runtime.
        """
        found = await self._ask({"do": "state", "name": name}, QUICK_S)
        if found["starter"] != self.starter:
            raise RuntimeNotFound("It was started by another engine of containers.")
        return ContainerState(
            is_running=found["is_running"],
            is_paused=found["is_paused"],
            exit_code=found["exit_code"],
            out_of_memory=found["out_of_memory"],
            pid=found["pid"],
            image_id=found["image_id"],
            oci_runtime=self.oci_runtime,
            labels=found["labels"],
        )

    async def pause(self, name: str) -> None:
        """Freeze all processes of a sandbox. Do nothing if they are already frozen.

        Raises:
            RuntimeNotFound: the sandbox is gone.
        """
        await self._ask({"do": "freeze", "name": name, "frozen": True}, QUICK_S)

    async def unpause(self, name: str) -> None:
        """Thaw all processes of a sandbox. Do nothing if they are not frozen.

        Raises:
            RuntimeNotFound: the sandbox is gone.
        """
        await self._ask({"do": "freeze", "name": name, "frozen": False}, QUICK_S)

    async def remove(self, name: str) -> None:
        """Kill and remove a sandbox. Do nothing if it does not exist."""
        await self._ask({"do": "remove", "name": name}, QUICK_S)

    async def list(self, label: str) -> list[ListedContainer]:
        """Return all sandboxes that have the label `label` (`name` or `name=value`), including
        those that have ended.
        """
        name, _, value = label.partition("=")
        found = (await self._ask({"do": "list"}, QUICK_S))["sandboxes"]
        return [
            ListedContainer(one["name"], one["name"], not one["is_running"], one["labels"])
            for one in found
            if name in one["labels"] and (not value or one["labels"][name] == value)
        ]

    async def attach_disk(self, name: str, device: str) -> None:
        """Make the file system on the block device `device` available to new sandboxes."""
        self._devices[name] = device

    async def detach_disk(self, name: str) -> None:
        """Undo `attach_disk`. Do nothing if the disk is not attached.

        Raises:
            RuntimeConflict: a sandbox uses the disk.
        """
        found = (await self._ask({"do": "list"}, QUICK_S))["sandboxes"]
        if any(one["disk"] == name and one["is_running"] for one in found):
            raise RuntimeConflict("A sandbox uses the disk.")
        self._devices.pop(name, None)

    # -- images ----------------------------------------------------------------------

    async def find_image(self, name: str) -> Image:
        """Return the newest current image with this name. Raises ImageMissing if it is missing."""
        return await self._in_thread(lambda: find_image(self._store, name, own=self._own_images))

    async def find_layer(self, base: str, lock: str) -> str | None:
        """Return the id of the image that adds to the image with the id `base` what `lock` names,
        or None if it does not exist.
        """
        return await self._in_thread(lambda: find_layer(self._store, base, lock))

    async def save_image(self, image_id: str, file: IO[bytes]) -> None:
        """Write an image to `file`, from which `load_image` loads it."""
        await self._in_thread(lambda: self._store.save(image_id, file), TRANSFER_S)

    async def load_image(self, file: IO[bytes]) -> None:
        """Load an image from a file that `save_image` has written."""
        await self._in_thread(lambda: self._store.load(file), TRANSFER_S)

    def open_store(self) -> DirectoryStore:
        """Return the store of the images."""
        return self._store

    # -- the launcher ------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], Answer], deadline_s: float = QUICK_S) -> Answer:
        try:
            return await self._threads.run(work, deadline_s)
        except TimeoutError:
            raise RuntimeTimeout("It took too long.") from None
        except OSError as error:
            raise LauncherFault(str(error)) from None

    async def _ask(
        self, request: JsonObject, deadline_s: float, descriptors: tuple[int, ...] = ()
    ) -> JsonObject:
        """Send a request to the launcher, and return the answer. Raises RuntimeFault."""
        # Copies, because the thread may outlive the deadline, and with it the caller.
        copies = [os.dup(descriptor) for descriptor in descriptors]
        has_begun = False

        def exchange() -> JsonObject:
            nonlocal has_begun
            has_begun = True
            try:
                return ask_launcher(self._directory, request, copies, deadline_s)
            finally:
                for copy in copies:
                    os.close(copy)

        try:
            answer = await self._threads.run(exchange, deadline_s)
        except TimeoutError:
            raise RuntimeTimeout("The launcher does not answer in time.") from None
        except OSError as error:
            self.failure = LauncherUnreachable(f"The launcher cannot be reached: {error}")
            raise self.failure from None
        finally:
            if not has_begun:  # no thread was free in time
                for copy in copies:
                    os.close(copy)
        self.failure = None
        if "error" in answer:
            raise FAULTS.get(answer["kind"], LauncherFault)(str(answer["error"]))
        return answer


def new_direct(own_images: Path, kind: type[Direct] = Direct) -> Direct:
    """Create the runtime of a container wall. `own_images` is the folder of the image recipes that
    the operator wrote, and `kind` is the class of the runtime.
    """
    return kind(launcher_directory(), open_store(kind.starter), own_images)
