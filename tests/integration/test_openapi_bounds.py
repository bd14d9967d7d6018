"""Request bodies: the OpenAPI documents allow exactly what the daemon accepts, bound by bound."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from conftest import Daemon
from fumehood import ControlClient
from support.http import Answer, SocketClient
from support.openapi import operations_of, validator_of
from support.scripted_daemon import running_scripted_daemon

pytestmark = pytest.mark.row("D1", "E1")

SUM = {"arguments": {"expression": "1 + 1"}}
CALL = {"id": "1", "function": {"name": "calculator", "arguments": '{"expression": "1 + 1"}'}}
RULE = '[[rules]]\nid = "x"\ndecision = "deny"\n'
APPROVE = {"decision": "approve"}
A = "/v1/agents/bound"

BODIES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "engine": {
        "callTool": ("/v1/tools/calculator/call", SUM),
        "callTools": ("/v1/calls", {"calls": [{"tool": "calculator", **SUM}]}),
        "handleMessage": ("/v1/tool_calls", {"format": "openai", "message": {"tool_calls": [CALL]}}),
        "decide": ("/v1/decisions", {"tool": "Bash"}),
        "createSession": ("/v1/sessions", {}),
        "snapshotSession": ("/v1/sessions/sess_0/snapshots", {}),
        "restoreSession": ("/v1/sessions/sess_0/restore", {"snapshot_id": "one"}),
        "forkSession": ("/v1/sessions/sess_0/fork", {}),
        "claimProject": ("/v1/projects", {"directory": "/srv/project"}),
    },
    "control": {
        "explainCall": ("/v1/policy/explain", {"tool": "calculator", **SUM}),
        "createAgent": ("/v1/agents", {"id": "bound"}),
        "replaceAgent": (A, {}),
        "updateAgent": (A, {}),
        "bindTool": (f"{A}/tools/calculator", {}),
        "newToken": ("/v1/tokens", {"name": "bound"}),
        "addApprover": ("/v1/approvers", {"name": "owner"}),
        "decideApprovals": ("/v1/approvals/decisions",
                            {"items": [{"approval_id": "apr_0", "decision": APPROVE}]}),
        "decideApproval": ("/v1/approvals/apr_0/decision", APPROVE),
        "previewRemembered": ("/v1/approvals/apr_0/remember-preview", {}),
        "previewEdit": ("/v1/approvals/apr_0/edit-preview", {"arguments": {}}),
        "resolveApproval": ("/v1/approvals/apr_0/resolve", {"outcome": "done"}),
        "tryRules": ("/v1/policy/try", {"rules": RULE}),
        "replacePolicyFile": ("/v1/policy/file", {"text": RULE, "version": "none"}),
    },
}  # fmt: skip
"""A path and a valid body for each socket and operation."""

ELSEWHERE = {"registerTool", "replaceTool", "receiveCallback", "streamTool"}
"""Operations excluded here: definitions have rules across fields, callbacks need a signature, and
a stream takes the body of a call."""

OTHER_RULES = re.compile(
    r"callTool (arguments|options\.isolation)|explainCall arguments"  # the tool's
    r"|(replace|update)Agent id|bindTool tool"  # as in the address
    r"|callTool options\.(packages|network|preview|receipt|replay)|createSession (packages|preset)"  # the tool's, and the operator's
    r"|(createSession|(create|replace|update)Agent) network"  # hosts
    r"|createSession (memory_mb|cpus|disk_mb|(idle|lifetime)_seconds)"  # the operator's
    r"|handleMessage (message|options\.memory_limit_mb)"  # the format's; an envelope for each call
    r"|decideApprovals items|tryRules rules|replacePolicyFile (?:text|version)"  # each approval once; TOML
    r"|\S+ (.*\.)?(until|expires_at|scope)|decide\w+ (.*\.)?decision"  # times; rules between fields
)
"""Fields for which JSON Schema states only the type; only wrong types are tried."""

ANYTHING = (None, True, 0, 1, -1, 1.0, 0.5, 269.0, 1e300, 10**30, "", "x", "a b", "é", [], {})
CHANGES = {"minimum": (-1, 0, 1), "maximum": (-1, 0, 1), "exclusiveMinimum": (-1, 0, 1)}


@dataclass
class Face:
    """One socket with its document."""

    client: SocketClient
    credential: str | None
    document: dict[str, Any]

    def send(self, method: str, path: str, body: Any = None) -> Answer:
        headers = {"authorization": f"Bearer {self.credential}"} if self.credential else {}
        raw = None
        if body is not None:
            raw = json.dumps(body).encode()
            headers |= {"content-type": "application/json", "if-match": "*"}
        return self.client.request(method.upper(), path, raw, headers)

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema without references at its root."""
        if "$ref" not in schema:
            return schema
        found = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return {**found, **{key: value for key, value in schema.items() if key != "$ref"}}

    def choices(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The alternatives of a schema, each merged with their common keywords."""
        schema = self.resolved(schema)
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return [{**self.resolved(one), **rest} for one in schema.get("anyOf", [{}])]

    def values(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Values at and around each bound of a schema, and of every type."""
        yield from ANYTHING
        for one in self.choices(schema):
            for bound, steps in CHANGES.items():
                if bound in one:
                    yield from (one[bound] + step for step in steps)
                    yield float(one[bound])
            yield from one.get("enum", ())
            for bound in ("minLength", "maxLength"):
                if bound in one:
                    yield from ("a" * max(0, one[bound] + step) for step in (-1, 0, 1))
            if "maxProperties" in one:
                most = one["maxProperties"]
                yield from ({f"k{i}": 1 for i in range(many)} for many in (most, most + 1))
            if one.get("type") == "array":
                items = one.get("items", {})
                yield from ([value] for value in self.values(items))
                good = next(self.examples(items))
                for bound in ("minItems", "maxItems"):
                    if bound in one:
                        yield from ([good] * max(0, one[bound] + step) for step in (-1, 0, 1))

    def examples(self, schema: dict[str, Any]) -> Iterator[Any]:
        for one in self.choices(schema):
            yield from one.get("enum", ())
            if one.get("type") == "object":
                required = one.get("required", ())
                yield {name: next(self.examples(one["properties"][name])) for name in required}
            yield {"string": "a", "integer": 1, "number": 1.5, "boolean": True}.get(one.get("type"))

    def changed(
        self, schema: dict[str, Any], body: Any, place: str = ""
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield one field, its value, and the body with that value."""
        for one in self.choices(schema):
            for name, part in one.get("properties", {}).items():
                here = f"{place}.{name}".lstrip(".")
                for value in self.values(part):
                    yield here, value, {**body, name: value}
                yield here, ..., {key: value for key, value in body.items() if key != name}
                inner = body.get(name) or next(self.examples(part), None)
                if isinstance(inner, list):
                    (items,) = (each["items"] for each in self.choices(part) if "items" in each)
                    below = self.changed(items, inner[0], here)
                    yield from ((p, v, {**body, name: [new]}) for p, v, new in below)
                elif isinstance(inner, dict):
                    below = self.changed(part, inner, here)
                    yield from ((p, v, {**body, name: new}) for p, v, new in below)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_scripted_daemon(approver=True) as daemon:
        with ControlClient(daemon.control, credential=daemon.credential) as control:
            control.agents.create("bound", principals=[f"uid:{os.getuid()}"])
        yield daemon


@pytest.fixture(params=BODIES)
def face(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[tuple[str, Face]]:
    is_control = request.param == "control"
    client = SocketClient(daemon.control if is_control else daemon.socket)
    document = client.get("/v1/openapi.json").body
    yield request.param, Face(client, daemon.credential if is_control else None, document)
    client.close()


def disagreements(face: Face, operation: str, document: dict[str, Any]) -> tuple[list[str], int]:
    """Bodies on which the document and the daemon disagree."""
    method, described = next(
        (method, found)
        for _, method, found in operations_of(face.document)
        if found["operationId"] == operation
    )
    path, right = next(found[operation] for found in BODIES.values() if operation in found)
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    validator = validator_of(document, schema)
    assert validator.is_valid(right)
    found, tried = [], set()
    for place, value, body in face.changed(schema, copy.deepcopy(right)):
        text = json.dumps(body, sort_keys=True)
        allows = validator.is_valid(body)
        if text in tried or (allows and OTHER_RULES.match(f"{operation} {place}")):
            continue
        if place == "options.wait_for_approval" and operation == "decide" and allows and value:
            continue  # it waits
        tried.add(text)
        answer = face.send(method, path, body)
        assert answer.status < 500 or answer.code, (operation, place, value)
        if operation == "createSession" and answer.status == 200:
            face.send("DELETE", f"/v1/sessions/{answer.body['data']['session']['id']}")
        takes = answer.status == 200 or answer.code != "INVALID_PARAMS"
        if takes is not allows:
            found.append(f"{operation} {place} {str(value)[:60]!r}: {allows=} {takes=}")
    return found, len(tried)


def test_daemon_accepts_a_body_exactly_if_the_document_allows_it(face: tuple[str, Face]) -> None:
    name, socket = face
    found, tried = [], 0
    for operation in BODIES[name]:
        wrong, many = disagreements(socket, operation, socket.document)
        found += [one for one in wrong if not OTHER_RULES.match(one)]
        tried += many
    assert found == []
    assert tried > 500


def test_every_operation_with_a_body_has_an_example_to_vary(face: tuple[str, Face]) -> None:
    name, socket = face
    described = {
        operation["operationId"]
        for _, _, operation in operations_of(socket.document)
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert described - ELSEWHERE == BODIES[name].keys()
    if name == "engine":
        paths = socket.document["paths"]
        call, stream = (paths[f"/v1/tools/{{name}}/{how}"]["post"] for how in ("call", "sse"))
        assert stream["requestBody"] == call["requestBody"]


@pytest.mark.parametrize("face", ["engine"], indirect=True)
def test_control_missing_bound_in_the_document_is_detected(face: tuple[str, Face]) -> None:
    """Control: the document without one bound."""
    _, socket = face
    document = copy.deepcopy(socket.document)
    del document["components"]["schemas"]["ForkWish"]["properties"]["count"]["minimum"]
    found, _ = disagreements(socket, "forkSession", document)
    assert any(one.startswith("forkSession count '0'") for one in found)


@pytest.mark.parametrize("face", ["engine"], indirect=True)
@pytest.mark.parametrize(
    ("query", "text", "is_allowed"),
    [
        ("max_cost", "0.05", True),
        ("max_cost", "x", False),
        ("max_cost", "-1", False),
        ("at_most", "9999", True),
        ("at_most", "10000", False),
    ],
)
def test_query_parameter_bounds_match_the_document(
    face: tuple[str, Face], query: str, text: str, is_allowed: bool
) -> None:
    _, socket = face
    (parameter,) = (
        parameter
        for parameter in socket.document["paths"]["/v1/tools"]["get"]["parameters"]
        if parameter["name"] == query
    )
    value: Any = int(text) if query == "at_most" else text
    assert validator_of(socket.document, parameter["schema"]).is_valid(value) is is_allowed
    answer = socket.send("GET", f"/v1/tools?agent_id=bound&{query}={quote(text)}")
    assert (answer.code != "INVALID_PARAMS") is is_allowed
