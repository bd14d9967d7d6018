"""Findings on a terminal: what needs attention in full, the rest in few lines."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fumehood import Config
from fumehood.cli.doctor import CHECKS, INTERPRETERS, Finding, daemon_findings, show_findings
from fumehood.core.limits import Limit
from fumehood.core.status import Readiness, StateReadiness

pytestmark = pytest.mark.row("D7")

WELL = (
    "platform", "python", *INTERPRETERS, "configuration", "state directory", "daemon", *CHECKS,
    *(f"{wall}: {limit}" for wall in ("interpreter", "jail") for limit in Limit),
    "docker", *(f"docker: {part}" for part in ("seccomp", "memory", "cgroups", "swap", "disk")),
    "image: node", "image: shell", "tools", "tools directory",
)  # fmt: skip
LIMITS = 2 * len(Limit)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def findings(**wrong: str) -> list[Finding]:
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
    show_findings([*findings(daemon=f"No engine answers on {path}."), one], verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warning  daemon: No engine answers")
    assert any(f"{path}." in line for line in lines)
    assert "           Remedy: Mend it." in lines
    assert "ok       image: python: not built" in lines
    assert "           Remedy: To build it: fumehood images build python" in lines
    assert f"ok       Limits: {LIMITS} of {LIMITS} enforced" in lines
    assert "ok       Engine: 2 of 3 ok: configuration, state directory" in lines
    assert "ok       Images: 2 of 3 ok: node, shell" in lines
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
    show_findings([*findings(), circuit], verbose=False)
    shown = capsys.readouterr().out
    assert "ok       Engine: 3 of 4 ok: configuration, state directory, daemon" in shown


def test_verbose_doctor_shows_every_check_in_full(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_findings(findings(daemon="No engine."), verbose=True)
    lines = capsys.readouterr().out.splitlines()
    heads = [line[9:] for line in lines if not line.startswith(" ")]
    assert [
        check for check, head in zip(WELL, heads, strict=True) if not head.startswith(check)
    ] == []
    assert max(map(len, lines)) <= 80


def test_findings_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    show_findings([Finding("tools", "warning", "\x1b[2J", "\x1b[2J")], verbose=False)
    assert "\x1b" not in capsys.readouterr().out
