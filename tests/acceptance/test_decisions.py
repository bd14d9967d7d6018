"""The approval gate for external tools: over the socket and as a Claude Code hook."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from support.site import Site
from support.wait import DEADLINE_S

pytestmark = pytest.mark.row("A1", "A2", "A5")

HOOK = ("hook", "claude-code")


def decide(site: Site, tool: str, arguments: Any, **more: Any) -> Any:
    body = {"tool": tool, "arguments": arguments, **more}
    answer = site.ask("caller", "POST", "/v1/decisions", body)
    assert (answer.status, answer.code) == (200, None), answer.body
    return answer.body["data"]


def call_of(command: str, **fields: Any) -> str:
    """The input of a Claude Code hook. *Source*: its hooks reference, PreToolUse."""
    document = {
        "session_id": "3f0c5d6e-0000-4000-8000-000000000001",
        "transcript_path": "/home/u/.claude/projects/p/t.jsonl",
        "cwd": "/home/u/p",
        "permission_mode": "default",
        "hook_event_name": "PreToolUse",
        "tool_name": "Bash",
        "tool_input": {"command": command, "description": "Work"},
        "tool_use_id": "toolu_01",
    }
    return json.dumps({**document, **fields})


def answer_of(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """The decision and its reason, which must be the only output on stdout."""
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.keys() == {"hookSpecificOutput"}
    output = answer["hookSpecificOutput"]
    assert output["hookEventName"] == "PreToolUse"
    return output["permissionDecision"], output["permissionDecisionReason"]


def hooked(site: Site, given: str, *options: str) -> tuple[str, str]:
    return answer_of(
        subprocess.run(
            [*site.command, *HOOK, *options], env=site.environment, cwd="/", text=True,
            input=given, capture_output=True, timeout=600, **site._identity("caller"),
        )
    )  # fmt: skip


def alone(given: str, *options: str, **environment: str) -> tuple[str, str]:
    return answer_of(
        subprocess.run(
            [FUMEHOOD, *HOOK, *options], env={**CLEAN_ENVIRONMENT, **environment}, text=True,
            input=given, capture_output=True, timeout=600,
        )
    )  # fmt: skip


def test_approved_decision_allows_one_identical_call_only(site: Site) -> None:
    asked = {"command": "make release"}
    first = decide(site, "Bash", asked, context={"cwd": "/p"})
    assert (first["decision"], first["tool"]) == ("pending", "external:Bash")
    shown = site.run("approver", "approvals", "show", first["approval_id"],
                     credential=site.owner)  # fmt: skip
    assert "make release" in shown.stdout
    assert "/p" in shown.stdout
    again = decide(site, "Bash", asked, context={"cwd": "/p"})
    assert again["approval_id"] == first["approval_id"]
    assert site.decide(first["approval_id"]).code is None
    site.until(first["approval_id"], "done")
    # The attack: the yes for one place or command is none for another.
    assert decide(site, "Bash", asked, context={"cwd": "/"})["decision"] == "pending"
    assert (
        decide(site, "Bash", {"command": "make x"}, context={"cwd": "/p"})["decision"] == "pending"
    )
    # The twin, and the control: it lets one call through, and no second one.
    assert decide(site, "Bash", asked, context={"cwd": "/p"})["decision"] == "allow"
    last = decide(site, "Bash", asked, context={"cwd": "/p"})
    assert last["approval_id"] not in (None, first["approval_id"])
    rows = [row for row in site.audit_rows("approval.") if row.get("tool") == "external:Bash@1.0.0"]
    assert rows


def test_decision_with_forged_token_or_invalid_tool_name_is_refused(site: Site) -> None:
    body = {"tool": "Bash", "arguments": {}}
    refused = site.ask("caller", "POST", "/v1/decisions", body, credential="fht_0_0")
    assert (refused.status, refused.code) == (401, "UNAUTHORIZED")
    wrong = site.ask("caller", "POST", "/v1/decisions", {**body, "tool": "a b"})
    assert (wrong.status, wrong.code) == (400, "INVALID_PARAMS")


def test_hook_denies_pending_call_and_allows_it_once_after_approval(site: Site) -> None:
    given = call_of("npm publish")
    decision, reason = hooked(site, given)
    assert decision == "deny"
    (approval_id,) = {word for word in reason.split() if word.startswith("apr_")}
    assert f"fumehood approvals approve {approval_id}" in reason
    assert hooked(site, given, "--pending", "ask")[0] == "ask"
    assert site.decide(approval_id).code is None
    site.until(approval_id, "done")
    assert hooked(site, given)[0] == "allow"
    assert hooked(site, given)[0] == "deny"


def test_hook_reports_denial_with_the_approvers_reason(site: Site) -> None:
    given = call_of("npm unpublish")
    _, reason = hooked(site, given)
    approval_id = next(word for word in reason.split() if word.startswith("apr_"))
    assert site.decide(approval_id, decision="deny", reason="Never that.").code is None
    decision, reason = hooked(site, given)
    assert decision == "deny"
    assert reason.startswith("APPROVAL_DENIED: ")
    assert "Never that." in reason


@pytest.mark.parametrize(
    "given",
    [
        "", "no JSON", "[]", "{}", "null", '{"a": 1, "a": 2}',
        call_of("x", hook_event_name="PostToolUse"),
        call_of("x", tool_input="rm -r /"),
        call_of("x", tool_name=None),
        call_of("x", tool_name="a b"),
        call_of("x", session_id="../.."),
        call_of("x", cwd=None),
        '{"hook_event_name": ' + "[" * 100_000,
    ],
)  # fmt: skip
def test_hook_denies_malformed_input(site: Site, given: str) -> None:
    decision, reason = hooked(site, given)
    assert decision == "deny"
    assert reason


def test_hook_without_running_engine_denies_and_shows_start_command(home: Path) -> None:
    decision, reason = alone(call_of("ls"), FUMEHOOD_HOME=str(home))
    assert decision == "deny"
    assert "fumehood serve" in reason


def test_hook_with_invalid_configuration_denies(home: Path) -> None:
    decision, _ = alone(call_of("ls"), FUMEHOOD_CONFIG=str(home / "nowhere"))
    assert decision == "deny"


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"\xff" * 100]
)
def test_hook_denies_on_malformed_server_response(home: Path, reply: bytes) -> None:
    path = home / "engine.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        process = subprocess.Popen(
            [FUMEHOOD, *HOOK, "--socket", str(path)], env=CLEAN_ENVIRONMENT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        process.stdin.write(call_of("ls"))
        process.stdin.close()
        connection, _ = server.accept()
        connection.recv(65536)
        connection.sendall(reply)
        connection.close()
        server.close()
        out = process.stdout.read()
        process.wait(timeout=DEADLINE_S)
        process.stdout.close()
        process.stderr.close()
    assert json.loads(out)["hookSpecificOutput"]["permissionDecision"] == "deny"
    assert process.returncode == 0


def test_hook_with_unknown_option_exits_with_blocking_status() -> None:
    done = subprocess.run(
        [FUMEHOOD, *HOOK, "--wiat", "5"], env=CLEAN_ENVIRONMENT, input=call_of("ls"), text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2


@pytest.mark.parametrize("output", ["&-", "/dev/full"])
def test_hook_with_unwritable_stdout_exits_with_blocking_status(home: Path, output: str) -> None:
    command = f'exec "$@" >{output}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", FUMEHOOD, *HOOK], input=call_of("ls"), text=True,
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)}, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2
    assert alone(call_of("ls"), FUMEHOOD_HOME=str(home))[0] == "deny"  # the twin: 0, and an answer


SOON = """
import sys
from fumehood.cli import hook, main
hook.LEAST_ANSWER_S, hook.WRITE_S = map(float, sys.argv[1:])
sys.argv = ["fumehood", "hook", "claude-code"]
main.main()
"""
"""Runs the hook with other deadlines: for the engine's answer, and for writing one."""


@pytest.mark.parametrize("answer_s", ["60", "0.05"], ids=["a decision", "no decision in time"])
def test_hook_whose_answer_nobody_reads_exits_with_blocking_status(
    home: Path, answer_s: str
) -> None:
    """A call is allowed if its hook outlasts the timeout of Claude Code."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while os.write(writing, b" " * 4096):
            pass
    os.set_blocking(writing, True)  # shared with the hook

    def start(output: int, write_s: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", SOON, answer_s, write_s], stdin=subprocess.PIPE, stdout=output,
            env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)},
        )  # fmt: skip

    given = call_of("ls").encode() if answer_s == "60" else b""
    with start(writing, "0.05") as blocked, start(subprocess.PIPE, "60") as read:
        assert blocked.stdin is not None
        assert read.stdin is not None
        for one in (blocked.stdin, read.stdin):
            one.write(given)
            if given:
                one.close()
            else:
                one.flush()  # the hook waits for the rest
        try:
            assert blocked.wait(timeout=DEADLINE_S) == 2
        finally:
            os.close(reading)
            os.close(writing)
        assert read.wait(timeout=DEADLINE_S) == 0  # the twin
        assert read.stdout is not None
        output = json.loads(read.stdout.read())["hookSpecificOutput"]
    assert output["permissionDecision"] == "deny"


def test_printed_settings_run_this_command_and_block_on_failure(site: Site) -> None:
    done = subprocess.run(
        [*site.command, *HOOK, "--wait", "30", "--print-settings"], env=site.environment,
        text=True, capture_output=True, timeout=600, **site._identity("caller"),
    )  # fmt: skip
    settings = json.loads(done.stdout)
    ((entry,),) = [group["hooks"] for group in settings["hooks"]["PreToolUse"]]
    assert (entry["type"], entry["onFailure"]) == ("command", "block")
    assert entry["timeout"] > 30 + 15
    assert shlex.split(entry["command"])[-4:] == [*HOOK, "--wait", "30"]
    assert shlex.split(entry["command"])[0].startswith("/")
