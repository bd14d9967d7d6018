"""The operator's settings of the result cache."""

from __future__ import annotations

from pydantic import Field

from fumehood.core.part import Setting
from fumehood.core.value import Value


class CacheSettings(Value):
    """The operator's settings of the result cache: how long it keeps answers, and how much memory
    it uses.
    """

    ttl_seconds: int = Field(default=300, ge=1, le=30 * 86_400)
    """Seconds for which an answer is kept if the tool's definition has no `cache_ttl`."""
    max_mb: int = Field(default=64, ge=0, le=1_000_000)
    """Maximum total size of all answers in MB. 0 disables the cache."""
    max_entry_kb: int = Field(default=1024, ge=1, le=1_000_000)


SETTINGS = {"cache": Setting(CacheSettings, CacheSettings())}
