"""Known faults of the programs that start containers: which versions have them."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from fumehood.docker.faults import Fault, faults_of, known_faults

pytestmark = pytest.mark.row("D7")

ESCAPES = "CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881"


@pytest.mark.parametrize(
    ("program", "version", "names"),
    [
        ("runc", "1.1.11", {"CVE-2024-21626", ESCAPES, "CVE-2026-41579"}),
        ("runc", "1.1.12", {ESCAPES, "CVE-2026-41579"}),
        ("runc", "1.2.7", {ESCAPES, "CVE-2026-41579"}),
        ("runc", "1.2.8", {"CVE-2026-41579"}),
        ("runc", "1.2.10", {"CVE-2026-41579"}),
        ("runc", "1.3.2", {ESCAPES, "CVE-2026-41579"}),
        ("runc", "1.3.3", {"CVE-2026-41579"}),
        ("runc", "1.3.6", set()),
        ("runc", "1.4.4", set()),
        ("runc", "1.5.0", set()),
        ("runc", "2.0.0", set()),
        ("runc", "1.4.0-rc.1", {ESCAPES, "CVE-2026-41579"}),
        ("runc", "1.1.5-0ubuntu2", set()),  # of which nothing is known
        ("runc", "1.1.5+ds1-1+deb12u1", {ESCAPES, "CVE-2026-41579"}),
        ("runc", "1.1.15+ds1-2+deb13u2", set()),  # a distribution that has mended it
        ("runsc", "release-20221219.0", {"ptrace"}),
        ("runsc", "0.0~20221219.0", {"ptrace"}),
        ("runsc", "0.0~20240729.0", set()),
        ("runsc", "release-20260105.0", set()),
        ("Engine", "20.10.24", {"end of support"}),
        ("Engine", "20.10.24+dfsg1", set()),  # the distribution mends it
        ("Engine", "29.0.0", set()),
        ("runc", "", set()),
        ("runc", "unknown", set()),
        ("containerd", "1.0.0", set()),
    ],
)
def test_version_has_the_faults_that_were_mended_later(
    program: str, version: str, names: set[str]
) -> None:
    assert {fault.name for fault in faults_of(program, version)} == names


@pytest.mark.parametrize("version", ["1.8.1", "1.30.0", "1.8.1-1+deb12u1"])
def test_crun_is_faulty_only_on_hosts_with_both_versions_of_control_groups(version: str) -> None:
    assert [fault.name for fault in faults_of("crun", version, is_hybrid=True)] == [
        "hybrid control groups"
    ]
    assert list(faults_of("crun", version)) == []


def test_list_is_dated_and_its_rows_differ() -> None:
    day, faults = known_faults()
    assert date(2026, 11, 30) <= day <= datetime.now(UTC).date()
    assert len({(fault.program, fault.name) for fault in faults}) == len(faults)
    assert all(isinstance(fault, Fault) and fault.words for fault in faults)
