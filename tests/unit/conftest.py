"""Property tests never look at the clock, and leave no files behind."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")
