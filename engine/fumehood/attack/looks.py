"""Checks from outside during and after an attack: by the host, Docker and the kernel.

Host side. Programs of the corpus give their processes a unique name, so that the host finds them
anywhere; those of process walls are found below their guest. Nothing relies on the program's own
report. A check that observed nothing fails, because it proves nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import psutil

from fumehood.attack.attack import Attack, Look
from fumehood.attack.bait import Bait
from fumehood.attack.targets import MOST_PROCESSES, Containers, Standing
from fumehood.core.limits import MB

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


@dataclass(frozen=True, slots=True)
class _Before:
    """The wall's state before the attack."""

    guest_pid: int | None = None
    names: frozenset[str] = frozenset()
    changes: dict[str, frozenset[str]] = field(default_factory=dict)
    configs: tuple[dict[str, Any], ...] = ()


_OF_PROCESSES = {Look.PROCESSES, Look.SEALED}
_OF_LIMITS = {Look.MEMORY_LIMIT, Look.NO_NETWORK}
_OF_NAMES = {Look.UNBROKEN, Look.OTHER_CONTAINER}


@asynccontextmanager
async def looking(
    attack: Attack, wanted: tuple[Look, ...], standing: Standing, bait: Bait
) -> AsyncIterator[Looked]:
    """Check a wall before, during and after the `async with` block, which runs the attack.

    Raises:
        DockerError: Docker could not be queried.
    """
    looked = Looked()
    wanted_set = set(wanted)
    before = await _before(wanted_set, standing)
    if not _OF_PROCESSES & wanted_set:
        yield looked
    elif not standing.sees_processes:
        yield looked
        looked.seen.append("its processes cannot be seen from here")
    else:
        containers = standing.containers
        watch = Watch(
            lambda: named(bait.mark) if containers is not None else below(standing.guest_pid())
        )
        with watch:
            yield looked
        most_after = 0 if containers is not None else standing.standing_processes
        await _look_at_processes(wanted_set, watch, most_after, looked)
    if Look.UNBROKEN in wanted_set and standing.containers is None:
        is_same = standing.guest_pid() == before.guest_pid is not None
        looked.say("the guest is the same process" if is_same else "the guest was ended",
                   holds=is_same)  # fmt: skip
    if standing.containers is not None:
        await _look_at_containers(wanted_set, standing.containers, before, standing, looked)


async def _before(wanted: set[Look], standing: Standing) -> _Before:
    containers = standing.containers
    if containers is None:
        return _Before(standing.guest_pid())
    return _Before(
        None,
        await containers.names() if _OF_NAMES & wanted else frozenset(),
        await containers.changes() if Look.LAYER in wanted else {},
        await containers.configs() if _OF_LIMITS & wanted else (),
    )


async def _look_at_processes(
    wanted: set[Look], watch: Watch, most_after: int, looked: Looked
) -> None:
    if Look.SEALED in wanted:
        sealed = [seal for seal in watch.seals if is_sealed(seal)]
        if most_after:  # one of them is the zygote, which runs no program
            looked.say(
                f"of {len(watch.seals)} processes below the guest, {len(sealed)} were seen sealed",
                holds=bool(sealed) and len(watch.seals) - len(sealed) <= 1,
            )
        else:
            holds = bool(watch.seals) and sealed == watch.seals
            looked.say(
                f"{len(sealed)} of {len(watch.seals)} processes were seen without rights, behind "
                "a filter",
                holds=holds,
            )
            roots = [seal for seal in watch.seals if "0" in seal["Uid"].split()]
            if roots:
                looked.faults.append("a program ran as root")
    if Look.PROCESSES in wanted:
        left = await anyio.to_thread.run_sync(watch.settled, most_after)
        within = 0 < watch.most <= MOST_PROCESSES
        looked.say(f"at most {watch.most} of its processes were seen at once", holds=within)
        looked.say(
            "none was left" if left <= most_after else f"{left - most_after} were left after it",
            holds=left <= most_after,
        )


async def _look_at_containers(
    wanted: set[Look],
    containers: Containers,
    before: _Before,
    standing: Standing,
    looked: Looked,
) -> None:
    if _OF_NAMES & wanted:
        _compare_names(wanted, before.names, await containers.names(), looked)
    if Look.LAYER in wanted:
        new = {
            path
            for name, paths in (await containers.changes()).items()
            for path in paths - before.changes.get(name, paths)
        }
        words = f"the container's layer was changed: {', '.join(sorted(new)[:5])}"
        looked.say(words if new else "the container's layer is unchanged", holds=not new)
    if _OF_LIMITS & wanted and not before.configs:
        looked.faults.append("Docker reported no container")
    for config in before.configs:
        _look_at_limits(wanted, config, standing.memory_mb, looked)


def _compare_names(
    wanted: set[Look], before: frozenset[str], after: frozenset[str], looked: Looked
) -> None:
    if Look.UNBROKEN in wanted:
        kept = bool(before) and before <= after
        looked.say("its container continues" if kept else "its container was ended", holds=kept)
    if Look.OTHER_CONTAINER in wanted:
        other = bool(after - before)
        words = "another container served it" if other else "the same container served it"
        looked.say(words, holds=other)


def _look_at_limits(
    wanted: set[Look], config: dict[str, Any], memory_mb: int, looked: Looked
) -> None:
    if Look.MEMORY_LIMIT in wanted:
        memory, swap = int(config.get("Memory") or 0), int(config.get("MemorySwap") or 0)
        holds = 0 < memory <= (memory_mb + MOST_FOR_GUEST_MB) * MB and swap == memory
        looked.say(f"Docker holds it to {memory // MB} MB", holds=holds)
    if Look.NO_NETWORK in wanted:
        mode = str(config.get("NetworkMode"))
        looked.say(f"Docker gives it the network {mode!r}", holds=mode == "none")


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
