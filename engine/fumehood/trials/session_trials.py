"""Trials in one session: the effect of a run is removed from the session, and may be applied later.

Host side. The changes to files are undone with the last saved copy of the session's files. If this
fails, or if the engine is killed before it is done, the container is ended and restored from the
copy. So none of the effect remains. The variables of the trial are kept in a separate process,
which the guest suspends.
"""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from fumehood.core.errors import ApprovalExpired, EndedBy, EngineError, InvalidParams, RateLimited
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.core.names import listed
from fumehood.sandbox.session import NotSaved, source_of
from fumehood.sandbox.session_use import SessionLease
from fumehood.sandbox.wall import RunEnding, RunSinks, try_later

if TYPE_CHECKING:
    from fumehood.durable.saver import Changes, SessionSaver

MAX_TRIALS = 4
"""Maximum number of effects of one session that wait for a decision at the same time."""

_LOOK: JsonObject = {"do": "list", "path": "", "recursive": False, "most": 1}
_LIMITS = Limits(wall_s=30.0, cpu_s=30.0, memory_mb=None, output_bytes=MB)


@dataclass(eq=False, slots=True)
class HeldFiles:
    """The effect of a trial on its session. The effect is held back until it is applied or dropped.
    Requests to the guest identify the effect by `token`.
    """

    token: str
    has_variables: bool
    changes: Changes
    """The changes to files, in the form in which they can be applied."""
    shown: JsonObject
    """The changes to files, in the form in which previews show them."""

    @property
    def is_empty(self) -> bool:
        """Whether the effect contains neither changes to files nor variables."""
        return not (self.has_variables or any(map(self.shown.get, ("added", "changed", "removed"))))


class SessionTrials:
    """Runs trials in the session of `lease`, and applies or drops their effects.

    `copies` saves and restores the session's files. `waiting` counts, for each session, the effects
    that wait for a decision.
    """

    def __init__(self, lease: SessionLease, copies: SessionSaver, waiting: Counter[str]) -> None:
        self._session = lease.session
        self._until_ready = lease.until_ready
        self._copies = copies
        self._save = lease.save
        self._write = lease.write
        self._waiting = waiting

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> tuple[RunEnding, HeldFiles | None]:
        """Run a program as a trial: afterwards, its effect is removed from the session. Return how
        the run ended, and the effect.

        If the program failed, or its effect cannot be held, the second value is None.

        Raises:
            InvalidParams, SandboxUnavailable, RateLimited: the program did not run.
        """
        session = self._session
        if self._waiting[session.id] >= MAX_TRIALS:
            raise RateLimited(
                f"{MAX_TRIALS} trials of this session wait for approval already.",
                retry_after_ms=1000,
            )
        await self._until_ready()
        if session.container.running:
            raise InvalidParams(
                "Processes run in this session, whose effects a trial could not undo. Stop them "
                "first.",
                fields=["options.preview"],
            )
        await self._require_copy()
        token = secrets.token_hex(8)
        sinks = replace(sinks, trial=("hold", token))
        limits = replace(limits, memory_mb=session.spec.memory_mb)
        ending: RunEnding | None = None
        is_whole = False
        try:
            while not session.must_restore:  # once, or again if `until_ready` restored the files
                session.must_restore = True
                await self._write()  # if this engine is killed, the next one restores the files
                await self._until_ready()
            arguments = session.with_env(program, arguments)
            ending = await session.container.run(program, arguments, limits, sinks)
        finally:
            with anyio.CancelScope(shield=True):
                held = await self._take_out(token, program)
                if held is not None and ending is not None:
                    has_lost = program == "python" and ending.state != "kept"
                    is_whole = ending.ended_by is EndedBy.OK and not has_lost
                if held is not None and not is_whole:
                    await self.drop(held)
        return replace(ending, isolation="session"), held if is_whole else None

    async def _require_copy(self) -> None:
        """Save the session's files if they may differ from the last saved copy.

        Raises:
            InvalidParams: the workspace contains links, special files or unreadable directories.
            SandboxUnavailable: the files could not be saved.
        """
        session = self._session
        assert session.copy is not None
        others = self._copies.others(session.id, session.copy)
        if others is None:
            not_saved = await self._save()
            if not_saved is not None:
                raise try_later(f"The session's files could not be saved: {not_saved}.")
            others = self._copies.others(session.id, session.copy)
        if others:  # the copy does not contain these
            raise InvalidParams(
                "A trial cannot put back links, special files and what it cannot look into, and "
                f"this session has some: {others[0]!a}.",
                fields=["options.preview"],
            )

    async def _take_out(self, token: str, program: str) -> HeldFiles | None:
        """Remove the effect of the trial `token` from the session, and return it. `program` is the
        name of the program that has run.

        Return None if the effect is lost, or if it is of a kind that cannot be applied later. If
        the removal fails, end the container. The session's next use then restores its files.
        """
        session = self._session
        assert session.copy is not None
        if session.finished is not None or session.container.lost is not None:
            return None  # the session's files are restored anyway
        source = source_of(session)
        try:
            changes, shown = await self._copies.hold(source, session.copy)
            try:
                await self._copies.put_back(source, session.copy, changes)
            except BaseException:
                await self._copies.let_go(changes)
                raise
        except Exception as error:
            session.container.end(f"the files of a trial were not undone: {error}")
            if not isinstance(error, NotSaved | EngineError):
                raise
            return None
        session.must_restore = False
        with suppress(EngineError):  # until this is stored, a killed engine loses the variables
            await self._write()
        held = HeldFiles(token, program == "python", changes, shown)
        self._waiting[session.id] += 1
        if changes.others:
            await self.drop(held)
            return None
        return held

    async def put_in(self, held: HeldFiles) -> str | None:
        """Apply an effect to the session. Then delete the files that were stored only for this
        effect. The caller must not call this method twice for the same effect.

        Return None if the session's files were saved afterwards. Otherwise, return the reason why
        not.

        Raises:
            ApprovalExpired: files or variables that the effect changes have changed since the
                trial, so nothing was applied.
            SandboxUnavailable: the effect was not applied, or perhaps only in part.
        """
        session = self._session
        self._decided()
        try:
            await self._until_ready()
            not_saved = await self._save()
            if not_saved is not None:
                raise try_later(f"The session's files could not be saved: {not_saved}.")
            assert session.copy is not None
            touched = self._copies.touched(session.id, held.changes)
            touched += self._copies.others(session.id, session.copy) or ()
            if touched:
                await self._drop_variables(held)
                names = listed([*map(ascii, touched)])
                raise ApprovalExpired(
                    f"Since the trial these have changed, so nothing was put in: {names}."
                )
            with anyio.CancelScope(shield=True):
                not_saved = await self._put_in(held)
        finally:
            await self._copies.let_go(held.changes)
        return not_saved

    async def _put_in(self, held: HeldFiles) -> str | None:
        session = self._session
        source = source_of(session)
        session.must_restore = True
        await self._write()  # if this engine is killed, the next one restores all or nothing of it
        try:
            if held.has_variables:
                sinks = RunSinks(trial=("adopt", held.token))
                if (await source.run("files", _LOOK, _LIMITS, sinks)).state != "kept":
                    raise ApprovalExpired(
                        "Since the trial the session's variables have changed, so nothing was put "
                        "in."
                    )
            try:
                await self._copies.put_in(source, held.changes)
            except NotSaved as error:
                session.container.end(f"the effect of a trial was not put in: {error}")
                raise try_later(f"It could not be put in: {error}.") from None
            return await self._save()
        finally:
            session.must_restore = session.container.lost is not None
            with suppress(EngineError):
                await self._write()

    async def drop(self, held: HeldFiles) -> None:
        """Drop an effect without applying it."""
        self._decided()
        await self._copies.let_go(held.changes)
        await self._drop_variables(held)

    async def _drop_variables(self, held: HeldFiles) -> None:
        container = self._session.container
        if held.has_variables and container.lost is None and not container.is_paused:
            sinks = RunSinks(trial=("drop", held.token))
            await source_of(self._session).run("files", _LOOK, _LIMITS, sinks)

    def _decided(self) -> None:
        """Reduce by 1 the number of effects in this session that wait for a decision."""
        self._waiting[self._session.id] -= 1
        if not self._waiting[self._session.id]:
            del self._waiting[self._session.id]
