"""Approvals on a real daemon: the caller's view, the command line and the webhook."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from conftest import FUMEHOOD, Daemon
from fumehood.cli.main import app
from fumehood.webhook.channel import HEADER, Callbacks, sign
from support.approving import approving_daemon, ran
from support.authority import ask
from support.clients import KINDS, LEAVES_SOCKETS, client_of
from support.http import Answer
from support.terminal import Person
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.row("A6"), *LEAVES_SOCKETS]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    import shutil
    import tempfile

    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    with approving_daemon(home) as running:
        yield running
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def caller(kind: str, daemon: Daemon) -> Iterator[Any]:
    with client_of(kind, daemon.socket) as made:
        yield made


@pytest.fixture
def control(kind: str, daemon: Daemon) -> Iterator[Any]:
    with client_of(kind, daemon.control, control=True, credential=daemon.credential) as made:
        yield made


def asked(caller: Any, text: str, **options: Any) -> Any:
    """Make a call that waits for approval; return its approval id."""
    envelope = caller.call("note", {"text": text}, **options)
    assert envelope.error.code == "REQUIRES_HUMAN_APPROVAL", envelope.error
    return envelope.error.approval_id


def test_next_change_blocks_until_an_approval_changes(caller: Any, control: Any, kind: str) -> None:
    before = control.approvals.next_change()
    assert control.approvals.next_change(before, wait_s=0) == before
    approval_id = asked(caller, f"change-{kind}")
    assert control.approvals.next_change(before) > before
    caller.approvals.cancel(approval_id)


def times(daemon: Daemon, text: str) -> int:
    return sum(line.startswith(repr(text) + " ") for line in ran(daemon))


@pytest.mark.row("R3")
def test_caller_does_not_see_arguments_fixed_by_the_agent_binding(
    caller: Any, control: Any, kind: str
) -> None:
    agent = f"fixed-{kind}"
    control.agents.create(agent, principals=[f"uid:{os.getuid()}"])
    control.agents.bind(agent, "note", fixed={"times": 7})
    approval_id = asked(caller, f"fixed-{kind}", agent_id=agent)
    (mine,) = caller.approvals.list(state="pending", limit=1).items
    assert (mine.binding, caller.approvals.show(approval_id).approvers) == (None, ())
    for seen in (
        mine, caller.approvals.show(approval_id), caller.call_state(mine.call_id).approval
    ):  # fmt: skip
        assert seen.id == approval_id
        assert seen.arguments == {"text": f"fixed-{kind}"}
    assert control.approvals.show(approval_id).arguments["times"] == 7
    assert control.approvals.list(limit=1).items[0].arguments["times"] == 7
    caller.approvals.cancel(approval_id)


# The command line.


def run(daemon: Daemon, *arguments: str, stdin: str | None = None) -> Result:
    environment = {"FUMEHOOD_HOME": str(daemon.home), "XDG_RUNTIME_DIR": None}
    given = f"{daemon.credential}\n" if stdin is None else stdin
    return CliRunner(env=environment).invoke(app, arguments, input=given)


def administer(daemon: Daemon, *arguments: str) -> Any:
    done = run(daemon, *arguments, "--credential-stdin")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if done.stdout else None


def call(daemon: Daemon, text: str, *more: str) -> tuple[str, str]:
    """Make a call that waits for approval; return the call id and the approval id."""
    done = run(daemon, "call", "note", json.dumps({"text": text}), *more)
    assert done.exit_code == 3, done.output
    envelope = json.loads(done.stdout)
    approval_id = envelope["error"]["approval_id"]
    assert f"fumehood approvals approve {approval_id}" in done.stderr
    return envelope["metadata"]["call_id"], approval_id


def at_the_terminal(daemon: Daemon, *arguments: str) -> Person:
    """A person at a terminal who has entered the credential at a prompt without echo."""
    person = Person(daemon.environment, *arguments)
    person.reads("Credential: ")
    person.types(daemon.credential)
    return person


@pytest.mark.row("A5")
def test_command_line_script_approves_a_call_and_fetches_its_answer(daemon: Daemon) -> None:
    call_id, approval_id = call(daemon, "script")
    assert administer(daemon, "approvals", "list")[0]["id"] == approval_id
    assert administer(daemon, "approvals", "show", approval_id)["state"] == "pending"
    waiting = run(daemon, "calls", "answer", call_id)
    assert waiting.exit_code == 3
    state = json.loads(waiting.stdout)
    assert (state["call"]["code"], state["approval"]["state"]) == (
        "REQUIRES_HUMAN_APPROVAL", "pending",
    )  # fmt: skip
    approved = administer(daemon, "approvals", "approve", approval_id, "--yes", "--version", "1")
    assert approved["state"] in ("approved", "started", "done")
    wait_until(lambda: run(daemon, "calls", "answer", call_id).exit_code == 0)
    assert json.loads(run(daemon, "calls", "answer", call_id).stdout)["data"] == {"noted": "script"}
    assert times(daemon, "script") == 1
    made = json.loads(run(daemon, "call", "calculator", '{"expression": "1"}').stdout)
    unasked = run(daemon, "calls", "answer", made["metadata"]["call_id"])
    assert unasked.exit_code == 0
    assert json.loads(unasked.stdout)["data"] == made["data"]


@pytest.mark.row("A3")
def test_denial_edit_and_cancel_from_the_command_line(daemon: Daemon) -> None:
    call_id, approval_id = call(daemon, "cli-no")
    administer(daemon, "approvals", "deny", approval_id, "--reason", "no")
    assert run(daemon, "calls", "answer", call_id).exit_code == 1
    call_id, approval_id = call(daemon, "cli-edit")
    administer(
        daemon, "approvals", "approve", approval_id, "--yes", "--edit", '{"text": "cli-edited"}'
    )
    wait_until(lambda: times(daemon, "cli-edited") == 1)
    _, approval_id = call(daemon, "cli-cancel")
    mine = json.loads(run(daemon, "approvals", "list", "--mine").stdout)
    assert mine[0]["id"] == approval_id
    assert run(daemon, "approvals", "cancel", approval_id).exit_code == 0
    assert run(daemon, "approvals", "cancel", approval_id).exit_code == 1
    assert [times(daemon, text) for text in ("cli-no", "cli-edit", "cli-cancel")] == [0, 0, 0]


def test_bulk_approve_with_one_stale_version_approves_none(daemon: Daemon) -> None:
    """Control: the same command with the current versions approves both."""
    ids = [call(daemon, text)[1] for text in ("several-1", "several-2")]
    stale = run(
        daemon, "approvals", "approve", f"{ids[0]}@1", f"{ids[1]}@2", "--yes", "--credential-stdin"
    )
    assert stale.exit_code == 1
    assert "IDEMPOTENCY_CONFLICT" in stale.stdout
    states = [administer(daemon, "approvals", "show", one)["state"] for one in ids]
    assert states == ["pending", "pending"]
    administer(daemon, "approvals", "approve", f"{ids[0]}@1", f"{ids[1]}@1", "--yes")
    wait_until(lambda: [times(daemon, f"several-{n}") for n in (1, 2)] == [1, 1])


def test_approve_of_decided_or_stale_approval_fails_without_prompting(daemon: Daemon) -> None:
    _, over = call(daemon, "over")
    administer(daemon, "approvals", "deny", over)
    _, open_one = call(daemon, "still-open")
    for ids, says in (
        ([over], f"{over} was already denied."),
        ([over, open_one], f"{over} was already denied"),
        ([f"{open_one}@7"], f"{open_one} is now version 1, not 7"),
    ):
        person = at_the_terminal(daemon, "approvals", "approve", *ids)
        assert person.leaves() == 1
        assert says in person.seen
        assert "Nothing was decided." in person.seen
        assert "Type yes" not in person.seen
    administer(daemon, "approvals", "deny", open_one)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["approve", "apr_0"], 2, "--yes"),
        (["approve", "apr_0", "--yes"], 1, "RESOURCE_NOT_FOUND"),
        (["approve", "a/b", "--yes"], 2, "can be no name or id"),
        (["approve", "apr_0", "apr_1", "--yes", "--edit", "{}"], 2, "one approval"),
        (["approve", "apr_0", "apr_1", "--yes", "--version", "1"], 2, "ID@VERSION"),
        (["approve", "apr_0@1", "--yes", "--version", "1"], 2, "ID@VERSION"),
        (["approve", "apr_0@one", "--yes"], 2, "a number"),
        (["approve", "apr_0@0", "--yes"], 2, "a number"),
        (["approve", "apr_0@", "--yes"], 2, "a number"),
        (["approve", "apr_0", "--yes", "--edit", "[]"], 2, "JSON object"),
        (["approve", "apr_0", "--yes", "--uses", "2"], 2, "--remember"),
        (["approve", "apr_0", "--yes", "--remember-until", "soon"], 2, "--remember-until"),
        (["list", "--state", "lost"], 2, "--state takes"),
        (["resolve", "apr_0", "--outcome", "done"], 1, "RESOURCE_NOT_FOUND"),
        (["resolve", "apr_0", "--outcome", "maybe"], 2, "maybe"),
        (["forget", "rul_0"], 1, "RESOURCE_NOT_FOUND"),
    ],
)
def test_invalid_approvals_command_fails_with_its_reason(
    daemon: Daemon, arguments: list[str], code: int, says: str
) -> None:
    done = run(daemon, "approvals", *arguments, "--credential-stdin")
    assert done.exit_code == code, done.output
    assert says in done.output


def test_wait_option_accepts_positive_seconds_or_no_value(daemon: Daemon) -> None:
    _, approval_id = call(daemon, "wait-short", "--wait=0.2")
    run(daemon, "approvals", "cancel", approval_id)
    for wrong in ("--wait=soon", "--wait=0", "--wait=-1", "--wait=inf"):
        assert run(daemon, "call", "note", '{"text": "x"}', wrong).exit_code == 2
    local = run(daemon, "call", "calculator", '{"expression": "1"}', "--local", "--wait")
    assert local.exit_code == 2


@pytest.mark.row("A5")
def test_call_with_wait_returns_its_answer_after_terminal_approval(daemon: Daemon) -> None:
    waiting = subprocess.Popen(
        [str(FUMEHOOD), "call", "note", '{"text": "wait"}', "--wait"],
        env=daemon.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip

    def pending() -> list[Any]:
        return [
            one
            for one in administer(daemon, "approvals", "list")
            if one["arguments"]["text"] == "wait"
        ]

    wait_until(lambda: bool(pending()))
    person = at_the_terminal(daemon, "approvals", "approve", pending()[0]["id"])
    person.reads("Type yes: ")
    person.types("yes")
    assert person.leaves() == 0, person.seen
    assert daemon.credential not in person.seen
    stdout, _ = waiting.communicate(timeout=DEADLINE_S)
    assert waiting.returncode == 0, stdout
    assert json.loads(stdout)["data"] == {"noted": "wait"}


def test_watch_shows_new_approvals_and_their_decisions(daemon: Daemon) -> None:
    person = at_the_terminal(daemon, "approvals", "watch")
    _, approval_id = call(daemon, "watched")
    person.reads(f"{approval_id}  pending")
    administer(daemon, "approvals", "deny", approval_id)
    person.reads(f"{approval_id}  denied")
    os.write(person._ours, b"\x03")
    assert person.interrupts() == 0


# The webhook.


def test_stopping_engine_ends_long_polls_of_approval_changes(home: Path) -> None:
    with approving_daemon(home) as daemon:
        answers: list[Answer] = []
        now = ask(daemon.control, "GET", "/v1/approvals/changes", None, daemon.credential)
        path = f"/v1/approvals/changes?after={now.body['data']['changes']}"
        poll = threading.Thread(
            target=lambda: answers.append(ask(daemon.control, "GET", path, None, daemon.credential))
        )
        poll.start()
        wait_until(lambda: is_watched(daemon))
        assert daemon.stop() == 0, daemon.log
        poll.join(timeout=DEADLINE_S)
        assert answers[0].code == "SHUTTING_DOWN"


def is_watched(daemon: Daemon) -> bool:
    """Whether a client is connected to the control socket; the long poll is its only request."""
    connections = Path("/proc/net/unix").read_text(encoding="utf-8")
    return connections.count(str(daemon.control)) > 1


class Hook(http.server.BaseHTTPRequestHandler):
    """Webhook receiver that accepts all messages."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        server: Any = self.server
        is_anchor = json.loads(body)["event"] == "audit.anchor"
        got = server.anchors if is_anchor else server.got
        got.append((body, self.headers[HEADER]))
        server.cookies.append(self.headers.get("cookie"))
        self.send_response(204)
        self.send_header("set-cookie", f"seen-{len(server.cookies)}={'x' * 1000}; Path=/")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def receiver() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.anchors, server.cookies = [], [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


SECRET = b"w" * 48


@contextmanager
def hooked(home: Path, hook: Any) -> Iterator[Daemon]:
    secret = home / "webhook-secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    settings = {
        "webhook__url": f"http://127.0.0.1:{hook.server_address[1]}/hook",
        "webhook__secret_file": str(secret), "webhook__may_decide": "true",
    }  # fmt: skip
    with approving_daemon(home, **settings) as daemon:
        yield daemon


def call_back(daemon: Daemon, body: Any, signature: str | None = None) -> Answer:
    import time
    from datetime import UTC, datetime

    from support.http import SocketClient

    raw = json.dumps(body).encode()
    given = signature or sign(SECRET, raw, datetime.fromtimestamp(time.time(), UTC))
    client = SocketClient(daemon.control)
    try:
        headers = {"content-type": "application/json", HEADER: given}
        return client.request("POST", "/v1/approvals/callback", raw, headers)
    finally:
        client.close()


@pytest.mark.row("A5")
def test_webhook_receives_approval_and_its_signed_decision_runs_the_call_once(home: Path) -> None:
    from datetime import UTC, datetime

    with receiver() as hook, hooked(home, hook) as daemon:
        call_id, approval_id = call(daemon, "hooked")
        wait_until(lambda: len(hook.got) == 1)
        body, signature = hook.got[0]
        Callbacks(SECRET, window_s=60).check([signature], body, datetime.now(UTC))
        message = json.loads(body)
        assert message["event"] == "approval.created"
        assert message["approval"]["arguments"] == {"text": "hooked", "times": 1}
        decision = {
            "approval_id": message["approval"]["id"], "version": message["approval"]["version"],
            "decision": {"decision": "approve"},
        }  # fmt: skip
        reflected = call_back(daemon, message, signature)
        assert reflected.code in ("UNAUTHORIZED", "INVALID_PARAMS")
        assert call_back(daemon, decision, "t=1,v1=" + "0" * 64).code == "UNAUTHORIZED"
        assert times(daemon, "hooked") == 0
        assert call_back(daemon, decision).code is None
        wait_until(lambda: run(daemon, "calls", "answer", call_id).exit_code == 0)
        assert call_back(daemon, decision).code in ("UNAUTHORIZED", "IDEMPOTENCY_CONFLICT")
        assert times(daemon, "hooked") == 1
        (word,) = administer(daemon, "approvals", "show", approval_id)["decisions"]
        assert (word["approver"], word["channel"]) == ("webhook", "webhook")
        wait_until(lambda: len(hook.got) >= 3)
        told = [json.loads(body)["event"] for body, _ in hook.got]
        assert sorted(told) == ["approval.created", "approval.decided", "approval.ended"]
        assert set(hook.cookies) == {None}  # although the receiver sets some
    assert {"seq", "key_id", "mac"} <= json.loads(hook.anchors[-1][0]).keys()
