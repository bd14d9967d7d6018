"""The engine's desk: made from its configuration, its state and the way of its calls.

Part of the composition root, which names concrete classes. Above it `engine_composition`, below
it `pipeline/`.
"""

from __future__ import annotations

from collections.abc import Callable

from fumehood.approvals.remembered import Remembering
from fumehood.approvals.resume import CallResumption
from fumehood.approvals.service import ApprovalService
from fumehood.approvals.store import ApprovalTable, StoredApproval
from fumehood.config import Config
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.identity.agents import Agents
from fumehood.identity.approvers import Approvers
from fumehood.identity.tokens import Tokens
from fumehood.observe.clock import Clock, IdSource
from fumehood.observe.log import Logger
from fumehood.pipeline.services import PipelineServices
from fumehood.storage.database import Database

WEBHOOK_ID = "webhook"
"""The principal of signed callbacks."""


class EngineApprovals:
    """The desk with whom it asks and for whom it acts."""

    def __init__(
        self,
        config: Config,
        database: Database,
        *,
        approvers: Approvers,
        tokens: Tokens,
        agents: Agents,
        clock: Clock,
        ids: IdSource,
        log: Logger,
    ) -> None:
        self._config = config
        self._approvers = approvers
        self._tokens = tokens
        self._agents = agents
        self._clock = clock
        self._log = log
        self._tell: Callable[[], None] | None = None
        chosen = config.approvals
        self.table = ApprovalTable(
            database,
            database.audit,
            tells=config.webhook is not None,
            kept_days=chosen.kept_days,
        )
        self.desk = ApprovalService(
            self.table,
            Remembering(database),
            chosen,
            now=clock.now,
            new_id=ids.approval_id,
            who_approves=self._who_approves,
            cure=lambda: approvers.cure,
            on_event=self._on_event,
        )

    def connect(
        self,
        rooms: PipelineServices,
        is_draining: Callable[[], bool],
        tell: Callable[[], None] | None,
    ) -> None:
        """Give the desk what needs the desk itself: the way of calls, and who tells others.

        `tell` is called after each event; None where nobody is to be told.
        """
        self.desk.way = CallResumption(rooms, self._principal_again)
        self.desk.is_draining = is_draining
        self._tell = tell

    def _on_event(self, event: str, values: JsonObject) -> None:
        level = self._log.info if event == "approval.changed" else self._log.warning
        level(event, **values)
        if self._tell is not None:
            self._tell()

    def _who_approves(self) -> frozenset[str]:
        """Everybody who could say yes now, as principals."""
        now, webhook = self._clock.now(), self._config.webhook
        approvers = {
            one.principal.id for one in self._approvers.current() if Scope.APPROVE in one.scopes
        }
        tokens = {
            one.principal_id
            for one in self._tokens.all()
            if Scope.APPROVE in one.scopes and one.is_valid(now)
        }
        decides = webhook is not None and webhook.may_decide
        return frozenset(approvers | tokens | ({WEBHOOK_ID} if decides else set()))

    def _principal_again(self, stored: StoredApproval) -> Principal | None:
        """Whoever asked, as far as that identity is still good."""
        approval, token_id = stored.approval, stored.request.token_id
        if token_id is not None:
            return self._tokens.principal_of_id(token_id, self._clock.now())
        agents = self._agents.spoken_for_by(approval.principal_id)
        return Principal(approval.principal_id, frozenset({Scope.CALL}), agents)
