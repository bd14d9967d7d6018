"""The findings of `fumehood doctor` about the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from fumehood.cli.findings import Finding
from fumehood.cluster.ray_membership import probe
from fumehood.cluster.settings import ClusterSettings
from fumehood.config import Config
from fumehood.core.errors import SandboxUnavailable


def check(config: Config) -> Iterator[Finding]:
    """If a cluster is configured, yield one finding. The finding says whether the cluster can be
    reached, and whether it requires a token.
    """
    settings = config.of("cluster", ClusterSettings)
    if settings is None or settings.address is None:
        return
    if find_spec("ray") is None:
        found = "Ray is not installed, and the engine cannot start without it"
        yield Finding("cluster", "missing", found, "pip install 'PATH_OF_THE_CHECKOUT[cluster]'")
        return
    try:
        found, asks = probe(settings.address, allow_unauthenticated=settings.allow_unauthenticated)
    except SandboxUnavailable as error:
        found, _, remedy = error.message.partition(". ")
        yield Finding("cluster", "warning", found, f"{remedy}.")
        return
    if not asks and settings.allow_unauthenticated:
        words = f"{found} requires no token: anyone who can reach it can run code on every node"
        yield Finding("cluster", "warning", words, "Start all of Ray with RAY_AUTH_MODE=token.")
    else:
        means = "requires its token" if asks else "has no token, and listens on loopback only"
        yield Finding("cluster", "ok", f"{found} answers, and {means}")
