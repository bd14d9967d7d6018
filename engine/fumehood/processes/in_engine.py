"""The part object of one engine for background processes in its sessions."""

from __future__ import annotations

from functools import partial

from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.session import OwnedSession
from fumehood.engine_part import EnginePart
from fumehood.processes.service import SessionProcesses
from fumehood.sandbox.session_use import SessionAccess
from fumehood.sandbox.wall import SessionContainer
from fumehood.storage.changes import recorded


class ProcessesPart(EnginePart):
    """Gives access to the background processes of sessions. In each new container of a session, it
    starts those processes again that have the option `restart`.
    """

    def in_session(self, access: SessionAccess) -> SessionProcesses:
        """Return the object that carries out requests about the session's background processes."""
        return SessionProcesses(access)

    async def in_new_container(self, access: SessionAccess, container: SessionContainer) -> None:
        """Start the processes that have the option `restart` in the session's new container. A
        process that cannot be started is only reported in the log.
        """
        tell = partial(self._tell_not_started, access)
        await SessionProcesses(access).start_again(container, tell)

    async def stop(
        self, processes: SessionProcesses, session: OwnedSession, name: str, grace_s: float,
        by: Principal,
    ) -> JsonObject:  # fmt: skip
        """End the process `name` in a session of any principal, and return its final state. `by` is
        the principal that requests this.

        The end of a running process is recorded in the audit log as an administrative change. If
        the process has already ended, nothing is changed or recorded.

        Raises:
            ResourceNotFound: there is no such process.
            SandboxUnavailable: the session cannot run now.
            WriteFailed: the change could not be recorded, and the process continues.
        """
        for process in (await processes.ask({"do": "list"}))["processes"]:
            if process["name"] == name and process["state"] == "ended":
                return dict(process)
            if process["name"] == name:
                break
        else:
            raise ResourceNotFound("This session has no such process.", fields=["process"])
        details = {"principal_id": session.principal_id, "process": name}
        await self.kernel.database.write(
            recorded(
                lambda _: None, at=self.kernel.clock.now(), by=by.id, action="process.stop",
                subject=session.id, details=details,
            )
        )  # fmt: skip
        answer = await processes.ask({"do": "stop", "name": name, "grace_s": grace_s})
        return dict(answer["process"])

    def _tell_not_started(self, access: SessionAccess, name: str, why: str) -> None:
        session = access.session
        self.kernel.log.info(
            "session.process_not_started", session=session.id, principal=session.principal_id,
            image=session.spec.image, calls=session.calls, process=name, why=why,
        )  # fmt: skip
