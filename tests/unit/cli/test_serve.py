"""`fumehood serve` for a person at a terminal."""

from __future__ import annotations

from fumehood import Config
from fumehood.cli.serve import in_foreground


def test_alerts_need_100_calls_in_the_foreground_unless_configured() -> None:
    config = in_foreground(Config())
    assert (config.alerts.min_calls, config.alerts.max_mean_ms) == (100, 500)
    configured = Config.model_validate({"alerts": {"min_calls": 20, "max_mean_ms": 9}})
    assert in_foreground(configured) == configured
