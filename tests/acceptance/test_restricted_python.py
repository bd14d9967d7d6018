"""Restricted programs through the daemon's socket and from the command line."""

from __future__ import annotations

import json
import subprocess

import pytest

from conftest import FUMEHOOD, Daemon
from support.http import SocketClient

PROGRAM = """
from collections import Counter

class Basket:
    def __init__(self):
        self.items = Counter()

    def add(self, name, number=1):
        self.items[name] += number
        return self

basket = Basket().add("apple", 3).add("pear")
for name, number in sorted(basket.items.items()):
    print(f"{name:>6} {number}")
sum(basket.items.values())
"""
PRINTED = " apple 3\n  pear 1\n"


@pytest.mark.row("S2", "S1", "E1")
def test_restricted_program_returns_value_repr_and_stdout(client: SocketClient) -> None:
    body = client.run(PROGRAM).body
    assert body["data"] == {"value": 4, "value_repr": "4", "stdout": PRINTED}
    sandbox = body["metadata"]["sandbox"]
    assert (sandbox["placement"], sandbox["isolation"]) == ("interpreter", "call")
    assert (sandbox["ended_by"], sandbox["limits"]["memory_mb"]) == ("ok", 64)
    resources = body["metadata"]["resources"]
    assert resources["cpu_ms"] > 0
    assert resources["peak_memory_mb"] > 0


@pytest.mark.row("S4", "E1")
def test_failed_program_reports_exception_line_traceback_and_stdout(client: SocketClient) -> None:
    answer = client.run("print('start')\ndef half(x):\n    return 1 / x\nhalf(0)")
    assert (answer.status, answer.code) == (500, "EXECUTION_ERROR")
    error = answer.body["error"]
    assert error["message"] == "The program failed: ZeroDivisionError: division by zero (line 3)."
    assert error["details"]["stdout"] == "start\n"
    assert error["details"]["exception"]["traceback"].endswith(
        "ZeroDivisionError: division by zero"
    )
    assert error["details"]["ended_by"] == "exception"
    assert answer.body["data"] == {}


@pytest.mark.row("S2")
def test_refused_import_names_module_and_line(client: SocketClient) -> None:
    answer = client.run("import os\nos.getcwd()")
    assert (answer.status, answer.code) == (403, "SANDBOX_VIOLATION")
    assert "'os' cannot be imported here" in answer.body["error"]["message"]
    assert "line 1" in answer.body["error"]["message"]
    assert "Do not retry" in answer.body["error"]["message"]


@pytest.mark.row("S4", "P8", "P11")
def test_endless_program_times_out_and_next_call_succeeds(client: SocketClient) -> None:
    answer = client.run("print('lost')\nwhile True: pass", timeout_seconds=0.3)
    assert (answer.status, answer.code) == (504, "TIMEOUT")
    details = answer.body["error"]["details"]
    assert details["limit"] == {"timeout_seconds": 0.3}
    assert details["stdout"] is None
    assert client.run("1 + 1").body["data"]["value"] == 2


@pytest.mark.row("S4", "P11")
def test_memory_limit_option_is_enforced(client: SocketClient) -> None:
    code = "print('kept')\nx = bytearray(40 * 10**6)\nlen(x)"
    assert client.run(code).body["data"]["value"] == 40_000_000
    answer = client.run(code, memory_limit_mb=32)
    assert (answer.status, answer.code) == (507, "MEMORY_LIMIT_EXCEEDED")
    assert answer.body["error"]["details"]["stdout"] == "kept\n"


@pytest.mark.row("S4")
def test_gradual_memory_exhaustion_is_reported_as_memory_limit(client: SocketClient) -> None:
    code = "print('kept')\nx = []\nwhile True: x.append(str(len(x)) * 50)"
    answer = client.run(code, memory_limit_mb=16, timeout_seconds=30)
    assert answer.code == "MEMORY_LIMIT_EXCEEDED"
    assert answer.body["error"]["details"]["stdout"] == "kept\n"


@pytest.mark.row("S4", "E1")
def test_output_over_limit_is_refused_and_its_beginning_kept(client: SocketClient) -> None:
    answer = client.run("n = 0\nwhile True:\n    n += 1\n    print(n)")
    assert (answer.status, answer.code) == (413, "OUTPUT_LIMIT_EXCEEDED")
    details = answer.body["error"]["details"]
    assert details["stdout"].startswith("1\n2\n3\n")
    assert details["limit"] == {"output_bytes": 65536}


@pytest.mark.row("P2")
def test_missing_oversized_or_unknown_argument_is_refused(client: SocketClient) -> None:
    answer = client.call("run_restricted_python", {"stdin": "x"})
    assert answer.code == "INVALID_PARAMS"
    assert sorted(answer.body["error"]["fields"]) == ["code", "stdin"]
    assert client.run("#" * 65_537).code == "INVALID_PARAMS"


@pytest.mark.row("S2", "D1")
def test_command_line_runs_restricted_program_through_the_daemon(shared_daemon: Daemon) -> None:
    done = subprocess.run(
        [str(FUMEHOOD), "call", "run_restricted_python", "-"],
        env=shared_daemon.environment, input=json.dumps({"code": PROGRAM}).encode(),
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["stdout"] == PRINTED
    failed = subprocess.run(
        [str(FUMEHOOD), "call", "run_restricted_python", json.dumps({"code": "1 / 0"})],
        env=shared_daemon.environment, capture_output=True, timeout=600,
    )  # fmt: skip
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["error"]["code"] == "EXECUTION_ERROR"


@pytest.mark.row("S2", "D1")
def test_command_line_local_option_runs_restricted_program_without_daemon(
    shared_daemon: Daemon, home
) -> None:
    done = subprocess.run(
        [str(FUMEHOOD), "call", "run_restricted_python", '{"code": "[n * n for n in range(4)]"}', "--local"],
        env={**shared_daemon.environment, "FUMEHOOD_HOME": str(home)},
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["value"] == [0, 1, 4, 9]
