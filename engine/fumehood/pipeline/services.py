"""Rooms: everything that a call passes through, put together in `engine_composition`.

Beside the spine, which hands it on; made once an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fumehood.approvals.requests import ApprovalRequests
from fumehood.budgets.ledger import Budgets, estimate_of
from fumehood.budgets.model import Amounts, Exceeded, Spender
from fumehood.core.usage import Prices, TokenCounter
from fumehood.identity.agents import Agents
from fumehood.observe.clock import Clock
from fumehood.observe.log import Logger
from fumehood.pipeline.approve import ApprovalRooms
from fumehood.pipeline.authorize import Policy
from fumehood.pipeline.claim import Keys
from fumehood.pipeline.validate import ValidatedCall
from fumehood.protocol.cursors import Cursors
from fumehood.registry.index import ToolIndex
from fumehood.sandbox.sessions import SessionKeeper
from fumehood.sandbox.wall import Walls
from fumehood.storage.blobs import BlobStore
from fumehood.storage.calls import CallLog


@dataclass(frozen=True, slots=True)
class PipelineServices:
    """What a call passes through; put together in `engine_composition.py`."""

    registry: ToolIndex
    agents: Agents
    walls: Walls
    clock: Clock
    log: Logger
    counter: TokenCounter
    prices: Prices
    allow_debug: bool
    is_draining: Callable[[], bool]
    calls: CallLog
    blobs: BlobStore
    cursors: Cursors
    sessions: SessionKeeper
    policy: Policy
    keys: Keys
    budgets: Budgets
    approvals: ApprovalRequests

    @property
    def asking(self) -> ApprovalRooms:
        """What asking a human needs."""
        return ApprovalRooms(self.approvals, self.walls, self.sessions, self.exceeded)

    def estimate(self, validated: ValidatedCall) -> Amounts:
        """What a call is expected to take of budgets."""
        tool = validated.resolved.tool.definition
        return estimate_of(tool, validated.shown_arguments, self.counter)

    def exceeded(self, validated: ValidatedCall) -> Exceeded | None:
        """The budget that has too little left for a call."""
        if self.budgets.is_empty:
            return None
        return self.budgets.exceeded(spender_of(validated), self.estimate(validated))

    def over_budget(self, validated: ValidatedCall) -> Callable[[], bool]:
        """Whether there is one, for rules that want to know."""
        return lambda: self.exceeded(validated) is not None


def spender_of(validated: ValidatedCall) -> Spender:
    """Who makes a call, of what."""
    request = validated.resolved.request
    return Spender(
        request.principal.id if request.principal is not None else "",
        request.options.agent_id,
        request.options.session_id,
        validated.resolved.tool.definition.name,
    )
