"""A real daemon with a changing policy file, and the policy commands."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, StartDaemon, launch, make_first_approver, wait_until_ready
from support.authority import Authority, ask
from support.wait import DEADLINE_S, wait_until

DENY_SIXES = """\
[[rules]]
id = "no-sixes"
decision = "deny"
tools = ["calculator"]
reason = "Sixes are unlucky."
[[rules.when]]
argument = "/expression"
glob = "*6*"
"""
ASK_SEVENS = DENY_SIXES.replace("no-sixes", "sevens").replace("*6*", "*7*").replace("deny", "ask")
SHADOW_EIGHTS = DENY_SIXES.replace("no-sixes", "eights").replace("*6*", "*8*") + "\n"
SHADOW_EIGHTS = SHADOW_EIGHTS.replace('decision = "deny"', 'decision = "deny"\nmode = "shadow"')


class PolicyPlace:
    """A policy file that is replaced atomically."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "policy.toml"

    def put(self, text: str, mode: int = 0o600) -> None:
        unfinished = self.path.with_name(".policy.toml")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.chmod(mode)
        unfinished.rename(self.path)


def place_in(home: Path) -> PolicyPlace:
    """A policy file next to an engine's state."""
    directory = home / "rules"
    directory.mkdir(mode=0o700)
    made = PolicyPlace(directory)
    made.put(DENY_SIXES + ASK_SEVENS + SHADOW_EIGHTS)
    return made


@pytest.fixture
def place(home: Path) -> PolicyPlace:
    return place_in(home)


@pytest.fixture
def authority(home: Path, place: PolicyPlace, start_daemon: StartDaemon) -> Authority:
    """A private daemon whose policy file the test may change."""
    credential = make_first_approver(home)
    start_daemon(policy_file=str(place.path))
    return Authority(home, credential)


@pytest.fixture(scope="module")
def shared() -> Iterator[Authority]:
    """A shared daemon for tests that do not change the policy file."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    credential = make_first_approver(home)
    daemon = wait_until_ready(launch(home, policy_file=str(place_in(home).path)))
    yield Authority(home, credential)
    assert daemon.stop() == 0, daemon.log
    shutil.rmtree(home, ignore_errors=True)


def code_of(authority: Authority, expression: str, **options: Any) -> str | None:
    body = {"arguments": {"expression": expression}, "options": options}
    return ask(authority.engine_socket, "POST", "/v1/tools/calculator/call", body).code


def events(authority: Authority, name: str) -> list[dict[str, Any]]:
    lines = (authority.home / "log").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [event for event in found if event["event"] == name]


@pytest.mark.row("A1", "P12")
def test_policy_denies_asks_or_allows_calls_and_dry_run_names_the_rule(
    shared: Authority,
) -> None:
    body: dict[str, Any] = {"arguments": {"expression": "6 * 7"}}
    denied = ask(shared.engine_socket, "POST", "/v1/tools/calculator/call", body)
    assert denied.code == "PERMISSION_DENIED"
    assert "Sixes are unlucky." in denied.body["error"]["message"]
    assert denied.body["error"]["details"]["rule"] == "no-sixes"
    assert code_of(shared, "7 + 1") == "REQUIRES_HUMAN_APPROVAL"
    assert code_of(shared, "5 + 1") is None
    rehearsed = {"arguments": {"expression": "7 + 1"}, "options": {"dry_run": True}}
    told = ask(shared.engine_socket, "POST", "/v1/tools/calculator/call", rehearsed)
    assert told.body["data"]["policy"]["rule"] == "sevens"
    assert told.body["data"]["would_run"] is False


@pytest.mark.row("A1")
def test_changed_policy_file_is_reloaded_and_a_faulty_one_is_refused(
    authority: Authority, place: PolicyPlace
) -> None:
    assert code_of(authority, "6 + 1") == "PERMISSION_DENIED"
    place.put(DENY_SIXES.replace("*6*", "*5*"))
    wait_until(lambda: code_of(authority, "5 + 1") == "PERMISSION_DENIED")
    assert code_of(authority, "6 + 1") is None
    place.put(DENY_SIXES.replace("glob", "glbo"))
    wait_until(lambda: bool(events(authority, "policy.refused")))
    assert code_of(authority, "5 + 1") == "PERMISSION_DENIED"
    (refused,) = events(authority, "policy.refused")
    assert "policy.toml: rule 'no-sixes': when[0].glbo: unknown key" in refused["faults"][0]
    status = authority.do("GET", "/v1/policy")
    assert (status["version"], status["refused"]) == (refused["version_kept"], refused["faults"])
    place.put(DENY_SIXES, mode=0o622)
    wait_until(lambda: len(events(authority, "policy.refused")) == 2)
    assert code_of(authority, "5 + 1") == "PERMISSION_DENIED"
    place.path.unlink()
    wait_until(lambda: len(events(authority, "policy.refused")) == 3)
    assert code_of(authority, "5 + 1") == "PERMISSION_DENIED"
    place.put(DENY_SIXES)
    wait_until(lambda: code_of(authority, "6 + 1") == "PERMISSION_DENIED")
    wait_until(lambda: len(events(authority, "policy.loaded")) == 3)
    versions = [event["version"] for event in events(authority, "policy.loaded")]
    assert len(set(versions)) == 3
    wait_until(lambda: len(_loads(authority)) == 3)
    assert [change["details"]["version"] for change in reversed(_loads(authority))] == versions


def _loads(authority: Authority) -> list[dict[str, Any]]:
    changes = authority.do("GET", "/v1/changes")["items"]
    return [change for change in changes if change["action"] == "policy.load"]


@pytest.mark.row("A1")
def test_engine_does_not_start_with_a_faulty_policy(
    home: Path, place: PolicyPlace, start_daemon: StartDaemon
) -> None:
    place.put(DENY_SIXES.replace("calculator", "calcluator"))
    daemon = start_daemon(ready=False, policy_file=str(place.path))
    assert daemon.process.wait(timeout=DEADLINE_S) == 4
    assert (
        "policy.toml: rule 'no-sixes': tools: no registered tool matches 'calcluator'; did you mean "
        "'calculator'?"
    ) in daemon.log
    assert "Traceback" not in daemon.log


@pytest.mark.row("A1", "R3")
def test_policy_sees_fixed_and_default_arguments_not_the_sent_ones(shared: Authority) -> None:
    """*Source*: approvers were shown the model's arguments (control.md, A.2: pydantic-ai #6968)."""
    shared.do("POST", "/v1/agents", {"id": "clerk", "principals": ["token:robot"]})
    token = shared.token("robot", principal_id="token:robot", agents=["clerk"])
    tool = "/v1/agents/clerk/tools/calculator"
    call: dict[str, Any] = {"arguments": {}, "options": {"agent_id": "clerk"}}
    for bound in ({"fixed": {"expression": "6"}}, {"defaults": {"expression": "6"}}):
        shared.do("PUT", tool, bound)
        asked = ask(shared.engine_socket, "POST", "/v1/tools/calculator/call", call, token)
        assert asked.code == "PERMISSION_DENIED", bound
    wish = {"tool": "calculator", "agent_id": "clerk", "principal_id": "token:robot"}
    told = shared.do("POST", "/v1/policy/explain", wish)
    assert (told["verdict"], told["rule"]) == ("deny", "no-sixes")
    shared.do("PUT", tool, {"fixed": {"expression": "5"}})
    asked = ask(shared.engine_socket, "POST", "/v1/tools/calculator/call", call, token)
    assert asked.code is None


CALLS = """\
[[calls]]
tool = "calculator"
arguments = { expression = "6" }
expect = "deny"
rule = "no-sixes"
[[calls]]
tool = "calculator"
arguments = { expression = "5" }
expect = "allow"
[[calls]]
tool = "calculator"
arguments = { expression = "8" }
expect = "allow"
[[calls]]
tool = "delete_files"
arguments = { paths = ["a"] }
expect = "ask"
"""


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FUMEHOOD), "policy", *arguments], cwd=home / "rules", timeout=600,
        env={"FUMEHOOD_HOME": str(home), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.row("A1")
def test_policy_commands_test_explain_and_check_work_without_a_daemon(
    home: Path, place: PolicyPlace
) -> None:
    calls = place.path.with_name("calls.toml")
    calls.write_text(CALLS, encoding="utf-8")
    with_policy = ("test", "calls.toml", "--policy", "policy.toml")
    done = run(home, *with_policy)
    assert (done.returncode, json.loads(done.stdout)["passed"]) == (0, 4), done.stderr
    enforced = run(home, *with_policy, "--enforce")
    failed = [call for call in json.loads(enforced.stdout)["calls"] if not call["passed"]]
    assert (enforced.returncode, failed[0]["number"], failed[0]["rule"]) == (1, 3, "eights")
    calls.write_text(CALLS.replace('"no-sixes"', '"other"'), encoding="utf-8")
    assert run(home, *with_policy).returncode == 1
    calls.write_text(CALLS.replace("expect", "expects"), encoding="utf-8")
    wrong = run(home, *with_policy)
    assert (wrong.returncode, "calls.toml: calls.0.expect: " in wrong.stderr) == (2, True)
    assert run(home, "test", "calls.toml").returncode == 2  # no policy is named anywhere

    told = run(home, "explain", "calculator", '{"expression": "66"}', "--file", "policy.toml")
    assert json.loads(told.stdout)["rule"] == "no-sixes"
    assert json.loads(run(home, "check", "policy.toml").stdout)["rules"] == 3
    place.put(DENY_SIXES + DENY_SIXES)
    faulty = run(home, "check", "policy.toml")
    assert (faulty.returncode, faulty.stdout) == (1, "")
    assert "policy.toml: rule 'no-sixes': id: the id no-sixes is given twice" in faulty.stderr


@pytest.mark.row("A1")
def test_explain_shows_the_clamped_argument_not_the_sent_one(
    home: Path, place: PolicyPlace
) -> None:
    """The engine clamps arguments of read-only tools before the rules see them."""
    place.put(DENY_SIXES.replace("/expression", "/precision").replace('glob = "*6*"', "min = 10"))
    sent = '{"expression": "1", "precision": 40}'
    told = json.loads(run(home, "explain", "calculator", sent, "--file", "policy.toml").stdout)
    assert told["rules"][0]["parts"][-1] == {
        "says": "argument /precision min 10", "holds": True, "compared": "15",
    }  # fmt: skip


@pytest.mark.row("A1")
def test_policy_commands_query_the_running_daemon(shared: Authority) -> None:
    def asked(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [str(FUMEHOOD), "policy", *arguments, "--credential-stdin"], timeout=600,
            input=shared.credential, capture_output=True, text=True,
            env={"FUMEHOOD_HOME": str(shared.home), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    told = asked("explain", "calculator", '{"expression": "7"}')
    assert (told["verdict"], told["rule"]) == ("ask", "sevens")
    assert [rule["matches"] for rule in told["rules"]] == [False, True, False]
    assert len(asked("show")["rules"]) == 3
    assert asked("reload")["version"] == asked("show")["version"]


def test_administrator_changes_the_file_and_the_new_rules_hold_at_once(
    authority: Authority, place: PolicyPlace
) -> None:
    file = authority.do("GET", "/v1/policy/file")
    assert file["text"] == place.path.read_text()
    place.path.chmod(0o640)
    new = file["text"].replace("*6*", "*5*")
    status = authority.do("PUT", "/v1/policy/file", {"text": new, "version": file["version"]})
    assert status["version"] != file["version"]
    assert place.path.read_text() == new
    assert place.path.stat().st_mode & 0o777 == 0o640
    assert code_of(authority, "5 + 1") == "PERMISSION_DENIED"
    assert code_of(authority, "6 + 1") is None
    (change, *_) = authority.do("GET", "/v1/changes")["items"]
    assert (change["action"], change["principal_id"]) == ("policy.load", "approver:owner")
    outdated = {"text": file["text"], "version": file["version"]}
    assert authority.ask("PUT", "/v1/policy/file", outdated).code == "IDEMPOTENCY_CONFLICT"
    faulty = {"text": "[[rules]]\nid = 7", "version": status["version"]}
    answer = authority.ask("PUT", "/v1/policy/file", faulty)
    assert answer.code == "INVALID_PARAMS"
    assert answer.body["error"]["details"]["faults"]
    large = {"text": f"{new}# {'é' * 600_000}", "version": status["version"]}
    assert authority.ask("PUT", "/v1/policy/file", large).code == "INVALID_PARAMS"
    place.path.with_name(f"{place.path.name}.new").mkdir()  # in the way of the draft
    changed = {"text": new + "\n", "version": status["version"]}
    answer = authority.ask("PUT", "/v1/policy/file", changed)
    assert answer.code == "STATE_UNAVAILABLE"
    assert "cannot be written" in answer.body["error"]["message"]
    assert place.path.read_text() == new
    made = authority.do("POST", "/v1/approvers", {"name": "ann", "scopes": ["approve"]})
    answer = authority.ask("GET", "/v1/policy/file", credential=made["secret"])
    assert answer.code == "PERMISSION_DENIED"


@pytest.mark.row("E4")
def test_budgets_of_the_file_change_at_once_and_outlive_a_kill(
    home: Path, place: PolicyPlace, start_daemon: StartDaemon
) -> None:
    budget = '[[budgets]]\nname = "sums"\ntools = ["calculator"]\nperiod = "total"\ncalls = '
    place.put(f"{budget}60\n")
    credential = make_first_approver(home)
    # The configuration's budget of the same name is not in force.
    less = '[{"name": "sums", "calls": 0}]'
    daemon = start_daemon(policy_file=str(place.path), budgets=less)
    authority = Authority(home, credential)

    def limit(calls: int) -> None:
        version = authority.do("GET", "/v1/policy/file")["version"]
        new = {"text": f"{budget}{calls}\n", "version": version}
        authority.do("PUT", "/v1/policy/file", new)

    assert code_of(authority, "1 + 1") is None
    limit(1)
    assert code_of(authority, "1 + 1") == "QUOTA_EXCEEDED"
    limit(2)
    assert code_of(authority, "1 + 1") is None
    daemon.process.kill()
    daemon.process.wait()
    start_daemon(policy_file=str(place.path), budgets=less)
    assert code_of(authority, "1 + 1") == "QUOTA_EXCEEDED"
    (left,) = authority.do("GET", "/v1/usage")["budgets"]
    assert (left["limit"], left["left"]) == (2, 0)


def test_engine_without_a_policy_file_has_none_to_change(administered_daemon: Daemon) -> None:
    authority = Authority(administered_daemon.home, administered_daemon.credential)
    assert authority.ask("GET", "/v1/policy/file").code == "RESOURCE_NOT_FOUND"
    changed = {"text": "x", "version": "y"}
    assert authority.ask("PUT", "/v1/policy/file", changed).code == "RESOURCE_NOT_FOUND"
