"""Who only looks for the socket finds it where the whole configuration says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fumehood import ConfigError, load_config
from fumehood.protocol.engine_paths import config_file, read_engine_paths

VARIABLES = ["SOCKET", "HOME", "MODE", "CONFIG", "SERVICE", "SERVICE__RUN_DIRECTORY"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"FUMEHOOD_{name}", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "/state")


def write(tmp_path: Path, text: str) -> None:
    (tmp_path / "fumehood").mkdir()
    (tmp_path / "fumehood" / "config.toml").write_text(text, encoding="utf-8")


FILES = [
    "", 'socket = "/a/b.sock"', 'home = "/home"', 'mode = "service"', 'socket = "relative.sock"',
    'mode = "service"\n[service]\nrun_directory = "/elsewhere"',
    'home = "/home"\nsocket = "/s"\nlog_level = "debug"', 'socket = "/x/engine.sock-2"',
]  # fmt: skip
ENVIRONMENTS: list[dict[str, str]] = [
    {}, {"FUMEHOOD_SOCKET": "/env.sock"}, {"FUMEHOOD_HOME": "/env"}, {"FUMEHOOD_MODE": "service"},
    {"XDG_RUNTIME_DIR": "/run/user/7"}, {"FUMEHOOD_SOCKET": ""}, {"fumehood_home": "/small"},
    {"FUMEHOOD_MODE": "service", "FUMEHOOD_SERVICE__RUN_DIRECTORY": "/env/run"},
]  # fmt: skip


@pytest.mark.parametrize("text", FILES)
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=str)
def test_both_readers_give_the_same_paths(
    text: str, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, text)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    paths, config = read_engine_paths(os.environ), load_config()
    assert paths is not None
    assert paths.state_directory == config.state_directory
    assert paths.socket_path == config.socket_path
    assert paths.control_socket_path == config.control_socket_path


@pytest.mark.parametrize("text", ["socket =", "socket = 7", 'mode = "other"', "service = 1", "\\"])
def test_unclear_configuration_is_left_to_the_reader_that_says_what_is_wrong(
    text: str, tmp_path: Path
) -> None:
    write(tmp_path, text)
    assert read_engine_paths(os.environ) is None
    with pytest.raises(ConfigError):
        load_config()


def test_file_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUMEHOOD_CONFIG", str(tmp_path / "nothing.toml"))
    assert config_file(os.environ) == tmp_path / "nothing.toml"
    assert read_engine_paths(os.environ) is None


def test_path_that_no_socket_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_SOCKET", "/" + "x" * 120)
    paths = read_engine_paths(os.environ)
    assert paths is not None
    with pytest.raises(ValueError, match="121 bytes"):
        _ = paths.socket_path
