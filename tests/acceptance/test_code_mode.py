"""Code mode, where a program calls tools: through the socket, command line and Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client, Config, ControlClient, Engine, Envelope
from fumehood.core.errors import EndedBy
from fumehood.sandbox.images.catalog import Image
from support.answers import details_of, sandbox_of
from support.approving import approving_daemon, ran
from support.http import SocketClient
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("B3")]

TWO = """\
import tools

squares = [tools.calculator(f"{n}**2")["value"] for n in range(30)]
found = tools.run_restricted_python("print('x' * 50_000)")
print(sum(squares), len(found["stdout"]))
"""


@pytest.fixture(scope="module")
def daemon(python_image: Image) -> Iterator[Daemon]:
    with approving_daemon() as running:
        yield running


def arguments(code: str, *tools: str) -> dict[str, Any]:
    return {"code": code, "tools": list(tools)}


def test_program_calls_tools_and_returns_only_its_own_output(http: SocketClient) -> None:
    answer = http.call("run_python", arguments(TWO, "calculator", "run_restricted_python"))
    assert answer.status == 200, answer.body["error"]
    data = answer.body["data"]
    assert data["stdout"] == "8555 50001\n"
    assert data["tool_calls"] == {"made": 31, "failed": 0}
    assert len(json.dumps(data)) < 400
    call_id = answer.body["metadata"]["call_id"]
    listed = http.get("/v1/calls?limit=32").body["data"]["items"]
    parent, *children = listed
    assert (parent["call_id"], parent["tool_name"]) == (call_id, "run_python")
    assert "parent_id" not in parent
    assert {child["parent_id"] for child in children} == {call_id}
    assert {child["trace_id"] for child in listed} == {answer.body["metadata"]["trace_id"]}
    assert len(children) == 31
    one = http.get(f"/v1/calls/{children[0]['call_id']}").body["data"]["call"]
    assert one["parent_id"] == call_id


def test_failed_tool_call_raises_catchable_exception_in_program(http: SocketClient) -> None:
    code = (
        "try:\n    tools.calculator('1/0')\n"
        "except tools.ToolError as error:\n    print(error.code, error.retryable)\n"
        "tools.calculator('2 +')"
    )
    answer = http.call("run_python", arguments(code, "calculator"))
    error = answer.body["error"]
    assert error["code"] == "EXECUTION_ERROR"
    assert error["details"]["stdout"] == "EXECUTION_ERROR False\n"
    assert error["details"]["exception"]["type"] == "ToolError"
    assert error["details"]["exception"]["message"].startswith("INVALID_PARAMS: ")
    assert error["details"]["tool_calls"] == {"made": 2, "failed": 2}


def test_session_program_has_tools_only_in_calls_that_request_them(http: SocketClient) -> None:
    body = json.dumps({"image": "python"}).encode()
    session = http.post("/v1/sessions", body).body["data"]["session"]["id"]

    def run(code: str, *tools: str) -> Any:
        given = arguments(code, *tools) if tools else {"code": code}
        return http.call("run_python", given, session_id=session).body["data"].get("value")

    assert (
        run("from tools import calculator as sums\nx = sums('20 + 1')['value']\nx", "calculator")
        == 21
    )
    assert run("'tools' in dir(__builtins__), x") == [False, 21]
    without = "try:\n    sums('1')\nexcept Exception as error:\n    found = str(error)\nfound"
    assert run(without).startswith("PERMISSION_DENIED: ")
    assert run("sums(f'{x} * 2')['value']", "calculator") == 42
    listed = http.get("/v1/calls?limit=2").body["data"]["items"]
    assert {one["session_id"] for one in listed} == {session}


@pytest.mark.row("A1", "A5", "S4")
def test_program_time_limit_is_paused_only_while_approval_is_pending(daemon: Daemon) -> None:
    """The control computes under the same limit and times out while the other one waits."""
    code = (
        "import time\n"
        "print(tools.note(text='waited')['noted'], flush=True)\n"
        "while True:\n"
        "    time.sleep(0.01)"
    )
    with (
        Client(daemon.socket) as caller,
        ControlClient(daemon.control, credential=daemon.credential) as control,
        ThreadPoolExecutor(1) as pool,
    ):
        options = {"timeout_seconds": 1, "wait_for_approval": 60}
        waits = pool.submit(caller.call, "run_python", arguments(code, "note"), **options)
        wait_until(lambda: control.approvals.list(state="pending").items != ())
        with Client(daemon.socket) as other:
            late = other.call("run_python", {"code": "while True: pass"}, timeout_seconds=1)
        assert ended_by(late) in (EndedBy.WALL_TIME, EndedBy.CPU_TIME)
        assert not waits.done()
        (asked,) = control.approvals.list(state="pending").items
        control.approvals.approve(asked.id, version=asked.version)
        answer = waits.result(DEADLINE_S)
        assert ended_by(answer) is EndedBy.WALL_TIME
        assert details_of(answer)["stdout"] == "waited\n"
        child = caller.call_state(asked.call_id).call
    assert child.parent_id == answer.metadata.call_id
    assert ran(daemon) == ["'waited' 1"]


def ended_by(envelope: Envelope) -> EndedBy:
    return sandbox_of(envelope).ended_by


@pytest.mark.anyio
async def test_embedded_engine_runs_program_that_calls_tools(
    home: Path, python_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUMEHOOD_CONTAINER__IMAGES__PYTHON", "python")
    monkeypatch.setenv("FUMEHOOD_SESSIONS__IMAGE", "python")
    async with Engine(config=Config(home=home)) as engine:
        envelope = await engine.call(
            "run_python", arguments("tools.calculator('6 * 7')['value']", "calculator")
        )
    assert envelope.data["value"] == 42, envelope.error
