"""A program that uses a host without namespaces: one sandbox, and what becomes of it.

It is executed as a script, also by other users and in containers, with a JSON object as its argument:
names and Python programs. It prints a JSON object.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import anyio

from fumehood.core.limits import MB, Grade, Limit, Limits
from fumehood.guest.core.marks import marked
from fumehood.landlock.runtime import Landlock, new_landlock
from fumehood.landlock.sandboxes import Sandboxes, default_home
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.spec import ContainerSpec
from fumehood.sandbox.wall import NO_SINKS, RunEnding

COUNTS = "n = globals().get('n', 0) + 1\nn"
LEAVES = """
import os, time
for _ in range(2):
    if os.fork() == 0: os.setsid()
time.sleep(600)
"""
"""Has processes in sessions of their own."""
ENOUGH_S = 600.0
"""What a busy machine may need."""


def lives(pid: int) -> bool:
    """Whether a process runs. One that has ended stays until somebody reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def spec_of(runtime: Landlock, memory_mb: int = 128) -> ContainerSpec:
    image = await runtime.find_image("host")
    name = f"fumehood-test-{secrets.token_hex(6)}"
    return ContainerSpec(
        name=name, image_id=image.id, image_name=image.name, engine_id=name, owner_id=name,
        memory_mb=memory_mb, cpus=1, lifetime_s=3600, deadline=int(time.time()) + 3600,
        guest_mb=image.guest_mb, runtime="landlock",
    )  # fmt: skip


async def started(runtime: Landlock, spec: ContainerSpec) -> Container:
    return await Container.start(
        runtime, spec, required=frozenset(Limit), least=Grade.PROCESS, ready_s=ENOUGH_S
    )


async def run(container: Container, code: str, *, keep: bool = False) -> RunEnding:
    while not container.is_free:
        assert not container.is_dead, (container.why, container.complaint)
        await anyio.sleep(0.01)
    arguments = {"code": code, "stdin": None, "files": []}
    isolation = "session" if keep else "call"
    limits = Limits(ENOUGH_S, ENOUGH_S, 128, MB)
    return await container.run("python", arguments, limits, NO_SINKS, isolation, keep=keep)


async def lives_of(runtime: Landlock) -> dict[str, Any]:
    """What becomes of a session's sandbox: it is frozen and taken over, and its warden is killed."""
    spec = await spec_of(runtime)
    container = await started(runtime, spec)
    container.keep(1, ENOUGH_S)
    counted = [(await run(container, COUNTS, keep=True)).result["value"]]
    await runtime.pause(spec.name)
    await runtime.pause(spec.name)
    is_paused = (await runtime.state(spec.name)).is_paused
    await runtime.unpause(spec.name)
    counted.append((await run(container, COUNTS, keep=True)).result["value"])
    container.end("its engine is killed")
    other = await Container.take_over(
        runtime, spec.name, spec.image_id, grade=Grade.PROCESS, required=frozenset(Limit),
        least=Grade.PROCESS, epoch=2,
    )  # fmt: skip
    other.keep(2, ENOUGH_S)
    counted.append((await run(other, COUNTS, keep=True)).result["value"])
    found = Sandboxes(default_home()).find(spec.name)
    os.kill(found.pid, signal.SIGKILL)
    while (await runtime.state(spec.name)).is_running or any(map(lives, marked(found.mark))):
        await anyio.sleep(0.01)
    other.end("the test is over")
    await runtime.remove(spec.name)
    return {
        "counted": counted, "is_paused": is_paused, "grade": str(other.grade),
        "held": {str(limit): str(held) for limit, held in other.held.items()},
        "left": [one.name for one in Sandboxes(default_home()).all()],
        "user": found.user,
    }  # fmt: skip


async def main(codes: dict[str, str]) -> dict[str, Any]:
    runtime = new_landlock(Path())
    said: dict[str, Any] = {"ended": {}}
    spec = await spec_of(runtime)
    container = await started(runtime, spec)
    for name, code in codes.items():
        ended = await run(container, code)
        value = (ended.result or {}).get("value")
        said["ended"][name] = [ended.ended_by, value, list(ended.limits_hit)]
    container.end("the test is over")
    await runtime.remove(spec.name)
    said["lives"] = await lives_of(runtime)
    try:
        await Container.start(
            runtime, await spec_of(runtime), required=frozenset(Limit), ready_s=ENOUGH_S
        )
    except Exception as error:
        said["refused"] = f"{type(error).__name__}: {getattr(error, 'message', error)}"
    for one in await runtime.list("fumehood.engine"):
        await runtime.remove(one.name)
    return said


if __name__ == "__main__":
    print(json.dumps(anyio.run(main, json.loads(sys.argv[1]))))
