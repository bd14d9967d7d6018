"""A fake Docker controlled by a test: containers are socket pairs with a scripted guest."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

from fumehood.core.json_types import JsonObject
from fumehood.docker.api import (
    DockerError,
    DockerNotFound,
    DockerUnreachable,
    DockerWarned,
)
from fumehood.docker.bodies import create_body
from fumehood.docker.host import why_unfit
from fumehood.docker.streams import DockerStreams
from fumehood.protocol import framing
from fumehood.sandbox.container.runtime import (
    ContainerState,
    ListedContainer,
    RuntimeHost,
    RuntimeUnreachable,
)
from fumehood.sandbox.container.spec import ContainerSpec
from fumehood.sandbox.wall import HostSize
from support.scripted_guest import READY, ended, reset


def record(stream: int, payload: bytes) -> bytes:
    """One record of a stream in Docker's format."""
    return struct.pack("!BxxxI", stream, len(payload)) + payload


GOOD_INFO: JsonObject = {
    "OSType": "linux",
    "SecurityOptions": ["name=seccomp,profile=default"],
    "CgroupVersion": "2",
    "CgroupDriver": "systemd",
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "Runtimes": {"runc": {}},
}

Behave = Callable[["FakeGuest"], Awaitable[None]]


class FakeGuest:
    """The guest of a fake container: an asynchronous stream of frames."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._decoder = framing.Decoder(16 << 20)
        self._waiting: list[dict[str, Any]] = []

    async def says(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self._stream.send(record(1, framing.encode(message)))

    async def hears(self) -> dict[str, Any]:
        """The host's next message but "keep". Raises EOFError if the host has disconnected."""
        while not self._waiting:
            await anyio.wait_readable(self._stream)
            chunk = self._stream.recv(1 << 16)
            if not chunk:
                raise EOFError
            heard = self._decoder.feed(chunk)
            self._waiting += [message for message in heard if message["op"] != "keep"]
        return self._waiting.pop(0)


async def honest(guest: FakeGuest) -> None:
    """Report ready and answer every run with 4."""
    await guest.says(READY)
    while True:
        message = await guest.hears()
        if message["op"] == "run":
            await guest.says(ended(message["id"]), reset(message["id"]))


@dataclass
class FakeDocker:
    """The parts of Docker that the wall uses. `failing` makes every request fail, `silence` holds
    back Docker's info until it is set.
    """

    group: Any
    id: str = "docker"
    behave: Behave = honest
    info_answer: JsonObject = field(default_factory=lambda: dict(GOOD_INFO))
    warnings: tuple[str, ...] = ()
    failing: DockerError | None = None
    failing_to_start: DockerError | None = None
    silence: anyio.Event | None = None
    last_state: ContainerState = field(default_factory=lambda: ContainerState(exit_code=0))
    containers: dict[str, ListedContainer] = field(default_factory=dict)
    bodies: list[JsonObject] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    is_local: bool = True
    failure: RuntimeUnreachable | None = None
    name: str = "Docker"
    _streams: dict[str, socket.socket] = field(default_factory=dict)
    _living: set[str] = field(default_factory=set)

    async def examine_host(self, oci_runtime: str | None) -> RuntimeHost:
        self._ask("info")
        answer = self.info_answer
        if self.silence is not None:
            await self.silence.wait()
        return RuntimeHost(HostSize(0, 0), why_unfit(answer, runtime=oci_runtime, has_swap=False))

    async def launch(self, spec: ContainerSpec) -> tuple[str, DockerStreams]:
        self._ask("create")
        body, container_id = create_body(spec), f"id-of-{spec.name}"
        self.bodies.append(body)
        self.containers[container_id] = ListedContainer(
            container_id, spec.name, is_stopped=True, labels=body["Labels"]
        )
        if self.warnings:
            raise DockerWarned("; ".join(self.warnings))
        self._ask("start")
        if self.failing_to_start is not None:
            raise self.failing_to_start
        ours, self._streams[container_id] = socket.socketpair()
        self.group.start_soon(self._live, container_id)
        return container_id, DockerStreams(ours)

    async def state(self, name: str) -> ContainerState:
        self._ask("state")
        return self.last_state

    async def remove(self, name: str) -> None:
        self._ask("remove")
        found = [one for one in self.containers.values() if name in (one.id, one.name)]
        for one in found:
            del self.containers[one.id]
            self.removed.append(one.name)
            self.hang_up(one.id)

    async def list(self, label: str) -> list[ListedContainer]:
        self._ask("list")
        name, _, value = label.partition("=")
        return [
            one
            for one in self.containers.values()
            if name in one.labels and (not value or one.labels[name] == value)
        ]

    async def find_image(self, name: str) -> Any:
        self._ask("find_image")
        raise DockerNotFound("no images here")

    async def find_layer(self, base: str, lock: str) -> str | None:
        self._ask("find_layer")
        raise DockerNotFound("no images here")

    def hang_up(self, container_id: str) -> None:
        """Simulate the container's death."""
        stream = self._streams.pop(container_id, None)
        if stream is not None:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)  # whoever reads wakes up; closed, nobody would
            if container_id not in self._living:
                stream.close()

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        self.failure = self.failing if isinstance(self.failing, DockerUnreachable) else None
        if self.failing is not None:
            raise self.failing

    async def _live(self, container_id: str) -> None:
        stream = self._streams.get(container_id)
        if stream is None:
            return
        self._living.add(container_id)
        with stream, suppress(EOFError, OSError):
            try:
                await self.behave(FakeGuest(stream))
            finally:
                self.hang_up(container_id)
