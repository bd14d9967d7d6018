"""What a host needs for direct sandboxes, and how a missing requirement is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fumehood.direct import host


@pytest.fixture(autouse=True)
def _fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has everything."""
    monkeypatch.setattr(host.os, "geteuid", lambda: 0)
    monkeypatch.setattr(host.ids, "may_make_namespaces", lambda: True)
    monkeypatch.setattr(host, "_kernel", lambda: (6, 1))
    monkeypatch.setattr(host, "_user_namespaces", lambda: 1000)


def test_host_that_has_everything_is_fit() -> None:
    assert host.why_unfit(None) is None


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("_kernel", lambda: (5, 10), "Linux 5.14"),
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


@pytest.fixture
def _user(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user who has everything."""
    monkeypatch.setattr(host.os, "geteuid", lambda: 4242)
    monkeypatch.setattr(host.shutil, "which", lambda program, path: f"/usr/bin/{program}")
    monkeypatch.setattr(host.ids, "read_sub_ids", lambda path, user: (100_000, 65_536))
    monkeypatch.setattr(host, "_read", lambda path: "")
    monkeypatch.setattr(host, "_failed_namespaces", lambda: "")
    monkeypatch.setattr(host.ids, "may_make_namespaces", lambda: False)


@pytest.mark.usefixtures("_user")
def test_ordinary_user_with_subordinate_ids_is_fit() -> None:
    assert host.why_unfit(None) is None


@pytest.mark.usefixtures("_user")
def test_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "which", lambda program, path: None)
    unfit = host.why_unfit(None)
    assert unfit is not None
    assert "newuidmap" in unfit.message
    assert "uidmap" in unfit.remedy


@pytest.mark.usefixtures("_user")
def test_user_without_subordinate_ids_is_told_how_to_get_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(path: str, user: int) -> tuple[int, int]:
        raise host.ids.NoIds(f"{path} gives this user 0 subordinate ids")

    monkeypatch.setattr(host.ids, "read_sub_ids", none)
    unfit = host.why_unfit(None)
    assert unfit is not None
    assert "/etc/subuid" in unfit.message
    assert "usermod" in unfit.remedy


@pytest.mark.usefixtures("_user")
@pytest.mark.parametrize(("failed", "words"), [("user", "user namespaces"), ("proc", "/proc")])
@pytest.mark.parametrize("uid", [0, 4242])
def test_container_that_forbids_namespaces_is_told_how_to_start_it(
    failed: str, words: str, uid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_failed_namespaces", lambda: failed)
    monkeypatch.setattr(host.os, "geteuid", lambda: uid)
    unfit = host.why_unfit(None)
    assert unfit is not None
    assert words in unfit.message
    assert "systempaths=unconfined" in unfit.remedy


@pytest.mark.parametrize(
    ("code", "failed"), [(0, ""), (1, "user"), (2, "proc"), (77, "user"), (-9, "user")]
)
def test_only_an_attempt_that_succeeds_shows_that_namespaces_are_permitted(
    code: int, failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = f"os._exit({code})" if code >= 0 else f"os.kill(os.getpid(), {-code})"
    monkeypatch.setattr(host, "TRIES_NAMESPACES", f"import os; {ends}")
    assert host._failed_namespaces() == failed


@pytest.mark.usefixtures("_user")
@pytest.mark.parametrize("sysctl", host.FORBIDDING)
def test_sysctl_that_forbids_user_namespaces_is_named(
    sysctl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbids = host.FORBIDDING[sysctl]
    monkeypatch.setattr(host, "_read", lambda path: forbids if str(path).endswith(sysctl) else "")
    unfit = host.why_unfit(None)
    assert unfit is not None
    assert sysctl.replace("/", ".") in unfit.message


def test_oci_runtime_is_refused() -> None:
    unfit = host.why_unfit("runsc")
    assert unfit is not None
    assert "'runsc'" in unfit.message
    assert "container.engine" in unfit.remedy
