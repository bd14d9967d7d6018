"""Projects as a part of one engine.

If an engine is killed while it writes changes into a project, the next engine undoes them before
any call can start, unless all of them were written. Until then, an engine without this part cannot
use the state.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread

from fumehood.core.errors import EngineError, StateUnavailable
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.log import log_fault
from fumehood.projects.home import NAME, ProjectHome
from fumehood.projects.service import Projects, ProjectStore, SessionProject
from fumehood.projects.writing import Journals
from fumehood.sandbox.session_use import KeptValues, SessionAccess
from fumehood.storage.needed_parts import need_part, needed_parts, release_part

if TYPE_CHECKING:
    from fumehood.compose import Composition

FOLDER = "projects"
"""Name of two folders: one for the stored lists of copied files, and one for the journals in the
engine's own state.
"""

NEEDED = "projects"
"""The name under which the state records that it needs this part. It needs the part while there are
journals.
"""


class ProjectsPart(EnginePart):
    """Connects sessions with the project directories from which their files were copied. At the
    engine's start, it undoes changes to a project that a killed engine has not finished.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        state = kernel.database.directory
        self._saved = kernel.files.saved(FOLDER)
        self._journals = Journals(None if state is None else state / FOLDER, self._need)
        self._store = ProjectStore(self._saved, self._journals)
        self.projects: Projects

    def in_session(self, access: SessionAccess) -> SessionProject | None:
        """Return the project of a session, or None if its files were not copied from a project
        directory.
        """
        value = access.values.get(NAME)
        if value is None:
            return None

        async def keep(home: ProjectHome) -> None:
            await access.keep(NAME, home.value)

        return SessionProject(self._store, access.session_id, ProjectHome(**value), keep)

    async def carry_over(self, source: KeptValues, made: KeptValues) -> None:
        """Connect the new session `made` with the project of the session `source`. The files of
        `source` are copied into the new session.

        The stored list of the files that were copied from the project is copied as well. Raises
        StateUnavailable if this list cannot be read or stored.
        """
        value = source.values.get(NAME)
        if value is not None:
            home = await self._store.copied(
                source.session_id, ProjectHome(**value), made.session_id
            )
            await made.keep(NAME, home.value)

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """Create `projects` for the running engine. Until the `with` block ends, regularly delete
        the stored lists of copied files that belong to ended sessions.
        """
        self.projects = Projects(self._store, made.services.sessions)
        async with AsyncExitStack() as stack:
            if self._saved is not None:
                on_fault = partial(log_fault, self.kernel.log, "state.retention_failed")
                sweeping = made.services.stores.sessions.sweeping
                await stack.enter_async_context(
                    sweeping(self._saved, self.kernel.clock.now, on_fault)
                )
            yield

    async def outcomes(self) -> Mapping[str, EngineError | None]:
        """Undo the unfinished changes of an engine that was killed.

        Return the outcomes of the calls that were writing changes, as a mapping from the id of each
        call. The value is None if the call has written everything. Otherwise, it is an error that
        says that the call has written nothing.
        """
        failed, outcomes = await anyio.to_thread.run_sync(self._journals.recover)
        for directory in failed:
            self.kernel.log.error("project.not_put_back", directory=directory)
        return {
            call_id: None if has_acted else _put_back() for call_id, has_acted in outcomes.items()
        }

    async def recovered(self) -> None:
        """Remove the journals of the changes whose outcomes were stored. A journal records changes
        to a project so that they can be undone.
        """
        await anyio.to_thread.run_sync(self._journals.forget)

    def _need(self, is_needed: bool) -> None:
        """Record in the engine's state whether an engine must have this part to use the state.
        Raises StoreError if this cannot be recorded.
        """
        database = self.kernel.database
        if is_needed != (NEEDED in database.read_now(needed_parts)):
            change = need_part if is_needed else release_part
            database.write_now(partial(change, name=NEEDED))

    def close(self) -> None:
        if self._saved is not None:
            self._saved.close()


def _put_back() -> StateUnavailable:
    return StateUnavailable(
        "The engine ended while it wrote the project, and everything was put back: nothing was "
        "written. Make the call again to ask for a new approval."
    )
