"""The container wall with direct sandboxes, as a target of the attacks.

Host side. The attacks look at the sandboxes from outside: at their control groups and at the files
of their image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.attack.targets import DIRECT, HOST_IMAGE, IMAGE, Target, wall_target
from fumehood.direct.ask import launcher_directory, sandboxes_of
from fumehood.direct.host import why_unfit
from fumehood.direct.runtime import Direct
from fumehood.direct.store import open_store
from fumehood.image_store.find import find_image
from fumehood.sandbox.container.runtime import Unfit
from fumehood.sandbox.container.spec import LABEL_ENGINE
from fumehood.sandbox.wall import ImageMissing


def direct_targets(
    wall: str, made_of: Callable[[Target], Target], *, is_wanted: bool
) -> list[Target | WallCard]:
    """Return the target of this host, or why it is missing. The arguments are those of
    `targets_of_host`.
    """
    return targets_of_host(
        DIRECT, wall, made_of, why_unfit(None), lambda image: direct_target(image=image),
        is_wanted=is_wanted,
    )  # fmt: skip


def targets_of_host(
    name: str,
    wall: str,
    made_of: Callable[[Target], Target],
    unfit: Unfit | None,
    target_of: Callable[[str], Target],
    *,
    is_wanted: bool,
) -> list[Target | WallCard]:
    """Return the target of this host with the name `name`, or why it is missing. `wall` is its
    wall, and `made_of` makes it from the container wall with an image, which `target_of` returns.

    It is optional: if the host is `unfit` for it or has no image for it, this is a fault only if
    `is_wanted` is True. If only the image `host` is built, it is attacked.
    """
    if unfit is not None:
        why, remedy = unfit.message, unfit.remedy
    else:
        why, remedy = "", ""
        for image in (IMAGE, HOST_IMAGE):
            try:
                find_image(open_store(), image)
            except ImageMissing as missing:
                why = why or missing.message
            else:
                return [made_of(target_of(image))]
    verdict = Verdict.UNTRIED if is_wanted else Verdict.ABSENT
    return [WallCard(wall, name, verdict, why, remedy, 0.0, ())]


def direct_target(*, image: str = IMAGE, command: tuple[str, ...] | None = None) -> Target:
    """Return the container wall with direct sandboxes of an image as a target."""
    runtime = Direct(launcher_directory(), open_store())
    return wall_target(
        DIRECT, runtime, lambda engine_id: Sandboxes(launcher_directory(), engine_id),
        image=image, command=command,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sandboxes:
    """Looks at the sandboxes of one engine. `launcher` is the launcher's directory."""

    launcher: Path
    engine_id: str

    async def names(self) -> frozenset[str]:
        """Return the names of the running sandboxes."""
        return frozenset(one["name"] for one in self._own())

    async def configs(self) -> tuple[dict[str, Any], ...]:
        """Return the limits of each running sandbox, with the field names of Docker's `HostConfig`.
        They are read from the operating system. A sandbox whose guest watches its memory has no
        `Memory`.
        """
        return tuple(
            {**_devices(one["pid"]), **({} if one["is_watched"] else _memory(one["pid"]))}
            for one in self._own()
        )

    async def changes(self) -> dict[str, frozenset[str]]:
        """Return, by sandbox name, the paths that differ between a sandbox's root file system and
        its image. The mounts in a sandbox are not part of it.
        """
        return {one["name"]: _paths(one["layers"]) for one in self._own()}

    def _own(self) -> list[Mapping[str, Any]]:
        return [
            one
            for one in sandboxes_of(self.launcher)
            if one["labels"].get(LABEL_ENGINE) == self.engine_id and one["is_running"]
            if one["pid"]  # else it is being started
        ]


def _memory(pid: int) -> dict[str, Any]:
    groups: dict[str, str] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines():
        _, names, path = line.split(":", 2)
        groups |= dict.fromkeys(names.split(","), path)
    if "memory" in groups:
        folder = Path(f"/sys/fs/cgroup/memory{groups['memory']}")
        memory, swap = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    else:
        folder = Path(f"/sys/fs/cgroup{groups['']}")
        memory, swap = "memory.max", "memory.swap.max"
    found = {name: int((folder / name).read_text(encoding="ascii")) for name in (memory, swap)}
    total = found[swap] + (found[memory] if swap == "memory.swap.max" else 0)
    return {"Memory": found[memory], "MemorySwap": total}


def _devices(pid: int) -> dict[str, Any]:
    own, host = (Path(f"/proc/{of}/ns/net").readlink() for of in (pid, "self"))
    lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines()
    devices = [line.split(":")[0].strip() for line in lines if ":" in line]
    mode = "none" if own != host and devices == ["lo"] else "host"
    return {"NetworkMode": mode}


def _paths(layers: list[str]) -> frozenset[str]:
    """Return the paths of all files in the directories `layers`, with the time of their last
    change.
    """
    return frozenset(
        f"{path} {path.lstat().st_ctime_ns}" for layer in layers for path in Path(layer).rglob("*")
    )
