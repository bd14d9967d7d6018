"""Checks from outside during and after an attack: by the host, Docker and the kernel.

Host side. Programs of the corpus give their processes a unique name, so that the host finds them
anywhere; those of process walls are found below their guest. Nothing relies on the program's own
report. A check that observed nothing fails, because it proves nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import psutil

from fumehood.attack.attack import Look
from fumehood.attack.bait import Bait
from fumehood.attack.targets import Standing
from fumehood.core.limits import CONTAINER_PROCESSES, MB
from fumehood.sandbox.container.spec import GUEST_PROCESSES

MOST_FOR_GUEST_MB = 256
"""Megabytes that a container's memory limit may exceed its class, for the guest and gVisor's
kernel."""


@dataclass
class Looked:
    """The findings of the checks: those that failed, and those that passed, as text."""

    faults: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def say(self, words: str, *, holds: bool) -> None:
        """Add one finding: passed if `holds`, otherwise failed."""
        (self.seen if holds else self.faults).append(words)


@asynccontextmanager
async def looking(
    wanted: tuple[Look, ...], standing: Standing, bait: Bait
) -> AsyncIterator[Looked]:
    """Check a wall before, during and after the `async with` block, which runs the attack.

    Raises:
        DockerError: Docker could not be queried.
    """
    looked = Looked()
    async with AsyncExitStack() as stack:
        for look in wanted:
            if look in (Look.PROCESSES, Look.SEALED) and not standing.sees_processes:
                looked.seen.append("its processes cannot be seen from here")
            else:
                await stack.enter_async_context(_LOOKS[look](standing, bait, looked))
        yield looked


def _pids(standing: Standing, bait: Bait) -> list[int]:
    if standing.containers is not None:
        return named(bait.mark)
    return below(standing.guest_pid())


@asynccontextmanager
async def _processes(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    with Watch(partial(_pids, standing, bait)) as watch:
        yield
    left = await anyio.to_thread.run_sync(watch.settled, standing.standing_processes)
    left -= standing.standing_processes
    within = 0 < watch.most <= CONTAINER_PROCESSES + GUEST_PROCESSES
    looked.say(f"at most {watch.most} of its processes were seen at once", holds=within)
    looked.say("none was left" if left <= 0 else f"{left} were left after it", holds=left <= 0)


@asynccontextmanager
async def _sealed(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    with Watch(partial(_pids, standing, bait)) as watch:
        yield
    seals = watch.seals
    sealed = [seal for seal in seals if is_sealed(seal)]
    if standing.standing_processes:  # one of them is the zygote, which runs no program
        words = f"of {len(seals)} processes below the guest, {len(sealed)} were seen sealed"
        looked.say(words, holds=bool(sealed) and len(seals) - len(sealed) <= 1)
        return
    words = f"{len(sealed)} of {len(seals)} processes were seen without rights, behind a filter"
    looked.say(words, holds=bool(seals) and sealed == seals)
    if any("0" in seal["Uid"].split() for seal in seals):
        looked.faults.append("a program ran as root")


@asynccontextmanager
async def _unbroken(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    if standing.containers is None:
        pid = standing.guest_pid()
        yield
        kept = standing.guest_pid() == pid is not None
        looked.say("the guest is the same process" if kept else "the guest was ended", holds=kept)
        return
    before = await standing.containers.names()
    yield
    kept = bool(before) and before <= await standing.containers.names()
    looked.say("its container continues" if kept else "its container was ended", holds=kept)


@asynccontextmanager
async def _other_container(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    before = await standing.containers.names()
    yield
    other = bool(await standing.containers.names() - before)
    words = "another container served it" if other else "the same container served it"
    looked.say(words, holds=other)


@asynccontextmanager
async def _layer(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    before = await standing.containers.changes()
    yield
    new = {
        path
        for name, paths in (await standing.containers.changes()).items()
        for path in paths - before.get(name, paths)
    }
    words = f"the container's layer was changed: {', '.join(sorted(new)[:5])}"
    looked.say(words if new else "the container's layer is unchanged", holds=not new)


@asynccontextmanager
async def _memory_limit(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    most = (standing.memory_mb + MOST_FOR_GUEST_MB) * MB
    for config in await standing.containers.configs() or [{}]:
        memory, swap = int(config.get("Memory") or 0), int(config.get("MemorySwap") or 0)
        holds = 0 < memory <= most and swap == memory
        looked.say(f"Docker holds it to {memory // MB} MB", holds=holds)
    yield


@asynccontextmanager
async def _no_network(standing: Standing, bait: Bait, looked: Looked) -> AsyncIterator[None]:
    assert standing.containers is not None
    for config in await standing.containers.configs() or [{}]:
        mode = str(config.get("NetworkMode"))
        looked.say(f"Docker gives it the network {mode!r}", holds=mode == "none")
    yield


_LOOKS = {
    Look.PROCESSES: _processes,
    Look.SEALED: _sealed,
    Look.UNBROKEN: _unbroken,
    Look.LAYER: _layer,
    Look.MEMORY_LIMIT: _memory_limit,
    Look.NO_NETWORK: _no_network,
    Look.OTHER_CONTAINER: _other_container,
}


PAUSE_S = 0.03
"""Seconds between two looks at the processes."""

GONE_PATIENCE_S = 3.0
"""Seconds to wait for processes to end after an attack."""

SEAL = ("CapEff", "CapPrm", "CapInh", "CapAmb", "NoNewPrivs", "Seccomp", "Uid", "Groups")
"""Fields of `/proc/PID/status` that show a process's rights."""


class Watch:
    """Observes processes from a thread while its `with` block runs.

    `find` returns the ids of the processes to observe.
    """

    def __init__(self, find: Callable[[], list[int]]) -> None:
        self._find = find
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.most = 0
        """The largest number of processes seen at once."""
        self._sightings: dict[int, list[dict[str, str]]] = {}

    @property
    def seals(self) -> list[dict[str, str]]:
        """The last `SEAL` lines of each process. A process that was seen only once is left out,
        because it may have just started.
        """
        return [seen[-1] for seen in self._sightings.values() if len(seen) > 1]

    def settled(self, most: int) -> int:
        """Wait until at most `most` processes are left, or `GONE_PATIENCE_S`. Returns their number.
        Blocks.
        """
        deadline = time.monotonic() + GONE_PATIENCE_S
        while (count := len(self._find())) > most and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return count

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(PAUSE_S):
            found = self._find()
            self.most = max(self.most, len(found))
            for pid in found:
                status = status_of(pid)
                if status:
                    sealed = {name: status.get(name, "") for name in SEAL}
                    self._sightings.setdefault(pid, []).append(sealed)


def named(mark: str) -> list[int]:
    """Return the ids of the processes with this name, without zombies."""
    found = [one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == mark]
    return [pid for pid in found if not _is_zombie(pid)]


def below(pid: int | None) -> list[int]:
    """Return the ids of a process's descendants, without zombies."""
    if pid is None:
        return []
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [child.pid for child in children if not _is_zombie(child.pid)]


def is_sealed(seal: dict[str, str]) -> bool:
    """Whether a process has no capabilities, `no_new_privs`, and a seccomp filter."""
    nothing = all(set(seal[name]) <= {"0"} for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"))
    return nothing and seal["NoNewPrivs"] == "1" and seal["Seccomp"] == "2"


def status_of(pid: int) -> dict[str, str]:
    """Return the fields of `/proc/PID/status`. Empty if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}


def _is_zombie(pid: int) -> bool:
    return status_of(pid).get("State", "Z").startswith(("Z", "X"))
