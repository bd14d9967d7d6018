"""Voices: who could say yes now, and whose yes counts.

Host side, below the desk, which tells it who approves at this moment. Everybody who counts asks
here: the quorum, what people are shown, and a new call that would have to wait. Invariants: a yes
counts only as long as whoever said it may approve; nothing waits for people who are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fumehood.approvals import refusals
from fumehood.approvals.model import Approval, ApprovalState
from fumehood.approvals.remembered import may_decide
from fumehood.policy.model import Decision


class ApprovalVoices:
    """Who may approve, as it is now."""

    def __init__(
        self,
        who_approves: Callable[[], frozenset[str]],
        cure: Callable[[], str],
        *,
        allow_self_approval: bool,
    ) -> None:
        self._who_approves = who_approves
        self._cure = cure
        self._allow_self_approval = allow_self_approval

    def counts(self, principal_id: str) -> bool:
        """Whether a word of this principal is worth something still."""
        return principal_id in self._who_approves()

    def cure_of_nobody(self) -> str | None:
        """What the operator has to do where nobody could say yes; None where somebody could."""
        return None if self._who_approves() else self._cure()

    def require_enough(self, tool: str, decision: Decision, principal_id: str) -> None:
        """Raises RequiresHumanApproval where a call that asks would wait for nobody."""
        if (cure := self.cure_of_nobody()) is not None:
            raise refusals.nobody_to_ask(tool, cure)
        lack = self._lack(decision.approvers, decision.quorum, principal_id)
        if lack is not None:
            raise refusals.too_few_to_ask(tool, lack)

    def shown(self, approval: Approval) -> Approval:
        """With whose yes counts, and why nobody could complete it, where that is so."""
        if approval.state is not ApprovalState.PENDING:
            return approval.model_copy(update={"counted": tuple(sorted(approval.yes_votes))})
        counted = tuple(sorted(one for one in approval.yes_votes if self.counts(one)))
        lack = self._lack(approval.approvers, approval.quorum, approval.principal_id)
        stuck = None if lack is None else f"Nobody is left who could complete it: {lack}."
        return approval.model_copy(update={"counted": counted, "stuck": stuck})

    def _lack(self, approvers: Sequence[str], quorum: int, principal_id: str) -> str | None:
        """What is missing for the quorum of those who are wanted; None: nothing."""
        able = {
            one
            for one in self._who_approves()
            if may_decide(approvers, one) and (self._allow_self_approval or one != principal_id)
        }
        if len(able) >= quorum:
            return None
        if not approvers:
            return f"{quorum} have to say yes, and {len(able)} could"
        gone = [name for name in approvers if not any(may_decide([name], one) for one in able)]
        what = f"{quorum} of {', '.join(approvers)} have to say yes"
        if not gone:
            return f"{what}, and {len(able)} could"
        are = "is" if len(gone) == 1 else "are"
        return f"{what}, and {', '.join(gone)} {are} not among those who can approve it"
