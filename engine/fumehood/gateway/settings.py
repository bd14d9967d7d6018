"""The operator's settings of the gateway, including lists of packages that programs may download.

Values only. Invariant: a path that does not name exactly one package matches no package in a list.
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
"""A host (`api.example.org`), or all its subdomains (`*.example.org`), with or without a port."""

NetworkHosts = Annotated[tuple[NetworkHost, ...], Field(min_length=1)]


_PAGES = ("simple", "pypi")
"""The first segments of those paths whose second segment is the name of a Python package. *Source*:
PEP 503; the API of PyPI.
"""

_WHEEL = re.compile(r"([^-/]+)-[^/]*\.whl(\.metadata)?")
_SOURCE = re.compile(r"([^/]+)-[^-/]+\.(tar\.gz|tar\.bz2|zip)(\.metadata)?")
"""Matches the file name of a source package. `_WHEEL` matches the file name of a wheel. *Source*:
PEP 427, 625, 658.
"""


class ListedPackages(BaseModel):
    """The packages that programs may download from one index. Either `python` or `npm` contains
    names, never both.
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
        """Whether a request for `target`, a path with an optional query, concerns a package in the
        list.
        """
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
    """Return the name of the npm package to which a path belongs, including the scope if there is
    one.

    `parts` are the segments of the path. *Source*: npm, "package metadata".
    """
    first, *rest = parts
    return "/".join([first, *rest[:1]]) if first.startswith("@") and "/" not in first else first


def _plain(name: str) -> str:
    """Return the name of a Python package in its normal form, which is the same for all spellings
    of the name. *Source*: PEP 503.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


class GatewaySettings(BaseModel):
    """The operator's settings for the network access of programs. Without `hosts` and `indexes`,
    programs have no network access.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[NetworkHost, ...] = ()
    """All hosts that programs may reach. Each call names the hosts that its program needs."""
    tunnels: tuple[NetworkHost, ...] = ()
    """Hosts whose TLS connections are passed through without decryption, for clients that pin
    certificates. For these, only the name of the host is checked, and no secret is inserted.
    """
    indexes: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$")], NetworkHosts] = Field(
        default_factory=dict
    )
    """The name of each package index → its hosts. A call requests the index `pypi` as `@pypi`.
    These hosts need not be in `hosts`.
    """
    packages: dict[str, ListedPackages] = Field(default_factory=dict)
    """The name of an index → the packages that programs may download from it. Programs may download
    every package from an index that has no entry here.
    """
    allowed_hosts: tuple[HostPattern, ...] = ()
    """Hosts that programs may reach even if the host's address is not public."""
    leave: Literal["engine", "node"] = "engine"
    """The machine that connects to the hosts for a program that runs on a node of a cluster. In
    both cases the TLS connection to the host begins in the engine, so a node sees no secret and no
    content of HTTPS.
    """
    writes: Literal["ask", "deny", "allow"] = "ask"
    """What happens to a request with another method than GET, HEAD or OPTIONS, if no rule of the
    policy decides.
    """
    max_requests: int = Field(default=1000, ge=1, le=1_000_000)
    """Maximum number of requests that the program of one call may send."""
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
