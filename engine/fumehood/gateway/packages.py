"""Package indexes: which package a request is for, for those whose packages the operator lists.

Values only. Invariant: a path that cannot be read as one package's is none's, and refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from fumehood.gateway.settings import ListedPackages

_PAGES = ("simple", "pypi")
"""First parts of paths whose second part is a name. *Source*: PEP 503; the Python index's API."""

_WHEEL = re.compile(r"([^-/]+)-[^/]*\.whl(\.metadata)?")
_SOURCE = re.compile(r"([^/]+)-[^-/]+\.(tar\.gz|tar\.bz2|zip)(\.metadata)?")
"""Names of files. *Source*: PEP 427, 625 and 658."""


@dataclass(frozen=True, slots=True)
class PackageList:
    """The hosts of an index, and the packages that programs may get from it."""

    hosts: tuple[str, ...]
    packages: ListedPackages

    def has(self, target: str) -> bool:
        """Whether a request's path is that of a listed package."""
        first, *rest = target.partition("?")[0].removeprefix("/").split("/")
        parts = [unquote(first), *map(unquote, rest)]
        if self.packages.npm:
            return _of_npm(parts) in self.packages.npm
        return _plain(_of_python(parts)) in map(_plain, self.packages.python)


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
