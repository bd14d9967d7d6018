"""The boundary of identity: same-uid callers, forged credentials and guessed names.

A caller reaches both sockets here, as in single-user mode, and must still be unable to create
approvers or tokens, to impersonate others, or to learn about them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD, Daemon, running_daemon
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.http.endpoint import Needs
from fumehood.identity.credential_hashes import make_credential
from support.attacks import Harm
from support.authority import Authority, ask, calculate
from support.http import Answer, SocketClient, connect, read_to_end, split_answer
from support.wait import DEADLINE_S, wait_until

OWN = f"uid:{os.getuid()}"


@dataclass
class Served:
    """A daemon with an approver, every kind of credential, and agents of two principals."""

    authority: Authority
    daemon: Daemon
    credentials: dict[str, str]

    @property
    def engine(self) -> Path:
        return self.authority.engine_socket

    @property
    def control(self) -> Path:
        return self.authority.control_socket

    def everything_kept(self) -> dict[str, Any]:
        """The owner's view of all authority state, which an attack must not change."""
        lists = ("/v1/approvers", "/v1/tokens", "/v1/agents", "/v1/changes")
        return {path: self.authority.do("GET", path)["items"] for path in lists}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running_daemon(approver=True, log_level="debug") as daemon:
        authority = Authority(daemon.home, daemon.credential)
        # A token is checked in no time, an approver's credential takes 40 ms by intent.
        working = Authority(daemon.home, authority.token("working", scopes=["admin"]))
        yield Served(working, daemon, _set_up(working, daemon.credential))


def _set_up(authority: Authority, owner: str) -> dict[str, str]:
    authority.agent("mine", OWN, tools=("calculator",))
    authority.agent("mine-off", OWN, tools=("calculator",), is_enabled=False)
    authority.agent("theirs", "uid:4242", tools=("calculator",))
    authority.agent("theirs-off", "uid:4242", is_enabled=False)
    soon = (datetime.now(UTC) + timedelta(seconds=3)).isoformat()
    expired = authority.token("short", expires_at=soon)
    found = {
        "owner": owner,
        "approve only": authority.do("POST", "/v1/approvers", {"name": "anna"})["secret"],
        "removed": authority.do("POST", "/v1/approvers", {"name": "berta", "scopes": ["admin"]})[
            "secret"
        ],
        "call": authority.token("call", agents=["mine"]),
        "call, no agents": authority.token("none"),
        "approve token": authority.token("approve", scopes=["approve"]),
        "admin token": authority.token("admin", scopes=["admin"]),
        "expired": expired,
        "revoked": authority.token("revoked"),
    }
    authority.do("DELETE", "/v1/approvers/berta")
    authority.do("DELETE", f"/v1/tokens/{found['revoked'].split('_')[1]}")
    wait_until(lambda: calculate(authority.engine_socket, found["expired"]).code == "UNAUTHORIZED")
    found["forged secret"] = found["call"][:-43] + make_credential("fht")[1]
    found["forged id"] = make_credential("fht")[2]
    found["forged approver"] = found["owner"][:-43] + make_credential("fha")[1]
    found["token as approver"] = found["admin token"].replace("fht_", "fha_")
    found["approver as token"] = found["owner"].replace("fha_", "fht_")
    return found


# -- authority is out of a caller's reach --------------------------------------------------

BODIES: dict[str, Any] = {
    "/v1/approvers": {"name": "intruder", "scopes": ["approve", "admin"]},
    "/v1/tokens": {"name": "intruder", "scopes": ["admin"]},
    "/v1/agents": {"id": "intruder", "principals": [OWN]},
    "/v1/agents/{agent_id}": {"principals": [OWN]},
    "/v1/agents/{agent_id}/tools/{tool}": {"fixed": {}},
}
FILLED = {"agent_id": "theirs", "tool": "calculator", "approver": "owner", "token_id": "0" * 16}
SHARED = {(operation.method, operation.path) for operation in OPERATIONS}


def _address(path: str) -> str:
    return re.sub(r"{(\w+)}", lambda found: FILLED.get(found[1], "calculator"), path)


ADDRESSES = sorted(
    (operation.method, operation.path)
    for operation in CONTROL_OPERATIONS
    if operation.needs is Needs.ADMIN and (operation.method, operation.path) not in SHARED
)
APPROVING = sorted(
    (operation.method, operation.path)
    for operation in CONTROL_OPERATIONS
    if operation.needs is Needs.APPROVER
)
SEEN_WITH_ADMIN_TOO = {
    "/metrics", "/v1/alerts", "/v1/calls", "/v1/calls/{call_id}",
    "/v1/calls/{call_id}/blobs/{blob_id}", "/v1/calls/{call_id}/dry-run", "/v1/changes",
    "/v1/engine", "/v1/figures", "/v1/figures/series", "/v1/nodes", "/v1/policy", "/v1/policy/explain",
    "/v1/policy/try", "/v1/sessions", "/v1/sessions/{session_id}",
    "/v1/sessions/{session_id}/processes", "/v1/whoami",
}  # fmt: skip
SLOWLY_CHECKED = [
    ("POST", "/v1/approvers"), ("POST", "/v1/tokens"), ("GET", "/v1/tokens"),
]  # fmt: skip
"""Addresses tried with credentials that need a slow hash; other kinds are tried everywhere."""


def test_admin_address_table_covers_every_method() -> None:
    assert len(ADDRESSES) >= 16
    assert {"POST", "PUT", "PATCH", "DELETE", "GET"} == {method for method, _ in ADDRESSES}


NO_ADMIN = {
    None: "UNAUTHORIZED",
    "approve only": "PERMISSION_DENIED",
    "removed": "UNAUTHORIZED",
    "call": "PERMISSION_DENIED",
    "approve token": "PERMISSION_DENIED",
    "expired": "UNAUTHORIZED",
    "revoked": "UNAUTHORIZED",
    "forged secret": "UNAUTHORIZED",
    "forged approver": "UNAUTHORIZED",
    "token as approver": "UNAUTHORIZED",
    "approver as token": "UNAUTHORIZED",
}


@pytest.mark.row("D4", "R1", "A4")
@pytest.mark.parametrize("who", NO_ADMIN, ids=str)
def test_credential_without_admin_scope_cannot_read_or_change_authority(
    served: Served, who: str | None
) -> None:
    before = served.everything_kept()
    credential = served.credentials[who] if who is not None else None
    some = (
        SLOWLY_CHECKED if who in ("removed", "forged approver", "token as approver") else ADDRESSES
    )
    for method, path in some:
        answer = ask(served.control, method, _address(path), BODIES.get(path, {}), credential)
        assert answer.code == NO_ADMIN[who], (method, path)
        assert answer.body["data"] == {}
    assert served.everything_kept() == before


@pytest.mark.row("D4", "R1")
@pytest.mark.parametrize("who", [None, "call", "owner", "admin token"], ids=str)
def test_callers_socket_serves_no_admin_routes_even_to_admins(
    served: Served, who: str | None
) -> None:
    before = served.everything_kept()
    credential = served.credentials[who] if who is not None else None
    served_here = {path for _, path in SHARED}
    for method, path in ADDRESSES:
        answer = ask(served.engine, method, _address(path), BODIES.get(path, {}), credential)
        exists = path in served_here
        assert answer.code == ("METHOD_NOT_ALLOWED" if exists else "RESOURCE_NOT_FOUND")
    assert served.everything_kept() == before


NO_APPROVER = {
    None: "UNAUTHORIZED",
    "admin token": "PERMISSION_DENIED",
    "call": "PERMISSION_DENIED",
    "expired": "UNAUTHORIZED",
    "revoked": "UNAUTHORIZED",
    "forged secret": "UNAUTHORIZED",
    "approver as token": "UNAUTHORIZED",
}


@pytest.mark.row("A4", "D4")
@pytest.mark.parametrize("who", NO_APPROVER, ids=str)
def test_credential_without_approve_scope_cannot_see_or_decide_approvals(
    served: Served, who: str | None
) -> None:
    credential = served.credentials[who] if who is not None else None
    refused = 0
    for method, path in APPROVING:
        if who == "admin token" and path in SEEN_WITH_ADMIN_TOO:
            continue
        answer = ask(served.control, method, _address(path), {}, credential)
        assert answer.code == NO_APPROVER[who], (method, path)
        refused += 1
    assert refused >= 9


@pytest.mark.row("A4", "D4")
def test_twin_approve_scope_is_served_on_approval_routes(served: Served) -> None:
    for method, path in APPROVING:
        answer = ask(
            served.control, method, _address(path), {}, served.credentials["approve token"]
        )
        assert answer.code not in ("UNAUTHORIZED", "PERMISSION_DENIED"), path


@pytest.mark.row("A4", "D4")
@pytest.mark.parametrize("who", [None, "call", "approve token", "owner"], ids=str)
def test_callers_socket_serves_no_decision_routes(served: Served, who: str | None) -> None:
    """Only the caller's own approvals are served there, to view and cancel."""
    credential = served.credentials[who] if who is not None else None
    for method, path in APPROVING:
        if (method, path) not in SHARED:
            answer = ask(served.engine, method, _address(path), {}, credential)
            assert answer.code in (
                "RESOURCE_NOT_FOUND", "METHOD_NOT_ALLOWED", "UNAUTHORIZED", "PERMISSION_DENIED",
            ), (method, path)  # fmt: skip


@pytest.mark.row("D4")
@pytest.mark.parametrize("who", ["owner", "admin token"])
def test_twin_admin_scope_is_served_on_admin_routes(served: Served, who: str) -> None:
    credential = served.credentials[who]
    made = ask(served.control, "POST", "/v1/tokens", {"name": "twin"}, credential)
    assert made.code is None
    token_id = made.body["data"]["token"]["id"]
    assert ask(served.control, "DELETE", f"/v1/tokens/{token_id}", None, credential).code is None
    for method, path in ADDRESSES:
        if method == "GET":
            answer = ask(served.control, method, _address(path), None, credential)
            assert answer.code not in ("UNAUTHORIZED", "PERMISSION_DENIED"), path


@pytest.mark.row("D4", "A4")
@pytest.mark.parametrize(
    ("scopes", "more"),
    [
        (["call", "admin"], {}),
        (["call", "approve"], {}),
        (["call"], {"principal_id": "approver:owner"}),
        (["approve"], {"principal_id": "approver:owner"}),
        ([], {}),
        (["root"], {}),
        (["call"], {"expires_at": "9999-12-31T23:59:59-12:00"}),
        (["call"], {"expires_at": "0001-01-01T00:00:00+12:00"}),
        (["call"], {"secret": "fht_" + "0" * 60}),
        (["call"], {"id": "0" * 16}),
    ],
)
def test_administrator_cannot_create_token_that_calls_and_approves(
    served: Served, scopes: list[str], more: dict[str, Any]
) -> None:
    before = served.everything_kept()
    answer = served.authority.ask("POST", "/v1/tokens", {"name": "x", "scopes": scopes, **more})
    assert (answer.status, answer.code) == (400, "INVALID_PARAMS")
    assert served.everything_kept() == before


@pytest.mark.row("D4")
def test_last_administrator_cannot_be_removed(served: Served) -> None:
    refused = served.authority.ask("DELETE", "/v1/approvers/owner")
    assert refused.code == "PERMISSION_DENIED"
    assert "owner" in str(served.everything_kept()["/v1/approvers"])
    # Twin: with another one there, it can.
    served.authority.do("POST", "/v1/approvers", {"name": "second", "scopes": ["admin"]})
    served.authority.do("DELETE", "/v1/approvers/second")


@pytest.mark.row("R1", "D4")
def test_administrative_changes_are_recorded_with_their_principal(served: Served) -> None:
    tool = "/v1/agents/recorded/tools/calculator"
    steps = [
        ("owner", "POST", "/v1/agents", {"id": "recorded"}, "approver:owner", "agent.create"),
        ("admin token", "PATCH", "/v1/agents/recorded", {"is_enabled": False},
         "token:admin", "agent.update"),
        ("owner", "PUT", tool, {}, "approver:owner", "agent.bind"),
        ("admin token", "DELETE", tool, None, "token:admin", "agent.unbind"),
        ("owner", "DELETE", "/v1/agents/recorded", None, "approver:owner", "agent.delete"),
    ]  # fmt: skip
    for who, method, path, body, principal_id, action in steps:
        answer = ask(served.control, method, path, body, served.credentials[who])
        assert answer.code is None, answer.body["error"]
        change = served.authority.do("GET", "/v1/changes")["items"][0]
        assert (change["principal_id"], change["action"]) == (principal_id, action)


@pytest.mark.row("D4")
def test_refused_admin_request_is_logged_with_uid_and_pid(served: Served) -> None:
    before = served.daemon.log.count("authority.refused")
    assert ask(served.control, "GET", "/v1/tokens").code == "UNAUTHORIZED"
    wait_until(lambda: served.daemon.log.count("authority.refused") == before + 1)
    line = [line for line in served.daemon.log.splitlines() if "authority.refused" in line][-1]
    event = json.loads(line)
    assert (event["uid"], event["pid"], event["code"]) == (os.getuid(), os.getpid(), "UNAUTHORIZED")


# -- the first approver ----------------------------------------------------------------------


def _init(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(FUMEHOOD), "approvers", "init", *arguments],
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), **environment},
        capture_output=True, timeout=600,
    )  # fmt: skip


@pytest.mark.row("D4")
def test_approvers_init_is_refused_while_engine_runs(served: Served) -> None:
    refused = _init(served.authority.home, "intruder")
    assert (refused.returncode, refused.stdout) == (4, b"")
    assert b"An engine uses this state directory" in refused.stderr


@pytest.mark.row("D4")
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_approvers_init_is_refused_after_engine_stop_or_kill(
    start_daemon: Any, home: Path, end: str
) -> None:
    """Even if the first approver has been removed in the meantime."""
    credential = _init(home, "owner").stdout.decode().strip()
    daemon = start_daemon()
    authority = Authority(home, credential)
    heir = authority.do("POST", "/v1/approvers", {"name": "heir", "scopes": ["approve", "admin"]})
    removed = authority.ask("DELETE", "/v1/approvers/owner", credential=heir["secret"])
    assert removed.code is None
    if end == "killed":
        daemon.process.kill()
        daemon.process.wait(timeout=DEADLINE_S)
    else:
        assert daemon.stop() == 0
    refused = _init(home, "intruder")
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"already had its first approver" in refused.stderr


@pytest.mark.row("D4")
def test_intruder_as_first_approver_is_visible_to_owner_and_audited(
    start_daemon: Any, home: Path
) -> None:
    """Control of the test above: the security model's case of a program with the same uid."""
    assert start_daemon().stop() == 0
    assert _init(home, "intruder").returncode == 0
    assert start_daemon().stop() == 0
    assert _init(home, "owner").returncode == 1
    exported = subprocess.run(
        [str(FUMEHOOD), "audit", "export"],
        env={**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)}, capture_output=True, timeout=600,
    )  # fmt: skip
    (row,) = [line for line in exported.stdout.splitlines() if b"change.approver.init" in line]
    assert b"intruder" in row


@pytest.mark.row("D4")
def test_approvers_init_succeeds_only_once_per_state_directory(home: Path) -> None:
    first = _init(home, "owner")
    assert first.returncode == 0
    assert re.fullmatch(rb"fha_[0-9a-f]{16}_[A-Za-z0-9_-]{43}\n", first.stdout)
    second = _init(home, "intruder")
    assert (second.returncode, second.stdout) == (1, b"")
    assert b"already had its first approver" in second.stderr


@pytest.mark.parametrize("name", ["a b", "a\nb", "", "-x", "x" * 65])
def test_approvers_init_refuses_ambiguous_name(home: Path, name: str) -> None:
    refused = _init(home, "--", name)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"Traceback" not in refused.stderr


# -- credentials on the callers' socket ------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """Authorization headers as sent over the wire, and how a call with them ends."""

    name: str
    lines: tuple[bytes, ...]
    code: str | None
    harm: Harm = Harm.LATERAL
    status: int = 401

    def __str__(self) -> str:
        return self.name


def _headers(credentials: dict[str, str]) -> list[Header]:
    good = credentials["call"].encode()
    wrong = credentials["forged secret"].encode()
    unauthorized = "UNAUTHORIZED"
    nobody = [
        Header(who, (b"authorization: Bearer " + credentials[who].encode(),), unauthorized)
        for who in (
            "owner", "approve only", "expired", "revoked", "forged secret", "forged id",
            "forged approver", "token as approver", "approver as token",
        )
    ]  # fmt: skip
    without_call = [
        Header(who, (b"authorization: Bearer " + credentials[who].encode(),),
               "PERMISSION_DENIED", status=403)
        for who in ("approve token", "admin token")
    ]  # fmt: skip
    forms = [
        Header(name, (line,), unauthorized)
        for name, line in {
            "empty": b"authorization:",
            "bearer alone": b"authorization: Bearer",
            "bearer and nothing": b"authorization: Bearer ",
            "basic": b"authorization: Basic " + good,
            "no scheme": b"authorization: " + good,
            "scheme joined": b"authorization: Bearer" + good,
            "tab": b"authorization: Bearer\t" + good,
            "tab inside": b"authorization: Bearer \t" + good,
            "quoted": b'authorization: Bearer "' + good + b'"',
            "two in one": b"authorization: Bearer " + good + b", Bearer " + good,
            "scheme twice": b"authorization: Bearer Bearer " + good,
            "upper case": b"authorization: Bearer " + good.upper(),
            "one too many": b"authorization: Bearer " + good + b"A",
            "one too few": b"authorization: Bearer " + good[:-1],
            "latin-1": b"authorization: Bearer " + good[:-1] + b"\xe9",
            "utf-8": b"authorization: Bearer " + good[:-2] + "é".encode(),
            "full width": b"authorization: Bearer " + "ｆht_".encode() + good[4:],
            "over-long": b"authorization: Bearer " + b"A" * 10_000,
            "padded over-long": b"authorization: Bearer " + b" " * 300 + good,
        }.items()
    ]
    smuggled = [
        Header("good and wrong", (b"authorization: Bearer " + good, b"authorization: Bearer " + wrong),
               unauthorized),
        Header("wrong and good", (b"authorization: Bearer " + wrong, b"Authorization: Bearer " + good),
               unauthorized),
        Header("good twice", (b"authorization: Bearer " + good,) * 2, unauthorized),
        Header("empty and good", (b"authorization:", b"AUTHORIZATION: Bearer " + good), unauthorized),
        Header("nul", (b"authorization: Bearer " + good + b"\x00",), "INVALID_PARAMS", status=400),
    ]  # fmt: skip
    served = [
        Header(name, (line,), None, status=200)
        for name, line in {
            "as documented": b"authorization: Bearer " + good,
            "lower case": b"authorization: bearer " + good,
            "all capitals": b"AUTHORIZATION: BEARER " + good,
            "spaces": b"authorization:    Bearer    " + good + b"  ",
            "another header": b"x-authorization: Bearer " + wrong,
        }.items()
    ]
    return [*nobody, *without_call, *forms, *smuggled, *served]


def _call_with(served: Served, lines: tuple[bytes, ...]) -> Answer:
    body = b'{"arguments": {"expression": "1 + 1"}}'
    head = [
        b"POST /v1/tools/calculator/call HTTP/1.1", b"host: x", b"connection: close",
        b"content-type: application/json", b"content-length: %d" % len(body), *lines, b"", b"",
    ]  # fmt: skip
    with connect(served.engine) as connection:
        connection.sendall(b"\r\n".join(head) + body)
        return split_answer(read_to_end(connection))


@pytest.mark.row("D4")
def test_forged_malformed_or_smuggled_credential_is_rejected(served: Served) -> None:
    cases = _headers(served.credentials)
    ended = {
        str(case): (a.code, a.status) for case in cases for a in [_call_with(served, case.lines)]
    }
    assert ended == {str(case): (case.code, case.status) for case in cases}
    assert len(ended) == len(cases) >= 40


@pytest.mark.row("D4")
def test_invalid_credential_does_not_fall_back_to_peer_uid(served: Served) -> None:
    # Control: the same peer without any credential is somebody.
    assert calculate(served.engine).code is None
    assert calculate(served.engine, served.credentials["revoked"]).code == "UNAUTHORIZED"
    listed = ask(served.engine, "GET", "/v1/tools", None, served.credentials["revoked"])
    assert (listed.code, listed.body["data"]) == ("UNAUTHORIZED", {})


@pytest.mark.row("D4")
def test_rejection_message_does_not_reveal_why_credential_is_invalid(served: Served) -> None:
    def words(socket: Path, path: str, who: str) -> str:
        answer = ask(socket, "GET", path, None, served.credentials[who])
        return answer.body["error"]["message"]

    unknown = ("forged secret", "forged id", "owner", "approver as token")
    assert len({words(served.engine, "/v1/tools", who) for who in unknown}) == 1
    unknown = ("forged approver", "token as approver")
    assert len({words(served.control, "/v1/tokens", who) for who in unknown}) == 1


# -- agents ------------------------------------------------------------------------------------


def _comparable(answer: Answer, agent_id: str) -> str:
    """The answer without the fields that differ between any two calls."""
    body = json.loads(json.dumps(answer.body).replace(agent_id, "AGENT"))
    metadata = body["metadata"]
    for key in ("call_id", "trace_id", "timestamp", "execution_time_ms", "performance"):
        metadata.pop(key)
    return json.dumps([answer.status, sorted(answer.headers.keys() - {"date"}), body])


@pytest.mark.row("R3", "D4")
@pytest.mark.parametrize("who", [None, "call", "call, no agents"], ids=str)
@pytest.mark.parametrize("tool", ["calculator", "nothing", "calculator@9.9.9"])
def test_call_with_unknown_disabled_and_foreign_agent_gets_identical_answers(
    served: Served, who: str | None, tool: str
) -> None:
    credential = served.credentials[who] if who is not None else None
    answers = set()
    guesses = ["unheard-of", "theirs", "theirs-off", "mine-off", "approver:owner", OWN]
    if who == "call, no agents":
        guesses.append("mine")
    for agent_id in guesses:
        body = {"arguments": {"expression": "1"}, "options": {"agent_id": agent_id}}
        answer = ask(served.engine, "POST", f"/v1/tools/{tool}/call", body, credential)
        assert answer.code == "RESOURCE_NOT_FOUND", agent_id
        answers.add(_comparable(answer, agent_id))
    assert len(answers) == 1


@pytest.mark.row("R3", "D4")
def test_tool_list_of_unknown_disabled_and_foreign_agent_is_identical(served: Served) -> None:
    def listed(agent_id: str) -> Answer:
        return ask(served.engine, "GET", f"/v1/tools?agent_id={agent_id}")

    guesses = ["unheard-of", "theirs", "theirs-off", "mine-off"]
    answers = {guess: listed(guess) for guess in guesses}
    assert {answer.code for answer in answers.values()} == {"RESOURCE_NOT_FOUND"}
    assert len({_comparable(answer, guess) for guess, answer in answers.items()}) == 1
    mine = listed("mine").body  # twin
    assert [tool["name"] for tool in mine["data"]["items"]] == ["calculator"]


@pytest.mark.row("R3")
@pytest.mark.parametrize("who", [None, "call"], ids=str)
def test_twin_own_agent_is_served(served: Served, who: str | None) -> None:
    credential = served.credentials[who] if who is not None else None
    assert calculate(served.engine, credential, agent_id="mine").code is None


@pytest.mark.row("R3", "D4")
def test_token_with_principal_id_of_uid_does_not_get_its_agents(served: Served) -> None:
    token = served.authority.token("namesake", principal_id=OWN)
    assert calculate(served.engine, token).code is None
    assert calculate(served.engine, token, agent_id="mine").code == "RESOURCE_NOT_FOUND"


@pytest.mark.row("R3")
@pytest.mark.parametrize("dry_run", [False, True])
def test_agent_cannot_see_or_override_fixed_parameters(served: Served, dry_run: bool) -> None:
    agent_id = f"fixed-{dry_run}".lower()
    served.authority.agent(agent_id, OWN)
    binding = {"fixed": {"precision": 3}, "defaults": {"expression": "1/3"}}
    served.authority.do("PUT", f"/v1/agents/{agent_id}/tools/calculator", binding)

    def answered(arguments: dict[str, Any]) -> Answer:
        body = {"arguments": arguments, "options": {"agent_id": agent_id, "dry_run": dry_run}}
        return ask(served.engine, "POST", "/v1/tools/calculator/call", body)

    for given in (1, 3, None):
        refused = answered({"precision": given})
        assert (refused.code, refused.body["error"]["fields"]) == ("INVALID_PARAMS", ["precision"])
        assert "not a parameter" in refused.body["error"]["message"]
    shown = answered({}).body
    assert shown["success"]
    if dry_run:
        assert shown["data"]["arguments"] == {"expression": "1/3"}
    else:
        assert shown["data"]["text"] == "0.333"  # control: it holds
    served.authority.do(
        "PUT", f"/v1/agents/{agent_id}/tools/calculator", {"fixed": {"precision": "many"}}
    )
    misfit = answered({"expression": "1"})
    assert misfit.code == "TOOL_DISABLED"
    assert "precision" not in json.dumps(misfit.body)
    assert "many" not in json.dumps(misfit.body)


# -- secrets -----------------------------------------------------------------------------------


@pytest.mark.row("D4")
def test_credential_secrets_appear_in_no_log_list_or_file(served: Served) -> None:
    for credential in served.credentials.values():
        for socket, path in ((served.engine, "/v1/tools"), (served.control, "/v1/tokens")):
            ask(socket, "GET", path, None, credential)
    real = [who for who in served.credentials if "forged" not in who and " as " not in who]
    secrets = {who: served.credentials[who][-43:] for who in real}
    files = [path for path in served.authority.home.rglob("*") if path.is_file()]
    assert {"state.db", "log"} <= {path.name for path in files}
    kept = b"".join(path.read_bytes() for path in files)
    seen = json.dumps(served.everything_kept()) + served.daemon.log
    assert "token:call" in seen  # control: they are listed, and their lines were searched
    assert b"token:call" in kept
    for who, secret in secrets.items():
        assert secret not in seen, who
        assert secret.encode() not in kept, who
    assert len(secrets) == 9


# -- guessing ------------------------------------------------------------------------------------


@pytest.mark.row("D4", "D1")
def test_parallel_credential_guessing_does_not_block_callers_or_approvers(
    served: Served,
) -> None:
    guesses = 24
    started = threading.Barrier(guesses + 1)
    ended: list[str] = []

    def guess() -> None:
        client = SocketClient(served.control)
        started.wait(timeout=DEADLINE_S)
        headers = {"authorization": f"Bearer {make_credential('fha')[2]}"}
        ended.append(client.request("GET", "/v1/tokens", None, headers).code or "served")
        client.close()

    threads = [threading.Thread(target=guess) for _ in range(guesses)]
    for thread in threads:
        thread.start()
    caller = served.engine
    started.wait(timeout=DEADLINE_S)
    answer = calculate(caller)
    done_meanwhile = len(ended)
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    assert answer.code is None
    assert done_meanwhile < guesses  # the call was answered while guesses were being checked
    assert len(ended) == guesses
    assert set(ended) <= {"UNAUTHORIZED", "RATE_LIMITED"}
    assert served.authority.ask("GET", "/v1/tokens").code is None
