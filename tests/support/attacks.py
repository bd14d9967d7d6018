"""The tables of attacks in tests/adversarial. Attacks that `doctor --attack` also makes are taken
from its corpus, so that each of them is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fumehood.attack.attack import Attack as CorpusAttack
from fumehood.attack.attack import Harm, Language
from fumehood.attack.corpus import attacks_on
from fumehood.core.errors import ENDING_ERRORS, EndedBy

__all__ = ["BAIT", "Attack", "Harm", "ending_of", "refused_by_language"]

BAIT = "@"
"""Marks programs that need the bait of `doctor --attack`."""


@dataclass(frozen=True)
class Attack:
    """`code` must end as `ends`; `twin`, the nearest harmless program, must succeed."""

    name: str
    harm: Harm
    code: str
    ends: str
    twin: str
    source: str = "own"

    def __str__(self) -> str:
        return self.name


def ending_of(row: CorpusAttack) -> tuple[str, str, str]:
    """The expected error code, `ended_by` and exception type of a row; the first of several."""
    ended_by, _, kind = row.expected.ends[0].partition(":")
    error = ENDING_ERRORS[EndedBy(ended_by)]
    return ("" if error is None else error.code, ended_by, kind)


def refused_by_language(language: Language) -> Iterator[Attack]:
    """The interpreter attacks refused by its language rules, with /etc/passwd as the host file."""
    for row in attacks_on("interpreter"):
        code, twin = (text.replace("@FILE@", "/etc/passwd") for text in (row.code, row.twin))
        is_refused = row.language is language and row.expected.ends == ("policy",)
        if is_refused and BAIT not in code:
            yield Attack(f"corpus-{row.id}", row.harm, code, "SANDBOX_VIOLATION", twin, row.tries)


LOCAL_HOSTS = (
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0.0.0.0", "0",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "localhost", "localhost.",
)  # fmt: skip
"""Spellings of this host's address that other parsers may take for a public one."""
