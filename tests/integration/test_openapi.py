"""Each socket's OpenAPI document: covers exactly the routes and matches the daemon's answers."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client, ControlClient
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.webhook.channel import HEADER, sign
from support.http import Answer, SocketClient
from support.openapi import faults_of, faults_of_answer, operations_of
from support.scripted_daemon import running_scripted_daemon
from support.streaming import call_id_of, streaming


@dataclass(frozen=True)
class Asked:
    """One request to one operation. `code` is the expected error code, or None for success."""

    operation: str
    path: str
    body: Any = None
    code: str | None = None
    credential: str | None = None
    """Overrides the correct value."""
    version: str | None = None
    """Value of the `If-Match` header."""
    is_signed: bool = False
    """Whether to sign the request with the webhook's secret."""


SUM = {"arguments": {"expression": "2 + 2"}}
TAR = tarfile.TarInfo("a").tobuf() + bytes(1024)
ASKED = {"arguments": {"expression": "40 + 2"}}
"""Arguments for which the policy of these tests requires approval."""

POLICY = """
[[rules]]
id = "the-answer"
decision = "ask"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
equals = "40 + 2"
"""

CALLERS = [
    Asked("health", "/v1/health"),
    Asked("ready", "/v1/ready"),
    Asked("openapi", "/v1/openapi.json"),
    Asked("listTools", "/v1/tools"),
    Asked("listTools", "/v1/tools?limit=1&type=BUILTIN"),
    Asked("listTools", "/v1/tools?agent_id=described&exclude_dangerous=false&at_most=3"),
    Asked("listTools", "/v1/tools?agent_id=nobody", code="RESOURCE_NOT_FOUND"),
    Asked("listTools", "/v1/tools?limit=0", code="INVALID_PARAMS"),
    Asked("listTools", "/v1/tools?format=openai"),
    Asked("listTools", "/v1/tools?format=gemini&agent_id=described"),
    Asked("listTools", "/v1/tools?format=mcp&tools=calculator"),
    Asked("listTools", "/v1/tools?format=mcp&tools=nothing", code="TOOL_NOT_FOUND"),
    Asked("listTools", "/v1/tools?format=yaml", code="INVALID_PARAMS"),
    Asked("listTools", "/v1/tools?format=openai&limit=3", code="INVALID_PARAMS"),
    Asked("handleMessage", "/v1/tool_calls", {"format": "openai", "message": {"tool_calls": [
        {"id": "1", "function": {"name": "calculator", "arguments": '{"expression": "1 + 1"}'}},
        {"id": "2", "function": {"name": "nothing", "arguments": "{"}}]}}),
    Asked("handleMessage", "/v1/tool_calls", {"format": "mcp", "message": {}}, "INVALID_PARAMS"),
    Asked("handleMessage", "/v1/tool_calls", {"format": "openai", "message": 7},
          "INVALID_PARAMS"),
    Asked("handleMessage", "/v1/tool_calls", {"format": "openai", "message": {}}, "UNAUTHORIZED",
          "fht_0_0"),
    Asked("listTools", "/v1/tools", code="UNAUTHORIZED", credential="fht_0_0"),
    Asked("showTool", "/v1/tools/calculator@1.0.0"),
    Asked("showTool", "/v1/tools/nothing", code="TOOL_NOT_FOUND"),
    Asked("showTool", "/v1/tools/calculator", code="UNAUTHORIZED", credential="fht_0_0"),
    Asked("callTool", "/v1/tools/calculator/call", SUM),
    Asked("decide", "/v1/decisions", {"tool": "Bash", "arguments": {"command": "ls"}}),
    Asked("decide", "/v1/decisions", {"tool": "a b"}, "INVALID_PARAMS"),
    Asked("decide", "/v1/decisions", {"tool": "Bash"}, "UNAUTHORIZED", "fht_0_0"),
    Asked("callTools", "/v1/calls", {"calls": [{"tool": "calculator", **SUM}, {"tool": "nothing"},
                                               {}, 7]}),
    Asked("callTools", "/v1/calls", {"calls": []}, "INVALID_PARAMS"),
    Asked("callTools", "/v1/calls", {"calls": [7]}, "UNAUTHORIZED", "fht_0_0"),
    Asked("listCalls", "/v1/calls?limit=1"),
    Asked("listCalls", "/v1/calls?limit=0", code="INVALID_PARAMS"),
    Asked("listCalls", "/v1/calls?cursor=call_0", code="RESOURCE_NOT_FOUND"),
    Asked("showCall", "/v1/calls/{call_id}"),
    Asked("showCall", "/v1/calls/call_0", code="RESOURCE_NOT_FOUND"),
    Asked("callTool", "/v1/tools/calculator/call", {**SUM, "options": {"dry_run": True}}),
    Asked("callTool", "/v1/tools/calculator/call", {}, "INVALID_PARAMS"),
    Asked("callTool", "/v1/tools/calculator/call", {"more": 1}, "INVALID_PARAMS"),
    Asked("callTool", "/v1/tools/nothing/call", SUM, "TOOL_NOT_FOUND"),
    Asked("callTool", "/v1/tools/calculator/call", {"arguments": {"expression": "1 / 0"}},
          "EXECUTION_ERROR"),
    Asked("callTool", "/v1/tools/calculator/call", {"arguments": {"expression": "a.b"}},
          "SANDBOX_VIOLATION"),
    Asked("callTool", "/v1/tools/calculator/call", {**SUM, "options": {"agent_id": "nobody"}},
          "RESOURCE_NOT_FOUND"),
    Asked("callTool", "/v1/tools/run_restricted_python/call",
          {"arguments": {"code": "print('x' * 20_000)"}}),
    Asked("streamTool", "/v1/tools/calculator/sse", {**SUM, "options": {"dry_run": True}}),
    Asked("streamTool", "/v1/tools/calculator/sse", SUM),
    Asked("streamTool", "/v1/tools/calculator/sse", {}, "INVALID_PARAMS"),
    Asked("streamTool", "/v1/tools/nothing/sse", SUM, "TOOL_NOT_FOUND"),
    Asked("cancelCall", "/v1/calls/{running_id}/cancel", {}),
    Asked("cancelCall", "/v1/calls/{running_id}/cancel", {}, "RESOURCE_NOT_FOUND"),
    Asked("followCall", "/v1/calls/{running_id}/events"),
    Asked("followCall", "/v1/calls/{running_id}/events?last_event_id=none"),
    Asked("followCall", "/v1/calls/{running_id}/events?after=0", code="INVALID_PARAMS"),
    Asked("followCall", "/v1/calls/call_0/events", code="RESOURCE_NOT_FOUND"),
    Asked("showUsage", "/v1/usage"),
    Asked("showUsage", "/v1/usage?by=day,agent&since=2026-01-01T00:00:00Z"),
    Asked("showUsage", "/v1/usage?by=colour", code="INVALID_PARAMS"),
    Asked("showUsage", "/v1/usage?principal=uid:0", code="INVALID_PARAMS"),
    Asked("callTool", "/v1/tools/calculator/call", ASKED, "REQUIRES_HUMAN_APPROVAL"),
    Asked("listOwnApprovals", "/v1/approvals?state=pending&limit=1"),
    Asked("listOwnApprovals", "/v1/approvals?state=lost", code="INVALID_PARAMS"),
    Asked("showOwnApproval", "/v1/approvals/{approval_id}"),
    Asked("showOwnApproval", "/v1/approvals/apr_0", code="RESOURCE_NOT_FOUND"),
    Asked("cancelApproval", "/v1/approvals/{approval_id}/cancel", {}),
    Asked("cancelApproval", "/v1/approvals/{approval_id}/cancel", {}, "IDEMPOTENCY_CONFLICT"),
    Asked("getBlob", "{blob_url}"),
    Asked("getBlob", "{blob_url}0", code="RESOURCE_NOT_FOUND"),
    Asked("getBlob", "/v1/blobs/blob_0", code="INVALID_PARAMS"),
    Asked("createSession", "/v1/sessions", {"memory_mb": 128, "disk_mb": 64, "lifetime_seconds": 600}),
    Asked("createSession", "/v1/sessions", {"memory_mb": 1}, "INVALID_PARAMS"),
    Asked("createSession", "/v1/sessions", {"agent_id": "nobody"}, "RESOURCE_NOT_FOUND"),
    Asked("listSessions", "/v1/sessions"),
    Asked("listSessions", "/v1/sessions", code="UNAUTHORIZED", credential="fht_0_0"),
    Asked("showSession", "/v1/sessions/{session_id}"),
    Asked("showSession", "/v1/sessions/sess_0", code="RESOURCE_NOT_FOUND"),
    Asked("claimProject", "/v1/projects", {"directory": "/srv/project"}),
    Asked("claimProject", "/v1/projects", {"directory": "project"}, "INVALID_PARAMS"),
    Asked("showSessionDiff", "/v1/sessions/{session_id}/diff", code="INVALID_PARAMS"),
    Asked("callTool", "/v1/tools/start_process/call",
          {"arguments": {"name": "web", "command": "x"}, "options": {"session_id": "{session_id}"}}),
    Asked("listSessionProcesses", "/v1/sessions/{session_id}/processes"),
    Asked("listSessionProcesses", "/v1/sessions/sess_0/processes", code="RESOURCE_NOT_FOUND"),
    Asked("showSessionProcess", "/v1/sessions/{session_id}/processes/web"),
    Asked("showSessionProcess", "/v1/sessions/{session_id}/processes/x", code="RESOURCE_NOT_FOUND"),
    Asked("readSessionProcess", "/v1/sessions/{session_id}/processes/web/output"),
    Asked("readSessionProcess", "/v1/sessions/{session_id}/processes/web/output?after=-1",
          code="INVALID_PARAMS"),
    Asked("stopSessionProcess", "/v1/sessions/{session_id}/processes/web"),
    Asked("stopSessionProcess", "/v1/sessions/sess_0/processes/web", code="RESOURCE_NOT_FOUND"),
    Asked("putSessionFile", "{files}/d/a.txt", {"a": 1}),
    Asked("putSessionFile", "{files}/d/a.txt?mode=create", {"a": 1}, "INVALID_PARAMS"),
    Asked("listSessionFiles", "{files}?recursive=true&limit=5"),
    Asked("listSessionFiles", "{files}?path=..", code="INVALID_PARAMS"),
    Asked("getSessionFile", "{files}/d/a.txt"),
    Asked("getSessionFile", "{files}/d/%2e%2e/a", code="INVALID_PARAMS"),
    Asked("getSessionFile", "{files}/nothing", code="RESOURCE_NOT_FOUND"),
    Asked("putSessionArchive", "/v1/sessions/{session_id}/archive?path=e", TAR),
    Asked("putSessionArchive", "/v1/sessions/{session_id}/archive", b"x", "INVALID_PARAMS"),
    Asked("getSessionArchive", "/v1/sessions/{session_id}/archive?path=e"),
    Asked("getSessionArchive", "/v1/sessions/sess_0/archive", code="RESOURCE_NOT_FOUND"),
    Asked("pauseSession", "/v1/sessions/{session_id}/pause"),
    Asked("pauseSession", "/v1/sessions/sess_0/pause", code="RESOURCE_NOT_FOUND"),
    Asked("stopSession", "/v1/sessions/{session_id}/stop"),
    Asked("stopSession", "/v1/sessions/sess_0/stop", code="RESOURCE_NOT_FOUND"),
    Asked("resumeSession", "/v1/sessions/{session_id}/resume"),
    Asked("resumeSession", "/v1/sessions/sess_0/resume", code="RESOURCE_NOT_FOUND"),
    Asked("snapshotSession", "/v1/sessions/{session_id}/snapshots", {"name": "one"}),
    Asked("snapshotSession", "/v1/sessions/{session_id}/snapshots", {"name": "one"}, "INVALID_PARAMS"),
    Asked("listSnapshots", "/v1/sessions/{session_id}/snapshots"),
    Asked("listSnapshots", "/v1/sessions/sess_0/snapshots", code="RESOURCE_NOT_FOUND"),
    Asked("restoreSession", "/v1/sessions/{session_id}/restore", {"snapshot_id": "one"}),
    Asked("restoreSession", "/v1/sessions/{session_id}/restore", {"snapshot_id": "two"},
          "RESOURCE_NOT_FOUND"),
    Asked("forkSession", "/v1/sessions/{session_id}/fork", {"snapshot_id": "one", "count": 2}),
    Asked("forkSession", "/v1/sessions/{session_id}/fork", {"count": 0}, "INVALID_PARAMS"),
    Asked("deleteSnapshot", "/v1/sessions/{session_id}/snapshots/one"),
    Asked("deleteSnapshot", "/v1/sessions/{session_id}/snapshots/one", code="RESOURCE_NOT_FOUND"),
    Asked("deleteSessionFile", "{files}/d", code="INVALID_PARAMS"),
    Asked("deleteSessionFile", "{files}/d?recursive=true"),
    Asked("endSession", "/v1/sessions/{session_id}"),
    Asked("endSession", "/v1/sessions/sess_0", code="RESOURCE_NOT_FOUND"),
]  # fmt: skip

A, T = "/v1/agents/documented", "/v1/agents/documented/tools/calculator"
W = "/v1/tools/documented_weather@1.0.0"
WEATHER = {
    "name": "documented_weather", "type": "REST", "description": "Get the weather of a city.",
    "endpoint": "https://weather.example/v1", "method": "GET",
    "parameters": {"properties": {"city": {"type": "string"}}},
}  # fmt: skip
YES = {"decision": "approve"}
FOR_EVER = {"scope": "until", "until": "2999-01-01T00:00:00Z"}
SECRET = b"s" * 32
CONTROL = [
    Asked("showMetrics", "/metrics"),
    Asked("showMetrics", "/metrics", code="UNAUTHORIZED", credential=""),
    Asked("showAlerts", "/v1/alerts"),
    Asked("showAlerts", "/v1/alerts", code="UNAUTHORIZED", credential="fha_0_0"),
    Asked("health", "/v1/health"),
    Asked("ready", "/v1/ready"),
    Asked("openapi", "/v1/openapi.json"),
    Asked("createAgent", "/v1/agents", {"id": "documented", "principals": ["uid:0"]}),
    Asked("createAgent", "/v1/agents", {"id": "documented"}, "IDEMPOTENCY_CONFLICT"),
    Asked("createAgent", "/v1/agents", {"id": "/"}, "INVALID_PARAMS"),
    Asked("listAgents", "/v1/agents"),
    Asked("listAgents", "/v1/agents", code="UNAUTHORIZED", credential=""),
    Asked("bindTool", T, {"fixed": {"precision": 2}}),
    Asked("bindTool", T, {"fixed": {"a": 1}, "defaults": {"a": 1}}, "INVALID_PARAMS"),
    Asked("bindTool", "/v1/agents/documented/tools/nothing", {}, "TOOL_NOT_FOUND"),
    Asked("showAgent", A),
    Asked("showAgent", "/v1/agents/nobody", code="RESOURCE_NOT_FOUND"),
    Asked("replaceAgent", A, {"description": "Adds.", "principals": ["uid:0"]}),
    Asked("replaceAgent", A, {"id": "another"}, "INVALID_PARAMS"),
    Asked("updateAgent", A, {"is_enabled": False}),
    Asked("updateAgent", A, {"is_enabled": "no"}, "INVALID_PARAMS"),
    Asked("listBindings", f"{A}/tools"),
    Asked("listBindings", "/v1/agents/nobody/tools", code="RESOURCE_NOT_FOUND"),
    Asked("unbindTool", T),
    Asked("unbindTool", T, code="RESOURCE_NOT_FOUND"),
    Asked("deleteAgent", A),
    Asked("deleteAgent", A, code="RESOURCE_NOT_FOUND"),
    Asked("registerTool", "/v1/tools", WEATHER),
    Asked("registerTool", "/v1/tools", WEATHER, "IDEMPOTENCY_CONFLICT"),
    Asked("registerTool", "/v1/tools", {**WEATHER, "type": "NATIVE"}, "INVALID_PARAMS"),
    Asked("replaceTool", W, {**WEATHER, "description": "Get it."}),
    Asked("replaceTool", W, {**WEATHER, "name": "another"}, "INVALID_PARAMS"),
    Asked("replaceTool", "/v1/tools/calculator@1.0.0", WEATHER, "PERMISSION_DENIED"),
    Asked("deactivateTool", "/v1/tools/documented_weather/deactivate"),
    Asked("deactivateTool", "/v1/tools/nothing/deactivate", code="TOOL_NOT_FOUND"),
    Asked("activateTool", "/v1/tools/documented_weather@1.0.0/activate"),
    Asked("activateTool", "/v1/tools/nothing/activate", code="TOOL_NOT_FOUND"),
    Asked("deleteTool", W),
    Asked("deleteTool", W, code="TOOL_NOT_FOUND"),
    Asked("deleteTool", "/v1/tools/documented_weather", code="INVALID_PARAMS"),
    Asked("newToken", "/v1/tokens", {"name": "documented", "agents": ["documented"],
                                     "expires_at": "2999-01-01T00:00:00Z"}),
    Asked("newToken", "/v1/tokens", {"name": "documented", "scopes": ["everything"]},
          "INVALID_PARAMS"),
    Asked("listTokens", "/v1/tokens"),
    Asked("listTokens", "/v1/tokens", code="UNAUTHORIZED", credential="fht_0_0"),
    Asked("revokeToken", "/v1/tokens/{token_id}"),
    Asked("revokeToken", "/v1/tokens/nothing", code="RESOURCE_NOT_FOUND"),
    Asked("addApprover", "/v1/approvers", {"name": "documented"}),
    Asked("addApprover", "/v1/approvers", {"name": "documented"}, "IDEMPOTENCY_CONFLICT"),
    Asked("listApprovers", "/v1/approvers"),
    Asked("listApprovers", "/v1/approvers", code="UNAUTHORIZED", credential="something"),
    Asked("removeApprover", "/v1/approvers/documented"),
    Asked("removeApprover", "/v1/approvers/owner", code="PERMISSION_DENIED"),
    Asked("showAllUsage", "/v1/usage?by=principal,tool&principal=uid:0"),
    Asked("showAllUsage", "/v1/usage?by=tool,tool", code="INVALID_PARAMS"),
    Asked("showAllUsage", "/v1/usage", code="UNAUTHORIZED", credential=""),
    Asked("showPolicy", "/v1/policy"),
    Asked("showPolicy", "/v1/policy", code="UNAUTHORIZED", credential=""),
    Asked("explainCall", "/v1/policy/explain", {"tool": "calculator", **ASKED}),
    Asked("explainCall", "/v1/policy/explain", {"tool": "nothing"}, "TOOL_NOT_FOUND"),
    Asked("reloadPolicy", "/v1/policy/reload", {}),
    Asked("reloadPolicy", "/v1/policy/reload", {}, "UNAUTHORIZED", credential=""),
    Asked("showEngine", "/v1/engine"),
    Asked("showEngine", "/v1/engine", code="UNAUTHORIZED", credential=""),
    Asked("showFigures", "/v1/figures?hours=168"),
    Asked("showFigures", "/v1/figures?hours=0", code="INVALID_PARAMS"),
    Asked("showSeries", "/v1/figures/series?by=day&hours=168&tool=calculator"),
    Asked("showSeries", "/v1/figures/series?by=minute", code="INVALID_PARAMS"),
    Asked("listAllCalls", "/v1/calls?principal=uid:0&limit=2"),
    Asked("listAllCalls", "/v1/calls?text=print"),
    Asked("listAllCalls", "/v1/calls?text=-", code="INVALID_PARAMS"),
    Asked("listAllCalls", "/v1/calls?state=running"),
    Asked("showAnyCall", "/v1/calls/{running_id}"),
    Asked("cancelAnyCall", "/v1/calls/{running_id}/cancel", {}),
    Asked("cancelAnyCall", "/v1/calls/{running_id}/cancel", {}, "RESOURCE_NOT_FOUND"),
    Asked("listAllCalls", "/v1/calls?cursor=call_0", code="RESOURCE_NOT_FOUND"),
    Asked("showAnyCall", "/v1/calls/{kept_call}"),
    Asked("showAnyCall", "/v1/calls/call_0", code="RESOURCE_NOT_FOUND"),
    Asked("getBlobOfCall", "/v1/calls/{kept_call}{kept_blob}"),
    Asked("getBlobOfCall", "/v1/calls/{kept_call}{kept_blob}0", code="RESOURCE_NOT_FOUND"),
    Asked("repeatAsDryRun", "/v1/calls/{asked_call}/dry-run", {}),
    Asked("repeatAsDryRun", "/v1/calls/call_0/dry-run", {}, "RESOURCE_NOT_FOUND"),
    Asked("listNodes", "/v1/nodes"),
    Asked("listNodes", "/v1/nodes", code="UNAUTHORIZED", credential=""),
    Asked("drainNode", "/v1/nodes/none/drain", code="RESOURCE_NOT_FOUND"),
    Asked("resumeNode", "/v1/nodes/none/resume", code="RESOURCE_NOT_FOUND"),
    Asked("listAllSessions", "/v1/sessions"),
    Asked("listAllSessions", "/v1/sessions", code="UNAUTHORIZED", credential=""),
    Asked("showAnySession", "/v1/sessions/{session_id}"),
    Asked("showAnySession", "/v1/sessions/sess_0", code="RESOURCE_NOT_FOUND"),
    Asked("listFilesOfSession", "/v1/sessions/{session_id}/files?limit=5"),
    Asked("listFilesOfSession", "/v1/sessions/sess_0/files", code="RESOURCE_NOT_FOUND"),
    Asked("getFileOfSession", "/v1/sessions/{session_id}/files/a.txt"),
    Asked("getFileOfSession", "/v1/sessions/{session_id}/files/%2e%2e/a", code="INVALID_PARAMS"),
    Asked("listProcessesOfSession", "/v1/sessions/{session_id}/processes"),
    Asked("listProcessesOfSession", "/v1/sessions/sess_0/processes", code="RESOURCE_NOT_FOUND"),
    Asked("readProcessOfSession", "/v1/sessions/{session_id}/processes/web/output"),
    Asked("readProcessOfSession", "/v1/sessions/{session_id}/processes/x/output",
          code="RESOURCE_NOT_FOUND"),
    Asked("stopProcessOfSession", "/v1/sessions/{session_id}/processes/web?grace_s=0"),
    Asked("stopProcessOfSession", "/v1/sessions/{session_id}/processes/x",
          code="RESOURCE_NOT_FOUND"),
    Asked("endAnySession", "/v1/sessions/{session_id}"),
    Asked("endAnySession", "/v1/sessions/sess_0", code="RESOURCE_NOT_FOUND"),
    Asked("tryRules", "/v1/policy/try",
          {"rules": '[[rules]]\nid = "r"\ndecision = "ask"\ntools = ["calculator"]'}),
    Asked("tryRules", "/v1/policy/try", {"rules": "[[rules]]"}, "INVALID_PARAMS"),
    Asked("readPolicyFile", "/v1/policy/file"),
    Asked("readPolicyFile", "/v1/policy/file", code="UNAUTHORIZED", credential="fha_0_0"),
    Asked("replacePolicyFile", "/v1/policy/file",
          {"text": POLICY, "version": "{policy_version}"}),
    Asked("replacePolicyFile", "/v1/policy/file",
          {"text": POLICY, "version": "other"}, "IDEMPOTENCY_CONFLICT"),
    Asked("replacePolicyFile", "/v1/policy/file",
          {"text": "[[rules]]", "version": "{policy_version}"}, "INVALID_PARAMS"),
    Asked("showDiffOfSession", "/v1/sessions/{session_id}/diff",
          code="RESOURCE_NOT_FOUND"),
    Asked("showCache", "/v1/cache"),
    Asked("showCache", "/v1/cache", code="UNAUTHORIZED", credential=""),
    Asked("clearCache", "/v1/cache"),
    Asked("clearCache", "/v1/cache", code="UNAUTHORIZED", credential=""),
    Asked("listAudit", "/v1/audit?limit=2"),
    Asked("listAudit", "/v1/audit?limit=0", code="INVALID_PARAMS"),
    Asked("verifyAudit", "/v1/audit/verify"),
    Asked("verifyAudit", "/v1/audit/verify", code="UNAUTHORIZED", credential=""),
    Asked("rotateAuditKey", "/v1/audit/rotate", {}),
    Asked("rotateAuditKey", "/v1/audit/rotate", {}, "UNAUTHORIZED", credential=""),
    Asked("listApprovals", "/v1/approvals?state=pending&tool=calculator"),
    Asked("listApprovals", "/v1/approvals?cursor=apr_0", code="RESOURCE_NOT_FOUND"),
    Asked("awaitApprovalChanges", "/v1/approvals/changes"),
    Asked("awaitApprovalChanges", "/v1/approvals/changes?wait=26", code="INVALID_PARAMS"),
    Asked("showApproval", "/v1/approvals/{first}"),
    Asked("showApproval", "/v1/approvals/{first}", code="UNAUTHORIZED", credential=""),
    Asked("previewRemembered", "/v1/approvals/{first}/remember-preview", FOR_EVER),
    Asked("previewRemembered", "/v1/approvals/{first}/remember-preview", {"scope": "until"},
          "INVALID_PARAMS"),
    Asked("previewEdit", "/v1/approvals/{first}/edit-preview", {"arguments": {"expression": "1"}}),
    Asked("previewEdit", "/v1/approvals/{first}/edit-preview", {"arguments": {}}, "INVALID_PARAMS"),
    Asked("previewEdit", "/v1/approvals/apr_0/edit-preview", {"arguments": {}},
          "RESOURCE_NOT_FOUND"),
    Asked("decideApproval", "/v1/approvals/{first}/decision", YES, "INVALID_PARAMS"),
    Asked("decideApproval", "/v1/approvals/{first}/decision", YES, "IDEMPOTENCY_CONFLICT",
          version='"9"'),
    Asked("decideApproval", "/v1/approvals/{first}/decision", {**YES, "remember": FOR_EVER},
          version='"1"'),
    Asked("decideApprovals", "/v1/approvals/decisions",
          {"items": [{"approval_id": "{second}", "version": 1, "decision": {"decision": "deny"}}]}),
    Asked("decideApprovals", "/v1/approvals/decisions",
          {"items": [{"approval_id": "apr_0", "decision": YES}]}, "RESOURCE_NOT_FOUND"),
    Asked("receiveCallback", "/v1/approvals/callback",
          {"approval_id": "{third}", "version": 1, "decision": YES}, "UNAUTHORIZED"),
    Asked("receiveCallback", "/v1/approvals/callback",
          {"approval_id": "{third}", "version": 1, "decision": YES}, is_signed=True),
    Asked("resolveApproval", "/v1/approvals/{third}/resolve", {"outcome": "done"},
          "IDEMPOTENCY_CONFLICT"),
    Asked("listRemembered", "/v1/policy/remembered"),
    Asked("listRemembered", "/v1/policy/remembered", code="UNAUTHORIZED", credential="fht_0_0"),
    Asked("forgetRemembered", "/v1/policy/remembered/{rule_id}"),
    Asked("forgetRemembered", "/v1/policy/remembered/rul_0", code="RESOURCE_NOT_FOUND"),
    Asked("whoami", "/v1/whoami"),
    Asked("whoami", "/v1/whoami", code="UNAUTHORIZED", credential="fha_0_0"),
    Asked("listChanges", "/v1/changes"),
    Asked("listChanges", "/v1/changes", code="UNAUTHORIZED", credential="fha_0_0"),
    Asked("listAudit", "/v1/audit?after=1&limit=1"),
    Asked("listAudit", "/v1/audit?limit=1001", code="INVALID_PARAMS"),
]  # fmt: skip

ONLY_AFTER_A_CRASH = {"resolveApproval"}
"""Operations that succeed only after a crash has interrupted a call."""

ONLY_WITH_NODES = {"drainNode", "resumeNode"}
ONLY_WITH_A_PROJECT = {"showSessionDiff", "showDiffOfSession"}
"""Operations that succeed only in a cluster; see `test_cluster`."""

NEVER_REFUSED = {"health", "ready", "openapi"}
"""Operations without parameters, for which no request is invalid."""

FACES = {"engine": (OPERATIONS, CALLERS), "control": (CONTROL_OPERATIONS, CONTROL)}


@dataclass
class Face:
    """One socket with its document."""

    name: str
    client: SocketClient
    credential: str | None
    document: dict[str, Any]

    def ask(self, asked: Asked, path: str) -> tuple[dict[str, Any], Answer]:
        """The operation's description and the daemon's answer."""
        method, operation = next(
            (method, operation)
            for _, method, operation in operations_of(self.document)
            if operation["operationId"] == asked.operation
        )
        credential = self.credential if asked.credential is None else asked.credential
        headers = {"authorization": f"Bearer {credential}"} if credential else {}
        body = None
        if asked.body is not None:
            is_raw = isinstance(asked.body, bytes)
            body = asked.body if is_raw else json.dumps(asked.body).encode()
            headers["content-type"] = "application/x-tar" if is_raw else "application/json"
            if asked.is_signed:
                headers[HEADER] = sign(SECRET, body, datetime.now(UTC))
        if asked.version is not None:
            headers["if-match"] = asked.version
        return operation, self.client.request(method.upper(), path, body, headers)


@pytest.fixture(scope="module")
def described_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with sessions and an agent with tools."""
    home = tmp_path_factory.mktemp("described")
    secret, rules = home / "secret", home / "policy.toml"
    secret.write_bytes(SECRET)
    rules.write_text(POLICY, encoding="utf-8")
    for file in (secret, rules):
        file.chmod(0o600)
    settings = {
        "policy_file": str(rules), "webhook__secret_file": str(secret),
        "webhook__url": "http://127.0.0.1:9/nobody", "webhook__may_decide": "true",
    }  # fmt: skip
    with running_scripted_daemon(approver=True, **settings) as daemon:
        with ControlClient(daemon.control, credential=daemon.credential) as control:
            control.agents.create("described", principals=[f"uid:{os.getuid()}"])
            control.agents.bind("described", "calculator", fixed={"precision": 2})
        yield daemon


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest, described_daemon: Daemon) -> Iterator[Face]:
    is_control = request.param == "control"
    client = SocketClient(described_daemon.control if is_control else described_daemon.socket)
    document = client.get("/v1/openapi.json").body
    credential = described_daemon.credential if is_control else None
    yield Face(request.param, client, credential, document)
    client.close()


@pytest.mark.row("D1")
def test_openapi_document_is_valid_by_the_3_1_specification(face: Face) -> None:
    assert faults_of(face.document) == []
    # Words of the models, which are none of JSON Schema.
    assert not re.search(r'"(gt|ge|lt|le)":', json.dumps(face.document))


@pytest.mark.row("D1")
@pytest.mark.parametrize("face", ["engine"], indirect=True)
def test_control_invalid_document_is_detected(face: Face) -> None:
    broken = json.loads(json.dumps(face.document))
    broken["paths"] = {path: broken["paths"][path] for path in ("/v1/health", "/v1/ready")}
    del broken["paths"]["/v1/health"]["get"]["responses"]["200"]["description"]
    broken["paths"]["/v1/ready"]["get"]["operationId"] = "health"
    assert len(faults_of(broken)) >= 2


@pytest.mark.row("D1")
def test_openapi_document_has_only_what_generators_understand(face: Face) -> None:
    """One plain object for each answer, one name for each type, and no default that a client would
    send for a field that its caller did not set.
    """
    schemas = face.document["components"]["schemas"]
    assert all(re.fullmatch(r"[A-Za-z]+", name) for name in schemas)
    keywords = {key for schema in schemas.values() for key in _keywords_in(schema)}
    assert keywords.isdisjoint({"allOf", "default"}), keywords
    assert {"properties", "anyOf", "const"} <= keywords  # not vacuous
    for path, method, operation in operations_of(face.document):
        for status, response in operation["responses"].items():
            said = response["content"].get("application/json", {}).get("schema")
            if said is not None and operation["operationId"] != "openapi":
                answer = schemas[said["$ref"].rpartition("/")[2]]
                assert answer["type"] == "object", (path, method, status)
                assert answer["additionalProperties"] is False, (path, method, status)
        for parameter in operation.get("parameters", []):
            assert "default" not in parameter["schema"], (path, method, parameter["name"])


def _keywords_in(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _keywords_in(part)
    elif isinstance(schema, dict):
        yield from schema
        for key, value in schema.items():
            parts = list(value.values()) if key == "properties" else value
            yield from _keywords_in(parts)


@pytest.mark.row("D1")
def test_openapi_document_covers_exactly_the_served_routes(face: Face) -> None:
    served = {(operation.path, operation.method.lower()) for operation in FACES[face.name][0]}
    described = {(path, method) for path, method, _ in operations_of(face.document)}
    assert described == served
    assert len(described) >= 6


@pytest.mark.row("D1", "E1")
def test_every_operation_answers_as_documented(face: Face, described_daemon: Daemon) -> None:
    examples = FACES[face.name][1]
    made: dict[str, str] = {}
    with streaming(
        described_daemon.socket, "run_restricted_python", {"code": "while True:\n    pass"},
        timeout_seconds=30,
    ) as running:  # fmt: skip
        made["running_id"] = call_id_of(next(running.events()))
        if face.name == "control":
            made |= _waiting_calls(described_daemon)
        _check_examples(face, examples, made)


def _waiting_calls(daemon: Daemon) -> dict[str, str]:
    """Create pending approvals, and a call, a blob and a session."""
    client = daemon.client()
    made = {}
    try:
        for name in ("first", "second", "third"):
            asked = client.call("calculator", ASKED["arguments"], new_call=True).body
            made[name] = asked["error"]["approval_id"]
        code = {"code": "print('x' * 20_000)"}
        kept = client.call("run_restricted_python", code, idempotency_key="kept").body
        made["kept_call"] = kept["metadata"]["call_id"]
        made["kept_blob"] = kept["data"]["resource_url"].removeprefix("/v1")
    finally:
        client.close()
    with Client(daemon.socket) as caller:
        made["asked_call"] = caller.approvals.show(made["first"]).call_id
        session = caller.create_session(memory_mb=128)
        caller.put_file(session.id, "a.txt", b"a")
        start = {"name": "web", "command": "x"}
        assert caller.call("start_process", start, session_id=session.id).success
        made["session_id"] = session.id
    return made


def _check_examples(face: Face, examples: list[Asked], made: dict[str, str]) -> None:
    succeeded, refused = set(), set()
    for asked in examples:
        if isinstance(asked.body, dict):
            filled = json.dumps(asked.body)
            for name, value in made.items():
                filled = filled.replace(f"{{{name}}}", value)
            asked = replace(asked, body=json.loads(filled))
        operation, answer = face.ask(asked, asked.path.format(**made))
        assert faults_of_answer(face.document, operation, answer.status, answer.body) == [], asked
        if asked.code is None:
            assert answer.status == 200, (asked, answer.body)
            succeeded.add(asked.operation)
        else:
            assert answer.code == asked.code, answer.body
            assert asked.code in operation["responses"][str(answer.status)]["description"]
            refused.add(asked.operation)
        if asked.operation == "readPolicyFile" and asked.code is None:
            made["policy_version"] = answer.body["data"]["version"]
        if asked.operation == "newToken" and asked.code is None:
            made["token_id"] = answer.body["data"]["token"]["id"]
        if asked.code == "REQUIRES_HUMAN_APPROVAL":
            made["approval_id"] = answer.body["error"]["approval_id"]
        if asked.operation == "listRemembered" and asked.code is None:
            made["rule_id"] = answer.body["data"]["items"][0]["id"]
        if asked.operation == "createSession" and asked.code is None:
            made["session_id"] = answer.body["data"]["session"]["id"]
            made["files"] = f"/v1/sessions/{made['session_id']}/files"
        if asked.operation == "callTool" and asked.code is None:
            made["call_id"] = answer.body["metadata"]["call_id"]
            made["blob_url"] = answer.body["data"].get("resource_url", "")
    described = {operation["operationId"] for _, _, operation in operations_of(face.document)}
    assert succeeded == described - ONLY_AFTER_A_CRASH - ONLY_WITH_NODES - ONLY_WITH_A_PROJECT
    assert refused == described - NEVER_REFUSED


@pytest.mark.row("D1")
def test_request_body_with_an_unknown_key_is_rejected_as_documented(face: Face) -> None:
    """Twin of the refusals: the document and the daemon both reject a body with an unknown key."""
    checked = 0
    for path, method, operation in operations_of(face.document):
        if "application/json" not in operation.get("requestBody", {}).get("content", {}):
            continue
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = face.document["components"]["schemas"][reference.rpartition("/")[2]]
        assert schema["additionalProperties"] is False
        asked = Asked(operation["operationId"], path, {"unheard_of": 1})
        _, answer = face.ask(asked, path.replace("{agent_id}", "x").replace("{name}", "x"))
        # Who is not there is said before what is wrong with the body.
        unknown = {"INVALID_PARAMS", "RESOURCE_NOT_FOUND"}
        if asked.operation == "receiveCallback":
            unknown = {"UNAUTHORIZED"}
        assert answer.code in unknown, (method, path)
        checked += 1
    assert checked >= 1


@pytest.mark.row("D1")
def test_control_undocumented_field_and_status_are_detected(face: Face) -> None:
    """Control: the checker detects an answer that differs from its description."""
    operation, answer = face.ask(Asked("ready", "/v1/ready"), "/v1/ready")
    document, body = face.document, answer.body
    assert faults_of_answer(document, operation, 200, body) == []
    assert faults_of_answer(document, operation, 200, {**body, "more": 1})
    assert faults_of_answer(document, operation, 418, body)


def test_undocumented_method_and_path_are_refused(face: Face) -> None:
    wrong_method = face.client.request("TRACE", "/v1/health")
    assert (wrong_method.status, wrong_method.code) == (405, "METHOD_NOT_ALLOWED")
    other = {"engine": "/v1/agents", "control": "/v1/tools/x/call"}[face.name]
    nowhere = face.client.get(other)
    assert (nowhere.status, nowhere.code) == (404, "RESOURCE_NOT_FOUND")
