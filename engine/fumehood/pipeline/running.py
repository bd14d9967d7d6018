"""Running: the calls that run now, and the way for their callers to end them.

Host side, held by the engine. Invariant: a call is ended only for the principal who made it;
for everybody else it is not there, in the same words as one that never was.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from fumehood.core.call import CallRequest
from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.executors.handle import CallHandle

END_PATIENCE_S = 15.0
"""How long the one who cancels waits for the end: longer than a wall takes to end a program."""


@dataclass(frozen=True, slots=True)
class _Running:
    principal_id: str | None
    live: CallHandle


class RunningCalls:
    """By their ids."""

    def __init__(self) -> None:
        self._calls: dict[str, _Running] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, request: CallRequest, live: CallHandle) -> None:
        """A call has come in."""
        principal_id = request.principal.id if request.principal is not None else None
        self._calls[request.call_id] = _Running(principal_id, live)

    def leave(self, call_id: str) -> None:
        """It has its answer."""
        del self._calls[call_id]

    def has(self, call_id: str, principal: Principal) -> bool:
        """Whether such a call of this principal's runs here."""
        found = self._calls.get(call_id)
        return found is not None and found.principal_id == principal.id

    async def cancel(self, call_id: str, principal: Principal) -> None:
        """End a call, and wait, bounded, until nothing of it runs any more.

        Raises:
            ResourceNotFound: no call of this principal's that can still be ended.
        """
        found = self._calls.get(call_id)
        if found is None or found.principal_id != principal.id or not found.live.cancel():
            raise ResourceNotFound("No such call of yours is running. Do not retry.")
        with anyio.move_on_after(END_PATIENCE_S):
            await found.live.over.wait()
