"""Mission rows and the tests that prove them, checked in both directions."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
MARK = re.compile(r"mark\.row\(([^)]*)\)")
AREAS = {"T": 10, "R": 4, "P": 13, "E": 8, "S": 11, "A": 7, "D": 7, "B": 14}

PROVEN_HERE = {
    "T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "T9", "T10", "R1", "R2", "R3", "R4", "D4", "E5", "P1", "P2", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12", "P13", "E1", "E2", "E3",
    "E6", "E7", "S1", "S2", "S3", "S4", "S5", "S8", "S9", "S10", "B3", "D1", "D2", "D3", "D5", "D6", "D7",
}  # fmt: skip
"""The rows that this version claims, as a whole or in the part that its documents name."""


def marked_rows() -> set[str]:
    rows: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        for mark in MARK.findall(file.read_text(encoding="utf-8")):
            rows |= set(re.findall(r'"([A-Z]\d+)"', mark))
    return rows


def test_every_claimed_row_has_a_test_that_proves_it() -> None:
    assert not PROVEN_HERE - marked_rows()


def test_every_row_mark_names_an_existing_mission_row() -> None:
    known = {f"{area}{number}" for area, count in AREAS.items() for number in range(1, count + 1)}
    assert not marked_rows() - known
