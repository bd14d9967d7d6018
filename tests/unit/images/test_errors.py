"""What the last words of a failed build mean for who reads them."""

from __future__ import annotations

import pytest

from fumehood.image_store.faults import build_error


@pytest.mark.parametrize(
    ("said", "found", "remedy"),
    [
        ("tar: write error: No space left on device", "no disk space", "Make room"),
        (
            "E: Failed to fetch http://x  Temporary failure resolving 'x'",
            "cannot be reached",
            "prox",
        ),
        ("E: Unable to locate package pythonx", "does not exist", "packages.txt"),
        ("manifest unknown: manifest unknown", "no such image", "digest"),
        ("mmdebstrap: /tmp is mounted with nodev", "temporary files", "TMPDIR"),
    ],
)
def test_known_build_error_has_a_remedy(said: str, found: str, remedy: str) -> None:
    error = build_error("It failed", ["I: running", said, "I: done"])
    assert found in error.found
    assert remedy in error.remedy


def test_unknown_build_error_shows_the_last_lines() -> None:
    error = build_error("It failed", [*(f"line {n}" for n in range(9)), "", "dpkg: error 7"])
    assert "dpkg: error 7" in error.found
    assert "line 4" not in error.found
    assert "printed nothing" in build_error("It failed", []).found
