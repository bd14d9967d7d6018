"""Which hosts can have containers as a wall, from what Docker says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.docker.host import why_unfit
from support.fake_docker import GOOD_INFO

ROOTLESS = ["name=seccomp,profile=builtin", "name=rootless", "name=cgroupns"]


def check(runtime: str | None = None, *, has_swap: bool = False, **other: Any) -> str | None:
    unfit = why_unfit({**GOOD_INFO, **other}, runtime=runtime, has_swap=has_swap)
    return unfit.message if unfit is not None else None


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"CgroupVersion": "1", "CgroupDriver": "cgroupfs"},
        {"SwapLimit": False},
        {"SecurityOptions": ROOTLESS},
        {"runtime": "runc"},
        {"has_swap": True},
    ],
)
def test_host_with_all_limits_is_accepted(other: dict[str, Any]) -> None:
    assert check(**other) is None


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"OSType": "windows"}, "Linux"),
        ({"MemoryLimit": False}, "memory"),
        ({"CpuCfsQuota": False}, "cpu"),
        ({"PidsLimit": False}, "pids"),
        ({"PidsLimit": None}, "pids"),
        ({"MemoryLimit": "yes"}, "memory"),
        ({"SwapLimit": False, "has_swap": True}, "swap"),
        ({"SecurityOptions": []}, "filter"),
        ({"SecurityOptions": None}, "filter"),
        ({"SecurityOptions": ["name=seccomp,profile=unconfined"]}, "filter"),
        ({"SecurityOptions": ROOTLESS, "CgroupVersion": "1"}, "Rootless"),
        ({"SecurityOptions": ROOTLESS, "CgroupDriver": "none"}, "Rootless"),
        ({"SecurityOptions": ROOTLESS, "CgroupDriver": None}, "Rootless"),
        ({"runtime": "runsc"}, "no runtime"),
    ],
)
def test_host_without_a_limit_is_refused_with_the_reason(other: dict[str, Any], fault: str) -> None:
    assert fault in (check(**other) or "")
