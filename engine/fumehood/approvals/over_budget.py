"""Over budget: what approvers are told of the budget that a call would exceed.

Host side, pure, used where a call is asked about: `approve`, an edit, and a call that is asked
about again. Invariant: whoever is to say yes to more sees whose budget it is, how much of it is
left and when it resets, with the figures of `QUOTA_EXCEEDED`.
"""

from __future__ import annotations

from fumehood.budgets.ledger import details_of
from fumehood.budgets.model import Exceeded, Unit
from fumehood.core.json_types import JsonObject
from fumehood.policy.model import Decision


def reason_with_budget(decision: Decision, exceeded: Exceeded | None) -> str | None:
    """The rule's reason, and the budget in words."""
    if exceeded is None:
        return decision.reason
    words = _words(exceeded)
    return f"{decision.reason} {words}" if decision.reason else words


def budget_record(exceeded: Exceeded | None) -> JsonObject | None:
    """The budget as the record keeps it, as it was when somebody was asked."""
    if exceeded is None:
        return None
    return {**details_of(exceeded), "needed": exceeded.needed, "subject": exceeded.subject.parts}


def _words(exceeded: Exceeded) -> str:
    parts = exceeded.subject.parts
    whose = ", ".join(f"{name} {value}" for name, value in parts.items()) or "everybody together"
    what = "(money)" if exceeded.unit is Unit.MONEY else exceeded.unit.value
    resets_at = details_of(exceeded)["resets_at"]
    when = "it does not reset" if resets_at is None else f"it resets at {resets_at}"
    return (
        f"Over budget: {exceeded.budget} of {whose} had {exceeded.left} of {exceeded.limit} {what} "
        f"left when this was asked, the call needs {exceeded.needed}, and {when}."
    )
