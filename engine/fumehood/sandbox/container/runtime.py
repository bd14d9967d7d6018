"""The seam between the container wall and what runs containers: a runtime, such as Docker.

Host side. Everything that only one runtime has (its records, its words, its checks of the host)
belongs to the module of that runtime. Invariants: a runtime starts exactly what a `ContainerSpec`
describes, or nothing; what a guest writes reaches the wall without a runtime's framing; no method
blocks the event loop, and each has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol

from fumehood.sandbox.container.spec import ContainerSpec
from fumehood.sandbox.wall import HostSize

if TYPE_CHECKING:
    from fumehood.sandbox.images.catalog import Image


class RuntimeFault(Exception):
    """A runtime cannot be used, or did not do what it was asked to.

    The text of the exception is for the operator: it may quote the runtime, including paths of the
    host.
    """

    message = "A request to the container runtime failed."
    """The text for callers, without paths of the host."""
    remedy = "Its log and the engine's say more."
    heals = True
    """Whether the fault may disappear without the operator's help, for example after a restart."""


class RuntimeUnreachable(RuntimeFault):
    """The runtime does not run, or this engine has no access to it."""


class RuntimeMissing(RuntimeUnreachable):
    """No part of the engine has a runtime."""

    message = "The part of the engine that runs containers is not installed."
    remedy = "Install fumehood with its part docker."
    heals = False


class RuntimeTimeout(RuntimeFault):
    """The runtime did not answer in time."""

    message = "The container runtime does not answer in time."
    remedy = "See its log, and restart it if it hangs."


class RuntimeNotFound(RuntimeFault):
    """The container, image or disk does not exist."""


class RuntimeConflict(RuntimeFault):
    """A name is already taken, a disk is in use, or the state of a container forbids the
    request.
    """


class LimitsRefused(RuntimeFault):
    """The runtime cannot apply a limit of a container, and has not started the container."""

    message = "The limits of a container cannot all be applied."
    remedy = "Run `fumehood doctor` to see why."
    heals = False


@dataclass(frozen=True, slots=True)
class Unfit:
    """A reason why a host cannot run containers with all limits: `message` states the problem, and
    `remedy` says how to solve it. Both texts are for callers.
    """

    message: str
    remedy: str
    heals: bool = False
    """Whether the problem may disappear without the operator's help, so that a call may be
    repeated.
    """


@dataclass(frozen=True, slots=True)
class RuntimeHost:
    """The host of a runtime: its size, and why it cannot run containers with all limits. `unfit` is
    None if it can.
    """

    size: HostSize
    unfit: Unfit | None = None


@dataclass(frozen=True, slots=True)
class ListedContainer:
    """One container in a runtime's list of containers."""

    id: str
    name: str
    is_stopped: bool
    """Whether it does not run: it has ended, or was never started."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ContainerState:
    """The state of a container that exists."""

    is_running: bool = False
    is_paused: bool = False
    exit_code: int | None = None
    out_of_memory: bool = False
    """Whether memory has run out in the container, now or earlier."""
    pid: int = 0
    """Process id of the guest on the runtime's host, or 0."""
    image_id: str = ""
    oci_runtime: str = ""
    """Name of the OCI runtime, if there are several."""
    labels: Mapping[str, str] = field(default_factory=dict)


class Receiver(asyncio.Protocol):
    """Receives what the first process of a container writes, in the event loop. The methods of
    `asyncio.Protocol` concern its standard output and input. Bytes may arrive before
    `connection_made` is called.
    """

    def errors_received(self, chunk: bytes) -> None:
        """Called with the next bytes of the standard error."""

    def stream_broken(self, why: str) -> None:
        """Called if the runtime's own framing is invalid. `why` completes the sentence "It has sent
        what it must not: …". Nothing else is received then.
        """


class Streams(Protocol):
    """The standard streams of the first process of a container. The owner must call `connect` or
    `close`.
    """

    async def connect(self, receiver: Receiver) -> None:
        """Connect the streams to the event loop. If this fails, the streams are closed."""

    def close(self) -> None:
        """Close the streams, which ends the guest."""


class Runtime(Protocol):
    """What runs containers. Every asynchronous method may raise RuntimeFault."""

    id: str
    """The name in the configuration, such as "docker"."""
    name: str
    """The name for people, such as "Docker"."""
    failure: RuntimeUnreachable | None
    """Why the last request did not reach the runtime, or None if it did."""

    @property
    def is_local(self) -> bool:
        """Whether the containers run on this host."""

    async def examine_host(self, oci_runtime: str | None) -> RuntimeHost:
        """Examine the host of the containers. `oci_runtime` is the configured OCI runtime."""

    async def launch(self, spec: ContainerSpec) -> tuple[str, Streams]:
        """Create and start a container. Return its id, and the streams of its first process. If
        this method fails, a created container may be left under its name.

        Raises:
            LimitsRefused: a limit cannot be applied; the container was not started.
        """

    async def take_over(self, name: str, epoch: int) -> Streams:
        """Connect to the guest of a running container whose engine is gone. `epoch` is the number
        of this engine among the engines that the container's session has had.

        Raises:
            RuntimeNotFound, RuntimeConflict: the container is gone, or not running.
        """

    async def state(self, name: str) -> ContainerState:
        """Return the state of a container, given its name or id. Raises RuntimeNotFound if it does
        not exist.
        """

    async def pause(self, name: str) -> None:
        """Freeze all processes of a container. Do nothing if they are already frozen.

        Raises:
            RuntimeNotFound: the container is gone.
        """

    async def unpause(self, name: str) -> None:
        """Thaw all processes of a container. Do nothing if they are not frozen.

        Raises:
            RuntimeNotFound: the container is gone.
        """

    async def remove(self, name: str) -> None:
        """Kill and remove a container, given its name or id. Do nothing if it does not exist or is
        already being removed.
        """

    async def list(self, label: str) -> list[ListedContainer]:
        """Return all containers that have the label `label` (`name` or `name=value`), including
        stopped containers.
        """

    async def find_image(self, name: str) -> Image:
        """Return the newest current image with this name. Raises ImageMissing if it is missing."""

    async def find_layer(self, base: str, lock: str) -> str | None:
        """Return the id of the image that adds to the image with the id `base` what `lock` names,
        or None if it does not exist.
        """

    async def save_image(self, image_id: str, file: IO[bytes]) -> None:
        """Write an image and its tag to `file`, from which `load_image` loads it."""

    async def load_image(self, file: IO[bytes]) -> None:
        """Load an image from a file that `save_image` has written."""

    async def attach_disk(self, name: str, device: str) -> None:
        """Make the file system on the block device `device` available to new containers whose spec
        names the disk `name`.
        """

    async def detach_disk(self, name: str) -> None:
        """Undo `attach_disk`. Do nothing if the disk is not attached.

        Raises:
            RuntimeConflict: a container uses the disk.
        """


NewRuntime = Callable[[Path], Runtime]
"""Creates the runtime of a container wall. It receives the folder of the image recipes that the
operator wrote. It can be pickled, because each node of an engine creates its own runtime.
"""


class NoRuntime:
    """The runtime of an engine in which no part has one: it refuses everything."""

    id = "none"
    name = "The container runtime"
    is_local = True
    failure: RuntimeUnreachable | None = RuntimeMissing()

    async def _refuse(self, *arguments: Any) -> NoReturn:
        raise RuntimeMissing

    examine_host = launch = take_over = state = pause = unpause = remove = _refuse
    list = find_image = find_layer = save_image = load_image = _refuse
    attach_disk = detach_disk = _refuse
