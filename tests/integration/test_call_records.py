"""What a real daemon keeps of calls, who may see it, and calls that run now."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conftest import Daemon, StartDaemon
from fumehood import Client, Config, ControlClient, Engine
from fumehood.client.api_request import Refused
from fumehood.core.envelope import Envelope
from support.wait import DEADLINE_S
from support.workshop import workshop

SECRET = "ghp_" + "a1B2" * 10


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with workshop(approver=True) as running:
        yield running


@pytest.fixture
def control(daemon: Daemon) -> Iterator[ControlClient]:
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        yield client


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


@pytest.fixture
def approver(daemon: Daemon, control: ControlClient) -> Iterator[ControlClient]:
    """A client of somebody who may approve, and is no administrator."""
    made = control.approvers.add(f"ann{time.monotonic_ns()}", scopes=["approve"])
    with ControlClient(daemon.control, credential=made.secret) as client:
        yield client


def failed(client: Client, name: str = "nothing_is_called_so") -> str:
    answer = client.call("calculator", {"expression": f"1 + {name}"})
    assert not answer.success
    assert answer.metadata.call_id is not None
    return answer.metadata.call_id


def audited(control: ControlClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (page := control.audit.page(len(found), limit=500)).items:
        found += [json.loads(row.body) for row in page.items]
    return found


def test_owner_sees_arguments_and_answer_of_a_failed_call(client: Client) -> None:
    found = client.call_state(failed(client))
    assert found.arguments == {"expression": "1 + nothing_is_called_so"}
    assert found.envelope is not None
    assert found.envelope.error is not None
    assert found.envelope.error.code == found.call.code == "SANDBOX_VIOLATION"


def test_arguments_that_were_refused_are_kept(client: Client) -> None:
    answer = client.call("calculator", {"expresion": "1 + 1"})
    found = client.call_state(str(answer.metadata.call_id))
    assert found.call.code == "INVALID_PARAMS"
    assert found.arguments == {"expresion": "1 + 1"}


def test_secrets_are_in_no_record_and_not_found(client: Client) -> None:
    answer = client.call("calculator", {"expression": f"'{SECRET}'"})
    found = client.call_state(str(answer.metadata.call_id))
    assert found.arguments == {"expression": "'[redacted]'"}
    assert client.calls(text=SECRET).items == ()
    files = [{"path": "a", "content_base64": SECRET}, {"path": SECRET, "content": f"x {SECRET}"}]
    answer = client.call("run_python", {"code": "1", "files": files, SECRET: 1})
    kept = client.call_state(str(answer.metadata.call_id))
    assert kept.arguments is not None
    assert SECRET not in repr(kept)


def test_record_of_a_long_call_is_there_once_it_is_answered(client: Client) -> None:
    """It is made in a thread."""
    answer = client.call("calculator", {"expression": f"1 + '{SECRET} {'long ' * 50_000}here'"})
    found = client.call_state(str(answer.metadata.call_id))
    assert found.arguments is not None
    assert found.arguments["expression"].startswith("1 + '[redacted] long long")
    assert found.arguments["expression"].endswith("long here'")
    assert found.call.call_id in [one.call_id for one in client.calls().items]


def test_nobody_else_sees_a_call_or_finds_it(
    daemon: Daemon, client: Client, control: ControlClient
) -> None:
    call_id = failed(client, "only_mine")
    token = control.tokens.new("other", "token:other").secret
    with Client(daemon.socket, credential=token) as other:
        with pytest.raises(Refused, match="no such call"):
            other.call_state(call_id)
        assert other.calls(text="only_mine").items == ()
        assert other.calls(state="running").items == ()


def test_administrator_sees_it_and_that_is_audited(client: Client, control: ControlClient) -> None:
    call_id = failed(client, "of_somebody")
    details = control.calls.show(call_id)
    assert details.arguments == {"expression": "1 + of_somebody"}
    assert details.envelope is not None
    assert details.answer == "shown"
    assert [one.call_id for one in control.calls.list(text="of_somebody").items] == [call_id]
    control.calls.list(text="from_a_cursor", cursor=call_id)
    control.calls.list(text=SECRET)
    told = [row for row in audited(control) if row["kind"] in ("call.read", "calls.searched")]
    searched = {row["text"] for row in told if row["kind"] == "calls.searched"}
    assert {"from_a_cursor", "[redacted]"} <= searched
    assert SECRET not in searched
    assert ("call.read", call_id) in [(row["kind"], row.get("call_id")) for row in told]
    assert ("calls.searched", "of_somebody") in [(row["kind"], row.get("text")) for row in told]
    assert {row["by"] for row in told} == {control.whoami().principal_id}


def test_approver_sees_no_record_of_a_call_nobody_was_asked_about(
    client: Client, approver: ControlClient
) -> None:
    call_id = failed(client, "not_asked")
    details = approver.calls.show(call_id)
    assert (details.arguments, details.envelope, details.answer) == (None, None, "needs_admin")
    with pytest.raises(Refused, match="needs the scope admin"):
        approver.calls.list(text="not_asked")


def test_failed_calls_are_recorded_as_configured_and_records_outlive_a_restart(
    start_daemon: StartDaemon,
) -> None:
    with Client((first := start_daemon(record__calls="failed")).socket) as client:
        call_id = failed(client, "before_the_restart")
        assert client.call_state(call_id).envelope is not None
        fine = client.call("calculator", {"expression": "1"})
        assert client.call_state(str(fine.metadata.call_id)).envelope is None
    assert first.stop() == 0
    with Client(start_daemon(record__calls="none").socket) as client:
        assert client.call_state(failed(client)).envelope is None
        assert client.calls(text="before_the_restart").items[0].call_id == call_id
        assert client.call_state(call_id).envelope is not None


RULE = """
[[rules]]
id = "sums-of-five"
decision = "ask"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
glob = "*tried_on_this*"
"""


def test_rule_is_tried_on_what_calls_were_given(
    client: Client, control: ControlClient, approver: ControlClient
) -> None:
    for name in ("tried_on_this", "tried_on_this", "another"):
        failed(client, name)
    tried = control.policy.try_rules(RULE).items[0]
    assert (tried.calls, tried.at_least, tried.unknown) == (2, 2, ())
    assert [group.calls for group in tried.groups] == [2]
    for_approver = approver.policy.try_rules(RULE).items[0]
    assert for_approver.at_least == 0
    assert for_approver.calls > 2
    assert for_approver.unknown


SHELL_RULE = """
[[rules]]
id = "no-removal"
decision = "deny"
tools = ["run_shell"]
runs = ["rm"]
"""


def test_rule_about_programs_is_tried_on_the_commands_of_calls(
    client: Client, control: ControlClient
) -> None:
    for command in ("cd x && rm -rf y", "ls", "echo rm"):
        client.call("run_shell", {"command": command})
    tried = control.policy.try_rules(SHELL_RULE).items[0]
    assert (tried.calls, tried.at_least, tried.unknown) == (1, 1, ())


# -- calls that run now --------------------------------------------------------------------

PRINTS = """\
import time
progress(40, 'half-way with ghp_' + 'a1B2' * 10)
for number in range(300):
    print('line', number, flush=True)
    time.sleep(0.1)
"""


@contextmanager
def running(daemon: Daemon, code: str = PRINTS, **options: Any) -> Iterator[list[Envelope]]:
    answers: list[Envelope] = []

    def work() -> None:
        with Client(daemon.socket) as client:
            answers.append(client.call("run_python", {"code": code}, **options))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield answers
    finally:
        with Client(daemon.socket) as client:
            for one in client.calls(state="running").items:
                client.cancel(one.call_id)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def the_one(client: Client | ControlClient) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = (
            client.calls(state="running")
            if isinstance(client, Client)
            else client.calls.list(state="running")
        )
        if found.items:
            return found.items[0]
        time.sleep(0.05)
    raise TimeoutError("No call runs.")


@pytest.mark.needs("docker")
def test_running_call_is_listed_with_its_output_and_progress(
    daemon: Daemon, client: Client, control: ControlClient, approver: ControlClient
) -> None:
    with running(daemon):
        listed = the_one(client)
        assert (listed.code, listed.tool_name, listed.running.stdout) == (
            "RUNNING",
            "run_python",
            None,
        )
        deadline = time.monotonic() + DEADLINE_S
        while "line 3" not in (client.call_state(listed.call_id).call.running.stdout or ""):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = client.call_state(listed.call_id)
        assert found.call.running is not None
        assert (found.call.running.progress, found.call.running.message) == (
            40, "half-way with [redacted]",
        )  # fmt: skip
        assert found.arguments == {"code": PRINTS}
        of_all = control.calls.show(listed.call_id)
        assert "line 3" in (of_all.call.running.stdout or "")
        assert of_all.arguments == {"code": PRINTS}
        for_approver = approver.calls.show(listed.call_id)
        assert (for_approver.call.running.stdout, for_approver.call.running.message) == (None, "")
        (in_list,) = approver.calls.list(state="running").items
        assert (in_list.running.progress, in_list.running.message) == (40, "")
        assert for_approver.arguments is None
        assert [
            one.call_id for one in control.calls.list(state="running", tool="calculator").items
        ] == []


@pytest.mark.needs("docker")
def test_administrator_cancels_a_call_and_that_is_audited(
    daemon: Daemon, control: ControlClient, approver: ControlClient
) -> None:
    with running(daemon) as answers:
        call_id = the_one(control).call_id
        with pytest.raises(Refused, match="admin"):
            approver.calls.cancel(call_id)
        control.calls.cancel(call_id)
        deadline = time.monotonic() + DEADLINE_S
        while not answers:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert answers[0].error is not None
    assert answers[0].error.code == "CANCELLED"
    assert f"cancelled call {call_id} of " in control.changes()[0].in_words
    with pytest.raises(Refused, match="running"):
        control.calls.cancel(call_id)


@pytest.mark.needs("docker")
@pytest.mark.anyio
async def test_embedding_program_sees_its_running_calls() -> None:
    import anyio

    config = Config(container={"images": {"python": "python"}})  # type: ignore[arg-type]
    async with Engine(config=config) as engine, anyio.create_task_group() as group:
        group.start_soon(engine.call, "run_python", {"code": "import time; time.sleep(30)"})
        with anyio.fail_after(DEADLINE_S):
            while not (found := (await engine.calls(state="running")).items):
                await anyio.sleep(0.05)
        assert found[0].code == "RUNNING"
        await engine.cancel(found[0].call_id)
        assert (await engine.calls(state="running")).items == ()
