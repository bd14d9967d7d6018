"""Approve: let a call pass if it needs no consent, and ask for the consent to any other call.

Fifth stage. Takes a `ClaimedCall`, returns an `ApprovedCall`, or the final answer if the caller
waited for the decision. Whoever decides is an `Asker`, which is all that the pipeline knows of it:
`HumanAsker` in `approvals/stored_calls` stores the call while it waits. Invariant: a call that the
policy asks about passes only with a `Consent` that was given for this very value, or as a trial; an
asker that raises, or returns anything else, ends the call before it starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from fumehood.core.envelope import Envelope
from fumehood.core.errors import EngineError, InvalidParams
from fumehood.core.json_types import JsonValue
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.claim import ClaimedCall
from fumehood.pipeline.plan import Plan, can_be_tried, plan_now
from fumehood.policy.model import Verdict

if TYPE_CHECKING:
    from fumehood.pipeline.context import CallContext, PipelineServices

MAX_READ_VALUES = 20_000
"""Maximum number of values in a call that needs approval. Hashing more would delay other calls."""


@dataclass(frozen=True, slots=True)
class Consent:
    """A yes to one call."""

    permitted: PermittedCall
    """The call, as it will run."""
    use: Callable[[Plan], Awaitable[None]]
    """Awaited just before the call starts: uses the consent up. What it raises ends the call, such
    as when the consent no longer covers the call, or is used up."""
    expected: str | None = None
    """The state of the workspace for which the call's effect was shown."""
    is_let_pass: bool = False
    """Whether the call may pass a gate in spite of an `Excess` with a `record`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer reports about a call that was stored while it waited for a decision."""

    tool: str
    tool_version: str
    at: datetime
    decided_at: datetime | None
    has_begun: bool
    """Whether the call had started when this was read."""
    edit_warning: str | None
    """The warning for its caller if its arguments were changed, to be given if it has run."""

    @property
    def waited_ms(self) -> float | None:
        """The milliseconds that the call waited for the decision, or None without one."""
        waited = self.decided_at - self.at if self.decided_at is not None else None
        return round(waited.total_seconds() * 1e3, 3) if waited is not None else None


class Asker(Protocol):
    """Decides about calls, or stores them until somebody has decided."""

    async def ask(
        self, claimed: ClaimedCall, plan: Plan, call: CallContext, services: PipelineServices
    ) -> Consent | Envelope:
        """Return the consent to a call, or its final answer after it was stored and has ended.

        Sets `call.parked_as` once the call is stored, and hands its claim over to the stored call.

        Raises:
            RequiresHumanApproval: the call waits, or nobody could decide.
            CallInProgress: the call was approved meanwhile and still runs.
            EngineError: the call is refused, or it would fail with this error.
        """

    async def wait_for(self, approval_id: str, call: CallContext) -> Envelope:
        """Return the answer of a stored call, within the time that the option of `call` allows.

        Raises:
            RequiresHumanApproval: the stored call still waits.
            CallInProgress: it is running.
        """

    def wait_s(self, wanted: bool | float | None) -> float:
        """Return how many seconds a call may wait for its answer, given the option that it sent."""

    async def same_call(self, repeat_key: str, tool: str) -> str | None:
        """Return the id of the approval of the call that a new call repeats, or None."""

    async def take_back(
        self, approval_id: str, call: CallContext, services: PipelineServices
    ) -> None:
        """Withdraw a stored call whose caller was cancelled, unless others wait for it."""

    async def ending_of(self, call_id: str, principal_id: str) -> Envelope | EngineError | None:
        """Return the answer of a caller's stored call, an error with its state, or None."""


# -- the stage ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApprovedCall:
    """A call with consent, or that needs none."""

    permitted: PermittedCall
    consent: Consent | None = None
    """The consent to it, which is used up when the call starts."""


def require_readable(permitted: PermittedCall) -> None:
    """Raise InvalidParams if a call has more values than can be shown to a human."""
    count = 0
    left: list[JsonValue] = [permitted.arguments, permitted.request.context]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        count += 1
        if count + len(left) > MAX_READ_VALUES:
            raise InvalidParams(
                f"A human has to read this call, and it has over {MAX_READ_VALUES:,} values. Send "
                "fewer.",
                fields=["arguments"],
            )


async def approve(
    claimed: ClaimedCall, services: PipelineServices, call: CallContext
) -> ApprovedCall | Envelope:
    """Pass a call that needs no consent, or becomes a trial. Ask about any other call.

    Raises:
        EngineError: as `Asker.ask`.
        TypeError: the asker has failed, as in `with_consent`.
    """
    permitted, decision = claimed.permitted, claimed.permitted.decision
    if decision.verdict is Verdict.ALLOW:
        return ApprovedCall(permitted)
    plan = await plan_now(permitted, services.walls, services.sessions)
    if decision.wants_trial and can_be_tried(permitted, plan):
        call.request = replace(
            call.request, options=call.request.options.model_copy(update={"preview": True})
        )
        return ApprovedCall(permitted.with_request(call.request))
    answer = await services.asker.ask(claimed, plan, call, services)
    return answer if isinstance(answer, Envelope) else with_consent(permitted, answer)


def with_consent(permitted: PermittedCall, consent: object) -> ApprovedCall:
    """Return a call with the consent to it.

    Raises:
        TypeError: it is not a consent, or was given for another call.
    """
    if not isinstance(consent, Consent) or consent.permitted is not permitted:
        raise TypeError("The asker returned no consent to this call.")
    return ApprovedCall(permitted, consent)
