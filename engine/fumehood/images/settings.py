"""The operator's settings for packages that callers may request."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.part import Setting


class PackageSettings(BaseModel):
    """Which packages of the Python index callers may request for sessions and calls."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: tuple[str, ...] = ()
    """Names of the allowed packages; `"*"` allows all. Their dependencies are allowed as well."""
    max_mb: int = Field(default=10_240, ge=1, le=10_000_000)
    """Maximum total size of all layers of packages, and also of all downloaded wheels. Above this
    size, the oldest unused layers or wheels are removed.
    """


SETTINGS = {"packages": Setting(PackageSettings, PackageSettings())}
