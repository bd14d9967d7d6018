"""Code through the daemon's sockets, up to the container: arguments, limits, registration.

The wall is scripted by the program (`support.container`), so these tests cover the engine's
part only. `test_run_python.py` runs programs in real containers.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import Daemon
from support.container import told
from support.http import Answer, SocketClient
from support.scripted_daemon import running_scripted_daemon


@pytest.fixture(scope="module")
def scripted() -> Iterator[Daemon]:
    with running_scripted_daemon() as daemon:
        yield daemon


@pytest.fixture
def http(scripted: Daemon) -> Iterator[SocketClient]:
    client = scripted.client()
    yield client
    client.close()


def run(http: SocketClient, code: str = told(), options: Any = None, **arguments: Any) -> Answer:
    return http.call("run_python", {"code": code, **arguments}, **(options or {}))


@pytest.mark.row("S1", "S7", "E7", "E1")
def test_answer_data_holds_streams_exit_status_value_and_files(http: SocketClient) -> None:
    answer = run(http, told(stdout="out", value={"a": 1}, files={"plot.png": "png"}))
    assert answer.body["data"] == {
        "stdout": "out", "stderr": "", "exit_code": 0, "value": {"a": 1},
        "value_repr": "{'a': 1}", "images": [], "ended_by": "ok",
        "files": [{"filename": "plot.png", "content_type": "image/png", "size": 3,
                   "content_base64": base64.b64encode(b"png").decode()}],
    }  # fmt: skip
    sandbox = answer.body["metadata"]["sandbox"]
    assert (sandbox["placement"], sandbox["ended_by"]) == ("container", "ok")
    assert sandbox["limits"] == {"timeout_seconds": 30, "memory_mb": 512}


@pytest.mark.row("S4", "E1")
def test_failure_details_hold_the_same_fields_as_success_data(http: SocketClient) -> None:
    answer = run(http, told(ended_by="memory", stdout="so far", files={"a": "b"}))
    assert (answer.status, answer.code) == (507, "MEMORY_LIMIT_EXCEEDED")
    details = answer.body["error"]["details"]
    data = run(http).body["data"]
    assert data.keys() <= details.keys()
    assert details.keys() - data.keys() == {"exception", "limit"}
    assert (details["stdout"], details["files"][0]["filename"]) == ("so far", "a")
    assert answer.body["data"] == {}


@pytest.mark.row("T2", "P11", "S5")
def test_limits_and_isolation_options_are_applied_or_refused(http: SocketClient) -> None:
    small = run(http, options={"memory_limit_mb": 300, "timeout_seconds": 600}).body["metadata"]
    assert small["sandbox"]["limits"] == {"timeout_seconds": 600, "memory_mb": 256}
    assert "next smaller size" in small["warnings"][0]
    assert run(http, options={"memory_limit_mb": 64}).code == "INVALID_PARAMS"
    fresh = run(http, options={"isolation": "container_per_call"})
    assert fresh.body["metadata"]["sandbox"]["isolation"] == "container_per_call"
    refused = run(http, options={"isolation": "session"})
    assert "needs a session_id" in refused.body["error"]["message"]
    elsewhere = http.calculate("1", isolation="container_per_call")
    assert elsewhere.body["error"]["fields"] == ["options.isolation"]


@pytest.mark.row("S1", "T6")
def test_tool_description_does_not_expose_the_container(http: SocketClient) -> None:
    tool = http.get("/v1/tools/run_python").body["data"]["tool"]
    assert (tool["executor"], tool["sandboxed"], tool["dangerous"]) == ("code:python", True, False)
    assert (tool["read_only"], tool["idempotent"]) == (False, False)
    assert sorted(tool["parameters"]["properties"]) == [
        "argv", "code", "env", "files", "return_files", "stdin", "stdin_base64", "tools",
        "working_directory",
    ]  # fmt: skip
    assert "container" not in tool["description"].lower()
