"""Clients find the socket that an engine of the same configuration listens on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fumehood import AsyncClient, AsyncControlClient, Client, ConfigError, ControlClient
from fumehood.config import load_config
from fumehood.protocol.engine_paths import read_engine_paths


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SOCKET", "HOME", "MODE", "CONFIG", "SERVICE", "SERVICE__RUN_DIRECTORY"):
        monkeypatch.delenv(f"FUMEHOOD_{name}", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "/state")


def _write(tmp_path: Path, text: str) -> None:
    (tmp_path / "fumehood").mkdir()
    (tmp_path / "fumehood" / "config.toml").write_text(text, encoding="utf-8")


PLACES = [
    ({}, "", "/state/fumehood/engine.sock", "/state/fumehood/control.sock"),
    ({"XDG_RUNTIME_DIR": "/run/1"}, "", "/run/1/fumehood/engine.sock", "/run/1/fumehood/control.sock"),
    ({"FUMEHOOD_HOME": "/h", "XDG_RUNTIME_DIR": "/run/1"}, "", "/h/engine.sock", "/h/control.sock"),
    ({"FUMEHOOD_SOCKET": "/s/mine", "FUMEHOOD_HOME": "/h"}, "", "/s/mine", "/s/control-mine"),
    ({"FUMEHOOD_SOCKET": ""}, "", "/state/fumehood/engine.sock", "/state/fumehood/control.sock"),
    ({}, 'home = "/file"', "/file/engine.sock", "/file/control.sock"),
    ({"FUMEHOOD_HOME": "/h"}, 'home = "/file"', "/h/engine.sock", "/h/control.sock"),
    ({"FUMEHOOD_SOCKET": "/env.sock"}, 'socket = "/a/b.sock"', "/env.sock", "/control-env.sock"),
    ({}, 'socket = "/a/b.sock"\nlog_level = "debug"', "/a/b.sock", "/a/control-b.sock"),
    ({"fumehood_home": "/small"}, "", "/small/engine.sock", "/small/control.sock"),
    ({}, 'mode = "service"\n[service]\nrun_directory = "/elsewhere"',
     "/elsewhere/engine/engine.sock", "/elsewhere/control/control.sock"),
    ({}, 'mode = "service"', "/run/fumehood/engine/engine.sock", "/run/fumehood/control/control.sock"),
    ({"FUMEHOOD_SERVICE__RUN_DIRECTORY": "/r"}, 'mode = "service"',
     "/r/engine/engine.sock", "/r/control/control.sock"),
    ({"FUMEHOOD_SERVICE": '{"run_directory": "/r"}'}, 'mode = "service"',
     "/r/engine/engine.sock", "/r/control/control.sock"),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "file", "callers", "control"), PLACES)
def test_client_and_engine_use_the_same_socket_path(
    environment: dict[str, str],
    file: str,
    callers: str,
    control: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _write(tmp_path, file)
    config, quick = load_config(), read_engine_paths(os.environ)
    assert quick.state_directory == config.state_directory
    assert (str(config.socket_path), str(config.control_socket_path)) == (callers, control)
    assert (str(quick.socket_path), str(quick.control_socket_path)) == (callers, control)


@pytest.mark.anyio
async def test_each_client_class_uses_its_own_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_HOME", "/h")
    blocking = Client(), ControlClient(credential="c")
    awaiting = AsyncClient(), AsyncControlClient(credential="c")
    for callers, control in (blocking, awaiting):
        assert callers._transport.endpoint.path == Path("/h/engine.sock")
        assert control._transport.endpoint.path == Path("/h/control.sock")
    for client in blocking:
        client.close()
    for client in awaiting:
        await client.close()


@pytest.mark.parametrize("text", ["socket =", "socket = 7", 'mode = "other"', "service = 1", "\\"])
def test_invalid_configuration_has_a_clear_error(text: str, tmp_path: Path) -> None:
    _write(tmp_path, text)
    with pytest.raises(ConfigError, match="socket cannot be found"):
        Client()
    with pytest.raises(ConfigError):
        load_config()


def test_named_configuration_file_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_CONFIG", "/nonexistent/config.toml")
    with pytest.raises(ConfigError, match="socket cannot be found"):
        Client()


def test_too_long_socket_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_SOCKET", "/" + "x" * 120)
    paths = read_engine_paths(os.environ)
    assert paths is not None
    with pytest.raises(ConfigError, match="121 bytes"):
        _ = paths.socket_path
