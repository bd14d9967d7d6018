"""One container of the real wall, used directly, without pool, session or engine."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limit, Limits
from fumehood.core.session import FileKind
from fumehood.direct.runtime import new_direct
from fumehood.docker.api import Docker
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.runtime import Runtime, RuntimeFault
from fumehood.sandbox.container.spec import GUEST_COMMAND, ContainerSpec
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.wall import RunEnding, RunSinks
from support.direct import ready_direct_image
from support.wait import DEADLINE_S

LIFETIME_S = 600
START_S = 90.0
"""Start deadline on a busy host, for an image that preloads much, in seconds."""


@dataclass
class Heard:
    """The events that a run's sinks received."""

    files: list[tuple[FileKind, str, bytearray]] = field(default_factory=list)
    output: list[tuple[str, str]] = field(default_factory=list)
    progress: list[tuple[float, str]] = field(default_factory=list)

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        self.files.append((kind, path, bytearray()))

    def write(self, data: bytes) -> None:
        self.files[-1][2].extend(data)

    @property
    def names(self) -> list[str]:
        return [path for kind, path, _ in self.files if kind == "file"]

    @property
    def pictures(self) -> list[tuple[str, bytes]]:
        return [(path, bytes(data)) for kind, path, data in self.files if kind == "image"]


class _Listener:
    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.ended: str | None = None

    def on_clean(self) -> None:
        self.settled.set()

    def on_end(self, why: str) -> None:
        self.ended = why
        self.settled.set()


class OneContainer:
    """`run` also waits until the container is reset; `heard` belongs to the last run."""

    def __init__(self, container: Container, listener: _Listener, memory_mb: int) -> None:
        self.container = container
        self._listener = listener
        self.memory_mb = memory_mb
        self.name = container.name
        self.heard = Heard()
        self.runtime: Runtime

    @property
    def ended(self) -> str | None:
        """Why the container has ended, or None while it serves."""
        return self._listener.ended

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        *,
        keep: bool = True,
        wall_s: float = 20,
        output_bytes: int = MB,
        live: bool = False,
        trial: tuple[str, str] | None = None,
    ) -> RunEnding:
        heard = self.heard = Heard()
        self._listener.settled = anyio.Event()
        sinks = RunSinks(files=heard)
        if live:
            sinks = RunSinks(
                progress=lambda percent, words: heard.progress.append((percent, words)),
                files=heard,
                output=lambda stream, text: heard.output.append((stream, text)),
                is_live=True,
            )
        sinks = replace(sinks, trial=trial)
        limits = Limits(wall_s, wall_s, self.memory_mb, output_bytes)
        ending = await self.container.run(program, arguments, limits, sinks, "session", keep=keep)
        with anyio.fail_after(DEADLINE_S):
            if self.ended is None:  # it may have ended before this run
                await self._listener.settled.wait()
        return ending

    async def python(self, code: str, **options: Any) -> RunEnding:
        files = options.pop("files", [])
        return await self.run("python", {"code": code, "stdin": None, "files": files}, **options)

    async def javascript(self, code: str, **options: Any) -> RunEnding:
        return await self.run(
            "javascript",
            {"code": code, "stdin": options.pop("stdin", None), "files": []},
            **options,
        )

    async def shell(self, command: str, **options: Any) -> RunEnding:
        return await self.run(
            "shell",
            {"command": command, "stdin": options.pop("stdin", None), "files": []},
            **options,
        )

    async def files(self, trial: tuple[str, str] | None = None, **arguments: Any) -> JsonObject:
        ending = await self.run("files", arguments, trial=trial)
        assert ending.result is not None, ending
        return ending.result


@asynccontextmanager
async def one_container(
    image: Image,
    *,
    runtime: str | None = None,
    memory_mb: int = 512,
    command: tuple[str, ...] = GUEST_COMMAND,
) -> AsyncIterator[OneContainer]:
    used, oci_runtime, image_id = _runtime(image, runtime)
    name = f"fumehood-test-{secrets.token_hex(8)}"
    spec = ContainerSpec(
        name=name, image_id=image_id, image_name=image.name, engine_id=name, owner_id=name,
        memory_mb=memory_mb, cpus=1, lifetime_s=LIFETIME_S, runtime=oci_runtime,
        deadline=int(time.time()) + LIFETIME_S, guest_mb=image.guest_mb, command=command,
    )  # fmt: skip
    listener = _Listener()
    try:
        container = await Container.start(used, spec, required=frozenset(Limit), ready_s=START_S)
        container.listener = listener
        box = OneContainer(container, listener, memory_mb)
        box.runtime = used
        yield box
        container.end("the test is over")
    finally:
        with anyio.CancelScope(shield=True), suppress(RuntimeFault):
            await used.remove(name)


def _runtime(image: Image, wanted: str | None) -> tuple[Runtime, str | None, str]:
    """What runs the container, the name of its OCI runtime, and the id that the image has there."""
    if wanted == "direct":
        return new_direct(Path()), None, ready_direct_image(image.name).id
    return Docker(os.environ), wanted, image.id


@asynccontextmanager
async def taken_over(box: OneContainer, epoch: int) -> AsyncIterator[OneContainer]:
    """The same container, whose host is now another engine."""
    container = await Container.take_over(
        box.runtime,
        box.name,
        box.container.image_id,
        required=frozenset(Limit),
        epoch=epoch,
    )
    listener = _Listener()
    container.listener = listener
    container.keep(epoch, 600)
    try:
        other = OneContainer(container, listener, box.memory_mb)
        other.runtime = box.runtime
        yield other
    finally:
        container.end("the test is over")


def value_of(ending: RunEnding) -> Any:
    """The value of a successful run."""
    assert ending.ended_by.value == "ok", (ending.ended_by, ending.stderr)
    return ending.result["value"]
