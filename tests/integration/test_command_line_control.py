"""Administration commands: refusals, credentials, the --socket option, output on 80 columns."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD, Daemon
from fumehood.cli.main import app
from support.clients import LEAVES_SOCKETS
from support.terminal import Person

pytestmark = [*LEAVES_SOCKETS]


def run(daemon: Daemon, *arguments: str, elsewhere: Path | None = None) -> Result:
    """Run a command; with `elsewhere`, only its options can locate the daemon."""
    home = daemon.home if elsewhere is None else elsewhere
    environment = {"FUMEHOOD_HOME": str(home), "XDG_RUNTIME_DIR": None}
    return CliRunner(env=environment).invoke(app, arguments, input=f"{daemon.credential}\n")


def administer(daemon: Daemon, *arguments: str) -> str:
    """Run a command with the credential and return its output."""
    done = run(daemon, *arguments, "--credential-stdin")
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.row("R3", "D4")
def test_commands_administer_agents_tokens_and_approvers(administered_daemon: Daemon) -> None:
    daemon = administered_daemon
    administer(daemon, "agents", "create", "cli-clerk", "--principal", "token:cli-robot")
    administer(daemon, "agents", "bind", "cli-clerk", "calculator", "--fixed", '{"precision": 2}')
    shown = json.loads(administer(daemon, "agents", "show", "cli-clerk"))
    assert shown["tools"][0]["fixed"] == {"precision": 2}
    administer(daemon, "agents", "disable", "cli-clerk")
    (agent,) = [
        agent
        for agent in json.loads(administer(daemon, "agents", "list"))
        if agent["id"] == "cli-clerk"
    ]
    assert agent["is_enabled"] is False
    administer(daemon, "agents", "enable", "cli-clerk")
    update = ("agents", "update", "cli-clerk")
    for given, presets in ((["b", "a"], ["b", "a"]), ([], ["b", "a"]), ([""], [])):
        words = [word for name in given for word in ("--preset", name)]
        administer(daemon, *update, "--description", "Adds.", *words)
        agent = json.loads(administer(daemon, "agents", "show", "cli-clerk"))["agent"]
        assert (agent["presets"], agent["principals"]) == (presets, ["token:cli-robot"])
    administer(daemon, "agents", "unbind", "cli-clerk", "calculator")
    administer(daemon, "agents", "delete", "cli-clerk")

    secret = administer(daemon, "tokens", "new", "cli-robot", "--expires", "1h").strip()
    assert secret.startswith("fht_")
    (token,) = [
        token
        for token in json.loads(administer(daemon, "tokens", "list"))
        if token["name"] == "cli-robot"
    ]
    administer(daemon, "tokens", "revoke", token["id"])

    assert administer(daemon, "approvers", "add", "cli-second").startswith("fha_")
    names = [a["name"] for a in json.loads(administer(daemon, "approvers", "list"))]
    assert "cli-second" in names
    administer(daemon, "approvers", "remove", "cli-second")


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["agents", "show", "nobody"], 1, "RESOURCE_NOT_FOUND"),
        (["agents", "show", "a/b"], 2, "can be no name or id"),
        (["agents", "delete", ".."], 2, "can be no name or id"),
        (["agents", "bind", "a", "calculator", "--fixed", "[1]"], 2, "JSON object"),
        (["tokens", "new", "x", "--expires", "soon"], 2, "--expires"),
        (["tokens", "new", "x", "--scope", "everything"], 1, "INVALID_PARAMS"),
        (["tokens", "revoke", "fht_0123456789abcdef_secret"], 2, "not a token's id"),
        (["tokens", "revoke", "0123456789abcdef"], 1, "RESOURCE_NOT_FOUND"),
        (
            ["agents", "bind", "a", "calculator", "--fixed", '{"x": 1}', "--defaults", '{"x": 2}'],
            1,
            "The body is wrong: 'x' is fixed and has a default; choose one.",
        ),
    ],
)
def test_refused_administration_command_has_its_exit_code_and_message(
    administered_daemon: Daemon, arguments: list[str], code: int, says: str
) -> None:
    done = run(administered_daemon, *arguments, "--credential-stdin")
    assert done.exit_code == code, done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.row("D4")
@pytest.mark.parametrize(
    ("arguments", "scope"),
    [
        (["approvals", "list"], "approve"),
        (["policy", "show"], "approve or admin"),
        (["policy", "reload"], "admin"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_command_without_credential_names_the_required_scope(
    administered_daemon: Daemon, arguments: list[str], scope: str
) -> None:
    done = run(administered_daemon, *arguments)
    assert done.exit_code == 2
    assert f"This needs a credential with {scope}. " in done.stderr


@pytest.mark.row("D1", "D4")
@pytest.mark.parametrize("arguments", [["approvers", "list"], ["approvals", "list"]], ids=" ".join)
def test_command_without_daemon_exits_4_before_prompting_for_a_credential(
    administered_daemon: Daemon, home: Path, arguments: list[str]
) -> None:
    environment = {**administered_daemon.environment, "FUMEHOOD_HOME": str(home)}
    person = Person(environment, *arguments)
    assert person.leaves() == 4
    assert "Credential" not in person.seen
    assert "Start one with: fumehood serve" in " ".join(person.seen.split())
    there = Person(administered_daemon.environment, *arguments)
    there.reads("Credential: ")
    there.types(administered_daemon.credential)
    assert there.leaves() == 0


@pytest.mark.row("D1", "D4")
def test_socket_option_selects_the_control_socket(administered_daemon: Daemon, home: Path) -> None:
    daemon = administered_daemon
    asked = ["agents", "list", "--credential-stdin"]
    there = run(daemon, *asked, "--socket", str(daemon.control), elsewhere=home)
    assert there.exit_code == 0, there.stderr
    assert isinstance(json.loads(there.stdout), list)
    not_there = run(daemon, *asked, elsewhere=home)
    assert not_there.exit_code == 4
    assert "fumehood serve" in not_there.stderr


@pytest.mark.row("D6")
def test_serve_with_closed_stderr_exits_4_and_creates_nothing(home: Path) -> None:
    """Otherwise the next opened file would get descriptor 2 and receive the log."""
    done = subprocess.run(
        ["sh", "-c", f"exec '{FUMEHOOD}' serve 2>&-"],
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)},
        stdout=subprocess.PIPE, timeout=600,
    )  # fmt: skip
    assert done.returncode == 4
    assert b"Standard error is closed" in done.stdout
    assert not list(home.iterdir())
