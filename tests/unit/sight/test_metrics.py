"""Metrics: what is counted of calls, and that no caller can make the series many."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from fumehood import Config
from fumehood.core.errors import ERROR_CODES
from fumehood.engine_part import Kernel
from fumehood.observe.ended_call import UNKNOWN, EndedCall
from fumehood.observe.figures import Figure
from fumehood.observe.log import quiet_logger
from fumehood.sight.in_engine import UNDECLARED, Sight
from fumehood.sight.metrics import MAX_CODES, MAX_TOOLS, OTHER, CallMetrics, exposition
from fumehood.sight.settings import AlertSettings
from fumehood.storage.database import open_database
from fumehood.testing import ManualClock

pytestmark = pytest.mark.row("D5")


def samples(calls: CallMetrics, *figures: Figure) -> dict[tuple[str, tuple[Any, ...]], float]:
    """Every sample as Prometheus' own parser reads it, by its name and the values of its labels."""
    text, media_type = exposition(calls, figures)
    assert media_type.startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(text.decode())
    return {
        (s.name, tuple(s.labels[label] for label in sorted(s.labels))): s.value
        for family in families
        for s in family.samples
    }


def test_invented_external_tool_names_do_not_displace_real_tools() -> None:
    config = Config(alerts=AlertSettings(min_calls=1), external_tools={"Read": {}})
    with closing(open_database(None)) as database:
        sight = Sight(Kernel(config, database, ManualClock(), quiet_logger()))
    for number in range(MAX_TOOLS + 50):
        sight.on_call(EndedCall(f"external:made_up_{number}", "CANCELLED", 0))
    for tool in ("calculator", "external:Read"):
        sight.on_call(EndedCall(tool, "TIMEOUT", 1, is_fault=True))
    found = samples(sight.metrics)
    for tool in ("calculator", "external:Read"):
        assert found["fumehood_tool_calls_total", ("TIMEOUT", tool)] == 1
    assert found["fumehood_tool_calls_total", ("CANCELLED", UNDECLARED)] == MAX_TOOLS + 50
    firing = {one.tool for one in sight.alerts.look().alerts if one.firing}
    assert firing == {None, UNDECLARED, "calculator", "external:Read"}


def counted(*calls: EndedCall) -> CallMetrics:
    metrics = CallMetrics()
    for call in calls:
        metrics.add(call)
    return metrics


def test_calls_are_counted_by_tool_and_code() -> None:
    found = samples(
        counted(
            EndedCall("calculator", "OK", 0.004, ended_by="ok"),
            EndedCall("calculator", "OK", 0.2, retries=2, ended_by="ok"),
            EndedCall("calculator", "TIMEOUT", 7, is_fault=True, ended_by="wall_time"),
            EndedCall("send", "APPROVAL_DENIED", 0, approval_s=70),
        )
    )
    assert found["fumehood_tool_calls_total", ("OK", "calculator")] == 2
    assert found["fumehood_tool_calls_total", ("TIMEOUT", "calculator")] == 1
    assert found["fumehood_tool_calls_total", ("APPROVAL_DENIED", "send")] == 1
    assert found["fumehood_tool_call_retries_total", ("calculator",)] == 2
    assert found["fumehood_tool_call_duration_seconds_bucket", ("0.005", "calculator")] == 1
    assert found["fumehood_tool_call_duration_seconds_bucket", ("0.25", "calculator")] == 2
    assert found["fumehood_tool_call_duration_seconds_bucket", ("+Inf", "calculator")] == 3
    assert found["fumehood_tool_call_duration_seconds_sum", ("calculator",)] == pytest.approx(7.204)
    assert found["fumehood_sandbox_runs_total", ("wall_time",)] == 1
    assert found["fumehood_approval_wait_seconds_bucket", ("60.0",)] == 0
    assert found["fumehood_approval_wait_seconds_bucket", ("300.0",)] == 1


def test_number_of_metric_series_is_bounded() -> None:
    metrics = CallMetrics()
    for number in range(10_000):
        metrics.add(EndedCall(f"tool_{number}", "OK", 0.1))  # tools that come and go
        metrics.add(EndedCall("loud", f"CODE_{number}", 0.1, is_fault=True))
        metrics.add(EndedCall(None, "TOOL_NOT_FOUND", 0.1))
    found = samples(metrics)
    calls = {labels: n for (name, labels), n in found.items() if name.endswith("calls_total")}
    assert len({tool for _, tool in calls}) == MAX_TOOLS + 1
    assert len([code for code, tool in calls if tool == "loud"]) == MAX_CODES + 1
    assert sum(calls.values()) == 30_000
    assert calls["TOOL_NOT_FOUND", UNKNOWN] == 10_000
    assert calls["OK", OTHER] == 10_000 - (MAX_TOOLS - 2)


def test_every_engine_error_code_fits_its_own_series() -> None:
    assert len(ERROR_CODES) + 1 < MAX_CODES


@given(st.text(max_size=80))
def test_metric_label_round_trips(name: str) -> None:
    name = name.encode("utf-8", "replace").decode().replace("\r", "")
    found = samples(counted(EndedCall(name or "x", "OK", 0.1)))
    assert found["fumehood_tool_calls_total", ("OK", name or "x")] == 1


def test_figures_of_other_components_are_exported() -> None:
    found = samples(
        CallMetrics(),
        Figure("calls_running", "now", 3),
        Figure("cache_hits", "since the start", 5, kind="counter"),
        Figure("containers", "by state", {"warm": 1, "busy": 2}, "state"),
        Figure("budget_used_ratio", "none", {}, "budget"),
    )
    assert found["fumehood_calls_running", ()] == 3
    assert found["fumehood_cache_hits_total", ()] == 5
    assert found["fumehood_containers", ("busy",)] == 2
    assert found["process_resident_memory_bytes", ()] > 1 << 20
