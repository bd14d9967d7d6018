"""Budgets and rate limits as a part of one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

from fumehood.budgets.gates import BudgetGate, RateGate
from fumehood.budgets.ledger import Budgets
from fumehood.budgets.limiter import RateLimits
from fumehood.budgets.settings import BudgetRule
from fumehood.budgets.store import CounterTable
from fumehood.engine_part import EnginePart, Kernel
from fumehood.observe.figures import Figure
from fumehood.observe.log import log_fault
from fumehood.pipeline.gate import Gate
from fumehood.storage.errors import StoreError, understood
from fumehood.storage.retention import retention

if TYPE_CHECKING:
    from fumehood.compose import Composition


class Spending(EnginePart):
    """The budgets and the rate limits of one engine, in the attributes `budgets` and `rates`.

    The constructor and the first call of `use_policy` read counters from the database.

    Raises:
        DamagedState: the counters in the database are invalid.
        ReadFailed: the counters cannot be read.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        table = CounterTable(kernel.database)
        self._configured: tuple[BudgetRule, ...] = kernel.config.of("budgets", tuple) or ()
        limits = kernel.config.of("rate_limits", tuple) or ()
        with understood("counters of budgets"):
            self.budgets = Budgets(self._configured, table, kernel.clock.now)
        with understood("rate limits"):
            self.rates = RateLimits(limits, table, kernel.clock)
        self._has_policy = False

    def gates(self) -> Iterator[Gate]:
        """Yield the gate of the rate limits, then the gate of the budgets."""
        yield RateGate(self.rates)
        yield BudgetGate(self.budgets, self.kernel.counter, self.kernel.clock.now)

    def use_policy(self, values: Mapping[str, Any], tools: Collection[str]) -> None:
        """Use the budgets in the policy file, and log a warning for each budget that covers no
        registered tool. `values` is the content of the file, and `tools` are the names of the
        registered tools.

        A budget from the engine's configuration stays in use, unless the policy file has a budget
        with the same name. The first call of this method also reads the budgets' counters from the
        database. It also logs a warning for each rate limit that covers no registered tool.
        """
        log = self.kernel.log
        more: tuple[BudgetRule, ...] = values.get("budgets", ())
        names = {budget.name for budget in more}
        self.budgets.replace([*(b for b in self._configured if b.name not in names), *more])
        for name in self.budgets.unmatched(tools):
            log.warning("budget.covers_no_tool", budget=name)
        if self._has_policy:
            return
        self._has_policy = True
        for pattern in self.rates.unmatched(tools):
            log.warning("rate_limit.covers_no_tool", rate_limit=pattern)
        with understood("counters of budgets"):
            self.budgets.load()

    def figures(self) -> Iterator[Figure]:
        """Yield the used fraction of each budget as a metric. If a budget has several counters, the
        one with the largest fraction counts.
        """
        used: dict[str, float] = {}
        for one in self.budgets.standings():
            limit, taken = Decimal(one.limit), Decimal(one.spent) + Decimal(one.held)
            ratio = float(taken / limit) if limit else 1.0
            used[one.budget] = max(ratio, used.get(one.budget, 0.0))
        yield Figure("budget_used_ratio", "The part of a budget that is used, of its owner who has "
                     "used most.", used, "budget")  # fmt: skip

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        """While the engine runs, delete expired counters regularly. When the engine ends, store
        what has really been spent of each budget.
        """
        log, now = self.kernel.log, self.kernel.clock.now
        on_fault = partial(log_fault, log, "state.retention_failed")
        async with AsyncExitStack() as stack:
            # Otherwise, amounts that were only reserved would count as spent after a restart.
            stack.push_async_callback(self._give_back)
            stack.callback(self.rates.write)
            for prune in (self.budgets.prune, self.rates.prune):
                await stack.enter_async_context(retention(prune, now, on_fault))
            yield

    async def _give_back(self) -> None:
        """Lower the stored marks of all budgets to the spent amounts. A mark is the amount that
        counts as spent after a restart. If this fails, log the error.
        """
        try:
            await self.budgets.close()
        except StoreError as fault:
            reason = str(fault)
            self.kernel.log.error("budgets.unavailable", reason=reason)  # noqa: TRY400
