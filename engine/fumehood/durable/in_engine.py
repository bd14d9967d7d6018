"""Durable sessions in one engine: their saver, and the deletion of old saved files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fumehood.durable.saver import SessionSaver
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.log import log_fault
from fumehood.sandbox.session_use import KeptValues

if TYPE_CHECKING:
    from fumehood.compose import Composition

FOLDER = "sessions"
"""Name of the folder of the saved files."""


class DurablePart(EnginePart):
    """Saves the files of durable sessions after each call, if the engine keeps state."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._saved = kernel.files.saved(FOLDER)
        self._saver = SessionSaver(self._saved) if self._saved is not None else None

    def saver(self) -> SessionSaver | None:
        """Return the saver, or None if the engine keeps no state."""
        return self._saver

    def in_session(self, kept: KeptValues) -> SessionSaver | None:
        """Return the saver, which undoes and applies the changes of trials. Return None if the
        engine keeps no state.

        `kept` (the values that parts keep with the session) is not used.
        """
        return self._saver

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Regularly delete the saved files of sessions that are over, until the engine stops."""
        if self._saved is None:
            yield
            return
        on_fault = partial(log_fault, self.kernel.log, "state.retention_failed")
        sweeping = made.services.stores.sessions.sweeping
        async with sweeping(self._saved, self.kernel.clock.now, on_fault):
            yield

    def close(self) -> None:
        if self._saved is not None:
            self._saved.close()
