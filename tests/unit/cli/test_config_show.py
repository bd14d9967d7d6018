"""`fumehood config show`: every setting with where it comes from, and no secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fumehood import load_config
from fumehood.cli.main import app

FILE = """
log_level = "debug"
[sessions]
max = 3
[webhook]
url = "https://user:pass@hooks.example:8443/s3cret?key=t0ken"
secret_file = "/etc/fumehood/secret"
[[budgets]]
name = "few"
calls = 3
"""


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    monkeypatch.setenv("FUMEHOOD_CONFIG", str(file))
    monkeypatch.setenv("FUMEHOOD_HOME", "/var/tmp/fumehood")
    monkeypatch.setenv("FUMEHOOD_JAIL__MEMORY_MB", "300")
    monkeypatch.setenv("FUMEHOOD_PRICES", '{"currency": "EUR"}')

    def run(*options: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["config", "show", *options])
        assert done.exit_code == code, done.output
        return done.output

    return run


def test_every_setting_is_shown_with_its_source(show: Any) -> None:
    settings = json.loads(show("--json"))["settings"]
    assert {path: (one["value"], one["source"]) for path, one in settings.items()}.items() >= {
        "log_level": ("debug", "file"),
        "log_format": ("auto", "default"),
        "sessions.max": (3, "file"),
        "sessions.waiting": (20, "default"),
        "home": ("/var/tmp/fumehood", "FUMEHOOD_HOME"),
        "jail.memory_mb": (300, "FUMEHOOD_JAIL__MEMORY_MB"),
        "prices.currency": ("EUR", "FUMEHOOD_PRICES"),
        "prices.cpu_second": ("0", "default"),
        "webhook.secret_file": ("/etc/fumehood/secret", "file"),
    }.items()
    assert settings["budgets"]["source"] == "file"
    heads = {path.split(".")[0] for path in settings}
    assert heads == set(type(load_config()).model_fields)


def test_paths_are_those_of_the_configuration(show: Any, tmp_path: Path) -> None:
    shown = json.loads(show("--json"))
    assert shown["file"] == str(tmp_path / "config.toml")
    assert shown["file_is_there"] is True
    assert shown["state_directory"] == "/var/tmp/fumehood"
    assert shown["socket"] == "/var/tmp/fumehood/engine.sock"
    assert shown["control_socket"] == "/var/tmp/fumehood/control.sock"


def test_address_that_may_hold_a_secret_is_masked(show: Any) -> None:
    shown = show("--json")
    assert "https://hooks.example/***" in shown
    assert not any(secret in shown for secret in ("s3cret", "t0ken", "pass", "user:"))


def test_only_what_is_set_can_be_shown(show: Any) -> None:
    settings = json.loads(show("--json", "--set"))["settings"]
    assert "log_format" not in settings
    assert {one["source"] for one in settings.values()} >= {"file", "FUMEHOOD_HOME"}


def test_on_a_terminal_it_is_a_table(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.cli.show.wants_json", lambda asked: asked)
    monkeypatch.setenv("COLUMNS", "80")
    lines = show().splitlines()
    assert lines[0].startswith("configuration file  /")
    (line,) = (line for line in lines if "jail.memory_mb" in line)
    assert line.split() == ["jail.memory_mb", "300", "environment"]
    assert "s3cret" not in "".join(lines)


def test_wrong_configuration_is_said_in_words(show: Any, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("log_levl = 1")
    assert "log_levl: there is no such key" in show(code=2)
