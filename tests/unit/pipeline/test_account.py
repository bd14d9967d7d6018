"""Account: exact decimal arithmetic on what was measured."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.envelope import UsageReport
from fumehood.core.errors import EndedBy
from fumehood.core.limits import Limits
from fumehood.core.usage import EstimatingCounter, Prices, TextKind
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.account import account
from fumehood.protocol import strict_json
from support.definitions import function_definition

PRICES = Prices(cpu_second=Decimal("0.10"), gb_second=Decimal("0.02"), currency="EUR")


def _outcome(**fields: Any) -> Outcome:
    return Outcome(EndedBy.OK, "none", **fields)


def _account(**fields: Any) -> UsageReport:
    values: dict[str, Any] = {
        "arguments_json": "",
        "data": {},
        "data_json": "",
        "tool": function_definition(cost_per_use="0.01"),
        "outcome": _outcome(),
        "limits": Limits(5, 5, 512, 1000),
        "processing_s": 2.0,
        "counter": EstimatingCounter(),
        "prices": Prices(),
    }
    return account(**{**values, **fields})


@pytest.mark.row("E3")
def test_cost_is_per_use_and_what_the_tool_reports() -> None:
    assert _account().cost == "0.010000"
    assert _account(outcome=_outcome(cost=Decimal("0.005"))).cost == "0.015000"


@pytest.mark.row("E3")
def test_resources_cost_what_they_were_priced_at() -> None:
    # 0.01 + 0.5 s × 0.10 + 0.5 GB × 2 s × 0.02
    report = _account(outcome=_outcome(cpu_ms=500.0), prices=PRICES)
    assert (report.cost, report.currency) == ("0.080000", "EUR")


@pytest.mark.row("E3")
def test_what_was_not_measured_or_not_limited_costs_nothing() -> None:
    assert _account(prices=PRICES, limits=Limits(5, 5, None, 10)).cost == "0.010000"
    assert _account(prices=PRICES, limits=None).cost == "0.010000"


@pytest.mark.row("E3")
def test_refused_call_costs_nothing() -> None:
    assert _account(outcome=None, prices=PRICES).cost == "0.000000"
    assert _account(tool=None, outcome=None).cost == "0.000000"


@pytest.mark.row("E3")
@given(st.decimals(0, 1000, places=6), st.decimals(0, 1000, places=6))
def test_sums_of_money_are_exact(per_use: Decimal, reported: Decimal) -> None:
    tool = function_definition(cost_per_use=str(per_use))
    assert Decimal(_account(tool=tool, outcome=_outcome(cost=reported)).cost) == per_use + reported


@pytest.mark.row("E2")
def test_tokens_are_counted_of_arguments_and_data() -> None:
    report = _account(arguments_json="x" * 7, data_json="x" * 8, outcome=_outcome(tokens_used=11))
    assert (report.input_tokens, report.output_tokens, report.tokens_used) == (2, 3, 11)
    assert report.estimated is True


@pytest.mark.row("E2")
def test_another_counter_can_be_plugged_in() -> None:
    class Words:
        estimated = False

        def count(self, characters: str, kind: TextKind) -> int:
            return 42 if kind is TextKind.JSON else 0

    report = _account(counter=Words())
    assert (report.input_tokens, report.output_tokens, report.estimated) == (42, 42, False)


FILE = {"filename": "plot.png", "content_type": "image/png", "size": 30_000}
CONTENT = "QUJD" * 10_000


def _tokens_of(data: dict[str, Any]) -> int:
    return _account(data=data, data_json=strict_json.dumps(data).decode()).output_tokens


@pytest.mark.row("E2", "E7")
@pytest.mark.parametrize("key", ["images", "files"])
def test_content_of_figures_and_files_counts_as_no_tokens(key: str) -> None:
    with_content = {"stdout": "hello", key: [{**FILE, "content_base64": CONTENT}, FILE]}
    without = {"stdout": "hello", key: [{**FILE, "content_base64": ""}, FILE]}
    assert _tokens_of(with_content) == _tokens_of(without)


@pytest.mark.row("E2", "E7")
@pytest.mark.parametrize(
    "data",
    [
        {"text": CONTENT},
        {"files": [{**FILE, "content_base64": "These are words, and a model reads them. " * 1000}]},
        {"files": [{"content_base64": CONTENT}]},
        {"files": {**FILE, "content_base64": CONTENT}},
    ],
    ids=["text", "no-base64", "no-file", "no-list"],
)
def test_what_only_looks_like_the_content_of_a_file_is_counted(data: dict[str, Any]) -> None:
    assert _tokens_of(data) > 10_000
