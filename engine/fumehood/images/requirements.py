"""Requirements are the packages that a caller or an operator asks for. A lock is the result of
resolving them.

Host side, pure except that wheels are read. Invariant: a requirement names a package of the index;
it is never an option of pip, an address or a path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fumehood.sandbox.images.recipe import (
    PACKAGE_NAME,
    Lock,
    Pinned,
    WrongRequirements,
    lines_of,
    normalized,
    parse_lock,
    shown,
)

EMPTY_LOCK = Lock()

_EXTRAS = rf"\[\s*{PACKAGE_NAME}(?:\s*,\s*{PACKAGE_NAME})*\s*\]"
_VERSION = r"(?:~=|==|!=|<=|>=|<|>)\s*[A-Za-z0-9][A-Za-z0-9.!+*_-]{0,63}"
_MARKER = r"(?!-|.*[ ;]-)[A-Za-z0-9_.'\"<>=!~() -]{1,300}"
"""Matches an environment marker. No word in it may begin with a hyphen, because pip would take the
word for an option, even within quotes. Some options of pip build packages, which would run their
code here.
"""
_REQUIREMENT = re.compile(
    rf"({PACKAGE_NAME})\s*(?:{_EXTRAS})?\s*(?:{_VERSION}(?:\s*,\s*{_VERSION})*)?\s*(?:;{_MARKER})?"
)
"""Matches one requirement. *Source*: PEP 508, without the form `NAME @ URL`."""

_ARCHIVES = (
    ".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".tlz", ".lz", ".lzma",
)  # fmt: skip
"""The suffixes that make pip take a requirement for the path of a file."""


def parse_requirements(text: str) -> dict[str, str]:
    """Parse the text of a requirements file. Return a dict from the normalized name of each package
    to the package's line.

    Raises:
        WrongRequirements: a line is not a name with optional extras, versions and marker, or two
            lines name the same package.
    """
    found: dict[str, str] = {}
    for line in lines_of(text):
        match = _REQUIREMENT.fullmatch(line)
        if match is None or _may_be_a_file(match[1]) or _may_be_a_file(line.partition(";")[0]):
            raise WrongRequirements(f"{shown(line)} {_why_refused(line)}")
        name = normalized(match[1])
        if name in found:
            raise WrongRequirements(
                f"{name} is named twice: write all its versions together, as in {name}>4,<5."
            )
        found[name] = line
    return found


def lock_of(wheels: Iterable[Path]) -> Lock:
    """Return a lock for the packages in these wheels. It accepts no other wheels of the packages.

    Raises:
        WrongRequirements: the name of a file is not that of a wheel, or cannot be written in a
            lock.
    """
    packages = []
    for wheel in wheels:
        parts = wheel.name.removesuffix(".whl").split("-")
        if not wheel.name.endswith(".whl") or len(parts) not in (5, 6):
            raise WrongRequirements(f"{shown(wheel.name)} is no wheel.")
        packages.append(Pinned(normalized(parts[0]), parts[1], (digest_of_file(wheel),)))
    lock = Lock(tuple(sorted(packages, key=lambda package: package.name)))
    return parse_lock(lock.text)  # ensures that the stored lock can be read again


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def merged(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return two lists of requirements, in the form that `parse_requirements` returns, as the text
    of one requirements file. If both contain a package, the line in `theirs` counts.
    """
    return "".join(f"{line}\n" for _, line in sorted({**ours, **theirs}.items()))


def _may_be_a_file(words: str) -> bool:
    """Whether pip might take a requirement for the path of a file. `name==1.0.zip` is an
    example.
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


def without(lock: Lock, other: Lock) -> Lock:
    """Return `lock` without the packages that are also in the lock `other`."""
    names = {each.name for each in other.packages}
    return Lock(tuple(each for each in lock.packages if each.name not in names))
