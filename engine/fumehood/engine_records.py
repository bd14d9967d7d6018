"""The engine's records: what can be looked up of calls that are over, and what they took.

Host side, part of the composition root. Above it `engine_composition`, below it `gates` and
`store`. Invariant: a question about one principal is answered with nothing of another's.
"""

from __future__ import annotations

from fumehood.budgets.ledger import Budgets
from fumehood.budgets.model import (
    MAX_STANDINGS,
    AllUsageQuery,
    BudgetStanding,
    UsageQuery,
    UsageTable,
)
from fumehood.budgets.usage import UsageLog
from fumehood.core.call_log import CallPage, CallQuery, CallRecord
from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.storage.calls import CallLog, UnknownCursor


class EngineRecords:
    """The log of calls, and their sums beside the budgets. Any question may raise ReadFailed."""

    def __init__(self, calls: CallLog, usage: UsageLog, budgets: Budgets) -> None:
        self._calls = calls
        self._usage = usage
        self._budgets = budgets

    async def page(self, query: CallQuery, principal: Principal) -> CallPage:
        """Some calls of one principal. Raises ResourceNotFound: there is no such cursor."""
        try:
            return await self._calls.page(principal.id, query)
        except UnknownCursor:
            raise ResourceNotFound("There is no such cursor. Begin again without one.") from None

    async def find(self, call_id: str, principal: Principal) -> CallRecord:
        """One call of one principal. Raises ResourceNotFound: it has none such."""
        record = await self._calls.get(principal.id, call_id)
        if record is None:
            raise ResourceNotFound("There is no such call of yours in the log. Do not retry.")
        return record

    async def usage_of(self, principal: Principal, query: UsageQuery) -> UsageTable:
        """What one principal's calls took, with the budgets that limit it."""
        table = await self._usage.table(query, principal.id)
        return _with_budgets(table, self._budgets.standings(principal))

    async def all_usage(self, query: AllUsageQuery) -> UsageTable:
        """What everybody's calls took, or one principal's, with all budgets."""
        table = await self._usage.table(query, query.principal)
        return _with_budgets(table, self._budgets.standings())


def _with_budgets(table: UsageTable, standings: list[BudgetStanding]) -> UsageTable:
    has_more = table.has_more or len(standings) > MAX_STANDINGS
    shown = tuple(standings[:MAX_STANDINGS])
    return table.model_copy(update={"budgets": shown, "has_more": has_more})
