"""`fumehood mcp`: what each client's configuration takes, and the servers of the engine's own."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fumehood.cli.main import app
from fumehood.config import load_config
from fumehood.mcp.command import PLACES

pytestmark = pytest.mark.row("D3")

OPTIONS = ["--agent", "clerk", "--session", "new", "--wait", "60", "--socket", "/run/x.sock"]


def snippet(client: str, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["mcp", "config", "--client", client, *options])
    assert done.exit_code == 0
    assert PLACES[client][0] in done.stderr
    loads = {"codex": tomllib.loads, "goose": yaml.safe_load}.get(client, json.loads)
    return loads(done.stdout)


def started(server: dict[str, Any]) -> list[str]:
    """The command line of a server, in the form of its client."""
    command = server.get("command", server.get("cmd"))
    return command if isinstance(command, list) else [command, *server["args"]]


@pytest.mark.parametrize("client", PLACES)
def test_snippet_starts_the_server_with_the_options_given(client: str) -> None:
    path = "/run/m\u00fcller \U0001f600/x.sock"
    (servers,) = snippet(client, *OPTIONS[:-1], path).values()
    command, *arguments = started(servers["fumehood"])
    assert arguments == ["mcp", *OPTIONS[:-1], path]
    assert command.endswith("fumehood")


@pytest.mark.parametrize("client", PLACES)
def test_wait_sets_the_time_limit_of_a_client_that_has_one(client: str) -> None:
    seconds = {"cline": 421, "codex": 421, "goose": 421, "zed": 421}
    milliseconds = dict.fromkeys(["claude-code", "copilot-cli", "gemini-cli", "opencode"], 421_000)
    key = "tool_timeout_sec" if client == "codex" else "timeout"
    done = CliRunner().invoke(app, ["mcp", "config", "--client", client, "--wait", "300.5"])
    (servers,) = snippet(client, "--wait", "300.5").values()
    assert servers["fumehood"].get(key) == {**seconds, **milliseconds}.get(client)
    assert ("has no setting" in done.stderr) is (key not in servers["fumehood"])
    (servers,) = snippet(client).values()  # the twin
    assert key not in servers["fumehood"]


def test_snippet_names_the_socket_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUMEHOOD_SOCKET", "/run/mine.sock")
    (servers,) = snippet("cursor").values()
    assert servers["fumehood"]["args"] == ["mcp", "--session", "new", "--socket", "/run/mine.sock"]


def test_project_is_named_by_its_whole_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (servers,) = snippet("cursor", "--project", ".", "--preset", "small", "--socket", "/s").values()
    words = ["--session", "new", "--preset", "small", "--project", str(tmp_path), "--socket", "/s"]
    assert servers["fumehood"]["args"] == ["mcp", *words]
    done = CliRunner().invoke(app, ["mcp", "--project", ".", "--session", "sess_1"])
    assert done.exit_code == 2
    assert "--project makes a session" in done.stderr


def test_mcp_config_has_a_snippet_for_each_client() -> None:
    assert list(snippet("vscode")) == ["servers"]
    assert snippet("claude-code")["mcpServers"]["fumehood"]["type"] == "stdio"
    assert list(snippet("codex")) == ["mcp_servers"]
    assert list(snippet("zed")) == ["context_servers"]
    goose = snippet("goose")["extensions"]["fumehood"]
    assert (goose["type"], goose["name"], goose["enabled"]) == ("stdio", "fumehood", True)
    opencode = snippet("opencode")["mcp"]["fumehood"]
    assert (opencode["type"], opencode["enabled"]) == ("local", True)
    copilot = snippet("copilot-cli")["mcpServers"]["fumehood"]
    assert (copilot["type"], copilot["tools"]) == ("local", ["*"])
    assert snippet("cline")["mcpServers"]["fumehood"].keys() == {"command", "args"}


def test_unknown_client_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["mcp", "config", "--client", "vim"])
    assert done.exit_code == 2
    assert "claude-code" in done.stderr


@pytest.mark.parametrize("wait", ["0", "-1", "inf", "nan"])
def test_mcp_wait_that_is_not_a_time_is_refused(wait: str) -> None:
    done = CliRunner().invoke(app, ["mcp", f"--wait={wait}"])
    assert done.exit_code == 2


FILE = """\
# Ours.
log_level = "debug"  # for a while

[mcp_servers.first]  # the first
command = ["a"]

[mcp_servers.first.env]
TZ = "UTC"

# About limits.
[container]
memory_mb = 256
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "here" / "config.toml"
    monkeypatch.setenv("FUMEHOOD_CONFIG", str(path))
    return path


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["mcp", *words])
    assert done.exit_code == code, done.output
    return done.output


def servers(file: Path) -> Any:
    return tomllib.loads(file.read_text()).get("mcp_servers")


def test_added_mcp_server_is_in_the_loaded_configuration(file: Path) -> None:
    words = run(
        "add", "clock", "--place", "host", "--harmless", "now", "--harmless", "zones",
        "--env", "A=b=\"c\" é\\", "--", "python3", "clock.py", "--fast", "two words",
    )  # fmt: skip
    assert "when it starts" in words
    found = load_config().mcp_servers["clock"]
    assert found.command == ("python3", "clock.py", "--fast", "two words")
    assert (found.place, found.harmless) == ("host", ("now", "zones"))
    assert found.env["A"].get_secret_value() == 'b="c" é\\'
    assert file.stat().st_mode & 0o777 == 0o600


def test_mcp_add_keeps_comments_and_mode_of_the_file(file: Path) -> None:
    file.parent.mkdir()
    file.write_text(FILE)
    file.chmod(0o640)
    run("add", "far", "--url", "https://mcp.example/mcp", "--header", "x-team=blue")
    assert file.read_text().startswith(FILE)
    assert servers(file)["far"] == {
        "url": "https://mcp.example/mcp", "headers": {"x-team": "blue"},
    }  # fmt: skip
    run("remove", "first")
    assert list(servers(file)) == ["far"]
    assert "# About limits.\n[container]" in file.read_text()
    assert "TZ" not in file.read_text()
    run("remove", "far")
    assert file.read_text().startswith('# Ours.\nlog_level = "debug"  # for a while\n')
    assert servers(file) is None
    assert load_config().container.memory_mb == 256
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["first", "--", "b"], "already"),
        (["new"], "one of `command` and `url`"),
        (["new", "--url", "https://a.example/", "--", "b"], "one of `command` and `url`"),
        (["new", "--url", "https://a.example/", "--place", "host"], "place"),
        (["new", "--url", "file:///etc/passwd"], "https://"),
        (["new", "--place", "moon", "--", "b"], "place"),
        (["new", "--env", "A", "--", "b"], "NAME=VALUE"),
        (["new", "--env", "A B=c", "--", "b"], "env"),
        (['x]\n[container', "--", "b"], "pattern"),
        (["a__b", "--", "b"], "pattern"),
    ],
)  # fmt: skip
def test_invalid_mcp_server_changes_nothing(file: Path, words: list[str], said: str) -> None:
    file.parent.mkdir()
    file.write_text(FILE)
    assert said in run("add", *words, code=2)
    assert file.read_text() == FILE
    assert [entry.name for entry in file.parent.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mcp_servers = { a = { command = ['b'] } }\n", ["add", "new", "--", "b"]),
        ("mcp_servers = { a = { command = ['b'] } }\n", ["remove", "a"]),
        ("mcp_servers.a.command = ['b']\n", ["remove", "a"]),
        ("[mcp_servers.b]\ncommand = ['b']\n", ["remove", "a"]),
        ('[mcp_servers.a]\ncommand = ["""\n[container]\n""", "c"]\n', ["remove", "a"]),
        ("no toml\n", ["add", "new", "--", "b"]),
    ],
)
def test_configuration_file_of_unusual_form_is_not_changed(
    file: Path, text: str, words: list[str]
) -> None:
    file.parent.mkdir()
    file.write_text(text)
    run(*words, code=2)
    assert file.read_text() == text
