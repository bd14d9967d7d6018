"""What `doctor` says of approvers, policy, webhook and audit key, for a state directory as it is."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fumehood.cli.doctor_authority import CHECKS, authority_findings
from fumehood.cli.finding import Finding
from fumehood.config import Config, WebhookConfig
from fumehood.identity import approvers as module
from fumehood.identity.approvers import make_first_approver
from fumehood.storage.database import FILE_NAME, Database, open_database

pytestmark = pytest.mark.row("D7")

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SOUND = '[[rules]]\nid = "r"\ndecision = "deny"\ntools = ["calculator"]\n'


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    return made


@pytest.fixture(autouse=True)
def cheap_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "slow_hash", lambda secret, salt: (secret.encode() + salt)[:64])


def look(state: Path, **settings: Any) -> dict[str, Finding]:
    return {one.check: one for one in authority_findings(Config(home=state, **settings))}


def opened(state: Path) -> Database:
    return open_database(state / FILE_NAME)


def private(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return path


def webhook(secret: Path, *, may_decide: bool) -> WebhookConfig:
    return WebhookConfig(
        url="https://hook.example/x-token", secret_file=secret, may_decide=may_decide
    )


@pytest.mark.row("D4")
def test_without_approvers_the_cure_is_that_which_is_possible(state: Path) -> None:
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


def test_webhook_that_may_decide_is_somebody_to_ask(state: Path) -> None:
    secret = private(state / "secret", "s" * 64)
    assert look(state, webhook=webhook(secret, may_decide=True))["approvers"].verdict == "ok"
    found = look(state, webhook=webhook(secret, may_decide=False))
    assert found["approvers"].verdict == "warning"


def test_policy_is_told_with_its_rules_or_with_file_and_line(state: Path) -> None:
    assert look(state)["policy"].verdict == "ok"
    file = private(state / "policy.toml", SOUND)
    sound = look(state, policy_file=file)["policy"]
    assert (sound.verdict, "1 rules" in sound.found) == ("ok", True)
    private(file, SOUND.replace("calculator", "calculater"))
    faulty = look(state, policy_file=file)["policy"]
    assert faulty.verdict == "missing"
    assert faulty.found.startswith("policy.toml: rule ")
    assert "policy check" in faulty.cure


def test_webhooks_secret_is_read_and_its_address_stays_unsaid(state: Path) -> None:
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


def test_audit_key_that_is_gone_or_open_is_told_and_nothing_is_made(state: Path) -> None:
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
def test_another_users_state_is_not_guessed_about(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    found = look(state, mode="service")
    assert tuple(found) == CHECKS
    assert {one.verdict for one in found.values()} == {"warning"}
    assert all("cannot be looked at by this user" in one.found for one in found.values())
    assert all("sudo -u" in one.cure for one in found.values())
