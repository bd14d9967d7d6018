"""Alerts: the mission's five thresholds over a window, told once when they fire and when not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

from fumehood.core.status import Alert
from fumehood.observe.ended_call import EndedCall
from fumehood.observe.log import quiet_logger
from fumehood.sight import alerts
from fumehood.sight.alerts import Alerts
from fumehood.sight.metrics import MAX_TOOLS
from fumehood.sight.settings import AlertSettings

pytestmark = pytest.mark.row("D5")

START = datetime(2026, 1, 1, tzinfo=UTC)


class Watched:
    """Alerts with a clock of the test's own."""

    def __init__(self, **settings: Any) -> None:
        self.time = 1000.0
        self.alerts = Alerts(
            AlertSettings(**settings),
            lambda: self.time,
            lambda: START + timedelta(seconds=self.time),
            quiet_logger(),
        )

    def calls(self, number: int, code: str = "OK", seconds: float = 0.01, **more: Any) -> None:
        for _ in range(number):
            self.alerts.add(
                EndedCall(
                    more.get("tool", "t"),
                    code,
                    seconds,
                    **{name: value for name, value in more.items() if name != "tool"},
                )
            )

    def firing(self, tool: str | None = None) -> set[str]:
        return {a.name for a in self.alerts.look().alerts if a.firing and a.tool == tool}

    def told(self) -> list[tuple[str, str | None, bool]]:
        """What would have been sent since the last time."""
        owed: list[Alert] = self.alerts._owed
        told = [(alert.name, alert.tool, alert.firing) for alert in owed]
        owed.clear()
        return told


FAILED = {"code": "EXECUTION_ERROR", "is_fault": True}
CROSSED = [
    ("success_rate", {"code": "PERMISSION_DENIED"}, {"success_rate"}),
    ("error_rate", FAILED, {"success_rate", "error_rate"}),
    ("mean_duration", {"seconds": 9.0}, {"mean_duration"}),
    ("retry_rate", {"retries": 2}, {"retry_rate"}),
]


@pytest.mark.parametrize(("name", "bad", "fires"), CROSSED, ids=[row[0] for row in CROSSED])
def test_crossed_threshold_fires_its_alert_only(
    name: str, bad: dict[str, Any], fires: set[str]
) -> None:
    at_it = Watched()
    at_it.calls(95)
    at_it.calls(5, **(bad if name != "mean_duration" else {"seconds": 9.8}))
    allowed = at_it.firing() - {"p99_duration"}
    at_it.calls(1, **bad)
    assert allowed == set()
    assert at_it.firing() - {"p99_duration"} == fires


def test_p99_fires_when_more_than_one_call_in_a_hundred_is_slow() -> None:
    watched = Watched()
    watched.calls(198)
    watched.calls(2, seconds=2.5)
    assert watched.firing() == set()
    watched.calls(1, seconds=2.5)
    assert watched.firing() == {"p99_duration"}


def test_alerts_need_a_minimum_number_of_calls() -> None:
    watched = Watched()
    watched.calls(19, **FAILED)
    assert watched.firing() == set()
    watched.calls(1, **FAILED)
    assert watched.firing() == {"success_rate", "error_rate"}


def test_alert_is_reported_once_and_resolved_once() -> None:
    watched = Watched(per_tool=False)
    watched.calls(20, **FAILED)
    for _ in range(3):
        watched.firing()
        watched.time += 5
    assert watched.told() == [("success_rate", None, True), ("error_rate", None, True)]
    watched.calls(2000)
    for _ in range(3):
        assert watched.firing() == set()
    assert watched.told() == [("success_rate", None, False), ("error_rate", None, False)]


@pytest.mark.anyio
async def test_alert_that_could_not_be_stored_is_reported_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alerts, "LOOK_S", 0.0)
    watched = Watched(per_tool=False)
    watched.calls(20, **FAILED)
    attempts: list[str] = []
    all_told = anyio.Event()

    async def tell(alert: Alert) -> None:
        attempts.append(alert.name)
        if len(attempts) == 1:
            raise OSError("the disk is full")
        if alert.name == "error_rate":
            all_told.set()

    async with anyio.create_task_group() as group:
        group.start_soon(watched.alerts.watch, tell)
        with anyio.fail_after(120):
            await all_told.wait()
        group.cancel_scope.cancel()
    assert attempts == ["success_rate", "success_rate", "error_rate"]


def test_alert_resolves_if_calls_stop() -> None:
    watched = Watched(window_seconds=60)
    watched.calls(20, **FAILED)
    assert watched.firing("t") == watched.firing() == {"success_rate", "error_rate"}
    watched.time += 50
    watched.calls(1, **FAILED)
    assert watched.firing() == {"success_rate", "error_rate"}
    watched.time += 61
    assert watched.firing() == watched.firing("t") == set()
    assert len(watched.told()) == 8
    assert {a.value for a in watched.alerts.look().alerts} == {None}


def test_tool_that_fails_among_many_calls_of_others_is_named() -> None:
    watched = Watched()
    watched.calls(1000)
    watched.calls(30, tool="broken", **FAILED)
    assert watched.firing() == set()
    assert watched.firing("broken") == {"success_rate", "error_rate"}
    (alert, _) = [a for a in watched.alerts.look().alerts if a.tool == "broken"]
    assert alert.since == START + timedelta(seconds=1000)
    assert alert.message == "0.0% of the calls succeeded (at least 95.0%)."


def test_number_of_tools_with_a_window_is_bounded() -> None:
    watched = Watched()
    for number in range(10_000):
        watched.calls(1, tool=f"tool_{number}")
    assert len(watched.alerts._windows) == MAX_TOOLS + 1


def test_disabled_alerts_count_nothing() -> None:
    watched = Watched(enabled=False)
    watched.calls(100, **FAILED)
    assert watched.firing() == set()
    assert watched.alerts.look().enabled is False
