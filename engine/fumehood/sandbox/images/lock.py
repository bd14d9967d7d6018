"""Packages of the Python index: permitted requirements, and a list locked by hashes.

Host side, pure. A request names packages, extras, versions and markers and nothing else: an
option, an address or a path could bring code from anywhere. Invariant: what a `Lock` names is
one version each, and every file of it is known by its SHA-256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?"
_EXTRAS = rf"\[\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\]"
_VERSION = r"(?:~=|==|!=|<=|>=|<|>)\s*[A-Za-z0-9][A-Za-z0-9.!+*_-]{0,63}"
_MARKER = r"(?!-|.*[ ;]-)[A-Za-z0-9_.'\"<>=!~() -]{1,300}"
"""No word of it begins with a hyphen: pip takes that for an option, also within quotes, and has
options of a line that make it build, which is to run the package's code here.
"""
_REQUIREMENT = re.compile(
    rf"({_NAME})\s*(?:{_EXTRAS})?\s*(?:{_VERSION}(?:\s*,\s*{_VERSION})*)?\s*(?:;{_MARKER})?"
)
"""*Source*: PEP 508, without its addresses."""

_ARCHIVES = (
    ".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".tlz", ".lz", ".lzma",
)  # fmt: skip
"""What pip takes for a file though it could be a name."""

_PINNED = re.compile(rf"({_NAME})==([A-Za-z0-9][A-Za-z0-9.!+_-]{{0,63}})(.*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class WrongRequirements(Exception):
    """A list of packages is refused. The message names the line and the reason."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One package in one version."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of every file that may be taken for it, as hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Lock:
    """All installed packages, including dependencies."""

    packages: tuple[Pinned, ...] = ()

    @property
    def text(self) -> str:
        """As pip reads it."""
        lines = (
            f"{each.name}=={each.version}"
            + "".join(f" \\\n    --hash=sha256:{digest}" for digest in each.hashes)
            for each in self.packages
        )
        return "".join(f"{line}\n" for line in lines)


def parse_lock(text: str) -> Lock:
    """Read `requirements.lock`.

    Raises:
        WrongRequirements: a line has no version or no hash, or holds anything else.
    """
    return Lock(tuple(_pinned(line) for line in _lines(text)))


def parse_requirements(text: str) -> dict[str, str]:
    """The lines of a requirements file by the normalized names of their packages.

    Raises:
        WrongRequirements: a line is anything but a name with extras, versions and a marker.
    """
    found: dict[str, str] = {}
    for line in _lines(text):
        match = _REQUIREMENT.fullmatch(line)
        if match is None or _may_be_a_file(match[1]) or _may_be_a_file(line.partition(";")[0]):
            raise WrongRequirements(f"{_shown(line)} {_why_refused(line)}")
        name = normalized(match[1])
        if name in found:
            raise WrongRequirements(f"{name} is named twice: one line a package.")
        found[name] = line
    return found


def lock_of(wheels: Iterable[Path]) -> Lock:
    """The lock that takes exactly these files.

    Raises:
        WrongRequirements: one is not named as a wheel is.
    """
    packages = []
    for wheel in wheels:
        parts = wheel.name.removesuffix(".whl").split("-")
        if not wheel.name.endswith(".whl") or len(parts) not in (5, 6):
            raise WrongRequirements(f"{_shown(wheel.name)} is no wheel.")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        packages.append(Pinned(normalized(parts[0]), parts[1], (digest,)))
    return Lock(tuple(sorted(packages, key=lambda package: package.name)))


def normalized(name: str) -> str:
    """A package's name as the index compares it. *Source*: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def merged(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Two lists as one; where both name a package, the second one's line."""
    return "".join(f"{line}\n" for _, line in sorted({**ours, **theirs}.items()))


def _lines(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]


def _pinned(line: str) -> Pinned:
    match = _PINNED.fullmatch(line)
    if match is None:
        raise WrongRequirements(f"{_shown(line)} is not NAME==VERSION with hashes.")
    words = match[3].split()
    hashes = [_HASH.fullmatch(word) for word in words]
    if not words or None in hashes:
        raise WrongRequirements(f"{match[1]}: everything after its version must be a hash.")
    return Pinned(
        normalized(match[1]), match[2], tuple(found[1] for found in hashes if found is not None)
    )


def _may_be_a_file(words: str) -> bool:
    """Whether pip would look for a file of this name in the current directory: `name==1.0.zip` can
    be one.
    """
    return words.rstrip().lower().endswith(_ARCHIVES)


def _why_refused(line: str) -> str:
    if line.startswith("-"):
        return "is an option: the list holds packages only."
    if "@" in line or "://" in line:
        return "is an address: packages come from the configured index only."
    if line.startswith((".", "/", "~")) or _may_be_a_file(line.partition(";")[0]):
        return "is a path: packages come from the configured index only."
    return "is not a package: write NAME, NAME[EXTRA] or NAME==VERSION, and a marker after ';'."


def _shown(line: str) -> str:
    return repr(line[:80])
