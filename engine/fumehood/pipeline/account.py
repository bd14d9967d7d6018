"""Account: what the call cost, in tokens and in money.

Ninth stage. Pure arithmetic on what was measured; `budgets/ledger` counts it. Money is decimal.
"""

from __future__ import annotations

from decimal import Decimal

from fumehood.core.envelope import UsageReport
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.returned_file import without_contents
from fumehood.core.tool import ToolDefinition
from fumehood.core.usage import Prices, TextKind, TokenCounter, money
from fumehood.executors.outcome import Outcome
from fumehood.protocol import strict_json


def account(
    *,
    arguments_json: str,
    data: JsonObject,
    data_json: str,
    tool: ToolDefinition | None,
    outcome: Outcome | None,
    limits: Limits | None,
    processing_s: float,
    counter: TokenCounter,
    prices: Prices,
) -> UsageReport:
    """The usage report. What did not run costs nothing: `outcome` is None for refusals."""
    cost = Decimal(0)
    if tool is not None and outcome is not None:
        cost = tool.cost_per_use + outcome.cost + _resources(outcome, limits, processing_s, prices)
    return UsageReport(
        input_tokens=counter.count(arguments_json, TextKind.JSON),
        output_tokens=counter.count(_without_files(data, data_json), TextKind.JSON),
        estimated=counter.estimated,
        tokens_used=outcome.tokens_used if outcome is not None else 0,
        cost=money(cost),
        currency=prices.currency,
    )


def _without_files(data: JsonObject, data_json: str) -> str:
    """The data as JSON, without the content of figures and files: no model reads base64."""
    if not data.get("images") and not data.get("files"):
        return data_json
    lists = {key: without_contents(data[key]) for key in ("images", "files") if key in data}
    return strict_json.dumps({**data, **lists}).decode()


def _resources(
    outcome: Outcome, limits: Limits | None, processing_s: float, prices: Prices
) -> Decimal:
    """CPU as measured; memory as reserved (the limit) for as long as it was held."""
    cost = Decimal(0)
    if prices.cpu_second and outcome.cpu_ms is not None:
        cost += prices.cpu_second * Decimal(repr(outcome.cpu_ms)) / 1000
    if prices.gb_second and limits is not None and limits.memory_mb is not None:
        cost += prices.gb_second * Decimal(limits.memory_mb) / 1024 * Decimal(repr(processing_s))
    return cost
