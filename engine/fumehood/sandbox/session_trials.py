"""Trials: runs whose effect is taken out of their session and put in after a human's yes.

Host side, during a call's turn in a durable session. The files of a trial are undone by the last
saved copy; where that fails, or the engine is killed meanwhile, the container is ended and restored
from the copy, so no part of an effect stays. Variables stay in their process, which the guest keeps
aside.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import anyio

from fumehood.core.errors import ApprovalExpired, EndedBy, EngineError, InvalidParams, RateLimited
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.sandbox.session import (
    HeldFiles,
    NotSaved,
    Saver,
    Session,
    source_of,
)
from fumehood.sandbox.session_processes import require_none
from fumehood.sandbox.wall import RunEnding, RunSinks, try_later

MAX_TRIALS = 4
"""Maximum number of effects that wait beside one session."""

MAX_NAMED = 5

_LOOK: JsonObject = {"do": "list", "path": "", "recursive": False, "most": 1}
_LIMITS = Limits(wall_s=30.0, cpu_s=30.0, memory_mb=None, output_bytes=MB)


class SessionTrials:
    """The trials of one session. `save` saves its files, and returns why it could not; `write`
    stores its record.
    """

    def __init__(
        self,
        session: Session,
        saver: Saver,
        until_ready: Callable[[], Awaitable[None]],
        save: Callable[[], Awaitable[str | None]],
        write: Callable[[], Awaitable[None]],
    ) -> None:
        self._session = session
        self._saver = saver
        self._until_ready = until_ready
        self._save = save
        self._write = write

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> tuple[RunEnding, HeldFiles | None]:
        session = self._session
        if session.trials >= MAX_TRIALS:
            raise RateLimited(
                f"{MAX_TRIALS} trials of this session wait for approval already.",
                retry_after_ms=1000,
            )
        await self._until_ready()
        require_none(session)
        await self._require_copy()
        token = secrets.token_hex(8)
        sinks = replace(sinks, trial=("hold", token))
        limits = replace(limits, memory_mb=session.memory_mb)
        session.in_trial = True
        try:
            await self._write()  # what a killed engine leaves, the next one restores
            await self._until_ready()
            arguments = session.with_env(program, arguments)
            ending = await session.container.run(program, arguments, limits, sinks)
        except BaseException:
            with anyio.CancelScope(shield=True):
                held = await self._take_out(token, program)
                if held is not None:
                    await self.drop(held)
            raise
        with anyio.CancelScope(shield=True):
            held = await self._take_out(token, program)
        has_lost = program == "python" and ending.state != "kept"
        is_whole = ending.ended_by is EndedBy.OK and held is not None and not has_lost
        if held is not None and not is_whole:
            await self.drop(held)
        ending = replace(ending, isolation="session")
        return ending, held if is_whole else None

    async def _require_copy(self) -> None:
        """Save the files, so that the copy is what is there now. Raises as `run`."""
        session = self._session
        assert session.copy is not None
        others = self._saver.others(session.id, session.copy)
        if others is None:
            not_saved = await self._save()
            if not_saved is not None:
                raise try_later(f"The session's files could not be saved: {not_saved}.")
            others = self._saver.others(session.id, session.copy)
        if others:
            raise InvalidParams(
                "A trial cannot put back links, special files and what it cannot look into, and "
                f"this session has some: {others[0]!a}.",
                fields=["options.preview"],
            )

    async def _take_out(self, token: str, program: str) -> HeldFiles | None:
        """Take the effect out. If that fails, the container is ended, and restored at its next use.
        Return None if there is no effect that can be put in.
        """
        session = self._session
        if session.finished is not None or session.copy is None:
            return None
        if session.container.lost is not None:
            session.in_trial = False  # it is restored anyway
            return None
        source = source_of(session)
        try:
            changes, shown = await self._saver.hold(source, session.copy)
            try:
                await self._saver.put_back(source, session.copy, changes)
            except BaseException:
                await self._saver.let_go(changes)
                raise
        except Exception as error:
            session.container.end(f"the files of a trial were not undone: {error}")
            session.in_trial = False
            if not isinstance(error, NotSaved | EngineError):
                raise
            return None
        session.in_trial = False
        with suppress(EngineError):  # until it is stored, a killed engine loses the variables
            await self._write()
        held = HeldFiles(token, program == "python", changes, shown)
        session.trials += 1
        if changes.others:
            await self.drop(held)
            return None
        return held

    async def put_in(self, held: HeldFiles) -> None:
        session = self._session
        session.trials -= 1
        try:
            await self._until_ready()
            not_saved = await self._save()
            if not_saved is not None:
                raise try_later(f"The session's files could not be saved: {not_saved}.")
            assert session.copy is not None
            touched = self._saver.touched(session.id, held.changes)
            touched += self._saver.others(session.id, session.copy) or ()
            if touched:
                await self._drop_variables(held)
                names = ", ".join(map(ascii, touched[:MAX_NAMED]))
                raise ApprovalExpired(
                    f"Since the trial these have changed, so nothing was put in: {names}."
                )
            with anyio.CancelScope(shield=True):
                await self._put_in(held)
        finally:
            await self._saver.let_go(held.changes)

    async def _put_in(self, held: HeldFiles) -> None:
        session = self._session
        source = source_of(session)
        session.in_trial = True
        await self._write()  # of what a killed engine leaves, nothing or all is restored
        try:
            await self._adopt(held)
            try:
                await self._saver.put_in(source, held.changes)
            except NotSaved as error:
                session.container.end(f"the effect of a trial was not put in: {error}")
                raise try_later(f"It could not be put in: {error}.") from None
            await self._save()
        finally:
            session.in_trial = False
            with suppress(EngineError):
                await self._write()

    async def _adopt(self, held: HeldFiles) -> None:
        source = source_of(self._session)
        if held.has_variables:
            sinks = RunSinks(trial=("adopt", held.token))
            ending = await source.run("files", _LOOK, _LIMITS, sinks)
            if ending.state != "kept":
                raise ApprovalExpired(
                    "Since the trial the session's variables have changed, so nothing was put in."
                )

    async def drop(self, held: HeldFiles) -> None:
        self._session.trials -= 1
        await self._saver.let_go(held.changes)
        await self._drop_variables(held)

    async def _drop_variables(self, held: HeldFiles) -> None:
        container = self._session.container
        if held.has_variables and container.lost is None and not container.is_paused:
            sinks = RunSinks(trial=("drop", held.token))
            await source_of(self._session).run("files", _LOOK, _LIMITS, sinks)
