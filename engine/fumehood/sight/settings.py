"""The operator's settings of alerts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from fumehood.core.part import Setting
from fumehood.core.value import Value

if TYPE_CHECKING:
    from fumehood.config import Config


class AlertSettings(Value):
    """Thresholds for alerts about calls that fail or take long.

    Each threshold is checked for all calls of the engine, and separately for the calls of each
    tool. Only the calls of the last `window_seconds` count, and only if there are at least
    `min_calls` of them.
    """

    enabled: bool = True
    window_seconds: float = Field(default=300, ge=10, le=86_400)
    min_calls: int = Field(default=20, ge=1, le=1_000_000)
    min_success_rate: float = Field(default=0.95, ge=0, le=1)
    max_mean_ms: float = Field(default=500, gt=0, le=86_400_000)
    max_p99_ms: float = Field(default=2000, gt=0, le=86_400_000)
    max_error_rate: float = Field(default=0.05, ge=0, le=1)
    max_retry_rate: float = Field(default=0.1, ge=0, le=100)
    per_tool: bool = True
    webhook: bool = True
    """Whether alerts are also sent to the webhook, if one is configured."""


SETTINGS = {"alerts": Setting(AlertSettings, AlertSettings())}

MIN_CALLS_IN_FOREGROUND = 100
"""`alerts.min_calls` while a person watches the log on a terminal."""


def in_foreground(config: Config) -> Config:
    """Raise the minimum number of calls for an alert, for an engine in the foreground. Return the
    changed configuration.

    If the operator has configured this number, or there are no settings for alerts, return `config`
    unchanged.
    """
    alerts = config.of("alerts", AlertSettings)
    if alerts is None or "min_calls" in alerts.model_fields_set:
        return config
    # An engine in the foreground has too few calls for meaningful rates.
    raised = alerts.model_copy(update={"min_calls": MIN_CALLS_IN_FOREGROUND})
    return config.model_copy(update={"alerts": raised})
