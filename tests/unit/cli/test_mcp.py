"""`fumehood mcp config`: what each client's configuration takes."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from typer.testing import CliRunner

from fumehood.cli.main import app
from fumehood.cli.mcp import PLACES

pytestmark = pytest.mark.row("D3")

OPTIONS = ["--agent", "clerk", "--session", "new", "--wait", "60", "--socket", "/run/x.sock"]


def snippet(client: str, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["mcp", "config", "--client", client, *options])
    assert done.exit_code == 0
    assert PLACES[client][0] in done.stderr
    return tomllib.loads(done.stdout) if client == "codex" else json.loads(done.stdout)


@pytest.mark.parametrize("client", PLACES)
def test_snippet_starts_the_server_with_the_options_given(client: str) -> None:
    (servers,) = snippet(client, *OPTIONS).values()
    assert servers["fumehood"]["args"] == ["mcp", *OPTIONS]
    assert servers["fumehood"]["command"].endswith("fumehood")


def test_snippet_names_the_socket_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_SOCKET", "/run/mine.sock")
    (servers,) = snippet("cursor").values()
    assert servers["fumehood"]["args"] == ["mcp", "--socket", "/run/mine.sock"]


def test_each_client_has_its_own_words() -> None:
    assert list(snippet("vscode")) == ["servers"]
    assert snippet("claude-code")["mcpServers"]["fumehood"]["type"] == "stdio"
    assert list(snippet("codex")) == ["mcp_servers"]


def test_unknown_client_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["mcp", "config", "--client", "vim"])
    assert done.exit_code == 2
    assert "claude-code" in done.stderr


@pytest.mark.parametrize("wait", ["0", "-1", "inf", "nan"])
def test_wait_that_is_no_time_is_refused(wait: str) -> None:
    done = CliRunner().invoke(app, ["mcp", f"--wait={wait}"])
    assert done.exit_code == 2


def test_without_an_engine_the_server_says_how_to_start_one(tmp_path: Any) -> None:
    done = CliRunner().invoke(app, ["mcp", "--socket", str(tmp_path / "none.sock")])
    assert done.exit_code == 4
    assert "Start one with: fumehood serve" in done.stderr
    assert done.stdout == ""
