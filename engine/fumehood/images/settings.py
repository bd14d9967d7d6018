"""The operator's settings for the packages that callers may ask for."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.part import Setting


class PackageSettings(BaseModel):
    """The operator's settings for additional Python packages, which callers can request for a
    session or a call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: tuple[str, ...] = ()
    """The names of the allowed packages, or `"*"` for all. Their dependencies are allowed too."""
    max_mb: int = Field(default=10_240, ge=1, le=10_000_000)
    """Maximum total size in MB of all layers of packages. The same maximum applies to all
    downloaded wheels. Above it, the oldest unused layers or wheels are removed.
    """


SETTINGS = {"packages": Setting(PackageSettings, PackageSettings())}
