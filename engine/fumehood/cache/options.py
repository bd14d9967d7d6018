"""The call option that the part `cache` adds."""

from __future__ import annotations

from fumehood.core.part import CallOption

ENABLE_CACHE = CallOption(
    name="enable_cache", type=bool, default=True, decides=False, inherited=True
)

OPTIONS = (ENABLE_CACHE,)
