"""The policy of a running engine: loads, watches, replaces and explains the policy.

Host side, used by `compose` and the public interfaces. This module uses `policy/loader` and
`policy/service`. Invariants: an engine with a faulty policy does not start; if the file becomes
faulty later, the old rules stay in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    ResourceNotFound,
    StateUnavailable,
)
from fumehood.core.identity import Principal
from fumehood.observe.log import Logger, log_fault
from fumehood.observe.watch import watch
from fumehood.policy.loader import Known, Outdated, PolicyFile
from fumehood.policy.model import (
    CallFacts,
    ExplainWish,
    Explanation,
    NewPolicy,
    Policy,
    PolicyError,
    PolicyStatus,
    PolicyText,
)
from fumehood.policy.service import PolicyGate
from fumehood.registry.index import ToolIndex
from fumehood.storage.changes import recorded
from fumehood.storage.database import Database
from fumehood.storage.errors import StoreError

NO_FILE = "No policy file is configured. Set policy_file in the configuration. Do not retry."
BY_FILE = "file"
"""The author that is recorded for a change made in the policy file."""


class CurrentPolicy:
    """The policy in force: that of the policy file, or the defaults if no file is configured.

    `path` is the policy file, or None if no file is configured. `registry` contains the tools
    against which rules are checked. `facts_of` resolves a call for `explain`. `use` is called at
    once, and again for each new policy. Its argument is the policy, or None if no file is
    configured.

    Raises:
        PolicyError: the file has faults or cannot be read.
    """

    def __init__(
        self,
        path: Path | None,
        environment: str,
        registry: ToolIndex,
        facts_of: Callable[[ExplainWish], CallFacts],
        use: Callable[[Policy | None], None],
        database: Database,
        log: Logger,
        now: Callable[[], datetime],
    ) -> None:
        self._registry = registry
        self._facts_of = facts_of
        self._pass_on = use
        self._database = database
        self._log = log
        self._now = now
        self._refused: tuple[str, ...] = ()
        self._file = PolicyFile(path, self._definitions) if path is not None else None
        self._policy = self._file.load() if self._file is not None else None
        self.gate = PolicyGate(self._policy, environment)
        use(self._policy)

    async def start(self) -> None:
        """Record the policy with which the engine starts in the audit log. Does nothing if there is
        no policy.
        """
        if self._policy is not None:
            self._log_loaded(self._policy, BY_FILE)
            await self._record_loaded(self._policy, BY_FILE)

    async def follow(self) -> None:
        """Watch the policy file and apply its changes, until cancelled. Returns at once if no file
        is configured.
        """
        if self._file is None:
            return
        async with anyio.create_task_group() as group:

            def take(news: Policy | PolicyError) -> None:
                if isinstance(news, PolicyError):
                    self._refuse(news)
                elif self._use(news, BY_FILE):
                    group.start_soon(self._record_loaded, news, BY_FILE)

            await watch(self._file.poll, take, partial(log_fault, self._log, "policy.failed"))

    async def reload(self, by: Principal) -> PolicyStatus:
        """Read the policy file now instead of at the next poll, and return the status. `by` is the
        principal that requests this. If no file is configured, only return the status.

        Raises:
            InvalidParams: the file has faults; the old rules stay in force.
        """
        if self._file is None:
            return self.status()
        try:
            policy = await anyio.to_thread.run_sync(self._file.load)
        except PolicyError as refused:
            self._refuse(refused)
            raise InvalidParams(
                "The policy has faults, so the old rules stay in force. First fault: "
                f"{refused.shown[0]}",
                details={"faults": list(refused.shown)},
            ) from None
        self._use(policy, by.id)
        await self._record_loaded(policy, by.id)
        return self.status()

    async def text(self) -> PolicyText:
        """Return the text of the policy file and the version of this text.

        Raises:
            ResourceNotFound: no policy file is configured, or the file cannot be read.
        """
        if self._file is None:
            raise ResourceNotFound(NO_FILE)
        try:
            text, version = await anyio.to_thread.run_sync(self._file.text)
        except PolicyError as refused:
            raise ResourceNotFound(f"The policy file cannot be read: {refused.shown[0]}") from None
        return PolicyText(text=text, version=version)

    async def replace(self, new: NewPolicy, by: Principal) -> PolicyStatus:
        """Replace the text of the policy file, put the new policy in force, and return the status.
        `by` is the principal that requests this.

        Raises:
            ResourceNotFound: no policy file is configured.
            InvalidParams: the new rules have faults, so the file was not changed.
            IdempotencyConflict: the file no longer has the version that `new` replaces.
            StateUnavailable: the file cannot be written.
        """
        if self._file is None:
            raise ResourceNotFound(NO_FILE)
        try:
            policy = await anyio.to_thread.run_sync(self._file.replace, new.text, new.version)
        except Outdated:
            raise IdempotencyConflict(
                "The policy file has changed since you read it. Read it again."
            ) from None
        except PolicyError as refused:
            raise InvalidParams(
                "The new rules have faults, so the old rules stay in force. First fault: "
                f"{refused.shown[0]}",
                fields=["text"], details={"faults": list(refused.shown)},
            ) from None  # fmt: skip
        except OSError as error:
            words = f"The policy file cannot be written: {error.strerror}."
            raise StateUnavailable(words, retryable=False) from None
        self._use(policy, by.id)
        await self._record_loaded(policy, by.id)
        return self.status()

    def status(self) -> PolicyStatus:
        """Return the rules in force. If the current policy file was refused, also return its
        faults.
        """
        return PolicyStatus(
            version=self.gate.version,
            file=self._policy.file if self._policy is not None else None,
            environment=self.gate.environment,
            rules=self.gate.rules(),
            refused=self._refused,
        )

    def explain(self, query: ExplainWish) -> Explanation:
        """Explain the policy's decision on a call, without making the call.

        The call is resolved and validated like a real call. Budgets are ignored.

        Raises:
            EngineError: a real call like this would be refused before the policy is evaluated.
        """
        return self.gate.explain(self._facts_of(query))

    def _definitions(self) -> Iterable[Known]:
        names = [tool.definition.name for tool in self._registry]
        found = [tool.definition for name in names for tool in self._registry.versions(name)]
        return [*found, *self._registry.coming]

    def _use(self, policy: Policy, by: str) -> bool:
        """Put a policy in force. Return whether it differs from the previous policy. `by` is the
        recorded author of the change.
        """
        self._refused = ()
        is_other = self._policy is None or policy.version != self._policy.version
        self._policy = policy
        if is_other:
            self.gate.replace(policy)
            self._pass_on(policy)
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
        """Record in the audit log that a policy was loaded, and by whom. If this fails, log the
        failure; the policy stays in force.
        """
        details = {"version": policy.version, "rules": len(policy.rules)}
        job = recorded(
            lambda _: None, at=self._now(), by=by, action="policy.load", subject=policy.file,
            details=details,
        )  # fmt: skip
        try:
            await self._database.write(job)
        except StoreError as fault:
            log_fault(self._log, "policy.not_recorded", fault)
