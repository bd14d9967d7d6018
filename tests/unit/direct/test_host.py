"""What a host needs for direct sandboxes, and how a missing requirement is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fumehood.direct import host


@pytest.fixture(autouse=True)
def _fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has everything."""
    monkeypatch.setattr(host.os, "geteuid", lambda: 0)
    monkeypatch.setattr(host, "_kernel", lambda: (6, 1))
    monkeypatch.setattr(host, "_missing_controllers", list)
    monkeypatch.setattr(host, "_user_namespaces", lambda: 1000)


def test_host_that_has_everything_is_fit() -> None:
    assert host.why_unfit(None) is None


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("_kernel", lambda: (5, 10), "Linux 5.12"),
        ("_missing_controllers", lambda: ["memory"], "memory"),
        ("_user_namespaces", lambda: 0, "disabled"),
    ],
)
def test_missing_requirement_is_named_with_its_remedy(
    name: str, found: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, name, found)
    unfit = host.why_unfit(None)
    assert unfit is not None
    assert words in unfit.message
    assert unfit.remedy


def test_ordinary_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "geteuid", lambda: 1000)
    unfit = host.why_unfit(None)
    assert unfit is not None
    assert "root" in unfit.message


def test_oci_runtime_is_refused() -> None:
    unfit = host.why_unfit("runsc")
    assert unfit is not None
    assert "'runsc'" in unfit.message
    assert "container.engine" in unfit.remedy
