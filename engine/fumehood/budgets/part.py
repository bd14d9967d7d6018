"""Declaration of the part `budgets`, which adds budgets and rate limits to the engine."""

from __future__ import annotations

from fumehood.core.part import Part

PART = Part(
    name="budgets",
    settings="fumehood.budgets.settings:SETTINGS",
    enforces=frozenset({"rate_limit"}),
    policy={"budgets": "fumehood.budgets.settings:AllBudgets"},
    excesses=frozenset({"over_budget"}),
    in_engine="fumehood.budgets.in_engine:Spending",
)
