"""The operator's settings of a cluster."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from fumehood.core.part import Setting


class ClusterSettings(BaseModel):
    """The Ray cluster on whose nodes this engine runs containers, instead of on its own machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str | None = Field(default=None, pattern=r"^(auto|[A-Za-z0-9_.:\[\]-]{1,255})$")
    """Address of the cluster's head (`HOST:PORT`), or `auto` for a head on this machine. None:
    there is no cluster, and the containers are on this machine."""
    lost_seconds: float = Field(default=60, ge=0, le=3600)
    """Seconds for which the sessions of a lost node wait for the node to return."""
    allow_unauthenticated: bool = False
    """Whether to use a cluster that others can reach but that lacks Ray's token authentication.
    Anyone who can reach its ports can run code on every node."""


SETTINGS = {"cluster": Setting(ClusterSettings, ClusterSettings())}
