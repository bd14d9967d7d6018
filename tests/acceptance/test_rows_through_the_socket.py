"""Mission rows, tested through the socket of a real daemon."""

from __future__ import annotations

import json
import re
import subprocess
from decimal import Decimal

import pytest

from conftest import Daemon, StartDaemon
from support.http import SocketClient

KEYS = ["success", "status", "data", "error", "metadata"]
METADATA = [
    "tool_name", "tool_version", "call_id", "trace_id", "timestamp", "execution_time_ms",
    "performance", "sandbox", "resources", "usage", "retry_count", "warnings",
]  # fmt: skip


@pytest.mark.row("E1", "E2", "E3")
def test_success_envelope_has_every_key_of_the_contract(client: SocketClient) -> None:
    body = client.calculate("2 + 2").body
    assert list(body) == KEYS
    metadata = body["metadata"]
    assert list(metadata) == METADATA
    assert re.fullmatch(r"call_[0-9a-f]{24}", metadata["call_id"])
    assert re.fullmatch(r"trace_\d{8}_[0-9a-f]{12}", metadata["trace_id"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", metadata["timestamp"])
    performance = metadata["performance"]
    assert set(performance) == {
        "total_ms", "validation_ms", "queue_ms", "approval_ms", "processing_ms", "network_ms",
    }  # fmt: skip
    assert performance["processing_ms"] <= performance["total_ms"] == metadata["execution_time_ms"]
    assert metadata["sandbox"] == {
        "placement": "interpreter",
        "isolation": "resident",
        "ended_by": "ok",
        "limits": {"timeout_seconds": 5.0, "memory_mb": 64},
        "node": None,
    }
    assert metadata["resources"]["cpu_ms"] > 0
    assert metadata["resources"]["peak_memory_mb"] is None
    usage = metadata["usage"]
    assert (usage["cost"], usage["currency"], usage["estimated"]) == ("0.000000", "USD", True)
    assert usage["input_tokens"] > 0


@pytest.mark.needs("curl")
@pytest.mark.row("D1", "E1")
def test_curl_call_over_unix_socket_returns_standard_envelope(shared_daemon: Daemon) -> None:
    answer = subprocess.run(
        [
            "curl", "--silent", "--unix-socket", str(shared_daemon.socket),
            "http://fumehood/v1/tools/calculator/call",
            "--header", "content-type: application/json",
            "--data", '{"arguments": {"expression": "5! + 2**10"}}',
        ],
        check=True, capture_output=True, timeout=600,
    )  # fmt: skip
    envelope = json.loads(answer.stdout)
    assert list(envelope) == KEYS
    assert envelope["success"] is True
    assert envelope["data"] == {"value": 1144, "text": "1144"}
    assert envelope["error"] is None


@pytest.mark.row("E1")
def test_error_envelope_has_empty_data_and_every_required_key(client: SocketClient) -> None:
    body = client.calculate("1 / 0").body
    assert list(body) == KEYS
    assert (body["success"], body["status"], body["data"]) == (False, "error", {})
    assert set(body["error"]) >= {"code", "message", "retryable", "human_review"}
    assert body["error"]["code"] == "EXECUTION_ERROR"


@pytest.mark.row("P1")
def test_coerced_and_clamped_arguments_are_reported_as_warnings(client: SocketClient) -> None:
    body = client.call("calculator", {"expression": "2 / 3", "precision": "2"}).body
    assert body["data"] == {"value": 0.67, "text": "0.67"}
    assert body["metadata"]["warnings"] == ["precision: a string was read as integer"]
    clamped = client.call("calculator", {"expression": "2 / 3", "precision": 99}).body
    assert clamped["data"]["text"] == "0.666666666666667"
    assert clamped["metadata"]["warnings"] == ["precision: 99 is out of range, 15 was used"]


@pytest.mark.row("P2")
def test_every_invalid_parameter_is_named_in_the_error(client: SocketClient) -> None:
    answer = client.call("calculator", {"expr": "1", "precision": []})
    assert answer.code == "INVALID_PARAMS"
    assert sorted(answer.body["error"]["fields"]) == ["expr", "expression", "precision"]


@pytest.mark.row("P8", "P11", "S4", "T2")
def test_timeout_option_is_enforced_and_reported_in_details(client: SocketClient) -> None:
    answer = client.calculate("pow(7, 10**4200, 10**4200 + 7)", timeout_seconds=0.2)
    assert (answer.status, answer.code) == (504, "TIMEOUT")
    error, sandbox = answer.body["error"], answer.body["metadata"]["sandbox"]
    assert error["retryable"] is False
    assert error["details"] == {"ended_by": "wall_time", "limit": {"timeout_seconds": 0.2}}
    assert sandbox["ended_by"] == "wall_time"
    assert sandbox["limits"]["timeout_seconds"] == 0.2


@pytest.mark.row("T2", "P11")
def test_requested_limits_are_capped_at_the_walls_ceiling(client: SocketClient) -> None:
    body = client.calculate("1 + 1", timeout_seconds=3600, memory_limit_mb=4096).body
    limits = body["metadata"]["sandbox"]["limits"]
    assert limits == {"timeout_seconds": 30.0, "memory_mb": 256}
    assert body["metadata"]["warnings"] == [
        "timeout_seconds: 3600 was asked for, 30 is the most that is allowed",
        "memory_limit_mb: 4096 was asked for, 256 is the most that is allowed",
    ]


@pytest.mark.row("S2")
def test_isolation_option_runs_call_in_fresh_process(client: SocketClient) -> None:
    sandbox = client.calculate("1 + 1", isolation="call").body["metadata"]["sandbox"]
    assert sandbox["isolation"] == "call"
    again = client.calculate("1 + 1").body["metadata"]["sandbox"]
    assert again["isolation"] == "resident"


@pytest.mark.row("P12", "S1")
def test_dry_run_reports_placement_and_limits_without_running(client: SocketClient) -> None:
    body = client.calculate("9**9**9", dry_run=True).body
    assert body["data"]["would_run"] is True
    assert body["data"]["placement"]["kind"] == "interpreter"
    assert "interpreter" in body["data"]["placement"]["why"]
    assert body["data"]["limits"]["timeout_seconds"] == 5
    assert body["metadata"]["sandbox"] is None
    assert body["metadata"]["performance"]["network_ms"] is None
    assert client.call("calculator", {}, dry_run=True).code == "INVALID_PARAMS"


@pytest.mark.row("D5")
def test_callers_trace_id_is_kept_in_metadata(client: SocketClient) -> None:
    body = client.calculate("1", trace_id="my-trace.1").body
    assert body["metadata"]["trace_id"] == "my-trace.1"


@pytest.mark.row("P11", "E6")
def test_max_length_option_truncates_texts_and_links_the_full_output(client: SocketClient) -> None:
    code = "print('x' * 500); raise ValueError('y' * 300)"
    whole = client.run("print('x' * 500)").body
    short = client.run("print('x' * 500)", max_length=100, return_summary=False).body
    failed = client.run(code, max_length=100).body
    assert whole["data"]["stdout"] == "x" * 500 + "\n"
    assert len(short["data"]["stdout"]) <= 100
    assert short["data"]["truncation_info"]["original_length"] == 501
    assert short["data"]["truncation_info"]["summary"] is None
    kept = client.get(short["data"]["resource_url"])
    assert kept.status == 200
    assert len(failed["error"]["details"]["stdout"]) <= 100
    assert failed["error"]["details"]["ended_by"] == "exception"
    refused = client.run("1", max_length=0)
    assert (refused.code, refused.body["error"]["fields"]) == (
        "INVALID_PARAMS", ["options.max_length"],
    )  # fmt: skip


@pytest.mark.row("T1", "R4")
def test_tools_are_listed_and_shown_over_http(client: SocketClient) -> None:
    listed = client.get("/v1/tools?limit=100").body
    assert list(listed) == KEYS
    assert listed["data"]["pagination"]["total_count"] == len(listed["data"]["items"]) >= 1
    shown = client.get("/v1/tools/calculator@1.0.0").body["data"]
    assert shown["versions"] == ["1.0.0"]
    assert shown["tool"]["type"] == "BUILTIN"
    assert shown["tool"]["read_only"] is True
    assert shown["tool"]["idempotent"] is True


@pytest.mark.row("D1")
def test_openapi_document_lists_every_path_and_its_references_resolve(client: SocketClient) -> None:
    document = client.get("/v1/openapi.json").body
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        "/v1/health", "/v1/ready", "/v1/openapi.json", "/v1/tools", "/v1/tools/{name}",
        "/v1/tools/{name}/call", "/v1/calls", "/v1/tool_calls", "/v1/decisions",
        "/v1/calls/{call_id}",
        "/v1/approvals", "/v1/approvals/{approval_id}", "/v1/approvals/{approval_id}/cancel",
        "/v1/usage",
        "/v1/blobs/{blob_id}", "/v1/tools/{name}/sse", "/v1/calls/{call_id}/cancel",
        "/v1/calls/{call_id}/events",
        "/v1/sessions", "/v1/sessions/{session_id}", "/v1/sessions/{session_id}/files",
        "/v1/sessions/{session_id}/archive", "/v1/sessions/{session_id}/pause",
        "/v1/sessions/{session_id}/resume", "/v1/sessions/{session_id}/stop",
        "/v1/sessions/{session_id}/snapshots", "/v1/sessions/{session_id}/snapshots/{snapshot_id}",
        "/v1/sessions/{session_id}/restore", "/v1/sessions/{session_id}/fork",
        "/v1/sessions/{session_id}/files/{path}", "/v1/sessions/{session_id}/diff",
        "/v1/sessions/{session_id}/processes", "/v1/sessions/{session_id}/processes/{process}",
        "/v1/sessions/{session_id}/processes/{process}/output", "/v1/projects",
    }  # fmt: skip
    references = re.findall(r"'\$ref': '([^']+)'", repr(document))
    assert len(references) > 10
    for reference in set(references):
        node = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


@pytest.mark.row("E3")
def test_cpu_time_is_priced_if_configured(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(prices__cpu_second="1000", prices__currency="EUR")
    client = daemon.client()
    body = client.calculate("pow(7, 10**1000, 10**1000 + 7)").body
    usage, cpu_ms = body["metadata"]["usage"], body["metadata"]["resources"]["cpu_ms"]
    assert usage["currency"] == "EUR"
    assert Decimal(usage["cost"]) == pytest.approx(Decimal(str(cpu_ms)), abs=Decimal("0.001"))


@pytest.mark.row("S4")
def test_configured_default_timeout_is_enforced(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(interpreter__timeout_seconds="0.2")
    client = daemon.client()
    answer = client.calculate("pow(7, 10**4200, 10**4200 + 7)")
    assert answer.code == "TIMEOUT"
    assert answer.body["metadata"]["sandbox"]["limits"]["timeout_seconds"] == 0.2


EXACT = {
    "0.1 + 0.2": (0.30000000000000004, "0.30000000000000004"),
    "1/3": (1 / 3, "0.3333333333333333"),
    "6/3": (2, "2"),
    "2**64": (None, "18446744073709551616"),
    "2**53 - 1": (9007199254740991, "9007199254740991"),
    "2**53": (None, "9007199254740992"),
    "25!": (None, "15511210043330985984000000"),
    "-3!": (-6, "-6"),
    "2**3!": (64, "64"),
    "sqrt(9)!": (6, "6"),
    "5! != 120": (False, "False"),
    "3!=6": (True, "True"),
    "7 % 3": (1, "1"),
    "7 % -3": (-2, "-2"),
    "-7 // 2": (-4, "-4"),
    "divmod(17, 5)": ([3, 2], "(3, 2)"),
    "[1, 2.5, 2**60]": ([1, 2.5, None], "[1, 2.5, 1152921504606846976]"),
    "1 < 2 <= 2": (True, "True"),
    "10 if 2 > 1 else 20": (10, "10"),
    "~5 & 0xff | 1 << 10": (1274, "1274"),
    "round(2.5)": (2, "2"),
    "max(1, 2, 3) + min([4, 5])": (7, "7"),
    "comb(52, 5)": (2598960, "2598960"),
    "gcd(12, 18) * lcm(4, 6)": (72, "72"),
    "factorial(5.0)": (120, "120"),
}


@pytest.mark.row("S2", "E1")
@pytest.mark.parametrize(("expression", "expected"), EXACT.items(), ids=EXACT)
def test_calculator_returns_exact_value_type_and_text(
    client: SocketClient, expression: str, expected: tuple
) -> None:
    body = client.calculate(expression).body
    assert body["success"], body["error"]
    assert (body["data"]["value"], body["data"]["text"]) == expected
    assert type(body["data"]["value"]) is type(expected[0])
