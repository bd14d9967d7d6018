"""The engine's approvals: made from its configuration, its identities and the pipeline.

Part of the composition root, in two steps: what the pipeline needs of approvals, and what needs the
pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fumehood.approvals.channels import CHANNELS, open_channels
from fumehood.approvals.channels.base import ApprovalChannel, ChannelContext
from fumehood.approvals.channels.webhook import WebhookChannel
from fumehood.approvals.eligibility import Eligibility
from fumehood.approvals.remembered import RememberedRules
from fumehood.approvals.requests import ApprovalRequests
from fumehood.approvals.resume import CallResumption
from fumehood.approvals.scheduler import ApprovalScheduler
from fumehood.approvals.service import ApprovalService
from fumehood.approvals.store import ApprovalTable
from fumehood.approvals.stored_calls import StoredCalls
from fumehood.config import Config
from fumehood.identity.agents import Agents
from fumehood.identity.approvers import Approvers
from fumehood.identity.tokens import Tokens
from fumehood.observe.clock import Clock, IdSource
from fumehood.observe.log import Logger
from fumehood.pipeline.services import PipelineServices
from fumehood.storage.database import Database


@dataclass(frozen=True, slots=True)
class EngineApprovals:
    """The approvals of one engine."""

    channels: tuple[ApprovalChannel, ...]
    requests: ApprovalRequests
    scheduler: ApprovalScheduler
    service: ApprovalService

    @property
    def webhook(self) -> WebhookChannel | None:
        """The webhook, if one is configured."""
        return next((one for one in self.channels if isinstance(one, WebhookChannel)), None)


def make_requests(
    config: Config,
    database: Database,
    channels: tuple[ApprovalChannel, ...],
    *,
    approvers: Approvers,
    tokens: Tokens,
    agents: Agents,
    is_draining: Callable[[], bool],
    clock: Clock,
    ids: IdSource,
    log: Logger,
) -> ApprovalRequests:
    """The part of approvals that the pipeline uses."""
    settings = config.approvals
    return ApprovalRequests(
        ApprovalTable(database, channels=channels, kept_days=settings.kept_days),
        RememberedRules(database),
        Eligibility(
            approvers,
            tokens,
            agents,
            channels={one.decides_as for one in channels if one.decides_as is not None},
            allow_self_approval=settings.allow_self_approval,
            now=clock.now,
        ),
        settings,
        channels=channels,
        now=clock.now,
        new_id=ids.approval_id,
        is_draining=is_draining,
        log=log,
    )


def make_channels(
    config: Config, database: Database, clock: Clock, log: Logger
) -> tuple[ApprovalChannel, ...]:
    """The configured channels. Raises ConfigError."""
    settings = {name: getattr(config, name) for name in CHANNELS}
    return open_channels(settings, ChannelContext(database, clock.now, log))


def make_approvals(
    channels: tuple[ApprovalChannel, ...], services: PipelineServices
) -> EngineApprovals:
    """All of it, once the services of the pipeline are there."""
    requests, resumption = services.approvals, CallResumption(StoredCalls(services))
    scheduler = ApprovalScheduler(requests, resumption)
    service = ApprovalService(requests, resumption, scheduler)
    return EngineApprovals(channels, requests, scheduler, service)
