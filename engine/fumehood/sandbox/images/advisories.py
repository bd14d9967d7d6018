"""Published escapes of runc and containerd, and whether a version has them.

Host side, asked by `doctor` alone: it informs and decides nothing. Invariant: what cannot be
known is not claimed. Distributions mend old versions, so a version in the affected range counts
as mended only where the package's own version or changelog says so.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int, int, int]
"""Major, minor, patch, release candidate."""

FINAL = 10**6
"""In the place of the release candidate: none, so later than all of them."""

DOCUMENTATION = Path("/usr/share/doc")


@dataclass(frozen=True, slots=True)
class Advisory:
    """One published hole: from `since` on, ended on each branch by a version of `mended`."""

    id: str
    component: str
    what: str
    since: Version
    mended: tuple[Version, ...]
    packages: tuple[str, ...] = ()
    """Patterns of package versions into which a distribution took the mend."""

    def affects(self, version: Version) -> bool:
        """By upstream's numbers alone."""
        if version < self.since:
            return False
        branch = [mended for mended in self.mended if mended[:2] == version[:2]]
        return version < (branch[0] if branch else max(self.mended))


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one component: holes that are open, and those the package mended."""

    open: tuple[Advisory, ...]
    mended_by_package: tuple[Advisory, ...]


ADVISORIES = (
    Advisory(
        "CVE-2019-5736", "runc", "a program overwrites runc itself on the host",
        (0, 0, 0, 0), ((1, 0, 0, 7),),
    ),
    Advisory(
        "CVE-2024-21626", "runc", "an open directory of the host leaks into the container",
        (1, 0, 0, 93), ((1, 1, 12, FINAL),),
        (r"1\.1\.5\+ds1-1\+deb12u[1-9]", r"1\.0\.0~rc93\+ds1-5\+deb11u[3-9]"),
    ),
    Advisory(
        "CVE-2025-31133", "runc", "a masked path is replaced while the container starts",
        (0, 0, 0, 0), ((1, 2, 8, FINAL), (1, 3, 3, FINAL), (1, 4, 0, 3)),
    ),
    Advisory(
        "CVE-2025-52565", "runc", "the console is bound to another path while it starts",
        (1, 0, 0, 3), ((1, 2, 8, FINAL), (1, 3, 3, FINAL), (1, 4, 0, 3)),
    ),
    Advisory(
        "CVE-2025-52881", "runc", "writes to procfs are redirected while it starts",
        (0, 0, 0, 0), ((1, 2, 8, FINAL), (1, 3, 3, FINAL), (1, 4, 0, 3)),
    ),
    Advisory(
        "CVE-2020-15257", "containerd", "its own interface is open to a host's network namespace",
        (0, 0, 0, 0), ((1, 3, 9, FINAL), (1, 4, 3, FINAL)),
    ),
    Advisory(
        "CVE-2026-53488", "containerd", "an image's label runs a command, through Kubernetes only",
        (0, 0, 0, 0),
        (
            (1, 7, 33, FINAL), (2, 0, 10, FINAL), (2, 1, 9, FINAL), (2, 2, 5, FINAL),
            (2, 3, 2, FINAL),
        ),
    ),
    Advisory(
        "CVE-2026-53492", "containerd", "a checkpoint brings devices, through Kubernetes only",
        (2, 1, 0, 0), ((2, 1, 9, FINAL), (2, 2, 5, FINAL), (2, 3, 2, FINAL)),
    ),
)  # fmt: skip
"""*Source*: the advisories of opencontainers/runc and containerd/containerd on GitHub, and
Debian's changelogs. A branch that is not named was mended by none but the newest's version."""


def parse_version(text: str) -> Version | None:
    """The upstream part of a version, as runc, containerd or a distribution writes it."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)(?:[-~]?rc[.-]?(\d+))?", text)
    if found is None:
        return None
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch), int(candidate) if candidate else FINAL


def standing(component: str, version: str, package: str, changelog: str = "") -> Standing | None:
    """What is known of this version; None where the version cannot be read.

    `package` is the distribution's own version, if any, `changelog` what its changelog says.
    """
    parsed = parse_version(version)
    if parsed is None:
        return None
    affecting = [
        advisory
        for advisory in ADVISORIES
        if advisory.component == component and advisory.affects(parsed)
    ]
    mended = tuple(a for a in affecting if _is_mended(a, package, changelog))
    return Standing(tuple(a for a in affecting if a not in mended), mended)


def changelog_of(packages: Iterable[str], folder: Path = DOCUMENTATION) -> str:
    """What Debian's changelog of the first of these packages says; empty where it is not there."""
    for package in packages:
        try:
            return gzip.decompress((folder / package / "changelog.Debian.gz").read_bytes()).decode(
                "utf-8", "replace"
            )
        except (OSError, EOFError, zlib.error):
            continue
    return ""


def _is_mended(advisory: Advisory, package: str, changelog: str) -> bool:
    in_package = any(re.fullmatch(pattern, package) for pattern in advisory.packages)
    return in_package or re.search(rf"\b{advisory.id}\b", changelog) is not None
