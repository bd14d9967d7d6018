"""Approve: let a call pass if it needs no consent, and request consent for any other call.

Fifth stage. Takes a `ClaimedCall`, returns an `ApprovedCall`, or the final answer if the caller
waited for the decision. Consent comes from an `Asker`; the pipeline knows only this interface.
`HumanAsker` in `approvals/stored_calls` stores the call while it waits. Invariant: a call for which
the policy requires approval passes in two cases only. Either it has a `Consent` that was given for
the same `PermittedCall` object, or a part holds back the effect of its program until a human has
decided. `execute` checks the latter before the program runs. If the asker raises, or returns
anything else, the call ends before it starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from fumehood.core.envelope import Envelope
from fumehood.core.errors import EngineError, InvalidParams
from fumehood.core.json_types import JsonValue
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import ClaimedCall
from fumehood.pipeline.plan import Plan, plan_now, with_options
from fumehood.policy.model import Verdict

if TYPE_CHECKING:
    from fumehood.pipeline.context import CallContext, PipelineServices

MAX_READ_VALUES = 20_000
"""Maximum number of JSON values in the arguments of a call that needs approval. Hashing more would
delay other calls."""


@dataclass(frozen=True, slots=True)
class Consent:
    """Permission to run one call, by a human's approval or by a remembered rule."""

    permitted: PermittedCall
    """The call as it will run."""
    use: Callable[[Plan], Awaitable[None]]
    """Awaited just before the call starts, to mark the consent as used. If it raises, the call
    ends, for example because the consent no longer covers the call or has already been used."""
    expected: str | None = None
    """The state of the workspace (`Effect.base`) for which a human approved the call's effect."""
    may_exceed: frozenset[str] = frozenset()
    """The keys (`Gate.key`) of the gates that the call may pass although they would refuse it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Data about a call that waited, or still waits, for a human's decision. The call's envelope
    reports it.
    """

    tool: str
    tool_version: str
    at: datetime
    decided_at: datetime | None
    has_begun: bool
    """Whether the call had started when this value was read from the database."""
    edit_warning: str | None
    """If an approver edited the arguments: the warning for the caller. The envelope contains the
    warning only if the call ran."""

    @property
    def waited_ms(self) -> float | None:
        """How many milliseconds the call waited for the decision, or None if nobody decided."""
        waited = self.decided_at - self.at if self.decided_at is not None else None
        return round(waited.total_seconds() * 1e3, 3) if waited is not None else None


class Asker(Protocol):
    """Asks humans to decide on calls. While no decision has been made, it stores the calls."""

    async def ask(
        self, claimed: ClaimedCall, plan: Plan, call: CallContext, services: PipelineServices
    ) -> Consent | Envelope:
        """Get a human's consent to a call. If a remembered rule allows the call, return the rule's
        consent. Otherwise, store the call and wait for it, as long as its options allow.

        If the stored call ends in this time, return its final answer, an envelope.

        An implementation must set `call.parked_as` as soon as it has stored the call. It must also
        transfer the call's claim to the stored call.

        Raises:
            RequiresHumanApproval: the call still waits for a decision, or has too few approvers.
            CallInProgress: the call was approved while its caller waited, and is still running.
            EngineError: the call is refused, or its preview shows that it would fail.
        """

    async def wait_for(self, approval_id: str, call: CallContext) -> Envelope:
        """Wait for a stored call, as long as the options of `call` allow, and return its answer.

        Raises:
            RequiresHumanApproval: the stored call still waits for a decision.
            CallInProgress: the stored call is still running.
        """

    def wait_s(self, wanted: bool | float | None) -> float:
        """Return the maximum number of seconds that a call with the option
        `wait_for_approval=wanted` waits for its approval.
        """

    async def same_call(self, repeat_key: str, tool: str) -> str | None:
        """Find a stored call of the tool `tool` that a new call repeats. Return its approval id, or
        None if there is none. `repeat_key` identifies the caller and the action of the new call.
        """

    async def take_back(
        self, approval_id: str, call: CallContext, services: PipelineServices
    ) -> None:
        """Cancel a stored call whose caller was cancelled, unless another caller still needs its
        answer.
        """

    async def ending_of(self, call_id: str, principal_id: str) -> Envelope | EngineError | None:
        """Return the answer to the principal's stored call, or an error if the call has not ended.

        Return None if the principal has no stored call with this id.
        """


# -- the stage ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call that may run now. Either the call needs no consent, or a consent was given, or a part
    holds back the effect of the call until a human has decided.
    """

    permitted: PermittedCall
    consent: Consent | None = None
    """The consent, or None. It is marked as used when the call starts."""

    @property
    def needs_consent(self) -> bool:
        """Whether the policy requires a consent that the call does not have."""
        return self.consent is None and self.permitted.decision.verdict is not Verdict.ALLOW


def require_readable(permitted: PermittedCall) -> None:
    """Raise InvalidParams if a call has more than `MAX_READ_VALUES` values for a human to read."""
    count = 0
    left: list[JsonValue] = [permitted.arguments, permitted.request.context]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        count += 1
        if count + len(left) > MAX_READ_VALUES:
            raise InvalidParams(
                f"A human must read this call, but it has over {MAX_READ_VALUES:,} values. Send "
                "fewer.",
                fields=["arguments"],
            )


async def approve(
    claimed: ClaimedCall, services: PipelineServices, call: CallContext
) -> ApprovedCall | Envelope:
    """Let a call pass, or request consent for it.

    A call passes without a request if it needs no consent or if a part holds back its effect.
    Return the approved call. If the call was stored while it waited for consent, and has already
    ended, return its final answer instead.

    Raises:
        EngineError: for the same reasons as in `Asker.ask`.
        TypeError: the asker returned neither an envelope nor a `Consent` for this call.
    """
    permitted, decision = claimed.permitted, claimed.permitted.decision
    if decision.verdict is Verdict.ALLOW:
        return ApprovedCall(permitted)
    plan = await plan_now(permitted, services.walls, services.sessions)
    holding = services.parts.holding
    if decision.may_run_first and holding is not None and plan.executor.language is not None:
        held_back = with_options(permitted, plan, holding.holds_back_with)
        if held_back is not None:
            call.request = held_back.request
            return ApprovedCall(held_back)
    answer = await services.asker.ask(claimed, plan, call, services)
    return answer if isinstance(answer, Envelope) else with_consent(permitted, answer)


def with_consent(permitted: PermittedCall, consent: object) -> ApprovedCall:
    """Return the call with its consent.

    Raises:
        TypeError: `consent` is not a `Consent`, or was given for another call.
    """
    if not isinstance(consent, Consent) or consent.permitted is not permitted:
        raise TypeError("The asker returned no consent to this call.")
    return ApprovedCall(permitted, consent)
