"""Eligibility: who can approve now, whose approval counts, and what authority a caller still has.

Host side. Reads the current authority from `identity`. This module is used when a quorum is
counted, when an approval is shown, and when a call requests approval or starts. Invariants: an
approval counts only while its approver may still approve; no call waits for approvers who do not
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from fumehood.approvals import refusals
from fumehood.approvals.model import Approval, ApprovalState, StoredApproval
from fumehood.core.identity import Principal, Scope
from fumehood.identity.identities import Identities
from fumehood.policy.model import Decision


class Eligibility:
    """Determines which principals of one engine can approve calls now. Also determines the current
    authority of a stored call's caller.

    `others` are ids of further principals that can approve, such as the principal for decisions
    that arrive through the webhook.
    """

    def __init__(
        self,
        identities: Identities,
        *,
        others: frozenset[str],
        allow_self_approval: bool,
        now: Callable[[], datetime],
    ) -> None:
        self.allow_self_approval = allow_self_approval
        self._identities = identities
        self._others = others
        self._now = now

    def approver_ids(self) -> frozenset[str]:
        """Return the ids of all principals that can approve now."""
        now = self._now()
        known, tokens = self._identities.approvers.current(), self._identities.tokens
        approvers = {one.principal.id for one in known if Scope.APPROVE in one.scopes}
        holders = {
            one.principal_id
            for one in tokens.all()
            if Scope.APPROVE in one.scopes and tokens.principal_of_id(one.id, now)
        }
        return frozenset(approvers | holders | self._others)

    def counts(self, principal_id: str) -> bool:
        """Return whether decisions of this principal count now. They count only while the principal
        may approve.
        """
        return principal_id in self.approver_ids()

    def remedy_without_approvers(self) -> str | None:
        """Return a clause that tells the operator how to add an approver. Return None if there
        already is an approver.
        """
        return None if self.approver_ids() else self._identities.approvers.cure

    def require_enough(self, tool: str, decision: Decision, principal_id: str) -> None:
        """Check that there are enough approvers for a new call.

        `tool` is the tool's name, `decision` the policy's decision on the call, and `principal_id`
        the caller.

        Raises:
            RequiresHumanApproval: there are too few approvers for the quorum of the call.
        """
        if (remedy := self.remedy_without_approvers()) is not None:
            raise refusals.no_approvers(tool, remedy)
        lack = self._lack(decision.approvers, decision.quorum, principal_id)
        if lack is not None:
            raise refusals.too_few_approvers(tool, lack)

    def shown(self, approval: Approval) -> Approval:
        """Return a copy of the approval with two fields set that depend on who can approve now.

        `counted` lists the approvers whose approval counts. `stuck` is a text that explains why the
        quorum cannot be reached, or None if it can be reached.
        """
        if approval.state is not ApprovalState.PENDING:
            return approval.model_copy(update={"counted": tuple(sorted(approval.yes_votes))})
        counted = tuple(sorted(one for one in approval.yes_votes if self.counts(one)))
        lack = self._lack(approval.approvers, approval.quorum, approval.principal_id)
        stuck = None if lack is None else f"The approval cannot be completed: {lack}."
        return approval.model_copy(update={"counted": counted, "stuck": stuck})

    def caller_of(self, stored: StoredApproval) -> Principal | None:
        """Return the caller of a stored call with the authority that the caller has now.

        Return None if the caller's token is no longer valid.
        """
        principal_id, request = stored.approval.principal_id, stored.request
        return self._identities.present(
            principal_id, request.token_id, self._now(), is_program=request.is_program
        )

    def _lack(self, approvers: Sequence[str], quorum: int, principal_id: str) -> str | None:
        """Return a text that explains why the quorum of a call cannot be reached, or None if it can
        be reached.

        `approvers` are the names of the approvers in the policy rules. `principal_id` is the
        caller.
        """
        able = {
            one
            for one in self.approver_ids()
            if may_decide(approvers, one) and (self.allow_self_approval or one != principal_id)
        }
        if len(able) >= quorum:
            return None
        if not approvers:
            return f"it needs {_votes(quorum)}, but only {len(able)} can approve"
        gone = [name for name in approvers if not any(may_decide([name], one) for one in able)]
        what = f"it needs {_votes(quorum)} of {', '.join(approvers)}"
        if not gone:
            return f"{what}, but only {len(able)} of them can approve"
        return f"{what}, but {', '.join(gone)} cannot approve it"


def _votes(quorum: int) -> str:
    return "1 approval" if quorum == 1 else f"{quorum} approvals"


def may_decide(approvers: Sequence[str], principal_id: str) -> bool:
    """Return whether a principal is among the approvers of a call.

    `approvers` are the names of the approvers in the policy rules. If there are none, the result is
    True for every principal.
    """
    names = (principal_id, principal_id.removeprefix("approver:"))
    return not approvers or any(name in approvers for name in names)
