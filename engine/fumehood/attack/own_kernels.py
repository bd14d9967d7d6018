"""The container wall with sandboxes of gVisor that the launcher starts, as a target of the attacks.

Host side. From outside, the processes of their programs cannot be told apart from gVisor's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fumehood.attack.attack import GVISOR
from fumehood.attack.sandboxes import Sandboxes, targets_of_host
from fumehood.attack.scorecard import WallCard
from fumehood.attack.targets import IMAGE, Target, wall_target
from fumehood.direct.ask import launcher_directory
from fumehood.gvisor.host import why_unfit
from fumehood.gvisor.runtime import new_gvisor
from fumehood.gvisor.starter import PROGRAM


def gvisor_targets(
    wall: str, made_of: Callable[[Target], Target], *, is_wanted: bool
) -> list[Target | WallCard]:
    """Return the target of this host, or why it is missing. The arguments are those of
    `targets_of_host`.
    """
    return targets_of_host(
        GVISOR, wall, made_of, why_unfit(None), lambda image: gvisor_target(image=image),
        is_wanted=is_wanted,
    )  # fmt: skip


def gvisor_target(*, image: str = IMAGE, command: tuple[str, ...] | None = None) -> Target:
    """Return the container wall with sandboxes of gVisor as a target."""
    return wall_target(
        GVISOR, new_gvisor(Path()), lambda engine_id: Sandboxes(launcher_directory(), engine_id),
        oci_runtime=PROGRAM, image=image, command=command, sees_processes=False,
    )  # fmt: skip
