"""The context of one call: what is known of it so far, and what it holds.

Made once for each call, by `run` or by the resumption of an approval, and handed from stage to
stage. `build_envelope` and `record` read it when the call has ended. Invariant: it opens no gate.
What lets a call go on is the value of its stage (`PermittedCall`, `AdmittedCall`), never a field
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.approvals.store import StoredApproval
from fumehood.budgets.ledger import Reservation, taken_by
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.executors.handle import CallHandle
from fumehood.observe.trail import CallTrace
from fumehood.pipeline.claim import Claim
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall


@dataclass(slots=True)
class CallContext:
    """One call. An optional field is None until the stage that sets it has passed."""

    request: CallRequest
    trace: CallTrace
    handle: CallHandle
    approval: StoredApproval | None = None
    """The approval of a call that waited for a human and continues or ends now."""
    resolved: ResolvedCall | None = None
    validated: ValidatedCall | None = None
    claim: Claim | None = None
    """Held on its idempotency key until `settle`."""
    reservation: Reservation | None = None
    """Held in the budgets until `settle` or `release`."""
    plan: Plan | None = None
    """Known once the call holds its place in the sandbox."""
    queue_ms: float | None = None
    is_approved: bool = False
    """Whether it passed the stage `approve` in this run."""
    is_parked: bool = False
    """Whether it continues without its caller after a human's approval."""
    has_begun: bool = False
    """Whether it may have acted."""

    def release(self) -> None:
        """Give back the reservation: nothing was used."""
        if self.reservation is not None:
            self.reservation.release()

    async def settle(self, envelope: Envelope) -> Envelope:
        """Settle the budgets and store the answer under the call's key.

        Returns the caller's answer.
        """
        if self.reservation is not None:
            if self.has_begun:
                self.reservation.settle(taken_by(envelope.metadata.usage))
            else:
                self.release()
        if self.claim is None:
            return envelope
        return await self.claim.settle(envelope, acted=self.has_begun)
