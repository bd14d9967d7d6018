"""The runtime `landlock`: programs on a host that gives no namespaces.

Host side, between the container wall and the wardens. Invariants: what a caller, a tool or a guest
has sent reaches a warden only through a `ContainerSpec`; the event loop never blocks; every request
has a deadline. The wardens outlive this engine.
"""

from __future__ import annotations

import hashlib
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import psutil

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB
from fumehood.direct.pipes import PipeStreams
from fumehood.landlock import host
from fumehood.landlock.sandboxes import Gone, NotStopped, Sandboxes, default_home
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
)
from fumehood.sandbox.container.spec import (
    GUEST_OPEN_FILES,
    WORKSPACE,
    ContainerSpec,
    guest_config,
    labels_of,
)
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import HOST_IMAGE, HOST_PYTHON, guest_digest, read_recipe
from fumehood.sandbox.wall import HostSize, ImageMissing

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 16
"""Maximum number of concurrent requests."""

QUICK_S, START_S = 15.0, 25.0
"""Deadlines in seconds of requests, and of those that start a sandbox."""

PATIENCE_S = 5.0
"""Maximum seconds until a guest accepts a message."""

SIGNALS = 1024
"""Maximum number of signals that wait for the processes of a sandbox."""

SPARE_PROCESSES = 8
"""How many more processes the user of a sandbox may have than its warden permits."""

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


class WardenFault(RuntimeFault):
    """A sandbox could not be started or changed."""

    message = "A sandbox could not be started or changed."
    remedy = "The engine's log says why."


class Unsupported(RuntimeFault):
    """Without namespaces, this is impossible."""

    message = "Without namespaces, this is impossible."
    remedy = "Use Docker, or run the engine as root or with subordinate ids."
    heals = False


class Landlock:
    """The runtime of the sandboxes in the directory `home`. Creating this object starts nothing."""

    id = "landlock"
    name = "Landlock"
    is_local = True
    failure: RuntimeUnreachable | None = None

    def __init__(self, home: Path) -> None:
        self._sandboxes = Sandboxes(home)
        self._threads = BoundedThreads(THREADS, "landlock")

    async def examine_host(self, oci_runtime: str | None) -> RuntimeHost:
        """Examine this host."""
        unfit = await self._in_thread(lambda: host.why_unfit(oci_runtime))
        memory_mb = psutil.virtual_memory().total // MB
        return RuntimeHost(HostSize(memory_mb, len(os.sched_getaffinity(0))), unfit)

    async def launch(self, spec: ContainerSpec) -> tuple[str, PipeStreams]:
        """Start a sandbox. Return its name, and the streams of its first process.

        Raises:
            LimitsRefused: a limit cannot be set; nothing was started.
        """
        if spec.program is not None:
            raise LimitsRefused("Nothing would watch the program's memory.")
        if spec.disk is not None:
            raise Unsupported("A disk needs a mount.")
        streams, theirs = PipeStreams.pair()
        try:
            await self._in_thread(
                lambda: self._sandboxes.start(spec.name, plan_of(spec), theirs), START_S
            )
        except BaseException:
            streams.close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return spec.name, streams

    async def take_over(self, name: str, epoch: int) -> PipeStreams:
        """Connect to the guest of a running sandbox whose engine is gone.

        Raises:
            RuntimeNotFound, RuntimeConflict: the sandbox is gone, or not running.
        """
        streams, theirs = PipeStreams.pair()
        try:
            await self._in_thread(lambda: self._hand_over(name, epoch, theirs[:2]))
        except BaseException:
            streams.close()
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return streams

    def _hand_over(self, name: str, epoch: int, descriptors: tuple[int, ...]) -> None:
        if self._sandboxes.find(name).exit_code is not None:
            raise RuntimeConflict("The sandbox has ended.")
        ours, theirs = socket.socketpair()
        folder = os.open(self._sandboxes.folder_of(name), os.O_PATH | os.O_CLOEXEC)
        try:
            with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.settimeout(PATIENCE_S)
                end.connect(f"/proc/self/fd/{folder}/takeover")  # the whole path may be too long
                socket.send_fds(end, [str(epoch).encode()], [*descriptors, theirs.fileno()])
        finally:
            os.close(folder)

    async def state(self, name: str) -> ContainerState:
        """Return the state of a sandbox. Raises RuntimeNotFound if it does not exist."""
        found = await self._in_thread(lambda: self._sandboxes.find(name))
        return ContainerState(
            is_running=found.exit_code is None,
            is_paused=found.is_paused,
            exit_code=found.exit_code,
            pid=found.pid,
            image_id=found.image_id,
            oci_runtime=host.NAME,
            labels=found.labels,
        )

    async def pause(self, name: str) -> None:
        """Stop all processes of a sandbox. Do nothing if they are already stopped.

        Raises:
            RuntimeNotFound: the sandbox is gone.
        """
        await self._in_thread(lambda: self._sandboxes.freeze(name))

    async def unpause(self, name: str) -> None:
        """Let all processes of a sandbox continue. Do nothing if they are not stopped.

        Raises:
            RuntimeNotFound: the sandbox is gone.
        """
        await self._in_thread(lambda: self._sandboxes.thaw(name))

    async def remove(self, name: str) -> None:
        """Kill and remove a sandbox. Do nothing if it does not exist."""
        await self._in_thread(lambda: self._sandboxes.remove(name))

    async def list(self, label: str) -> list[ListedContainer]:
        """Return all sandboxes that have the label `label` (`name` or `name=value`), including
        those that have ended.
        """
        name, _, value = label.partition("=")
        return [
            ListedContainer(one.name, one.name, one.exit_code is not None, one.labels)
            for one in await self._in_thread(self._sandboxes.all)
            if name in one.labels and (not value or one.labels[name] == value)
        ]

    async def attach_disk(self, name: str, device: str) -> NoReturn:
        """Refuse: a disk needs a mount."""
        raise Unsupported("A disk needs a mount.")

    async def detach_disk(self, name: str) -> None:
        """Do nothing: no disk is attached."""

    # -- images ----------------------------------------------------------------------

    async def find_image(self, name: str) -> Image:
        """Return the image `host`. Raises ImageMissing for every other name."""
        return await self._in_thread(lambda: image_of_host(name))

    async def find_layer(self, base: str, lock: str) -> str | None:
        """Return None: packages cannot be added."""
        return None

    async def save_image(self, image_id: str, file: IO[bytes]) -> NoReturn:
        """Refuse: the image is the host itself."""
        raise Unsupported("There are no images.")

    async def load_image(self, file: IO[bytes]) -> NoReturn:
        """Refuse: the image is the host itself."""
        raise Unsupported("There are no images.")

    async def _in_thread(self, work: Callable[[], Answer], deadline_s: float = QUICK_S) -> Answer:
        try:
            return await self._threads.run(work, deadline_s)
        except TimeoutError:
            raise RuntimeTimeout("It took too long.") from None
        except Gone:
            raise RuntimeNotFound("The sandbox does not exist.") from None
        except FileExistsError:
            raise RuntimeConflict("The name is taken.") from None
        except (NotStopped, OSError) as error:
            raise WardenFault(str(error) or "its processes do not stop") from None


def plan_of(spec: ContainerSpec) -> JsonObject:
    """Return what a warden must know to start a sandbox."""
    rlimits: dict[str, Any] = {
        "CORE": 0, "FSIZE": spec.writable_mb[WORKSPACE] * MB, "MSGQUEUE": 0,
        "NOFILE": GUEST_OPEN_FILES, "SIGPENDING": SIGNALS, "RTPRIO": 0, "NICE": 0,
        "MEMLOCK": 65_536,
    }  # fmt: skip
    if os.geteuid() == 0:  # the sandbox then has a user of its own
        rlimits["NPROC"] = spec.processes + SPARE_PROCESSES
    config = {**guest_config(spec), "is_watched": True}
    return {
        "record": {"image_id": spec.image_id, "labels": labels_of(spec)},
        "guest": config,
        "processes": config["processes"],
        "rlimits": rlimits,
        "env": ENVIRONMENT,
    }


def image_of_host(name: str) -> Image:
    """Return the image `host`, whose programs are those of this host. Raises ImageMissing for every
    other name.
    """
    if name != HOST_IMAGE:
        remedy = f"Without namespaces there is only the image {HOST_IMAGE}: set container.images."
        raise ImageMissing.of(repr(name), "cannot be used here", remedy)
    recipe, guest = read_recipe(HOST_IMAGE).digest, guest_digest()
    identity = hashlib.sha256(f"{recipe}\n{guest}".encode()).hexdigest()
    since = datetime.fromtimestamp(HOST_PYTHON.stat().st_mtime, UTC)
    return Image(HOST_IMAGE, f"sha256:{identity}", 0, since, recipe, guest, 0, since)


def new_landlock(own_images: Path) -> Landlock:
    """Create the runtime of a container wall."""
    return Landlock(default_home())
