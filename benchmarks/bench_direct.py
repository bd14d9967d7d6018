"""Sandboxes without Docker against Docker's containers: the same image, guest and calls, in turn."""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil

from benchmarks.bench_containers import (
    BODY,
    CALLS_PER_ROUND,
    PATH,
    ROUNDS,
    WARM_UP,
    check,
    timed,
)
from benchmarks.bench_daemon import MB, SMALLEST_IMAGE, bare_client, private_bytes, run_daemon
from benchmarks.line import Line
from fumehood.core.limits import Grade, Limit, Limits
from fumehood.direct.ask import launcher_directory, sandboxes_of
from fumehood.direct.runtime import Direct
from fumehood.direct.store import open_store
from fumehood.docker.api import Docker
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.spec import ContainerSpec
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.wall import NO_SINKS
from support.direct import ready_direct_image

DIRECT = {"FUMEHOOD_CONTAINER__ENGINE": "direct"}
GVISOR = {"FUMEHOOD_CONTAINER__ENGINE": "gvisor"}
IMAGE = "python-data"
"""The image of the default configuration."""

STARTS = 5
CODE = {"code": "n = globals().get('n', 0) + 1\nn", "stdin": None, "files": []}


def direct_lines() -> Iterator[Line]:
    """Every target of sandboxes without Docker, as root."""
    image = ready_direct_image(IMAGE)
    yield from asyncio.run(starts(image))
    yield asyncio.run(takeovers(image))
    yield ratio_line("run_python warm, direct / Docker", 1.0, *warm_calls(DIRECT, {}))
    times = warm_calls(GVISOR, {"FUMEHOOD_CONTAINER__RUNTIME": "runsc"})
    yield ratio_line("run_python warm, gVisor / gVisor under Docker", 2.0, *times)
    yield first_program()
    yield idle_sandbox()


def warm_calls(ours: dict[str, str], theirs: dict[str, str]) -> tuple[list[float], list[float]]:
    """The seconds of calls to two daemons with these settings, in turns."""
    with ExitStack() as stack:
        daemons = [stack.enter_context(run_daemon(settings)) for settings in (ours, theirs)]
        calls = [bare_client(daemon.socket, PATH, BODY) for daemon in daemons]
        times: tuple[list[float], list[float]] = ([], [])
        for call in calls:
            for _ in range(WARM_UP):
                check(call())
        for _ in range(ROUNDS):
            for call, taken in zip(calls, times, strict=True):
                taken += [timed(lambda call=call: check(call())) for _ in range(CALLS_PER_ROUND)]
    return times


def ratio_line(what: str, most: float, ours: list[float], theirs: list[float]) -> Line:
    direct_ms, docker_ms = (statistics.median(taken) * 1e3 for taken in (ours, theirs))
    ratio = direct_ms / docker_ms
    figure = f"{ratio:.2f} ({direct_ms:.2f} ms / {docker_ms:.2f} ms)"
    return Line(what, f"≤ {most}", figure, ratio <= most)


def spec_of(image: Image) -> ContainerSpec:
    name = f"fumehood-bench-{secrets.token_hex(6)}"
    return ContainerSpec(
        name=name, image_id=image.id, image_name=image.name, engine_id=name, owner_id=name,
        memory_mb=512, cpus=1, lifetime_s=600, deadline=int(time.time()) + 600,
        guest_mb=image.guest_mb,
    )  # fmt: skip


async def started(runtime: Any, image: Image) -> tuple[Container, float]:
    before = time.perf_counter()
    container = await Container.start(
        runtime, spec_of(image), required=frozenset(Limit), ready_s=60
    )
    return container, time.perf_counter() - before


async def starts(image: Image) -> Iterator[Line]:
    direct, docker = Direct(launcher_directory(), open_store()), Docker(os.environ)
    images = (image, await docker.find_image(IMAGE))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for runtime, own, taken in zip((direct, docker), images, times, strict=True):
            container, seconds = await started(runtime, own)
            taken.append(seconds)
            container.end("measured")
            await runtime.remove(container.name)
    return iter([ratio_line("launch to hello, direct / Docker", 0.6, *times)])


async def takeovers(image: Image) -> Line:
    """Another engine asks for the sandbox of a session, until its guest has greeted it."""
    direct = Direct(launcher_directory(), open_store())
    container, _ = await started(direct, image)
    name, taken = container.name, []
    container.keep(1, 600)
    for epoch in range(2, ROUNDS + 2):
        await container.run("python", CODE, Limits(30, 30, 512, MB), NO_SINKS, "session", keep=True)
        container.end("its engine is gone")
        before = time.perf_counter()
        container = await Container.take_over(
            direct, name, image.id, grade=Grade.NAMESPACES, required=frozenset(Limit),
            least=Grade.NAMESPACES, epoch=epoch,
        )  # fmt: skip
        taken.append(time.perf_counter() - before)
        container.keep(epoch, 600)
    container.end("measured")
    await direct.remove(name)
    ms = statistics.median(taken) * 1e3
    return Line("takeover of a direct sandbox", "≤ 60 ms", f"{ms:.1f} ms", ms <= 60)


def first_program() -> Line:
    """From starting `fumehood serve` to the first answer of a program."""
    times = []
    for _ in range(STARTS):
        with run_daemon(DIRECT) as daemon:
            check(bare_client(daemon.socket, PATH, BODY)())
            times.append(time.monotonic() - daemon.started)
    seconds = statistics.median(times)
    return Line(
        "first answer of a program after serve, direct", "≤ 0.9 s", f"{seconds:.2f} s",
        seconds <= 0.9,
    )  # fmt: skip


def idle_sandbox() -> Line:
    """Private memory of the processes of a sandbox that has served and waits."""
    ready_direct_image("python")
    with run_daemon({**SMALLEST_IMAGE, **DIRECT}) as daemon:
        call = bare_client(daemon.socket, PATH, BODY)
        for _ in range(WARM_UP):
            check(call())
        time.sleep(1)
        pids = [
            one["pid"]
            for one in sandboxes_of(launcher_directory())
            if one["labels"].get("fumehood.pid") == str(daemon.process.pid) and one["is_running"]
        ]
        firsts = [psutil.Process(pid) for pid in pids]
        sizes = [private_bytes([one, *one.children(recursive=True)]) / MB for one in firsts]
    largest = max(sizes)
    return Line(
        "image python: idle direct sandbox, private", "≤ 20 MB", f"{largest:.1f} MB", largest <= 20
    )
