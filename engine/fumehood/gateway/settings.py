"""The operator's gateway settings, including lists of packages that programs may download.

Values only. Invariant: if a path does not name exactly one package, it matches no package in a
list.
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
"""A host (`api.example.org`) or its subdomains (`*.example.org`), with or without a port."""

NetworkHosts = Annotated[tuple[NetworkHost, ...], Field(min_length=1)]


_PAGES = ("simple", "pypi")
"""First path segments that are followed by a package name. *Source*: PEP 503; the API of PyPI."""

_WHEEL = re.compile(r"([^-/]+)-[^/]*\.whl(\.metadata)?")
_SOURCE = re.compile(r"([^/]+)-[^-/]+\.(tar\.gz|tar\.bz2|zip)(\.metadata)?")
"""File names of source packages; `_WHEEL` matches the file names of wheels. *Source*: PEP 427, 625,
658.
"""


class ListedPackages(BaseModel):
    """The packages that an index may serve. The list contains names of either Python or npm
    packages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if bool(self.python) is bool(self.npm):
            raise ValueError("needs one of `python` and `npm`, with package names")
        return self

    def has(self, target: str) -> bool:
        """Whether a request with this target concerns a package in the list."""
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
    """Return the name of the npm package to which a path belongs, including its scope if it has
    one. `parts` are the segments of the path. *Source*: npm, "package metadata".
    """
    first, *rest = parts
    return "/".join([first, *rest[:1]]) if first.startswith("@") and "/" not in first else first


def _plain(name: str) -> str:
    """Return a package's name in the normal form that package indexes compare. *Source*: PEP
    503.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


class GatewaySettings(BaseModel):
    """Settings of programs' network access. If no hosts and no indexes are set, programs have no
    network access.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[NetworkHost, ...] = ()
    """All hosts that programs may reach. Each call names the hosts that its program needs."""
    tunnels: tuple[NetworkHost, ...] = ()
    """Hosts whose TLS is passed through without decryption, for clients that pin certificates: only
    the host name is checked, and no secret is inserted."""
    indexes: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")], NetworkHosts] = Field(
        default_factory=dict
    )
    """Name of each package index → its hosts. Calls request the index `pypi` as `@pypi`. These
    hosts need not be in `hosts`."""
    packages: dict[str, ListedPackages] = Field(default_factory=dict)
    """Name of an index → the packages that programs may download from it. An index without an entry
    offers all its packages.
    """
    allowed_hosts: tuple[HostPattern, ...] = ()
    """Hosts whose addresses need not be public."""
    leave: Literal["engine", "node"] = "engine"
    """The machine that connects to the hosts for programs on a cluster's nodes. The engine holds
    the TLS session with the host in both cases, so a node sees no secret and no HTTPS content."""
    writes: Literal["ask", "deny", "allow"] = "ask"
    """What happens to a request that is not GET, HEAD or OPTIONS, if no rule of the policy
    decides."""
    max_requests: int = Field(default=1000, ge=1, le=1_000_000)
    """Maximum number of requests of one call."""
    max_mb: int = Field(default=1024, ge=1, le=1_000_000)
    """Maximum number of MB that one call may send and receive in total."""
    max_held_kb: int = Field(default=1024, ge=1, le=16 * 1024)
    """Maximum body size of a request that waits for approval, in KiB."""

    @model_validator(mode="after")
    def _lists_are_of_indexes(self) -> Self:
        if unknown := self.packages.keys() - self.indexes.keys():
            raise ValueError(f"packages: {min(unknown)} is not an index in gateway.indexes")
        return self


SETTINGS = {"gateway": Setting(GatewaySettings, GatewaySettings())}
