"""The command line: exit codes, strict arguments, output streams."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conftest import FUMEHOOD, Daemon
from support.terminal import on_a_terminal

SLOW = "pow(7, 10**4200, 10**4200 + 7)"


def run(daemon: Daemon, *arguments: str, stdin: bytes = b"", **environment: str):
    return subprocess.run(
        [str(FUMEHOOD), *arguments],
        env={**daemon.environment, **environment},
        input=stdin,
        capture_output=True,
        timeout=600,
    )


@pytest.mark.row("D1", "P11")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["call", "calculator", '{"expression": "1 + 1"}'], 0),
        (["call", "calculator", '{"expression": "1 / 0"}'], 1),
        (["call", "calculator", '{"expression": "2 ^ 3"}'], 1),
        (["call", "nothing", "{}"], 1),
        (["call", "calculator", '{"expression": "' + SLOW + '"}', "--timeout", "0.1"], 1),
        (["call", "calculator", '{"expression": '], 2),
        (["call", "calculator", '{"expression": "1", "expression": "2"}'], 2),
        (["call", "calculator", "[1]"], 2),
        (["call", "calculator", "@/nowhere/at/all"], 2),
        (["call", "calculator", "{}", "--nonsense"], 2),
        (["call", "calculator", "{}", "--timeout", "nan"], 2),
        (["call", "calculator", "{}", "--timeout", "-1"], 2),
        (["call", "a/b", "{}"], 2),
        (["tools", "show", "x y"], 1),
        (["--version"], 0),
        (["call"], 2),
        (["nonsense"], 2),
        (["tools", "show", "nothing"], 1),
        (["tools", "list"], 0),
    ],
)
def test_exit_code_distinguishes_success_refusal_and_usage_error(
    shared_daemon: Daemon, arguments: list[str], code: int
) -> None:
    answer = run(shared_daemon, *arguments)
    assert answer.returncode == code, answer.stderr
    assert b"Traceback" not in answer.stderr


@pytest.mark.row("D1")
def test_non_json_arguments_are_refused_with_an_example(shared_daemon: Daemon) -> None:
    answer = run(shared_daemon, "call", "calculator", "5+5")
    assert answer.returncode == 2
    assert b"""such as '{"expression": "1 + 1"}'.""" in answer.stderr


@pytest.mark.row("D1")
def test_missing_daemon_exits_4_and_names_the_start_command(
    home: Path, shared_daemon: Daemon
) -> None:
    answer = run(shared_daemon, "call", "calculator", "{}", FUMEHOOD_HOME=str(home))
    assert answer.returncode == 4
    assert b"fumehood serve" in answer.stderr
    assert answer.stdout == b""


@pytest.mark.row("D1")
@pytest.mark.parametrize("command", [["call", "calculator", "{}"], ["policy", "show"]])
def test_missing_service_exits_4_and_names_systemctl(
    home: Path, shared_daemon: Daemon, command: list[str]
) -> None:
    """The twin is `test_missing_daemon_exits_4_and_names_the_start_command`."""
    file = home / "config.toml"
    file.write_text(f'mode = "service"\n[service]\nrun_directory = "{home}/run"\n')
    more = ["--credential-stdin"] if command[0] == "policy" else []
    answer = run(
        shared_daemon, *command, *more, stdin=b"fha_0_x\n",
        FUMEHOOD_CONFIG=str(file), FUMEHOOD_HOME=str(home),
    )  # fmt: skip
    assert answer.returncode == 4, answer.stderr
    assert b"the socket of a service, which is not running" in answer.stderr
    assert b"systemctl start fumehood" in answer.stderr
    assert b"fumehood serve" not in answer.stderr


@pytest.mark.row("D1")
def test_wait_seconds_without_equals_sign_are_refused_with_the_correct_form(
    shared_daemon: Daemon,
) -> None:
    answer = run(shared_daemon, "call", "calculator", "--wait", "60s", "{}")
    assert answer.returncode == 2
    assert b"equals sign: --wait=" in b" ".join(answer.stderr.split())


@pytest.mark.row("D1")
def test_wait_option_without_value_is_accepted_in_any_position(shared_daemon: Daemon) -> None:
    for arguments in (["--wait", '{"expression": "2"}'], ['{"expression": "2"}', "--wait"]):
        answer = run(shared_daemon, "call", "calculator", *arguments)
        assert answer.returncode == 0, answer.stderr


@pytest.mark.row("D1")
def test_arguments_are_read_from_a_file_or_standard_input(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    file = tmp_path / "arguments.json"
    file.write_text('{"expression": "6 * 7"}')
    for given, stdin in ((f"@{file}", b""), ("-", file.read_bytes())):
        answer = run(shared_daemon, "call", "calculator", given, stdin=stdin)
        assert json.loads(answer.stdout)["data"]["value"] == 42


@pytest.mark.row("D7")
def test_doctor_passes_on_this_host(administered_daemon: Daemon) -> None:
    answer = run(administered_daemon, "doctor")
    findings = {finding["check"]: finding for finding in json.loads(answer.stdout)}
    assert answer.returncode == 0, answer.stdout
    of_containers = {name for name in findings if name.startswith(("docker", "image"))}
    others = {name: finding for name, finding in findings.items() if name not in of_containers}
    assert {finding["verdict"] for finding in others.values()} == {"ok"}, others
    # What a host's Docker lacks takes containers away, and nothing else.
    assert of_containers
    assert "missing" not in {findings[name]["verdict"] for name in of_containers}
    assert findings["interpreter: memory"]["found"].startswith("enforced")
    assert {"asteval", "RestrictedPython"} <= findings.keys()
    assert findings["approvers"]["found"] == "owner"
    assert findings["audit key"]["found"].startswith(f"{administered_daemon.home}/audit.key")


@pytest.mark.row("D7")
def test_doctor_names_the_cure_for_an_open_state_directory(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    open_to_all.chmod(0o755)
    answer = run(shared_daemon, "doctor", FUMEHOOD_HOME=str(open_to_all))
    findings = {finding["check"]: finding for finding in json.loads(answer.stdout)}
    assert answer.returncode == 1
    assert findings["state directory"]["verdict"] == "missing"
    assert "chmod 700" in findings["state directory"]["cure"]
    assert findings["daemon"]["verdict"] == "warning"


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["run_restricted_python", r'{"code": "raise ValueError(\"a\\u001b[31mred\\u202eX\")"}'],
            r"a\u{001b}[31mred\u{202e}X",
        ),
        (["calculator", r'{"\u001b[2Jx\u202e": "1"}', "--json"], r"\u001b[2Jx\u202e"),
    ],
)
def test_control_characters_in_a_refusal_are_escaped_on_a_terminal(
    shared_daemon: Daemon, arguments: list[str], says: str
) -> None:
    environment = {**shared_daemon.environment, "NO_COLOR": "1"}
    status, shown = on_a_terminal(
        environment, "call", "--local", *arguments, columns=300, term="xterm"
    )
    assert status == 1
    assert says in shown
    assert "\u202e" not in shown
    assert "\x1b[31m" not in shown
    assert "\x1b[2J" not in shown


def test_invalid_configuration_warns_but_does_not_fail_a_daemon_command(
    shared_daemon: Daemon, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("pool_min = 0\n")
    wrong = {"FUMEHOOD_CONFIG": str(file)}
    listed = run(shared_daemon, "tools", "list", **wrong)
    assert listed.returncode == 0
    assert json.loads(listed.stdout)
    (line,) = listed.stderr.decode().splitlines()
    assert f"pool_min: there is no such key in {file}" in line
    assert "running engine keeps the configuration" in line

    nobody = run(shared_daemon, "tools", "list", **wrong, FUMEHOOD_HOME=str(tmp_path))
    (line,) = nobody.stderr.decode().splitlines()
    assert (nobody.returncode, "pool_min" in line, "engine" in line) == (2, True, False)

    file.write_text('log_level = "debug"\n')
    assert run(shared_daemon, "tools", "list", **wrong).stderr == b""
