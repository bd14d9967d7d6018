"""The container wall on hosts that give no namespaces, as a target of the attacks.

Host side. The attacks look at the directories of the sandboxes from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from fumehood.attack.attack import LANDLOCK
from fumehood.attack.scorecard import Verdict, WallCard
from fumehood.attack.targets import HOST_IMAGE, Target, wall_target
from fumehood.landlock.host import why_unfit
from fumehood.landlock.runtime import Landlock
from fumehood.landlock.sandboxes import Sandbox, Sandboxes, default_home
from fumehood.landlock.warden import WRITABLE
from fumehood.sandbox.container.spec import LABEL_ENGINE


def landlock_targets(
    wall: str, made_of: Callable[[Target], Target], *, is_wanted: bool
) -> list[Target | WallCard]:
    """Return the target of this host, or why it is missing. `wall` is its wall, and `made_of` makes
    it from the container wall. It is attacked only if `is_wanted` is True, because no host uses it
    unless its operator names the grade.
    """
    if not is_wanted:
        return []
    unfit = why_unfit(None)
    if unfit is not None:
        card = WallCard(wall, LANDLOCK, Verdict.UNTRIED, unfit.message, unfit.remedy, 0.0, ())
        return [card]
    return [made_of(landlock_target())]


def landlock_target() -> Target:
    """Return the container wall without namespaces as a target."""
    home = default_home()
    return wall_target(
        LANDLOCK, Landlock(home), lambda engine_id: Directories(Sandboxes(home), engine_id),
        oci_runtime=LANDLOCK, image=HOST_IMAGE,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Directories:
    """Looks at the sandboxes of one engine."""

    sandboxes: Sandboxes
    engine_id: str

    async def names(self) -> frozenset[str]:
        """Return the names of the running sandboxes."""
        return frozenset(one.name for one in await self._own())

    async def configs(self) -> tuple[dict[str, Any], ...]:
        """Return nothing for each running sandbox: the operating system limits nothing of it."""
        return tuple({} for _ in await self._own())

    async def changes(self) -> dict[str, frozenset[str]]:
        """Return, by sandbox name, the paths that a program should not be able to change, with the
        time of their last change.
        """
        found = {}
        for one in await self._own():
            folder = self.sandboxes.folder_of(one.name)
            found[one.name] = frozenset(
                f"{path} {path.lstat().st_ctime_ns}"
                for path in folder.iterdir()
                if path.name not in WRITABLE
            )
        return found

    async def _own(self) -> list[Sandbox]:
        found = await anyio.to_thread.run_sync(self.sandboxes.all)
        return [
            one
            for one in found
            if one.exit_code is None and one.labels.get(LABEL_ENGINE) == self.engine_id
        ]
