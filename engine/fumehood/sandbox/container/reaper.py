"""The reaper: no container outlives its engine, and none of another engine is touched.

Host side, between the wall and Docker. A failure between two steps of making a container
(the engine is killed, Docker hangs, an answer is lost) leaves at most a container with this
engine's labels behind, under an unknown name. So names are chosen first, and a container with the
labels and a name that is not in use is removed.

Invariant, checked in this order for every container: one without our labels is not ours; this
engine's is removed if its name is not in use; one of the same owner belongs to a dead engine,
because one engine at a time holds a state directory; another owner's is removed only if it is long
past its deadline and does not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import anyio

from fumehood.core.json_types import JsonObject
from fumehood.sandbox.container.docker_api import Docker, DockerError, Listed
from fumehood.sandbox.container.spec import LABEL_DEADLINE, LABEL_ENGINE, LABEL_OWNER

PAST_DEADLINE_S = 60
RETRY_PAUSE_S = (0.1, 0.5, 2.0, 5.0, 15.0)
STOP_DEADLINE_S = 8.0
"""Seconds to remove everything when the engine stops. The next engine removes the rest, whose
guests end by themselves."""

RUNNING_STATES = frozenset({"running", "paused", "restarting"})


class Reaper:
    """Removes containers. `in_use` has the names of this engine's containers in use."""

    def __init__(
        self,
        docker: Docker,
        engine_id: str,
        owner_id: str,
        in_use: Callable[[], Iterable[str]],
        *,
        on_event: Callable[[str, JsonObject], None] = lambda event, values: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._docker = docker
        self._engine_id = engine_id
        self._owner_id = owner_id
        self._in_use = in_use
        self._on_event = on_event
        self._now = now

    async def remove(self, name: str) -> None:
        """Remove one of this engine's containers; try until it works."""
        tries = 0
        while True:
            try:
                await self._docker.remove(name)
            except DockerError:
                await anyio.sleep(RETRY_PAUSE_S[min(tries, len(RETRY_PAUSE_S) - 1)])
                tries += 1
            else:
                return

    async def sweep(self) -> int:
        """Find and remove lost containers; returns their number.

        Raises:
            DockerError: they could not be listed, or one could not be removed.
        """
        found = await self._docker.list(LABEL_ENGINE)
        # Read after the list: a container made meanwhile is in use before it is made.
        in_use = frozenset(self._in_use())
        lost = [one for one in found if self._is_lost(one, in_use)]
        for one in lost:
            await self._docker.remove(one.id)
            owner = "ours" if one.labels.get(LABEL_OWNER) == self._owner_id else "another's"
            self._on_event("container.reaped", {"name": one.name, "owner": owner})
        return len(lost)

    async def stop(self) -> None:
        """Remove everything of this engine, in parallel, for a few seconds at most."""
        with anyio.move_on_after(STOP_DEADLINE_S, shield=True):
            try:
                mine = await self._docker.list(f"{LABEL_ENGINE}={self._engine_id}")
            except DockerError:
                return
            async with anyio.create_task_group() as group:
                for one in mine:
                    group.start_soon(self._try_to_remove, one.id)

    async def _try_to_remove(self, container_id: str) -> None:
        with suppress(DockerError):
            await self._docker.remove(container_id)

    def _is_lost(self, one: Listed, in_use: frozenset[str]) -> bool:
        engine, owner = one.labels.get(LABEL_ENGINE), one.labels.get(LABEL_OWNER)
        if not engine or not owner:
            return False
        if engine == self._engine_id:
            return one.name not in in_use
        if owner == self._owner_id:
            return True
        deadline = one.labels.get(LABEL_DEADLINE, "")
        if one.state in RUNNING_STATES or not deadline.isdecimal() or len(deadline) > 15:
            return False
        return int(deadline) + PAST_DEADLINE_S < self._now()
