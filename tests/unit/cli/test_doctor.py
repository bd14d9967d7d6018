"""Findings of `doctor`, and how a terminal shows them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from docker.errors import APIError

from fumehood.cli import doctor
from fumehood.cli.doctor import (
    Finding,
    authority_checks,
    authority_findings,
    daemon_findings,
    docker_findings,
    image_finding,
    libraries,
    show_findings,
)
from fumehood.cli.policy import Offline
from fumehood.config import Config
from fumehood.core.limits import Limit
from fumehood.core.status import Readiness, StateReadiness
from fumehood.identity.approvers import make_first_approver
from fumehood.sandbox.container.docker_api import (
    DockerError,
    DockerNotPermitted,
    DockerNotRunning,
    DockerNotSupported,
    DockerTimeout,
)
from fumehood.sandbox.images.catalog import guest_digest, list_images
from fumehood.sandbox.images.recipe import read_recipe
from fumehood.sandbox.settings import (
    ContainerSettings,
    LanguageImages,
    SessionSettings,
)
from fumehood.storage.database import FILE_NAME, Database, open_database
from fumehood.webhook.settings import WebhookSettings
from support.docker_images import ListedImages, image_row, write_image_folder

pytestmark = pytest.mark.row("D7")

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SOUND = '[[rules]]\nid = "r"\ndecision = "deny"\ntools = ["calculator"]\n'

GOOD: dict[str, Any] = {
    "OSType": "linux", "MemoryLimit": True, "PidsLimit": True, "CpuCfsQuota": True,
    "SwapLimit": True, "CgroupVersion": "2", "Runtimes": {"runc": {}, "runsc": {}, "io.x": {}},
    "DefaultRuntime": "runc", "SecurityOptions": ["name=seccomp,profile=default"],
    "MemTotal": 8 << 30, "DockerRootDir": "/",
}  # fmt: skip


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


def version(**components: str) -> dict[str, Any]:
    parts = [{"Name": name, "Version": number} for name, number in components.items()]
    return {"Version": "29.0.0", "ApiVersion": "1.52", "Components": parts}


class Engine(ListedImages):
    """An engine that says what a test lets it say."""

    def __init__(self, *rows: dict[str, Any], **info: Any) -> None:
        super().__init__(*rows)
        self.said = {**GOOD, **info}
        self.components = version(runc="1.3.3", containerd="2.2.5")

    def version(self) -> dict[str, Any]:
        return self.components

    def info(self) -> dict[str, Any]:
        return self.said

    def close(self) -> None:
        pass


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """Findings on one engine, by check; on a host with swap and 4 GB free."""
    memory = SimpleNamespace(available=4 << 30)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor, "may_swap", lambda is_local: True if is_local else None)
    monkeypatch.delenv("DOCKER_HOST", raising=False)

    def look(engine: Engine, **settings: Any) -> dict[str, Finding]:
        monkeypatch.setattr(doctor, "open_docker", lambda: engine)
        settings.setdefault("images", dict.fromkeys(("python", "shell", "javascript"), "python"))
        return {
            finding.check: finding
            for finding in docker_findings(
                ContainerSettings(**settings), SessionSettings(image="python")
            )
        }

    return look


def fresh_row(**changes: Any) -> dict[str, Any]:
    now = int(datetime.now(UTC).timestamp())
    chosen = {"recipe": read_recipe("python").digest, "guest": guest_digest(), "created": now}
    return image_row("sha256:" + "1" * 64, **(chosen | changes))


def test_doctor_finds_no_fault_in_a_good_docker_with_its_image(findings: Any) -> None:
    found = findings(Engine(fresh_row()))
    assert {finding.verdict for finding in found.values()} == {"ok"}, found
    assert found["docker: runtimes"].found == "runc, runsc (default: runc)"
    assert set(found) >= {"docker", "docker: cgroups", "docker: swap",
                          "docker: memory", "image: python"}  # fmt: skip


@pytest.mark.parametrize(
    ("info", "check", "words"),
    [
        ({"OSType": "windows"}, "docker", "on Linux"),
        ({"MemoryLimit": False}, "docker: cgroups", "controllers"),
        ({"PidsLimit": False}, "docker: cgroups", "controllers"),
        ({"CpuCfsQuota": False}, "docker: cgroups", "controllers"),
        (
            {"MemoryLimit": False, "SecurityOptions": ["name=rootless", "name=seccomp"]},
            "docker: cgroups",
            "delegation",
        ),
        ({"SwapLimit": False}, "docker: swap", "swapoff"),
        ({"SecurityOptions": []}, "docker: seccomp", "seccomp"),
        ({"SecurityOptions": ["name=seccomp,profile=unconfined"]}, "docker: seccomp", "seccomp"),
    ],
)
def test_doctor_warns_about_missing_docker_features_with_a_remedy(
    findings: Any, info: dict[str, Any], check: str, words: str
) -> None:
    found = findings(Engine(fresh_row(), **info))
    assert found[check].verdict == "warning"
    assert words in found[check].cure
    others = {name for name, finding in found.items() if finding.verdict != "ok"}
    assert others == {check}


def test_host_without_swap_needs_no_swap_limit(
    findings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "may_swap", lambda is_local: False)
    assert findings(Engine(fresh_row(), SwapLimit=False))["docker: swap"].verdict == "ok"


def test_doctor_does_not_check_local_swap_for_a_remote_docker(
    findings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2376")
    found = findings(Engine(fresh_row(), SwapLimit=False))
    assert found["docker: swap"].verdict == "warning"
    assert "unknown" in found["docker: swap"].found


def test_full_memory_is_a_warning(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=100 << 20)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    assert findings(Engine(fresh_row()))["docker: memory"].verdict == "warning"


UNUSABLE = (
    DockerNotRunning, DockerNotPermitted, DockerNotSupported, DockerTimeout, DockerError,
)  # fmt: skip


@pytest.mark.parametrize("failure", UNUSABLE)
def test_each_docker_fault_has_its_own_message_and_remedy(
    monkeypatch: pytest.MonkeyPatch, failure: type[DockerError]
) -> None:
    def refuse() -> None:
        raise failure("It is away.")

    monkeypatch.setattr(doctor, "open_docker", refuse)
    (finding,) = docker_findings(ContainerSettings(), SessionSettings())
    assert (finding.check, finding.verdict) == ("docker", "warning")
    assert "It is away." in finding.found
    assert finding.cure == failure.remedy
    assert len({each.remedy for each in UNUSABLE}) == len(UNUSABLE)


@pytest.mark.row("S3")
def test_runtime_of_the_configuration_that_docker_lacks_is_a_warning(findings: Any) -> None:
    found = findings(Engine(fresh_row()), runtime="kata")["docker: runtimes"]
    assert (found.verdict, "'kata'" in found.found) == ("warning", True)
    assert "container.runtime" in found.cure
    found = findings(Engine(fresh_row()), runtime="runsc")["docker: runtimes"]
    assert (found.verdict, found.found.endswith("used: runsc")) == ("ok", True)


@pytest.mark.row("S10")
def test_doctor_warns_about_a_configured_image_without_a_recipe(findings: Any) -> None:
    found = findings(Engine(fresh_row()), images={"python": "pyhton"})["image: pyhton"]
    assert (found.verdict, found.cure) == (
        "warning", "Set container.images.python to an existing image: node, python, python-data, python-science, shell.",
    )  # fmt: skip


def test_doctor_warns_about_a_docker_that_fails_after_its_first_answer(findings: Any) -> None:
    class Failing(Engine):
        def info(self) -> dict[str, Any]:
            raise APIError("500")

    assert set(findings(Failing())) == {"docker"}


@pytest.mark.row("S10")
@pytest.mark.parametrize(
    ("rows", "age", "found", "cure"),
    [
        ([], 0, "not built", "fumehood images build python"),
        ([fresh_row(guest="0" * 64)], 0, "another version", "fumehood images build python"),
        ([fresh_row()], 31, "31 days", "fumehood images build python --force"),
    ],
    ids=["missing", "other guest", "old"],
)
def test_doctor_names_the_command_that_builds_a_missing_image(
    rows: list[dict[str, Any]], age: int, found: str, cure: str
) -> None:
    images = list_images(ListedImages(*rows), "python")
    finding = image_finding("python", images, datetime.now(UTC) + timedelta(days=age))
    assert finding.verdict == "warning"
    assert found in finding.found
    assert finding.cure.endswith(cure)


@pytest.mark.row("S10")
def test_image_that_the_configuration_does_not_use_may_be_missing(findings: Any) -> None:
    found = findings(Engine(fresh_row()))
    for name in ("python-data", "shell", "node"):
        assert (found[f"image: {name}"].verdict, "not built" in found[f"image: {name}"].found) == (
            "ok", True,
        )  # fmt: skip
        assert found[f"image: {name}"].cure.endswith(f"fumehood images build {name}")
    used = findings(Engine(fresh_row()), images=LanguageImages(python="shell"))["image: shell"]
    assert used.verdict == "warning"


def test_doctor_also_checks_the_operators_own_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_image_folder(tmp_path, "mine") / "mine"
    (folder / "requirements.in").write_text("", encoding="utf-8")
    monkeypatch.setattr(doctor, "open_docker", lambda: Engine(fresh_row()))
    found = docker_findings(
        ContainerSettings(images=LanguageImages(python="mine")),
        SessionSettings(image="mine"),
        folder.parent,
    )
    assert {f.check: f.verdict for f in found}["image: mine"] == "warning"


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
