"""One container from its start to its end, and the runs in it.

Host side, between the pool or the wall and the container runtime. Invariant: a container is used
only if the runtime could apply all its limits and its guest has tested every required limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import anyio

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Held, Limit, Limits
from fumehood.sandbox.container.channel import STREAM_ENDED, Channel
from fumehood.sandbox.container.runtime import LimitsRefused, Runtime, RuntimeFault, Streams
from fumehood.sandbox.container.spec import ContainerSpec, grade_of
from fumehood.sandbox.wall import RunEnding, RunSinks, require_grade

START_DEADLINE_S = 20.0
"""Maximum seconds until a new guest is ready. This is enough for a host that starts several guests
at once.
"""

TAKEOVER_DEADLINE_S = 60.0
"""Maximum seconds until a guest accepts a takeover. Before that, the guest ends the run of the
earlier engine.
"""

LOSS_DEADLINE_S = 5.0
"""Maximum seconds to determine why a container ended."""

OOM_EXIT_CODE = 137
"""Exit code of a container whose guest was killed with SIGKILL, for example because memory ran
out.
"""

LOOKS = 4
"""Maximum number of queries about a container that has ended. If the runtime reports no reason by
then, the reason is unknown.
"""

LOOK_PAUSE_S = 0.05
"""Seconds between two queries about a container that has ended. Several queries are needed, because
Docker does not record the end and the reason at the same time.
"""


class ContainerFailed(Exception):
    """The container was created, but does not work. The text of the exception is for the
    operator.
    """

    message = "Containers start, but the guest in them does not."
    """The error's text for callers."""
    remedy = "The engine's log says why."
    heals = True


class LimitsNotEnforced(ContainerFailed):
    """The container does not enforce a required limit. Another attempt would fail in the same
    way.
    """

    message = "Containers on this host lack a required limit."
    remedy = "Run `fumehood doctor` to see why."

    def __init__(
        self, faults: tuple[str, ...], enforced: frozenset[Limit], missing: Iterable[Limit] = ()
    ) -> None:
        super().__init__("; ".join(faults))
        self.enforced = enforced
        if names := ", ".join(limit.value for limit in sorted(missing)):
            self.message = f"Containers on this host lack a required limit: {names}."


class GradeTooLow(LimitsNotEnforced):
    """The container holds programs less strongly than the operator demands."""

    heals = False

    def __init__(self, grade: Grade, least: Grade) -> None:
        super().__init__((f"its grade is {grade}, not {least}",), frozenset())
        self.message = f"Containers on this host have the grade {grade}, not {least}."
        others = "Use gVisor as root" if least is Grade.KERNEL else "Run the engine as root"
        self.remedy = f'{others}, or set container.least_grade to "{grade}".'
        self.details = {"grade": grade.value, "least_grade": least.value, "cure": self.remedy}


class Container(Channel):
    """A running container, and the channel to its guest. Create it with `start`, or with
    `take_over` if it already runs.

    The caller of `start` must remove the container, even if `start` fails.
    """

    def __init__(self, runtime: Runtime, name: str, image_id: str, grade: Grade) -> None:
        super().__init__()
        self._grade = grade
        self._runtime = runtime
        self._id = ""
        self._examined = asyncio.Event()
        self._examined.set()
        self.name = name
        """The container's name in the runtime."""
        self.image_id = image_id
        """The digest of the image from which the container was made."""
        self.ran_out_of_memory = False
        """Whether memory has run out in any run. If so, the runtime's flag that memory ran out,
        which is never cleared, proves nothing about later runs.
        """

    @property
    def grade(self) -> Grade:
        """How strongly the container holds its programs. It is known when the guest is ready."""
        if not self.watched or Grade.WATCHED.is_at_least(self._grade):
            return self._grade
        return Grade.WATCHED

    @property
    def held(self) -> Mapping[Limit, Held]:
        """How the container holds each limit. It is known when the guest is ready."""
        return {
            limit: Held.WATCHED if limit in self.watched else Held.ENFORCED
            for limit in sorted(self.enforced)
        }

    @classmethod
    async def start(
        cls,
        runtime: Runtime,
        spec: ContainerSpec,
        *,
        required: frozenset[Limit],
        least: Grade = Grade.NAMESPACES,
        ready_s: float = START_DEADLINE_S,
    ) -> Container:
        """Create a container, attach to its streams, start it, and wait at most `ready_s` seconds
        until its guest is ready. `required` are the limits that the container must enforce, and
        `least` is the grade that it must have.

        Raises:
            RuntimeFault: the runtime failed.
            ContainerFailed: the guest failed.
            LimitsNotEnforced: the runtime or the host does not enforce a required limit, or the
                grade is too low.
        """
        container = cls(runtime, spec.name, spec.image_id, grade_of(spec.runtime))
        try:
            container._id, streams = await runtime.launch(spec)
            await container._connect(streams, required, least, ready_s)
        except BaseException as error:
            container.end("it did not start")
            if isinstance(error, LimitsRefused):
                raise LimitsNotEnforced((str(error),), frozenset()) from None
            raise
        return container

    @classmethod
    async def take_over(
        cls,
        runtime: Runtime,
        name: str,
        image_id: str,
        *,
        required: frozenset[Limit],
        epoch: int,
        grade: Grade = Grade.NAMESPACES,
        least: Grade = Grade.NAMESPACES,
    ) -> Container:
        """Connect to the running container of a session that an earlier engine has left, and return
        the container. If a run is still in progress, the guest cancels it. `name` is the
        container's name in the runtime, and `image_id` the digest of its image. `epoch` is the
        number of this engine among the engines that the session has had; it must be higher than
        that of every earlier engine.

        Raises:
            RuntimeFault: the runtime failed.
            ContainerFailed: the guest failed, or has refused because it already knows an epoch that
                is not lower than `epoch`.
        """
        container = cls(runtime, name, image_id, grade)
        container._id = name
        container._is_kept = True  # the guest reports at once how many processes run
        try:
            streams = await runtime.take_over(name, epoch)
            await container._connect(streams, required, least, TAKEOVER_DEADLINE_S)
        except BaseException:
            container.end("it was not taken over")
            raise
        return container

    async def _connect(
        self, streams: Streams, required: frozenset[Limit], least: Grade, ready_s: float
    ) -> None:
        """Connect the channel to the guest's streams, and wait at most `ready_s` seconds until the
        guest is ready.
        """
        await streams.connect(self)
        with anyio.move_on_after(ready_s):
            await self.ready.wait()
        if self.is_dead:
            raise ContainerFailed(self._in_words(f"the guest did not start: {self.why}"))
        if not self.ready.is_set():
            raise ContainerFailed(self._in_words("the guest was not ready in time"))
        missing = required - self.enforced
        if missing or self.faults:
            said = [f"{limit.value} is not enforced" for limit in sorted(missing)]
            faults = map(self._in_words, self.faults)
            raise LimitsNotEnforced((*faults, *said), self.enforced, missing)
        if not self.grade.is_at_least(least):
            raise GradeTooLow(self.grade, least)

    def _in_words(self, fault: str) -> str:
        said = self.complaint.strip()
        return f"{fault}; it said: {said!r}" if said else fault

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks,
        isolation: str,
        *,
        keep: bool = False,
    ) -> RunEnding:
        """Run a program, and return how the run ended. The arguments have the same meaning as in
        `Channel.run`. If the container is lost during the run, find out why: if its memory ran out,
        the ending is `MEMORY` instead of `SANDBOX_LOST`.

        Raises:
            SandboxUnavailable: the container's grade is lower than the limits of the call demand.
        """
        require_grade(self.grade, limits.least_grade)
        if self.is_dead:  # it ended after it was leased
            return RunEnding(EndedBy.SANDBOX_LOST, isolation)
        self._examined.clear()
        try:
            ending = await super().run(program, arguments, limits, sinks, isolation, keep=keep)
            if (
                ending.ended_by is EndedBy.SANDBOX_LOST
                and self.why == STREAM_ENDED
                and not self.ran_out_of_memory  # otherwise the flag may be from an earlier run
                and await self._was_killed_for_memory()
            ):
                ending = replace(ending, ended_by=EndedBy.MEMORY)
        finally:
            self._examined.set()
        self.ran_out_of_memory = self.ran_out_of_memory or (
            ending.ended_by is EndedBy.MEMORY or Limit.MEMORY.value in ending.limits_hit
        )
        return replace(ending, runtime=self._runtime.id, grade=self.grade, held=self.held)

    async def until_examined(self) -> None:
        """Wait until the reason for the container's end is known. Until then, the container must
        not be removed, because the runtime could no longer report the reason.
        """
        await self._examined.wait()

    async def _was_killed_for_memory(self) -> bool:
        """Return True if the runtime reports that the guest was killed because memory ran out.
        Return False if there was another reason, or if it reports none in time.
        """
        # Neither the exit code nor the flag is sufficient alone: something else may have
        # killed the guest, and the flag is also set if only a child was killed.
        looks = 0
        with anyio.move_on_after(LOSS_DEADLINE_S), suppress(RuntimeFault):
            while looks < LOOKS:
                state = await self._runtime.state(self._id)
                if not state.is_running:
                    if state.exit_code != OOM_EXIT_CODE:
                        return False
                    if state.out_of_memory:
                        return True
                    looks += 1
                await anyio.sleep(LOOK_PAUSE_S)
        return False
