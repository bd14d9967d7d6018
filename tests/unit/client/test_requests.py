"""Every request as it would be sent, and as its answer would be read: no socket, no daemon."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from fumehood.client import authority, callers
from fumehood.client.ask import Ask
from fumehood.daemon.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.model.agent import Agent, Binding
from fumehood.model.identity import Scope
from support.answers import envelope_bytes

AGENT = {"id": "a", "description": "", "principals": ["uid:0"], "is_enabled": True}
BINDING = {"tool": "t", "sort_order": 1, "fixed": {}, "defaults": {}, "is_enabled": True}
CREATED = {"description": "d", "principals": ("uid:0",), "is_enabled": True}
BOUND: dict[str, Any] = {"sort_order": 1, "fixed": {"x": 1}, "defaults": None, "is_enabled": False}
TOKEN: dict[str, Any] = {
    "principal_id": None, "scopes": (Scope.CALL, "admin"), "agents": ["a"],
    "expires_at": datetime(2030, 1, 1, tzinfo=UTC),
}  # fmt: skip

CALLERS: list[tuple[Ask[Any], str, Any]] = [
    (callers.call("t@1.0.0", None, {"debug": True}), "POST /v1/tools/t@1.0.0/call",
     {"arguments": {}, "options": {"debug": True}}),
    (callers.tools(), "GET /v1/tools", None),
    (callers.tool("t"), "GET /v1/tools/t", None),
    (callers.health(), "GET /v1/health", None),
    (callers.ready(), "GET /v1/ready", None),
    (callers.openapi(), "GET /v1/openapi.json", None),
]  # fmt: skip
CONTROL: list[tuple[Ask[Any], str, Any]] = [
    (authority.create_agent("a", **CREATED), "POST /v1/agents",
     {"id": "a", "description": "d", "principals": ["uid:0"], "is_enabled": True}),
    (authority.list_agents(), "GET /v1/agents", None),
    (authority.show_agent("a"), "GET /v1/agents/a", None),
    (authority.update_agent("a", principals=[]), "PATCH /v1/agents/a", {"principals": []}),
    (authority.update_agent("a", is_enabled=False), "PATCH /v1/agents/a", {"is_enabled": False}),
    (authority.delete_agent("a"), "DELETE /v1/agents/a", None),
    (authority.list_bindings("a"), "GET /v1/agents/a/tools", None),
    (authority.bind("a", "t", **BOUND), "PUT /v1/agents/a/tools/t",
     {"sort_order": 1, "fixed": {"x": 1}, "defaults": {}, "is_enabled": False}),
    (authority.unbind("a", "t"), "DELETE /v1/agents/a/tools/t", None),
    (authority.new_token("n", **TOKEN), "POST /v1/tokens",
     {"name": "n", "principal_id": None, "scopes": ["call", "admin"], "agents": ["a"],
      "expires_at": "2030-01-01T00:00:00+00:00"}),
    (authority.list_tokens(), "GET /v1/tokens", None),
    (authority.revoke_token("i"), "DELETE /v1/tokens/i", None),
    (authority.add_approver("n", scopes=["admin"]), "POST /v1/approvers",
     {"name": "n", "scopes": ["admin"]}),
    (authority.list_approvers(), "GET /v1/approvers", None),
    (authority.remove_approver("n"), "DELETE /v1/approvers/n", None),
    (authority.changes(), "GET /v1/changes", None),
]  # fmt: skip


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("ask", "line", "body"), [*CALLERS, *CONTROL], ids=[line for _, line, _ in [*CALLERS, *CONTROL]]
)
def test_request_is_what_the_method_says(ask: Ask[Any], line: str, body: Any) -> None:
    assert f"{ask.method} {ask.path}" == line
    assert (None if ask.content is None else json.loads(ask.content)) == body


WITHOUT_A_METHOD = {"replaceAgent"}
"""What `update` does as well."""


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("operations", "asks"), [(OPERATIONS, CALLERS), (CONTROL_OPERATIONS, CALLERS + CONTROL)]
)
def test_every_operation_of_the_daemon_has_a_request(operations: Any, asks: Any) -> None:
    sent = [line.split(" ") for _, line, _ in asks]
    unsent = {
        operation.id
        for operation in operations
        if not any(
            method == operation.method and operation.route.path_regex.match(path)
            for method, path in sent
        )
    }
    assert unsent <= WITHOUT_A_METHOD


def test_answers_are_values_of_the_model() -> None:
    assert authority.list_agents().read(envelope_bytes({"items": [AGENT]})) == (
        Agent(id="a", principals=("uid:0",)),
    )
    bound = authority.list_bindings("a").read(envelope_bytes({"items": [BINDING]}))
    assert bound == (Binding(tool="t", sort_order=1),)
    assert authority.delete_agent("a").read(envelope_bytes({"deleted": "a"})) is None
    assert callers.ready().read(b'{"status": "not_ready", "walls": {}}').status == "not_ready"


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
    assert callers.tools().work_s == 0


def test_one_string_is_not_a_list_of_names() -> None:
    """It would make an agent that `a`, `b` and `c` may speak for."""
    for make in (
        lambda: authority.create_agent("a", **{**CREATED, "principals": "abc"}),
        lambda: authority.update_agent("a", principals="abc"),
        lambda: authority.new_token("n", **{**TOKEN, "agents": "abc"}),
        lambda: authority.add_approver("n", scopes="admin"),
    ):
        with pytest.raises(ValueError, match="A list of names is needed"):
            make()


def test_end_of_a_token_needs_its_time_zone() -> None:
    with pytest.raises(ValueError, match="time zone"):
        authority.new_token("n", **{**TOKEN, "expires_at": datetime(2030, 1, 1)})  # noqa: DTZ001
