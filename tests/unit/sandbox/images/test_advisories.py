"""Which published holes a version has, and what is not claimed."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fumehood.sandbox.images.advisories import FINAL, changelog_of, parse_version, standing

RACES = {"CVE-2025-31133", "CVE-2025-52565", "CVE-2025-52881"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("1.1.5+ds1", (1, 1, 5, FINAL)),
        ("v1.2.8-0-g59923ef", (1, 2, 8, FINAL)),
        ("1.3.3-0ubuntu1~24.04.2", (1, 3, 3, FINAL)),
        ("1.0.0~rc93+ds1", (1, 0, 0, 93)),
        ("1.4.0-rc.2", (1, 4, 0, 2)),
        ("1.6.20~ds1", (1, 6, 20, FINAL)),
        ("unknown", None),
        ("", None),
    ],
)
def test_versions_of_all_writers_are_read(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("component", "version", "ids"),
    [
        ("runc", "1.0.0-rc6", {"CVE-2019-5736", *RACES}),
        ("runc", "1.0.0-rc92", RACES),
        ("runc", "1.0.0-rc93", {"CVE-2024-21626", *RACES}),
        ("runc", "1.1.11", {"CVE-2024-21626", *RACES}),
        ("runc", "1.1.12", RACES),
        ("runc", "1.2.7", RACES),
        ("runc", "1.2.8", set()),
        ("runc", "1.3.2", RACES),
        ("runc", "1.3.3", set()),
        ("runc", "1.4.0-rc.2", RACES),
        ("runc", "1.4.0-rc.3", set()),
        ("runc", "1.5.0", set()),
        ("containerd", "1.3.8", {"CVE-2020-15257", "CVE-2026-53488"}),
        ("containerd", "1.7.32", {"CVE-2026-53488"}),
        ("containerd", "1.7.33", set()),
        ("containerd", "2.0.9", {"CVE-2026-53488"}),
        ("containerd", "2.1.8", {"CVE-2026-53488", "CVE-2026-53492"}),
        ("containerd", "2.2.5", set()),
        ("containerd", "2.3.1", {"CVE-2026-53488", "CVE-2026-53492"}),
        ("containerd", "2.4.0", set()),
    ],
)
def test_open_holes_follow_upstreams_numbers(component: str, version: str, ids: set[str]) -> None:
    known = standing(component, version, version)
    assert known is not None
    assert {advisory.id for advisory in known.open} == ids
    assert known.mended_by_package == ()


def test_what_the_package_is_known_to_mend_is_not_open() -> None:
    known = standing("runc", "1.1.5+ds1", "1.1.5+ds1-1+deb12u1")
    assert known is not None
    assert {advisory.id for advisory in known.mended_by_package} == {"CVE-2024-21626"}
    assert {advisory.id for advisory in known.open} == RACES
    before = standing("runc", "1.1.5+ds1", "1.1.5+ds1-1")
    assert before is not None
    assert {advisory.id for advisory in before.open} == {"CVE-2024-21626", *RACES}


def test_changelog_of_the_package_says_what_it_mends(tmp_path: Path) -> None:
    home = tmp_path / "runc"
    home.mkdir()
    text = "runc (1.1.5+ds1-1+deb12u2) …\n  * Fix CVE-2025-31133, CVE-2025-525650\n"
    (home / "changelog.Debian.gz").write_bytes(gzip.compress(text.encode()))
    said = changelog_of(("nothing", "runc"), tmp_path)
    known = standing("runc", "1.1.5+ds1", "1.1.5+ds1-1+deb12u2", said)
    assert known is not None
    assert {advisory.id for advisory in known.open} == {"CVE-2025-52565", "CVE-2025-52881"}


@pytest.mark.parametrize("content", [None, b"", b"\x1f\x8bbroken"])
def test_unreadable_changelog_says_nothing(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "runc").mkdir()
    if content is not None:
        (tmp_path / "runc" / "changelog.Debian.gz").write_bytes(content)
    assert changelog_of(("runc",), tmp_path) == ""


def test_unreadable_version_is_not_called_safe() -> None:
    assert standing("runc", "unknown", "") is None
