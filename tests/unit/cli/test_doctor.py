"""Findings of `doctor`, and how a terminal shows them."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fumehood.cli.doctor import (
    Finding,
    authority_checks,
    authority_findings,
    daemon_findings,
    libraries,
    show_findings,
)
from fumehood.cli.policy import Offline
from fumehood.config import Config
from fumehood.core.limits import Limit
from fumehood.core.status import Readiness, StateReadiness
from fumehood.identity.approvers import make_first_approver
from fumehood.storage.database import FILE_NAME, Database, open_database
from fumehood.webhook.settings import WebhookSettings

pytestmark = pytest.mark.row("D7")

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SOUND = '[[rules]]\nid = "r"\ndecision = "deny"\ntools = ["calculator"]\n'


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    return made


def look(state: Path, **settings: Any) -> dict[str, Finding]:
    config = Config(home=state, **settings)
    return {one.check: one for one in authority_findings(config, Offline(config, None))}


def opened(state: Path) -> Database:
    return open_database(state / FILE_NAME)


def private(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def webhook(secret: Path, *, may_decide: bool) -> WebhookSettings:
    return WebhookSettings(
        url="https://hook.example/x-token", secret_file=secret, may_decide=may_decide
    )


@pytest.mark.row("D4")
def test_doctor_without_approvers_names_a_possible_remedy(state: Path) -> None:
    never = look(state)["approvers"]
    assert (never.verdict, "approvers init" in never.cure) == ("warning", True)
    opened(state).close()
    served = look(state)["approvers"]
    assert (served.verdict, "approvers init" in served.cure) == ("warning", True)


def test_who_may_approve_is_named(state: Path) -> None:
    database = opened(state)
    make_first_approver(database, "owner", NOW)
    database.close()
    assert look(state)["approvers"] == Finding("approvers", "ok", "owner")


def test_webhook_that_may_decide_counts_as_an_approver(state: Path) -> None:
    secret = private(state / "secret", "s" * 64)
    assert look(state, webhook=webhook(secret, may_decide=True))["approvers"].verdict == "ok"
    found = look(state, webhook=webhook(secret, may_decide=False))
    assert found["approvers"].verdict == "warning"


def test_doctor_reports_the_policy_or_its_faults_with_lines(state: Path) -> None:
    assert look(state)["policy"].verdict == "ok"
    file = private(state / "policy.toml", SOUND)
    sound = look(state, policy_file=file)["policy"]
    assert (sound.verdict, "1 rule," in sound.found) == ("ok", True)
    private(file, SOUND.replace("calculator", "calculater"))
    faulty = look(state, policy_file=file)["policy"]
    assert faulty.verdict == "missing"
    assert faulty.found.startswith("policy.toml: rule ")
    assert "policy check" in faulty.cure


def test_doctor_names_secrets_without_a_usable_value(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(state)["secrets"] == Finding("secrets", "ok", "none are configured")
    monkeypatch.delenv("UNSET_KEY", raising=False)
    bound: dict[str, Any] = {"hosts": ["api.example"], "tools": ["weather"]}
    chosen = {
        "unset": {"env": "UNSET_KEY", **bound},
        "absent": {"file": str(state / "absent"), **bound},
        "there": {"file": str(private(state / "there", "value-of-the-key")), **bound},
        "locked": {"keyring": {"service": "s", "username": "u"}, **bound},
    }
    found = look(state, secrets=chosen)["secrets"]
    assert (found.verdict, found.found) == ("warning", "no usable value here: unset, absent")
    monkeypatch.setenv("UNSET_KEY", "value-of-the-variable")
    private(state / "absent", "value-of-the-file")
    found = look(state, secrets=chosen)["secrets"]
    assert found == Finding(
        "secrets", "ok",
        "3 of 4 secrets have a usable value; in a keyring, which is not read now: locked",
    )  # fmt: skip


def test_doctor_reads_the_webhook_secret_and_hides_its_address(state: Path) -> None:
    assert look(state)["webhook"].found == "none is configured"
    secret = private(state / "secret", "s" * 64)
    for may_decide, words in ((True, "may decide"), (False, "may not decide")):
        found = look(state, webhook=webhook(secret, may_decide=may_decide))["webhook"]
        assert (found.verdict, words in found.found) == ("ok", True)
        assert "x-token" not in found.found
    secret.chmod(0o644)
    open_to_all = look(state, webhook=webhook(secret, may_decide=True))["webhook"]
    assert (open_to_all.verdict, "chmod 600" in open_to_all.found) == ("missing", True)
    secret.unlink()
    assert look(state, webhook=webhook(secret, may_decide=True))["webhook"].verdict == "missing"


def test_doctor_reports_a_missing_or_open_audit_key_and_creates_nothing(state: Path) -> None:
    assert look(state)["audit key"].verdict == "ok"
    assert list(state.iterdir()) == []
    database = opened(state)
    make_first_approver(database, "owner", NOW)  # the chain's first row
    database.close()
    key = state / "audit.key"
    assert look(state)["audit key"].verdict == "ok"
    key.chmod(0o644)
    assert look(state)["audit key"].verdict == "missing"
    key.unlink()
    gone = look(state)["audit key"]
    assert (gone.verdict, "copy" in gone.cure) == ("missing", True)
    assert not key.exists()


@pytest.mark.row("D6")
def test_doctor_says_if_another_users_state_cannot_be_read(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    found = look(state, mode="service")
    assert tuple(found) == tuple(authority_checks())
    assert {one.verdict for one in found.values()} == {"warning"}
    assert all("cannot be read by this user" in one.found for one in found.values())
    assert all("sudo -u" in one.cure for one in found.values())


# -- Findings on a terminal ----------------------------------------------------------


WELL = (
    "platform", "python", *libraries(), "configuration", "state directory", "daemon", *authority_checks(),
    *(f"{wall}: {limit}" for wall in ("interpreter", "jail") for limit in Limit),
    "docker", *(f"docker: {part}" for part in ("seccomp", "memory", "cgroups", "swap", "disk")),
    "image: node", "image: shell", "tools", "tools directory",
)  # fmt: skip
LIMITS = 2 * len(Limit)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def all_findings(**wrong: str) -> list[Finding]:
    return [
        Finding(check, "warning", wrong[check], "Mend it.")
        if check in wrong
        else Finding(check, "ok", "well " * 20)
        for check in WELL
    ]


def test_doctor_shows_problems_in_full_and_counts_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = f"/tmp/{'long/' * 20}"
    one = Finding("image: python", "ok", "not built", "To build it: fumehood images build python")
    show_findings([*all_findings(daemon=f"No engine answers on {path}."), one], verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warning  daemon: No engine answers")
    assert any(f"{path}." in line for line in lines)
    assert "           Remedy: Mend it." in lines
    assert "ok       image: python: not built" in lines
    assert "           Remedy: To build it: fumehood images build python" in lines
    assert f"ok       Limits: {LIMITS} of {LIMITS} enforced" in lines
    assert "ok       Engine: 2 of 3 ok: configuration, state directory" in lines
    assert "ok       Images: 3 of 3 ok: node, shell, python" in lines
    assert not any("well" in line for line in lines)
    assert len(lines) <= 20


@pytest.mark.row("P7")
def test_doctor_warns_about_an_open_circuit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = StateReadiness(failing=False, lost_rows=0)
    found = Readiness(status="ready", walls={}, state=state, broken_circuits=1)
    client = MagicMock()
    client.return_value.__enter__.return_value.ready.return_value = found
    monkeypatch.setattr("fumehood.cli.doctor.Client", client)
    daemon, circuit = daemon_findings(Config(home=tmp_path))
    assert (daemon.check, daemon.verdict) == ("daemon", "ok")
    assert (circuit.check, circuit.verdict) == ("circuits", "warning")
    assert circuit.found == "not closed: 1; calls to these services are suspended"
    show_findings([*all_findings(), circuit], verbose=False)
    shown = capsys.readouterr().out
    assert "ok       Engine: 3 of 4 ok: configuration, state directory, daemon" in shown


def test_verbose_doctor_shows_every_check_in_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_findings(all_findings(daemon="No engine."), verbose=True)
    lines = capsys.readouterr().out.splitlines()
    heads = [line[9:] for line in lines if not line.startswith(" ")]
    assert [
        check for check, head in zip(WELL, heads, strict=True) if not head.startswith(check)
    ] == []
    assert max(map(len, lines)) <= 80


def test_findings_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    show_findings([Finding("tools", "warning", "\x1b[2J", "\x1b[2J")], verbose=False)
    assert "\x1b" not in capsys.readouterr().out
