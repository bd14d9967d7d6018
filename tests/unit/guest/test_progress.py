"""What a child may report: of one form, of one size, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.guest.core.pipes import read_report


@pytest.mark.row("S8")
@pytest.mark.parametrize(
    ("claim", "report"),
    [
        ({"percent": 50, "message": "half"}, {"percent": 50.0, "message": "half"}),
        ({"percent": -1, "message": ""}, {"percent": 0.0, "message": ""}),
        ({"percent": 1e300, "message": ""}, {"percent": 100.0, "message": ""}),
        ({"percent": 10**400, "message": ""}, {"percent": 100.0, "message": ""}),
        ({"percent": -(10**400), "message": ""}, {"percent": 0.0, "message": ""}),
        ({"percent": 1, "message": "", "other": 1}, {"percent": 1.0, "message": ""}),
        ({"percent": 1, "message": "x " * 999}, {"percent": 1.0, "message": "x " * 99 + "x…"}),
    ],
)  # fmt: skip
def test_progress_report_is_clamped_to_its_bounds(claim: Any, report: Any) -> None:
    assert read_report(claim) == report


@pytest.mark.row("S8")
@pytest.mark.parametrize(
    "claim",
    [None, 5, [], "50", {}, {"percent": 1}, {"message": "x"}, {"percent": "1", "message": ""},
     {"percent": True, "message": ""}, {"percent": 1, "message": None}, {"percent": float("nan"), "message": ""},
     {"percent": float("inf"), "message": ""}],
)  # fmt: skip
def test_malformed_progress_report_is_ignored(claim: Any) -> None:
    assert read_report(claim) is None
