"""Every request as it would be sent, and as its answer would be read: no socket, no daemon."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fumehood import DaemonUnavailable
from fumehood.answers import Pagination, ToolList
from fumehood.approvals.model import NewDecision, OneOfSeveral, RememberWish
from fumehood.client.api_request import ApiRequest
from fumehood.client.exchange import Endpoint
from fumehood.client.requests import approvals, callers, control, sessions
from fumehood.core.identity import Scope
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.identity.model import Agent, Binding
from support.answers import envelope_bytes
from support.definitions import function_definition

AGENT = {"id": "a", "description": "", "principals": ["uid:0"], "is_enabled": True}
BINDING = {"tool": "t", "sort_order": 1, "fixed": {}, "defaults": {}, "is_enabled": True}
CREATED = {"description": "d", "principals": ("uid:0",), "is_enabled": True}
BOUND: dict[str, Any] = {"sort_order": 1, "fixed": {"x": 1}, "defaults": None, "is_enabled": False}
TOKEN: dict[str, Any] = {
    "principal_id": None, "scopes": (Scope.CALL, "admin"), "agents": ["a"],
    "expires_at": datetime(2030, 1, 1, tzinfo=UTC),
}  # fmt: skip

BLOB = f"/v1/blobs/blob_{'0' * 32}?expires=1&signature={'f' * 64}"

CALLERS: list[tuple[ApiRequest[Any], str, Any]] = [
    (callers.call("t@1.0.0", None, {"debug": True}), "POST /v1/tools/t@1.0.0/call",
     {"arguments": {}, "options": {"debug": True}}),
    (callers.stream("t", {"a": 1}, {}), "POST /v1/tools/t/sse",
     {"arguments": {"a": 1}, "options": {}}),
    (callers.cancel("call_1"), "POST /v1/calls/call_1/cancel", None),
    (callers.tools_page(), "GET /v1/tools", None),
    (callers.tools_page(limit=2, cursor="x=y", category="a b", tag=None),
     "GET /v1/tools?limit=2&cursor=x%3Dy&category=a+b", None),
    (callers.agent_tools("a/b", categories=["x", "y"], max_cost=Decimal("0.10"), at_most=3),
     "GET /v1/tools?agent_id=a%2Fb&categories=x%2Cy&exclude_dangerous=true&max_cost=0.10&at_most=3",
     None),
    (callers.calls(since=datetime(2030, 1, 1, tzinfo=UTC), limit=2),
     "GET /v1/calls?since=2030-01-01T00%3A00%3A00%2B00%3A00&limit=2", None),
    (callers.usage(None, {}), "GET /v1/usage", None),
    (callers.usage(["day", "tool"], {"agent": "a", "since": None}),
     "GET /v1/usage?by=day%2Ctool&agent=a", None),
    (callers.call_record("call_1"), "GET /v1/calls/call_1", None),
    (callers.tool("t"), "GET /v1/tools/t", None),
    (approvals.list_approvals(state="pending", limit=5, cursor=None),
     "GET /v1/approvals?state=pending&limit=5", None),
    (approvals.show_approval("apr_1"), "GET /v1/approvals/apr_1", None),
    (approvals.cancel_approval("apr_1"), "POST /v1/approvals/apr_1/cancel", None),
    (approvals.call_state("call_1"), "GET /v1/calls/call_1", None),
    (callers.health(), "GET /v1/health", None),
    (callers.ready(), "GET /v1/ready", None),
    (callers.openapi(), "GET /v1/openapi.json", None),
    (callers.blob(BLOB), f"GET {BLOB}", None),
    (sessions.sessions(), "GET /v1/sessions", None),
    (sessions.create_session(image="node", memory_mb=None, idle_seconds=60), "POST /v1/sessions",
     {"image": "node", "idle_seconds": 60}),
    (sessions.session("sess_1"), "GET /v1/sessions/sess_1", None),
    (sessions.end_session("sess_1"), "DELETE /v1/sessions/sess_1", None),
    (sessions.session_files("sess_1"), "GET /v1/sessions/sess_1/files", None),
    (sessions.session_files("sess_1", "a b", recursive=True, limit=5, cursor="x="),
     "GET /v1/sessions/sess_1/files?path=a+b&recursive=true&limit=5&cursor=x%3D", None),
    (sessions.put_file("sess_1", "d/a b.csv"), "PUT /v1/sessions/sess_1/files/d/a%20b.csv", None),
    (sessions.put_file("sess_1", "a%2fb?", mode="create"),
     "PUT /v1/sessions/sess_1/files/a%252fb%3F?mode=create", None),
    (sessions.get_file("sess_1", "ü\n#"), "GET /v1/sessions/sess_1/files/%C3%BC%0A%23", None),
    (sessions.delete_file("sess_1", "d", recursive=True),
     "DELETE /v1/sessions/sess_1/files/d?recursive=true", None),
]  # fmt: skip
CONTROL: list[tuple[ApiRequest[Any], str, Any]] = [
    (control.create_agent("a", **CREATED), "POST /v1/agents",
     {"id": "a", "description": "d", "principals": ["uid:0"], "is_enabled": True}),
    (control.list_agents(), "GET /v1/agents", None),
    (control.show_agent("a"), "GET /v1/agents/a", None),
    (control.update_agent("a", principals=[]), "PATCH /v1/agents/a", {"principals": []}),
    (control.update_agent("a", is_enabled=False), "PATCH /v1/agents/a", {"is_enabled": False}),
    (control.delete_agent("a"), "DELETE /v1/agents/a", None),
    (control.list_bindings("a"), "GET /v1/agents/a/tools", None),
    (control.bind("a", "t", **BOUND), "PUT /v1/agents/a/tools/t",
     {"sort_order": 1, "fixed": {"x": 1}, "defaults": {}, "is_enabled": False}),
    (control.unbind("a", "t"), "DELETE /v1/agents/a/tools/t", None),
    (control.add_tool({"name": "t"}), "POST /v1/tools", {"name": "t"}),
    (control.replace_tool("t@1.0.0", {"name": "t"}), "PUT /v1/tools/t@1.0.0", {"name": "t"}),
    (control.remove_tool("t@1.0.0"), "DELETE /v1/tools/t@1.0.0", None),
    (control.switch_tool("t", is_active=True), "POST /v1/tools/t/activate", None),
    (control.switch_tool("t", is_active=False), "POST /v1/tools/t/deactivate", None),
    (control.new_token("n", **TOKEN), "POST /v1/tokens",
     {"name": "n", "principal_id": None, "scopes": ["call", "admin"], "agents": ["a"],
      "expires_at": "2030-01-01T00:00:00+00:00"}),
    (control.list_tokens(), "GET /v1/tokens", None),
    (control.revoke_token("i"), "DELETE /v1/tokens/i", None),
    (control.add_approver("n", scopes=["admin"]), "POST /v1/approvers",
     {"name": "n", "scopes": ["admin"]}),
    (control.list_approvers(), "GET /v1/approvers", None),
    (control.remove_approver("n"), "DELETE /v1/approvers/n", None),
    (control.changes(), "GET /v1/changes", None),
    (control.audit_page(after=7, limit=50), "GET /v1/audit?after=7&limit=50", None),
    (control.verify_audit(), "GET /v1/audit/verify", None),
    (control.rotate_audit_key(), "POST /v1/audit/rotate", None),
    (control.show_policy(), "GET /v1/policy", None),
    (control.reload_policy(), "POST /v1/policy/reload", None),
    (control.explain("t", {"a": 1}, principal_id=None, agent_id="a", session_id=None),
     "POST /v1/policy/explain", {"tool": "t", "arguments": {"a": 1}, "agent_id": "a"}),
    (approvals.decide("apr_1", NewDecision(decision="deny", reason="r"), 3),
     "POST /v1/approvals/apr_1/decision", {"decision": "deny", "reason": "r"}),
    (approvals.decide("apr_1", NewDecision(decision="approve", arguments={"a": None}), None),
     "POST /v1/approvals/apr_1/decision", {"decision": "approve", "arguments": {"a": None}}),
    (approvals.decide_all([OneOfSeveral(approval_id="apr_1", decision=NewDecision(decision="deny"))]),
     "POST /v1/approvals/decisions",
     {"items": [{"approval_id": "apr_1", "decision": {"decision": "deny"}}]}),
    (approvals.preview_remember("apr_1", RememberWish(uses=2)),
     "POST /v1/approvals/apr_1/remember-preview", {"uses": 2}),
    (approvals.preview_edit("apr_1", {"a": None}),
     "POST /v1/approvals/apr_1/edit-preview", {"arguments": {"a": None}}),
    (approvals.resolve("apr_1", "done", None), "POST /v1/approvals/apr_1/resolve",
     {"outcome": "done", "note": None}),
    (approvals.next_change(4, 2.5), "GET /v1/approvals/changes?after=4&wait=2.5", None),
    (approvals.list_remembered(), "GET /v1/policy/remembered", None),
    (approvals.forget("rul_1"), "DELETE /v1/policy/remembered/rul_1", None),
]  # fmt: skip


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("api_request", "line", "body"),
    [*CALLERS, *CONTROL],
    ids=[line for _, line, _ in [*CALLERS, *CONTROL]],
)
def test_request_is_what_the_method_says(
    api_request: ApiRequest[Any], line: str, body: Any
) -> None:
    assert f"{api_request.method} {api_request.path}" == line
    assert (None if api_request.content is None else json.loads(api_request.content)) == body


WITHOUT_A_METHOD = {"replaceAgent", "receiveCallback"}
"""What `update` does as well, and what another program than a client sends."""


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("operations", "requests"), [(OPERATIONS, CALLERS), (CONTROL_OPERATIONS, CALLERS + CONTROL)]
)
def test_every_operation_of_the_daemon_has_a_request(operations: Any, requests: Any) -> None:
    sent = [line.split(" ") for _, line, _ in requests]
    unsent = {
        operation.id
        for operation in operations
        if not any(
            method == operation.method and operation.route.path_regex.match(path.partition("?")[0])
            for method, path in sent
        )
    }
    assert unsent <= WITHOUT_A_METHOD


def test_answers_are_values_of_the_model() -> None:
    assert control.list_agents().read(envelope_bytes({"items": [AGENT]})) == (
        Agent(id="a", principals=("uid:0",)),
    )
    bound = control.list_bindings("a").read(envelope_bytes({"items": [BINDING]}))
    assert bound == (Binding(tool="t", sort_order=1),)
    assert control.delete_agent("a").read(envelope_bytes({"deleted": "a"})) is None
    readiness = {
        "status": "not_ready", "walls": {}, "state": {"failing": True, "lost_rows": 1}
    }  # fmt: skip
    assert callers.ready().read(json.dumps(readiness).encode()).state.failing


def test_refused_call_is_an_answer_and_nothing_is_raised() -> None:
    envelope = callers.call("t", {}, {}).read(envelope_bytes({}, code="TOOL_NOT_FOUND"))
    assert envelope.error is not None
    assert envelope.error.code == "TOOL_NOT_FOUND"


@pytest.mark.parametrize(
    ("asked", "work_s"),
    [(2, 2.0), (0.5, 0.5), (900, 900.0), (None, 600.0), ("2", 600.0), (True, 600.0), (-1, 600.0)],
)
def test_call_is_waited_for_as_long_as_it_may_run(asked: Any, work_s: float) -> None:
    assert callers.call("t", {}, {"timeout_seconds": asked}).work_s == work_s
    assert callers.health().work_s == 0


@pytest.mark.row("A6")
def test_call_that_waits_for_a_human_is_waited_for_so_much_longer() -> None:
    for wait, work_s in ((None, 2.0), (False, 2.0), (True, 3602.0), (60, 62.0), (0.5, 2.5)):
        options = {"timeout_seconds": 2, "wait_for_approval": wait}
        assert callers.call("t", {}, options).work_s == work_s


@pytest.mark.row("A6")
def test_decision_says_which_version_was_seen() -> None:
    yes = NewDecision(decision="approve")
    assert approvals.decide("apr_1", yes, 3).headers == {"if-match": '"3"'}
    assert approvals.decide("apr_1", yes, None).headers == {"if-match": "*"}
    endpoint = Endpoint(Path("/s"), "secret", 1, 1)
    sent = endpoint.headers(approvals.decide("apr_1", yes, 3))
    assert sent["if-match"] == '"3"'
    assert sent["authorization"] == "Bearer secret"


def test_one_string_is_not_a_list_of_names() -> None:
    """It would make an agent that `a`, `b` and `c` may speak for."""
    for make in (
        lambda: control.create_agent("a", **{**CREATED, "principals": "abc"}),
        lambda: control.update_agent("a", principals="abc"),
        lambda: control.new_token("n", **{**TOKEN, "agents": "abc"}),
        lambda: control.add_approver("n", scopes="admin"),
    ):
        with pytest.raises(ValueError, match="A list of names is needed"):
            make()


def test_end_of_a_token_needs_its_time_zone() -> None:
    with pytest.raises(ValueError, match="time zone"):
        control.new_token("n", **{**TOKEN, "expires_at": datetime(2030, 1, 1)})  # noqa: DTZ001


@pytest.mark.row("S6")
@pytest.mark.parametrize("path", ["", "/a", "a/", "../a", "a/../b", ".", "a//b"])
def test_path_that_would_address_something_else_is_not_sent(path: str) -> None:
    for make in (sessions.put_file, sessions.get_file, sessions.delete_file):
        with pytest.raises(ValueError, match="can be no name"):
            make("sess_1", path)


def page_of(name: str, cursor: str | None) -> ToolList:
    pagination = Pagination(has_more=cursor is not None, next_cursor=cursor, total_count=3)
    return ToolList(
        items=(function_definition(name=name),), sources={name: "api"}, pagination=pagination
    )


def test_all_tools_are_asked_for_page_by_page() -> None:
    requests = callers.all_tools(tag="x")
    assert next(requests).path == "/v1/tools?tag=x&limit=100"
    assert requests.send(page_of("a", "one")).path == "/v1/tools?tag=x&limit=100&cursor=one"
    assert requests.send(page_of("b", "two")).path.endswith("cursor=two")
    with pytest.raises(StopIteration) as end:
        requests.send(page_of("c", None))
    assert [(tool.name, source) for tool, source in end.value.value] == [
        ("a", "api"), ("b", "api"), ("c", "api"),
    ]  # fmt: skip


def test_list_that_never_ends_is_no_engines() -> None:
    requests = callers.all_tools()
    next(requests)
    requests.send(page_of("a", "one"))
    requests.send(page_of("b", "two"))
    with pytest.raises(DaemonUnavailable, match="never ends"):
        requests.send(page_of("c", "one"))


def test_category_that_would_be_two_is_refused() -> None:
    with pytest.raises(ValueError, match="comma"):
        callers.agent_tools("a", categories=["x,y"])
    with pytest.raises(ValueError, match="A list of names"):
        callers.agent_tools("a", categories="xy")


@pytest.mark.parametrize(
    "make",
    [
        lambda: callers.call("t", None, {"timeout": 1}),
        lambda: callers.stream("t", None, {"timeout": 1}),
        lambda: callers.tools_page(timeout=1),
        lambda: next(callers.all_tools(timeout=1)),
        lambda: callers.calls(timeout=1),
        lambda: callers.usage(None, {"timeout": 1}),
        lambda: approvals.list_approvals(timeout=1),
    ],
)
def test_unknown_keyword_is_refused_before_anything_is_sent(make: Any) -> None:
    with pytest.raises(TypeError, match="no keyword argument 'timeout'"):
        make()
