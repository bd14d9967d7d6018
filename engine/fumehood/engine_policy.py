"""The engine's policy: read at the start, watched, exchanged whole, and explained.

Part of the composition root. Above it `engine_composition`, below it `gates`. Invariants: an engine
whose policy is faulty at the start does not start; one that becomes faulty later is left out, and
the old rules stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.errors import InvalidParams
from fumehood.core.identity import Principal, Scope
from fumehood.core.tool import ToolDefinition
from fumehood.identity.agents import Agents
from fumehood.observe.log import Logger, log_fault
from fumehood.pipeline.authorize import facts_of
from fumehood.pipeline.resolve import resolve
from fumehood.pipeline.validate import validate
from fumehood.policy.loader import PolicyFile
from fumehood.policy.model import ExplainWish, Explanation, Policy, PolicyError, PolicyStatus
from fumehood.policy.service import PolicyGate
from fumehood.registry.index import ToolIndex
from fumehood.registry.watch import Watched, watch
from fumehood.storage.changes import recorded
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError

BY_FILE = "file"
"""Who has changed the policy where nobody asked for it: whoever may write the file."""


class EnginePolicy:
    """Decides by the rules of a file, and by the defaults where there is none.

    Raises:
        PolicyError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        environment: str,
        registry: ToolIndex,
        agents: Agents,
        database: Database,
        log: Logger,
        now: Callable[[], datetime],
    ) -> None:
        self._registry = registry
        self._agents = agents
        self._database = database
        self._log = log
        self._now = now
        self._refused: tuple[str, ...] = ()
        self._file = PolicyFile(path, self._definitions) if path is not None else None
        self._policy = self._file.load() if self._file is not None else None
        self.gate = PolicyGate(self._policy, environment)

    async def start(self) -> None:
        """Record with which rules the engine begins, where it has some."""
        if self._policy is not None:
            self._log_loaded(self._policy, BY_FILE)
            await self._record_loaded(self._policy, BY_FILE)

    async def follow(self) -> None:
        """Take changes of the file over until it is cancelled."""
        if self._file is None:
            return
        watched: Watched[Policy | PolicyError] = self._file
        async with anyio.create_task_group() as group:

            def take(news: Policy | PolicyError) -> None:
                if isinstance(news, PolicyError):
                    self._refuse(news)
                elif self._use(news, BY_FILE):
                    group.start_soon(self._record_loaded, news, BY_FILE)

            await watch(watched, take, partial(log_fault, self._log, "policy.failed"))

    async def reload(self, by: Principal) -> PolicyStatus:
        """Read the file now, without waiting for the next look; without one there is nothing to do.

        Raises:
            InvalidParams: it is faulty; the old rules stay.
        """
        if self._file is None:
            return self.status()
        try:
            policy = await anyio.to_thread.run_sync(self._file.load)
        except PolicyError as refused:
            self._refuse(refused)
            raise InvalidParams(
                f"The policy cannot be used, and the old rules stay: {refused.shown[0]}",
                details={"faults": list(refused.shown)},
            ) from None
        self._use(policy, by.id)
        await self._record_loaded(policy, by.id)
        return self.status()

    def status(self) -> PolicyStatus:
        """The rules that decide now, and what is wrong with the file where they are older."""
        return PolicyStatus(
            version=self.gate.version,
            file=self._policy.file if self._policy is not None else None,
            environment=self.gate.environment,
            rules=self.gate.rules(),
            refused=self._refused,
        )

    def explain(self, wish: ExplainWish) -> Explanation:
        """What the rules say of a call that nobody makes.

        It is resolved and validated as a real one; no budget is looked at.

        Raises:
            EngineError: as the call would, before it came to the policy.
        """
        validated = validate(
            resolve(_request(wish), self._registry, self._agents, self._now().date())
        )
        return self.gate.explain(facts_of(validated, wish.principal_id or "", lambda: False))

    def _definitions(self) -> Iterable[ToolDefinition]:
        names = [tool.definition.name for tool in self._registry]
        return [tool.definition for name in names for tool in self._registry.versions(name)]

    def _use(self, policy: Policy, by: str) -> bool:
        """Decide by it from now on; whether it is another one than before."""
        self._refused = ()
        is_other = self._policy is None or policy.version != self._policy.version
        self._policy = policy
        if is_other:
            self.gate.replace(policy)
            self._log_loaded(policy, by)
        return is_other

    def _refuse(self, refused: PolicyError) -> None:
        self._refused = refused.shown
        self._log.error(
            "policy.refused", faults=list(refused.shown), version_kept=self.gate.version
        )

    def _log_loaded(self, policy: Policy, by: str) -> None:
        self._log.info("policy.loaded", version=policy.version, rules=len(policy.rules), by=by)

    async def _record_loaded(self, policy: Policy, by: str) -> None:
        """Among the changes of authority. That it cannot be kept undoes nothing."""
        details = {"version": policy.version, "rules": len(policy.rules)}
        job = recorded(
            lambda _: None, at=self._now(), by=by, action="policy.load", subject=policy.file,
            details=details,
        )  # fmt: skip
        try:
            await self._database.write(job)
        except StoreError as fault:
            log_fault(self._log, "policy.not_recorded", fault)


def _request(wish: ExplainWish) -> CallRequest:
    agents = frozenset({wish.agent_id} if wish.agent_id is not None else ())
    try:
        options = CallOptions(agent_id=wish.agent_id, session_id=wish.session_id)
    except ValueError:
        raise InvalidParams(
            "The agent's or the session's id can be none.", fields=["agent_id", "session_id"]
        ) from None
    principal = Principal(wish.principal_id or "", frozenset({Scope.CALL}), agents)
    return CallRequest(wish.tool, wish.arguments, options, principal, "explain", "explain")


__all__ = ["EnginePolicy"]
