"""Callers with a token on the command line, and the tools their agents may use."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conftest import FUMEHOOD, Daemon

SUM = ("call", "calculator", '{"expression": "1 + 1"}')
HOOKED = {
    "hook_event_name": "PreToolUse", "session_id": "s", "cwd": "/", "tool_name": "Bash",
    "tool_input": {"command": "ls"},
}  # fmt: skip


def run(
    daemon: Daemon, *arguments: str, given: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FUMEHOOD, *arguments], env={**daemon.environment, **more}, text=True, input=given,
        capture_output=True, timeout=600,
    )  # fmt: skip


def administer(daemon: Daemon, *arguments: str) -> str:
    done = run(daemon, *arguments, "--credential-stdin", given=f"{daemon.credential}\n")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def token(administered_daemon: Daemon) -> str:
    return administer(administered_daemon, "tokens", "new", "line-robot").strip()


@pytest.fixture
def token_file(token: str, tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    return file


def caller_of(daemon: Daemon, *arguments: str, **more: str) -> str:
    """The principal of a call, according to the caller's own call log."""
    done = run(daemon, *SUM, *arguments, **more)
    assert done.returncode == 0, (done.stdout, done.stderr)
    call_id = json.loads(done.stdout)["metadata"]["call_id"]
    shown = run(daemon, "calls", "show", call_id, "--json", **more)
    return str(json.loads(shown.stdout)["principal_id"]) if shown.returncode == 0 else "another"


@pytest.mark.row("T2", "D4")
def test_token_from_variable_or_file_determines_the_principal(
    administered_daemon: Daemon, token: str, token_file: Path
) -> None:
    daemon = administered_daemon
    assert caller_of(daemon).startswith("uid:")
    assert caller_of(daemon, FUMEHOOD_TOKEN=token) == "token:line-robot"
    assert caller_of(daemon, "--token-file", str(token_file)) == "another"
    lines = '{"tool": "calculator", "arguments": {"expression": "1"}}\n'
    batch = run(daemon, "call", "--batch", "-", "--json", given=lines, FUMEHOOD_TOKEN=token)
    assert batch.returncode == 0
    for more in ((), ("--stream",)):
        wrong = run(daemon, *SUM, *more, FUMEHOOD_TOKEN="fht_0_0")
        assert "UNAUTHORIZED" in wrong.stdout + wrong.stderr


@pytest.mark.row("D4")
def test_unsafe_token_source_is_refused_without_printing_the_token(
    administered_daemon: Daemon, token: str, token_file: Path, tmp_path: Path
) -> None:
    daemon = administered_daemon
    open_to_all = tmp_path / "open"
    open_to_all.write_text(token)
    open_to_all.chmod(0o644)
    for options, more in (
        (["--token-file", str(open_to_all)], {}),
        (["--token-file", str(tmp_path / "nowhere")], {}),
        (["--token-file", str(tmp_path)], {}),
        (["--token-file", str(token_file), "--local"], {}),
        ([], {"FUMEHOOD_TOKEN": daemon.credential}),
        ([], {"FUMEHOOD_TOKEN": "secret-of-another-kind"}),
    ):
        done = run(daemon, *SUM, *options, **more)
        assert (done.returncode, done.stdout) == (2, ""), options
        assert done.stderr
        assert token not in done.stderr
        assert not more or more["FUMEHOOD_TOKEN"] not in done.stderr


@pytest.mark.row("D4")
def test_hook_uses_its_token_principal_and_denies_with_invalid_token(
    administered_daemon: Daemon, token: str
) -> None:
    daemon, given = administered_daemon, json.dumps(HOOKED)
    asked = run(daemon, "hook", "claude-code", given=given, FUMEHOOD_TOKEN=token)
    reason = json.loads(asked.stdout)["hookSpecificOutput"]["permissionDecisionReason"]
    approval_id = next(word for word in reason.split() if word.startswith("apr_"))
    shown = administer(daemon, "approvals", "show", approval_id)
    assert "token:line-robot" in shown
    for bad in ("fht_0_0", "nothing"):
        done = run(daemon, "hook", "claude-code", given=given, FUMEHOOD_TOKEN=bad)
        assert done.returncode == 0
        assert json.loads(done.stdout)["hookSpecificOutput"]["permissionDecision"] == "deny"


@pytest.mark.row("R2", "R3")
def test_agent_filter_lists_allowed_tools_and_reasons_for_left_out_ones(
    administered_daemon: Daemon, token: str
) -> None:
    daemon = administered_daemon
    administer(daemon, "agents", "create", "line-clerk", "--principal", "token:line-robot")
    for name in ("calculator", "delete_files", "read_file"):
        administer(daemon, "agents", "bind", "line-clerk", name)
    administer(daemon, "tokens", "new", "line-clerks-own", "--agent", "line-clerk",
               "--principal", "token:line-robot")  # fmt: skip
    own = administer(daemon, "tokens", "new", "line-second", "--agent", "line-clerk",
                     "--principal", "token:line-robot").strip()  # fmt: skip

    def chosen(*options: str) -> tuple[list[str], dict[str, str]]:
        done = run(daemon, "agents", "filter", "line-clerk", "--json", *options, FUMEHOOD_TOKEN=own)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        left_out = {one["name"]: one["reason"] for one in found["left_out"]}
        return [one["name"] for one in found["items"]], left_out

    names, left_out = chosen()
    assert names == ["calculator", "read_file"]
    assert "dangerous" in left_out["delete_files"]
    assert chosen("--include-dangerous")[1] == {}
    assert chosen("--at-most", "1")[0] == ["calculator"]
    foreign = run(daemon, "agents", "filter", "line-clerk", "--json", FUMEHOOD_TOKEN="")
    assert foreign.returncode == 1
    assert "RESOURCE_NOT_FOUND" in foreign.stdout + foreign.stderr
    assert run(daemon, "agents", "filter", "line-clerk", "--max-cost", "x").returncode == 2
