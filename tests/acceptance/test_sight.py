"""D5: metrics for Prometheus, traces for a collector, alerts and logs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from conftest import Daemon, StartDaemon, make_first_approver
from fumehood import ControlClient
from fumehood.core.errors import ERROR_CODES, Fault
from fumehood.observe.ended_call import UNKNOWN
from fumehood.sandbox.images.catalog import Image
from fumehood.webhook.channel import HEADER, Callbacks
from support.authority import ask
from support.clients import LEAVES_SOCKETS
from support.definition_files import DefinitionDirectory
from support.http import Answer, SocketClient
from support.mcp import META, modern, post
from support.wait import wait_until
from upstream import Reply, Upstream, running_upstream

pytestmark = [pytest.mark.row("D5"), *LEAVES_SOCKETS]

MONITORING = Path(__file__).parents[2] / "monitoring"
TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"
POLICY = """
[[rules]]
id = "{id}"
decision = "ask"
tools = ["{tool}"]
"""


def scrape(daemon: Daemon) -> dict[tuple[str, tuple[str, ...]], float]:
    """All samples of `/metrics`, keyed by name and label values."""
    answer = ask(daemon.control, "GET", "/metrics", credential=daemon.credential)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


def approve(daemon: Daemon, tool: str) -> None:
    """Approve a tool's only pending call."""
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        wait_until(lambda: control.approvals.list(state="pending", tool=tool).items)
        (waiting,) = control.approvals.list(state="pending", tool=tool).items
        control.approvals.approve(waiting.id, version=waiting.version)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    """Rules that require approval for two tools."""
    path = tmp_path / "policy.toml"
    tools = ("run_python", "run_restricted_python")
    path.write_text("".join(POLICY.format(id=f"ask-{n}", tool=t) for n, t in enumerate(tools)))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def daemon(home: Path, start_daemon: StartDaemon, policy: str) -> Daemon:
    """A daemon with an approver."""
    credential = make_first_approver(home)
    started = start_daemon(policy_file=policy)
    started.credential = credential
    return started


# -- metrics --------------------------------------------------------------------------------


def test_metrics_count_calls_by_code_and_match_the_call_log(daemon: Daemon) -> None:
    client = daemon.client()
    for _ in range(3):
        client.calculate("1 + 1")
    client.calculate("1 / 0")
    client.calculate("1 + 1", dry_run=True)
    client.call("calculator", {})
    client.call("no_such_tool", {})
    for key in ("a", "a"):
        client.calculate("2 + 2", idempotency_key=key)
    waiting = client.run("1 + 1")
    assert waiting.code == "REQUIRES_HUMAN_APPROVAL"
    before = scrape(daemon)
    assert before["fumehood_approvals_pending", ()] == 1
    assert ("fumehood_tool_calls_total", ("OK", "run_restricted_python")) not in before
    approve(daemon, "run_restricted_python")
    done = ("fumehood_tool_calls_total", ("OK", "run_restricted_python"))
    wait_until(lambda: done in scrape(daemon))
    found = scrape(daemon)
    counted = {labels: n for (name, labels), n in found.items() if name == done[0]}
    assert counted == {
        ("OK", "calculator"): 5,
        ("EXECUTION_ERROR", "calculator"): 1,
        ("INVALID_PARAMS", "calculator"): 1,
        ("TOOL_NOT_FOUND", UNKNOWN): 1,
        ("OK", "run_restricted_python"): 1,
    }
    logged = client.get("/v1/calls?limit=100").body["data"]["items"]
    assert Counter(call["code"] for call in logged) == {
        "OK": 6, "EXECUTION_ERROR": 1, "INVALID_PARAMS": 1, "TOOL_NOT_FOUND": 1,
    }  # fmt: skip
    assert found["fumehood_tool_call_duration_seconds_count", ("calculator",)] == 7
    assert found["fumehood_approvals_pending", ()] == 0
    assert found["fumehood_approval_wait_seconds_count", ()] == 1
    assert found["fumehood_sandbox_runs_total", ("ok",)] == 5
    assert found["fumehood_calls_running", ()] == 0
    assert found["process_resident_memory_bytes", ()] > 1 << 20


def test_unknown_tool_names_share_one_metric_series(daemon: Daemon) -> None:
    calls = [{"tool": f"made_up_{number}"} for number in range(1000)]
    client = daemon.client()
    answer = client.post("/v1/calls", json.dumps({"calls": calls}).encode())
    assert len(answer.body["data"]["results"]) == 1000
    tools = {
        labels[-1]: value
        for (name, labels), value in scrape(daemon).items()
        if name == "fumehood_tool_calls_total"
    }
    assert tools == {UNKNOWN: 1000}


@pytest.mark.parametrize("path", ["/metrics", "/v1/alerts"])
def test_metrics_and_alerts_require_admin_authority_on_control_socket(
    administered_daemon: Daemon, path: str
) -> None:
    daemon, name = administered_daemon, path.rpartition("/")[2]
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        caller = control.tokens.new(f"{name}-caller").secret
        admin = control.tokens.new(f"{name}-admin", scopes=["admin"]).secret

    def asked(credential: str | None) -> Answer:
        return ask(daemon.control, "GET", path, credential=credential)

    assert asked(admin).status == asked(daemon.credential).status == 200
    for credential, code in ((None, "UNAUTHORIZED"), ("fha_0_0", "UNAUTHORIZED"),
                             (caller, "PERMISSION_DENIED")):  # fmt: skip
        assert asked(credential).code == code
    for credential in (None, daemon.credential, admin, caller):
        assert ask(daemon.socket, "GET", path, credential=credential).code in (
            "RESOURCE_NOT_FOUND", "UNAUTHORIZED",
        )  # fmt: skip
    assert ask(daemon.socket, "GET", path).code == "RESOURCE_NOT_FOUND"


NAME = re.compile(r"\b(?:fumehood|process)_[a-z0-9_]+")


def test_alert_rules_and_dashboard_use_only_existing_metrics(administered_daemon: Daemon) -> None:
    client = administered_daemon.client()
    client.calculate("1 + 1")
    client.close()
    exist = {name for name, _ in scrape(administered_daemon)} | {"fumehood_budget_used_ratio"}
    rules = yaml.safe_load((MONITORING / "prometheus-rules.yml").read_text(encoding="utf-8"))
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
    expressions = {r["alert"]: r["expr"] for g in rules["groups"] for r in g["rules"]}
    assert expressions.pop("FumehoodNodeDown") == "fumehood_node_up == 0"  # of a cluster
    assert expressions.pop("FumehoodSecretMisuse").endswith("[5m]) > 0")
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(shown) > 20
    named = {name for text in (*expressions.values(), *shown) for name in NAME.findall(text)}
    assert named - exist == set()
    thresholds = {
        name: re.search(r"([<>] [0-9.]+)\s+and ", text)[1]  # type: ignore[index]
        for name, text in expressions.items()
    }
    assert thresholds == {
        "FumehoodSuccessRate": "< 0.95", "FumehoodMeanDuration": "> 0.5",
        "FumehoodP99Duration": "> 2", "FumehoodErrorRate": "> 0.05", "FumehoodRetryRate": "> 0.1",
    }  # fmt: skip
    no_fault = {"OK"} | {
        code for code, kind in ERROR_CODES.items() if kind.fault in (Fault.CALLER, Fault.RULES)
    }
    (excluded,) = re.findall(r'code!~"([^"]+)"', expressions["FumehoodErrorRate"])
    assert set(excluded.split("|")) == no_fault


# -- alerts ---------------------------------------------------------------------------------


def test_alert_is_listed_logged_and_sent_as_signed_webhook(
    home: Path, start_daemon: StartDaemon, tmp_path: Path, upstream: Upstream
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 40)
    secret.chmod(0o600)
    credential = make_first_approver(home)
    daemon = start_daemon(
        webhook__url=f"{upstream.url}/hook", webhook__secret_file=str(secret), alerts__min_calls="5"
    )
    client = daemon.client()
    for _ in range(5):
        client.calculate("1 / 0")
    with ControlClient(daemon.control, credential=credential) as control:
        shown = control.alerts()
        assert {(a.name, a.tool) for a in shown.alerts if a.firing} == {
            ("success_rate", None), ("success_rate", "calculator"),
            ("error_rate", None), ("error_rate", "calculator"),
        }  # fmt: skip

    def told() -> list[Any]:
        return [r for r in list(upstream.requests) if b'"alert.' in r.body]

    upstream.wait_for(lambda: len(told()) >= 4)
    checker = Callbacks(b"s" * 40, window_s=300)
    for message in told():
        checker.check([message.headers[HEADER]], message.body, datetime.now(UTC))
        assert message.json["event"] == "alert.firing"
    alerts = {(m.json["alert"]["name"], m.json["alert"]["tool"]): m.json["alert"] for m in told()}
    first = alerts["success_rate", "calculator"]
    assert (first["value"], first["threshold"], first["calls"]) == (0.0, 0.95, 5)
    for _ in range(200):
        client.calculate("1 + 1")
    upstream.wait_for(lambda: len(told()) >= 8)
    assert [m.json["event"] for m in told()[4:]] == ["alert.resolved"] * 4
    # The log gathers its lines, so that the webhook can be first.
    wait_until(lambda: daemon.log.count('"alert.') >= 8)
    events = [json.loads(line) for line in daemon.log.splitlines() if '"alert.' in line]
    assert [event["event"] for event in events] == ["alert.firing"] * 4 + ["alert.resolved"] * 4


# -- traces ---------------------------------------------------------------------------------


class Collector:
    """An OpenTelemetry collector, reduced to receiving spans over HTTP."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        upstream.script("/v1/traces", Reply(body=b"", content_type="application/x-protobuf"))

    @property
    def variables(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.upstream.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def spans(self, trace_id: str = TRACE) -> dict[str, Any]:
        """The spans of a trace, keyed by id."""
        found = {}
        for request in self.upstream.requests:
            if request.path == "/v1/traces":
                sent = ExportTraceServiceRequest.FromString(request.body)
                for resource in sent.resource_spans:
                    for scope in resource.scope_spans:
                        found |= {span.span_id.hex(): span for span in scope.spans}
        return {key: span for key, span in found.items() if span.trace_id.hex() == trace_id}

    def call(self, name: str, trace_id: str = TRACE) -> Any:
        """The only span with this name, once it has arrived."""

        def named() -> list[Any]:
            return [s for s in self.spans(trace_id).values() if s.name == name]

        wait_until(named)
        (span,) = named()
        return span


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_upstream() as upstream:
        yield Collector(upstream)


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def call_in_trace(client: SocketClient, tool: str, arguments: Any, **options: Any) -> Answer:
    body = json.dumps({"arguments": arguments, "options": options}).encode()
    headers = {"content-type": "application/json", "traceparent": CALLER}
    return client.request("POST", f"/v1/tools/{tool}/call", body, headers)


PROGRAM = "import os\nprint(os.environ['TRACEPARENT'], 'canary-of-the-result')  # canary-argument"


@pytest.mark.needs("docker")
def test_trace_of_approved_container_call_is_one_tree_across_restart(
    home: Path, start_daemon: StartDaemon, policy: str, collector: Collector, python_image: Image
) -> None:
    credential = make_first_approver(home)

    def start() -> Daemon:
        started = start_daemon(
            variables=collector.variables, policy_file=policy,
            container__images__python=python_image.name,
        )  # fmt: skip
        started.credential = credential
        return started

    daemon = start()
    client = daemon.client()
    waiting = call_in_trace(client, "run_python", {"code": PROGRAM})
    assert waiting.code == "REQUIRES_HUMAN_APPROVAL"
    assert waiting.body["metadata"]["trace_id"] == TRACE
    call_id = waiting.body["metadata"]["call_id"]
    client.close()
    assert daemon.stop() == 0
    daemon = start()
    approve(daemon, "run_python")
    client = daemon.client()

    def answer() -> Any:
        return client.get(f"/v1/calls/{call_id}").body["data"]["envelope"]

    wait_until(answer)
    assert answer()["success"], answer()["error"]
    call = collector.call("execute_tool run_python")
    assert call.parent_span_id.hex() == "b7ad6b7169203331"
    told = answer()["data"]["stdout"].split()[0]
    assert told == f"00-{TRACE}-{call.span_id.hex()}-01"  # the program belongs to the call
    wait_until(lambda: len(collector.spans()) >= 9)
    spans = collector.spans()
    stages = [span for span in spans.values() if span is not call and span.name != call.name]
    assert {span.parent_span_id.hex() for span in stages} == {call.span_id.hex()}
    assert len(spans) == len(stages) + 1
    assert [s.name for s in sorted(stages, key=lambda s: s.start_time_unix_nano)] == [
        "approval wait", "resolve", "validate", "authorize", "admit", "start", "execute", "record",
    ]  # fmt: skip
    by_name = {span.name: span for span in stages}
    assert attributes(by_name["execute"]) == {
        "fumehood.sandbox.placement": "container",
        "fumehood.sandbox.isolation": answer()["metadata"]["sandbox"]["isolation"],
        "fumehood.sandbox.ended_by": "ok",
    }
    assert attributes(call) == {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "run_python",
        "gen_ai.tool.type": "function", "gen_ai.tool.call.id": call_id,
        "fumehood.trace_id": TRACE,
    }  # fmt: skip
    for span in stages:
        assert call.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= call.end_time_unix_nano
    assert not [r for r in collector.upstream.requests if b"canary" in r.body]


def test_trace_context_is_read_from_option_and_mcp_and_sent_to_rest(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, collector: Collector,
    upstream: Upstream,
) -> None:  # fmt: skip
    definitions.put(
        "weather.json",
        {
            "name": "get_weather", "type": "REST", "description": "Read the weather.",
            "method": "GET", "endpoint": f"{upstream.url}/now", "read_only": True,
            "parameters": {"properties": {}},
        },
    )  # fmt: skip
    daemon = start_daemon(
        variables=collector.variables, tools_directory=str(definitions.path),
        rest__allowed_hosts=json.dumps([upstream.authority]),
    )  # fmt: skip
    client = daemon.client()
    answer = call_in_trace(client, "get_weather", {}, trace_id="of-the-option")
    assert answer.body["metadata"]["trace_id"] == "of-the-option"
    call = collector.call("execute_tool get_weather")
    (sent,) = upstream.requests
    assert sent.headers["traceparent"] == f"00-{TRACE}-{call.span_id.hex()}-01"
    assert attributes(call)["fumehood.trace_id"] == "of-the-option"
    assert call.parent_span_id.hex() == "b7ad6b7169203331"

    other = "a" * 32
    client.calculate("1 / 0", trace_id=f"00-{other}-{'b' * 16}-01")
    failed = collector.call("execute_tool calculator", other)
    assert failed.parent_span_id.hex() == "b" * 16
    assert attributes(failed)["error.type"] == "EXECUTION_ERROR"
    assert failed.status.code == 2

    third = "c" * 32
    meta = {**META, "traceparent": f"00-{third}-{'d' * 16}-01"}
    message = modern(1, "tools/call", meta, name="calculator", arguments={"expression": "1"})
    result = post(daemon.socket, message).body["result"]
    assert result["_meta"]["fumehood/envelope"]["metadata"]["trace_id"] == third
    assert collector.call("execute_tool calculator", third).parent_span_id.hex() == "d" * 16

    alone = client.calculate("1 + 1").body["metadata"]["trace_id"]
    assert re.fullmatch(r"trace_\d{8}_[0-9a-f]{12}", alone)


def test_unreachable_collector_delays_neither_calls_nor_shutdown(
    start_daemon: StartDaemon,
) -> None:
    with running_upstream() as gone:
        endpoint = gone.url
    daemon = start_daemon(variables={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    client = daemon.client()
    for _ in range(20):
        assert client.calculate("1 + 1").body["success"]
    client.close()
    assert daemon.stop() == 0
    lines = [line for line in daemon.log.splitlines() if not line.startswith("fumehood listens")]
    assert [line for line in lines if not line.startswith("{")] == []


# -- logs -----------------------------------------------------------------------------------


def test_every_log_event_about_a_call_has_its_trace_id(daemon: Daemon) -> None:
    client = daemon.client()
    call_in_trace(client, "calculator", {"expression": "1 + 1"})
    client.call("nothing", {}, trace_id="my-trace")
    call_in_trace(client, "run_restricted_python", {"code": "1"})
    approve(daemon, "run_restricted_python")
    wait_until(lambda: daemon.log.count('"call.ended"') >= 4)
    client.close()
    events = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    about = [e for e in events if "call_id" in e or e["event"].startswith(("call.", "approval."))]
    assert {event["trace_id"] for event in about} == {TRACE, "my-trace"}
    assert {"call.ended", "approval.changed"} <= {event["event"] for event in about}
