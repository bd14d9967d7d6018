"""Known faults of the programs with which Docker starts containers, by version (`faults.toml`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

_OF_DISTRIBUTION = re.compile(r"[+~]|\d-\d")
_NUMBERS = re.compile(r"(\d+(?:\.\d+)*)(-(?:alpha|beta|rc))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One known fault of a program. The fields are explained in `faults.toml`."""

    program: str
    name: str
    words: str
    mended: tuple[str, ...]
    unmended: tuple[str, ...]
    only_hybrid: bool = False
    """Whether the fault exists only on hosts with control groups of both versions."""

    def is_in(self, version: str) -> bool:
        """Return whether a version of the program has the fault, as far as is known."""
        if _OF_DISTRIBUTION.search(version):
            return any(mark in version for mark in self.unmended)
        mine, mended = _numbers(version), [_numbers(one) for one in self.mended]
        if not mine:
            return False
        return not any(one[:2] == mine[:2] and mine >= one for one in mended) and not (
            mended and mine[:2] > max(mended)[:2]
        )


def known_faults() -> tuple[date, tuple[Fault, ...]]:
    """Return the known faults, and the date of their list."""
    text = Path(__file__).with_name("faults.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    faults = (
        Fault(**{**row, "mended": tuple(row["mended"]), "unmended": tuple(row["unmended"])})
        for row in document["fault"]
    )
    return document["date"], tuple(faults)


def faults_of(program: str, version: str, *, is_hybrid: bool = False) -> Iterator[Fault]:
    """Return the known faults of a version of a program. `is_hybrid` says whether the host has
    control groups of both versions.
    """
    for fault in known_faults()[1]:
        is_here = is_hybrid or not fault.only_hybrid
        if fault.program == program and is_here and fault.is_in(version):
            yield fault


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, and then 1 if it is final, or 0: (1, 4, 0, 0) of
    1.4.0-rc.1.
    """
    found = _NUMBERS.search(version)
    if found is None:
        return ()
    return (*map(int, found[1].split(".")), int(found[2] is None))
