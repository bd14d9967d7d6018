"""The life of an engine: it starts its parts, recovers what a crash left, drains and stops.

Host side, part of the composition root. Above it `engine`, below it `engine_composition`.
Invariants: calls are taken only after those were looked for that an engine before this one has left
running, and what a human said yes to is carried out after that; when it has ended, nothing runs.
"""

from __future__ import annotations

import math
from contextlib import AsyncExitStack

import anyio
import anyio.lowlevel

from fumehood.compose import Composition
from fumehood.core.errors import FumehoodError
from fumehood.core.idempotency import KEY_LIFETIME
from fumehood.observe.log import log_fault
from fumehood.storage.errors import StoreError
from fumehood.storage.retention import Kept, retention


class EngineNotRunning(FumehoodError, RuntimeError):
    """A call was made before `async with` entered the engine, or after it left it."""


class EngineLife:
    """Begins once and ends once. What `begin` starts, `end` stops in the opposite order."""

    def __init__(self, made: Composition) -> None:
        self._made = made
        self._config = made.basis.config
        self._log = made.basis.log
        self._now = made.basis.clock.now
        self._stack = AsyncExitStack()
        self._has_begun = False

    def require_begun(self) -> None:
        """Raises EngineNotRunning before `begin` and after `end`."""
        if self._made.intake.is_open:
            return
        raise EngineNotRunning(
            "This engine has stopped, so it takes no calls. Make the call inside its `async with` "
            "block."
            if self._has_begun
            else "This engine was not started, so it takes no calls. Use "
            "`async with Engine(...) as engine:`, and make the call inside."
        )

    async def begin(self) -> None:
        """Start everything, and take calls."""
        self._has_begun = True
        made, enter = self._made, self._stack.enter_async_context
        if made.owns_database:
            self._stack.callback(made.database.close)
        await enter(made.audit.anchored())
        await enter(made.walls)
        await enter(made.sessions)
        await made.policy.start()
        await self._follow_files()
        self._stack.callback(made.state.blobs.close)
        self._stack.callback(made.state.spools.close)
        self._stack.push_async_callback(self._close_budgets)
        self._stack.push_async_callback(made.calls.end_streamed)
        await self._open_stores()
        await self._keep_within_bounds()
        await self._recover_keys()
        made.intake.is_open = True
        for channel in made.approvals.channels:
            await enter(channel.running(made.approvals.service.show))
        await enter(made.approvals.scheduler)

    def drain(self) -> None:
        """Take no new calls; what runs goes on."""
        self._made.calls.drain()

    async def drained(self) -> None:
        """Wait, after `drain`, until none runs any more, those with a human's yes included."""
        await self._made.calls.drained()
        await self._made.approvals.scheduler.drained()

    async def end(self) -> None:
        """Take no calls any more, and stop everything."""
        self._made.intake.is_open = False
        await self._stack.aclose()
        await anyio.lowlevel.checkpoint()  # the last calls' last events are still to be logged

    async def _follow_files(self) -> None:
        """Take over what changes in the policy's file and in the directory of definitions."""
        group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(group.cancel_scope.cancel)
        group.start_soon(self._made.policy.follow)
        if self._made.directory is not None:
            group.start_soon(self._made.directory.follow)

    async def _open_stores(self) -> None:
        """Without them what is too large is not kept, or what happens not told: answers say so."""
        state = self._made.state
        for name, open_store in (("blobs", state.blobs.open), ("streams", state.spools.open)):
            try:
                await open_store()
            except StoreError as fault:
                self._on_store_fault(name, fault)

    async def _keep_within_bounds(self) -> None:
        """Let what is old go, now and from time to time."""
        state = self._made.state
        all_kept: tuple[tuple[Kept, float], ...] = (
            (state.calls, self._config.calls_kept_days * 86_400),
            (state.blobs, self._config.blobs_kept_hours * 3600),
            (state.keys, KEY_LIFETIME.total_seconds()),
            (state.budgets, math.inf),
            (self._made.approvals.requests.table, math.inf),
        )
        for kept, kept_s in all_kept:
            await self._stack.enter_async_context(
                retention(kept, self._now, self._on_retention_fault, kept_s=kept_s)
            )

    async def _recover_keys(self) -> None:
        """Where it fails, each lost call is found when its key comes again."""
        try:
            lost = await self._made.state.keys.recover(self._now())
        except StoreError as fault:
            self._on_store_fault("idempotency_keys", fault)
            return
        if lost:
            self._log.warning("idempotency.outcomes_unknown", calls=lost)

    async def _close_budgets(self) -> None:
        try:
            await self._made.state.budgets.close()
        except StoreError as fault:  # what was reserved ahead counts as spent then
            self._on_store_fault("budgets", fault)

    def _on_store_fault(self, name: str, fault: StoreError) -> None:
        self._log.error(f"{name}.unavailable", reason=str(fault))

    def _on_retention_fault(self, fault: Exception) -> None:
        log_fault(self._log, "state.retention_failed", fault)
