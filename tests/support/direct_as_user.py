"""A program that an ordinary user runs: one sandbox without Docker, and what happens in it.

It is executed as a script, with a request as its argument: a JSON object with `image` (a file from
which the image is loaded, or `host`), `codes` (names and Python programs), and perhaps the `engine`.
It prints a JSON object.
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
from fumehood.direct.ask import ask_launcher, launcher_directory
from fumehood.direct.runtime import Direct
from fumehood.direct.store import open_store
from fumehood.gvisor.runtime import STARTER, new_gvisor
from fumehood.image_store.find import list_images
from fumehood.images.build import build_image
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.container.runtime import LimitsRefused
from fumehood.sandbox.container.spec import ContainerSpec, OperatorProgram
from fumehood.sandbox.images.recipe import read_recipe
from fumehood.sandbox.wall import NO_SINKS, RunEnding

COUNTS = "n = globals().get('n', 0) + 1\nn"
STOPPED = "import os\nos.kill(os.fork() or os.getpid(), 19)"
"""Leaves a child process that has stopped itself."""
CPU_S = 2.0
ENOUGH_S = 600.0
"""What a busy machine may need."""

READY_S = 300.0

RUNTIME: str | None = None
"""The OCI runtime of the containers."""


def ask(do: str, **fields: Any) -> Any:
    return ask_launcher(launcher_directory(), {"do": do, **fields}, [], 60)


def spec_of(image: Any, **fields: Any) -> ContainerSpec:
    name = f"fumehood-test-{secrets.token_hex(6)}"
    return ContainerSpec(
        name=name, image_id=image.id, image_name=image.name, engine_id=name, owner_id=name,
        memory_mb=128, cpus=1, lifetime_s=3600, deadline=int(time.time()) + 3600,
        guest_mb=image.guest_mb, runtime=RUNTIME, **fields,
    )  # fmt: skip


async def run(container: Container, code: str, *, keep: bool, cpu_s: float = ENOUGH_S) -> RunEnding:
    while not container.is_free:
        await anyio.sleep(0.01)
    arguments = {"code": code, "stdin": None, "files": []}
    isolation = "session" if keep else "call"
    limits = Limits(ENOUGH_S, cpu_s, 128, MB)
    return await container.run("python", arguments, limits, NO_SINKS, isolation, keep=keep)


def state_of(pid: int) -> str:
    """The state of a process, or X if it is gone. Nobody may have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def states(first: int) -> dict[int, str]:
    """Process id → state, of the processes in the sandbox with this first process. Those of gVisor
    are not the host's.
    """
    found = {}
    namespace = Path(f"/proc/{first}/ns/pid").readlink()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "ns/pid").readlink() == namespace:
                found[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return found


async def started(direct: Direct, image: Any) -> Container:
    return await Container.start(
        direct, spec_of(image), required=frozenset(Limit), least=Grade.WATCHED, ready_s=READY_S
    )


async def lives_of(direct: Direct, image: Any) -> dict[str, Any]:
    """What becomes of a session's sandbox: it is paused, and its launcher is killed."""
    spec = spec_of(image)
    container = await Container.start(
        direct, spec, required=frozenset(Limit), least=Grade.WATCHED, ready_s=READY_S
    )
    container.keep(1, 600)
    counted = [(await run(container, COUNTS, keep=True)).result["value"]]
    pid = (await direct.state(spec.name)).pid
    before = states(pid)
    await direct.pause(spec.name)
    paused = states(pid)
    await direct.pause(spec.name)  # a second time
    os.kill(ask("hello")["pid"], signal.SIGKILL)
    kept_paused = (await direct.state(spec.name)).is_paused
    await direct.unpause(spec.name)
    counted.append((await run(container, COUNTS, keep=True)).result["value"])
    status = Path(f"/proc/{pid}/status").read_text()
    os.kill(ask("hello")["pid"], signal.SIGKILL)
    counted.append((await run(container, COUNTS, keep=True)).result["value"])
    held = (await direct.state(spec.name)).is_running
    container.end("its engine is killed")
    other = await Container.take_over(
        direct, spec.name, image.id, grade=Grade.NAMESPACES, required=frozenset(Limit),
        least=Grade.WATCHED, epoch=2,
    )  # fmt: skip
    other.keep(2, 600)
    counted.append((await run(other, COUNTS, keep=True)).result["value"])
    grade = str(other.grade)
    other.end("the test is over")
    await direct.remove(spec.name)
    return {
        "counted": counted, "held": held, "grade": grade, "kept_paused": kept_paused, "status": status,
        "before": sorted({*before.values()}), "paused": sorted({*paused.values()}),
        "gone": state_of(pid) in "XZ", "left": ask("list")["sandboxes"],
    }  # fmt: skip


async def main(request: dict[str, Any]) -> dict[str, Any]:
    global RUNTIME
    is_gvisor = request.get("engine") == "gvisor"
    RUNTIME = "runsc" if is_gvisor else None
    store = open_store(STARTER if is_gvisor else None)
    if request["image"] == "host":
        image = build_image(store, read_recipe("host"), lambda step: None).image
    else:
        with Path(request["image"]).open("rb") as file:  # noqa: ASYNC230 - nothing else runs
            store.load(file)
        (image,) = list_images(store, "python")
    direct = new_gvisor(Path()) if is_gvisor else Direct(launcher_directory(), store)
    said: dict[str, Any] = {"ended": {}, "hello": ask("hello")}
    container = await started(direct, image)
    for name, code in request["codes"].items():
        if container.is_dead:  # gVisor ends with its programs if they use too much memory
            container = await started(direct, image)
        ended = await run(container, code, keep=False, cpu_s=CPU_S if name == "cpu" else ENOUGH_S)
        value = (ended.result or {}).get("value")
        said["ended"][name] = {
            "ended_by": ended.ended_by, "value": value, "hit": ended.limits_hit,
            "error": ended.claimed_error, "peak": ended.peak_memory_bytes,
        }  # fmt: skip
        if container.is_dead:
            await direct.remove(container.name)
    if container.is_dead:
        container = await started(direct, image)
    while not container.is_free:
        await anyio.sleep(0.01)
    shell = {"command": "cat; echo $((6 * 7))", "stdin": "given ", "files": []}
    ended = await container.run(
        "shell", shell, Limits(ENOUGH_S, ENOUGH_S, 128, MB), NO_SINKS, "call"
    )
    said["shell"] = ended.stdout
    container.end("the test is over")
    await direct.remove(container.name)
    said["lives"] = await lives_of(direct, image)
    try:
        await Container.start(direct, spec_of(image), required=frozenset(Limit), ready_s=READY_S)
    except Exception as error:
        said["refused"] = f"{type(error).__name__}: {getattr(error, 'message', error)}"
    for one in ask("list")["sandboxes"]:
        await direct.remove(one["name"])
    program = OperatorProgram(("/usr/bin/true",), {}, has_network=False)
    try:
        await direct.launch(spec_of(image, program=program))
    except LimitsRefused as error:
        said["program"] = str(error)
    os.kill(ask("hello")["pid"], signal.SIGKILL)
    return said


if __name__ == "__main__":
    print(json.dumps(anyio.run(main, json.loads(sys.argv[1]))))
