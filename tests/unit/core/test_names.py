"""Near names: few, and at a bounded cost."""

from __future__ import annotations

import pytest

from fumehood.core.names import MAX_COMPARED, did_you_mean


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("calculater", " Did you mean 'calculator'?"),
        ("run_pyton", " Did you mean 'run_python'?"),
        ("calculator", " Did you mean 'calculator'?"),
        ("zebra", ""),
        ("", ""),
    ],
)
def test_near_names_are_named(given: str, says: str) -> None:
    assert did_you_mean(given, ["calculator", "run_python", "read_file"]) == says


def test_only_so_many_names_are_compared() -> None:
    known = [f"tool_{number:06}" for number in range(MAX_COMPARED)] + ["tool_abcdef"]
    assert "tool_abcdef" not in did_you_mean("tool_abcdeg", known)
    assert "tool_abcdef" in did_you_mean("tool_abcdeg", known[1:])
