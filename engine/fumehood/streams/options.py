"""The call option that the part `streams` adds."""

from __future__ import annotations

from fumehood.core.part import CallOption

ENABLE_STREAMING = CallOption(name="enable_streaming", type=bool, default=True, decides=False)

OPTIONS = (ENABLE_STREAMING,)
