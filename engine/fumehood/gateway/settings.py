"""The operator's settings of the gateway, with the packages of an index that programs may get.

Values only. Invariant: a path that cannot be read as one package's is none's, and refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from fumehood.core.hosts import network_pattern
from fumehood.core.part import Setting
from fumehood.registry.secrets import HostPattern

NetworkHost = Annotated[str, Field(max_length=300), AfterValidator(network_pattern)]
"""A host (`api.example.org`), or all below one (`*.example.org`), with or without a port."""

NetworkHosts = Annotated[tuple[NetworkHost, ...], Field(min_length=1)]


_PAGES = ("simple", "pypi")
"""First parts of paths whose second part is a name. *Source*: PEP 503; the Python index's API."""

_WHEEL = re.compile(r"([^-/]+)-[^/]*\.whl(\.metadata)?")
_SOURCE = re.compile(r"([^/]+)-[^-/]+\.(tar\.gz|tar\.bz2|zip)(\.metadata)?")
"""Names of files. *Source*: PEP 427, 625 and 658."""


class ListedPackages(BaseModel):
    """Packages of an index, which is one of these kinds: they differ in what a path means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if bool(self.python) is bool(self.npm):
            raise ValueError("needs one of `python` and `npm`, with names of packages")
        return self

    def has(self, target: str) -> bool:
        """Whether a request's path is that of a listed package."""
        path = target.partition("?")[0].removeprefix("/")
        parts = [unquote(part) for part in path.split("/")]
        if self.npm:
            return _of_npm(parts) in self.npm
        return _plain(_of_python(parts)) in map(_plain, self.python)


def _of_python(parts: list[str]) -> str:
    if parts[0] in _PAGES:
        return parts[1] if len(parts) > 1 else ""
    file = _WHEEL.fullmatch(parts[-1]) or _SOURCE.fullmatch(parts[-1])
    return file[1] if file is not None else ""


def _of_npm(parts: list[str]) -> str:
    """The name of a package, or of a scope and a package. *Source*: npm, "package metadata"."""
    first, *rest = parts
    return "/".join([first, *rest[:1]]) if first.startswith("@") and "/" not in first else first


def _plain(name: str) -> str:
    """A name as indexes compare it. *Source*: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


class GatewaySettings(BaseModel):
    """What programs may reach. Without hosts they have no network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[NetworkHost, ...] = ()
    """The most that a program gets. Each call names those that it needs."""
    tunnels: tuple[NetworkHost, ...] = ()
    """Those of them whose TLS passes through unopened, for clients that pin certificates: only the
    host's name is judged, and no secret is put in."""
    indexes: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")], NetworkHosts] = Field(
        default_factory=dict
    )
    """Package indexes by name, with their hosts: `pypi` is what programs ask for as `@pypi`. They
    need not be in `hosts`."""
    packages: dict[str, ListedPackages] = Field(default_factory=dict)
    """Those packages of an index that programs may get, by the index's name; default: all."""
    allowed_hosts: tuple[HostPattern, ...] = ()
    """Those of them that may have addresses that are not public."""
    leave: Literal["engine", "node"] = "engine"
    """From which machine requests of programs on a cluster's nodes leave. TLS with the host is the
    engine's in both cases, so a node sees no secret and no content of HTTPS."""
    writes: Literal["ask", "deny", "allow"] = "ask"
    """What happens to a request that is not GET, HEAD or OPTIONS, if no rule of the policy
    decides."""
    max_requests: int = Field(default=1000, ge=1, le=1_000_000)
    """Maximum number of requests of one call."""
    max_mb: int = Field(default=1024, ge=1, le=1_000_000)
    """Maximum number of MB that one call may send and receive, together."""
    max_held_kb: int = Field(default=1024, ge=1, le=16 * 1024)
    """Longest body of a request that waits for approval, in KiB."""

    @model_validator(mode="after")
    def _lists_are_of_indexes(self) -> Self:
        if unknown := self.packages.keys() - self.indexes.keys():
            raise ValueError(f"packages: {min(unknown)} is no index (gateway.indexes)")
        return self


SETTINGS = {"gateway": Setting(GatewaySettings, GatewaySettings())}
