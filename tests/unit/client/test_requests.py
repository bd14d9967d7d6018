"""Requests of the clients: how they are made, sent, and answered."""

from __future__ import annotations

import errno
import inspect
import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx2
import pytest
from pydantic import BaseModel

from fumehood import Client, ControlClient, Refused
from fumehood.answers import Deleted, ToolDetails
from fumehood.approvals.model import NewDecision, OneOfSeveral, RememberWish
from fumehood.client.api_request import (
    ApiRequest,
    address,
    call_read_by,
    data_of,
    encode,
    object_of,
    plain,
)
from fumehood.client.exchange import Endpoint, Progress, may_send_again, unavailable
from fumehood.client.sync.client import BaseClient
from fumehood.client.sync.transport import Transport
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Scope
from fumehood.core.status import Health
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.http.endpoint import Operation
from support.answers import envelope_bytes
from support.clients import KINDS, client_of

LONG = "x" * 70_000
"""A name that makes an address too long for HTTP clients."""


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "/", "../tools/x", "a/../b", "a\udc80"])
def test_name_that_would_change_the_url_path_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match=r"can be no name|surrogates"):
        address("agents", part)


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("calculator@1.0.0", "calculator@1.0.0"),
        ("a?b=c", "a%3Fb%3Dc"),
        ("a#b", "a%23b"),
        ("a%2fb", "a%252fb"),
        ("...", "..."),
        ("a b\r\nx: y", "a%20b%0D%0Ax%3A%20y"),
        ("ä", "%C3%A4"),
    ],
)
def test_name_is_encoded_as_one_url_segment(part: str, shown: str) -> None:
    assert address("agents", part, "tools") == f"/v1/agents/{shown}/tools"


CIRCULAR: list[object] = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1, 2}, object(), b"bytes", CIRCULAR], ids=type
)
def test_body_that_json_cannot_represent_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        encode({"arguments": value})


def test_refusal_is_raised_with_its_envelope() -> None:
    raw = envelope_bytes({}, code="TOOL_NOT_FOUND", message="There is none.")
    with pytest.raises(Refused, match="There is none") as caught:
        data_of(ToolDetails)(raw)
    assert caught.value.code == "TOOL_NOT_FOUND"
    assert isinstance(caught.value.envelope, Envelope)


@pytest.mark.parametrize(
    "raw", [b"", b"<hi>", b"[]", b'{"status": 1}', b"\xff", envelope_bytes({"removed": "x"})]
)
@pytest.mark.parametrize("read", [data_of(Deleted), plain(Health)], ids=["envelope", "plain"])
def test_malformed_answer_is_a_value_error(raw: bytes, read: Callable[[bytes], object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read(raw)


# -- Which failed request may be sent again, and what an endpoint refuses ------------------

DROPPED = [httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError]
OTHERS = [
    httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ReadTimeout, httpx2.WriteTimeout,
    httpx2.PoolTimeout, httpx2.LocalProtocolError, httpx2.DecodingError,
]  # fmt: skip

HEALTH = ApiRequest("GET", "/v1/health", object_of)


def request(method: str) -> ApiRequest[Any]:
    return ApiRequest(method, "/v1/x", lambda raw: raw)


def progress(*events: str) -> Progress:
    made = Progress()
    for event in events:
        made.note(event, {})
    return made


HEAD = "http11.send_request_headers"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("error", DROPPED)
def test_change_is_resent_only_if_its_headers_were_not_sent(
    method: str, error: type[httpx2.HTTPError]
) -> None:
    failure = error("dropped")
    assert may_send_again(request(method), failure, progress(f"{HEAD}.started", f"{HEAD}.failed"))
    for events in (
        [],
        [f"{HEAD}.started"],
        [f"{HEAD}.started", f"{HEAD}.complete"],
        [f"{HEAD}.started", f"{HEAD}.complete", "http11.send_request_body.failed"],
        ["some.other.library.failed"],
    ):
        assert not may_send_again(request(method), failure, progress(*events)), events


@pytest.mark.parametrize("error", OTHERS)
def test_requests_are_resent_only_after_a_dropped_connection(error: type[httpx2.HTTPError]) -> None:
    for method in ("GET", "POST"):
        assert not may_send_again(request(method), error("other"), progress(f"{HEAD}.failed"))


def endpoint(**fields: Any) -> Endpoint:
    settled = {"credential": None, "connect_timeout_s": 5.0, "grace_s": 30.0, **fields}
    return Endpoint(Path("/x"), **settled)


def test_client_waits_for_the_engines_work_time_plus_a_grace() -> None:
    timeout = endpoint(grace_s=3.0).timeout(
        call_read_by(object_of, "t", {}, {"timeout_seconds": 2})
    )
    assert (timeout.read, timeout.connect) == (5.0, 5.0)
    assert endpoint().timeout(HEALTH).read == 30.0


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["connect_timeout_s", "grace_s"])
def test_infinite_or_negative_timeout_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=name):
        endpoint(**{name: seconds})


@pytest.mark.parametrize("credential", ["a\nb", "a\rx: y", "ä", "a\0", "", " "])
def test_credential_that_is_empty_or_could_add_a_header_is_refused(credential: str) -> None:
    with pytest.raises(ValueError, match="not a credential"):
        endpoint(credential=credential)


def test_credential_is_sent_in_a_header_and_hidden_in_repr() -> None:
    made = endpoint(credential="fht_secret")
    assert made.headers(HEALTH) == {"authorization": "Bearer fht_secret"}
    assert "secret" not in repr(made)
    assert endpoint().headers(HEALTH) == {}


@pytest.mark.parametrize(
    ("cause", "says", "says_not"),
    [
        (PermissionError(errno.EACCES, "denied"), "Permission denied: /s", "fumehood serve"),
        (FileNotFoundError(errno.ENOENT, "missing"), "fumehood serve", "group"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "fumehood serve", "group"),
    ],
)
def test_socket_permission_error_is_not_reported_as_a_missing_engine(
    cause: OSError, says: str, says_not: str
) -> None:
    failure = httpx2.ConnectError("no")
    failure.__cause__ = RuntimeError("the library's own")
    failure.__cause__.__context__ = cause
    endpoint = Endpoint(Path("/s"), None, 1, 1)
    for method in ("GET", "POST"):
        said = unavailable(request(method), endpoint, failure, progress())
        assert says in str(said)
        assert says_not not in str(said)
        assert said.may_have_acted is False


@pytest.mark.parametrize(
    "send",
    [
        lambda client: client.session(LONG),
        lambda client: client.put_file(LONG, "a", b""),
        lambda client: client.get_file(LONG, "a"),
        lambda client: next(client.follow(LONG, "1:0")),
    ],
    ids=["send", "upload", "download", "follow"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_request_with_too_long_an_address_is_refused_before_it_is_sent(
    kind: str, send: Callable[[Any], Any]
) -> None:
    with (
        client_of(kind, Path("/nowhere")) as client,
        pytest.raises(ValueError, match="The request cannot be sent: URL too long"),
    ):
        send(client)


# -- Every request as it would be sent, and as its answer would be read --------------------

AGENT = {"id": "a", "description": "", "principals": ["uid:0"], "is_enabled": True}
BINDING = {"tool": "t", "sort_order": 1, "fixed": {}, "defaults": {}, "is_enabled": True}
CREATED = {"description": "d", "principals": ("uid:0",), "is_enabled": True}
TOKEN: dict[str, Any] = {
    "principal_id": None, "scopes": (Scope.CALL, "admin"), "agents": ["a"],
    "expires_at": datetime(2030, 1, 1, tzinfo=UTC),
}  # fmt: skip

BLOB = f"/v1/blobs/blob_{'0' * 32}?expires=1&signature={'f' * 64}"

Method = Callable[[Any], Any]
"""Asks a client for something; which class it is follows from the address."""


class Sent(Exception):
    """What a client would have sent."""

    def __init__(self, request: ApiRequest[Any], *_: Any) -> None:
        self.request = request


def sent_by(method: Method, kind: type[BaseClient] = Client) -> ApiRequest[Any]:
    """The one request that a method sends."""

    def note(_: Transport, request: ApiRequest[Any], *more: Any) -> Any:
        raise Sent(request)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("send", "download", "upload", "begun"):
            patch.setattr(Transport, name, note)
        with kind("/s", credential="secret") as client:
            try:
                next(method(client))  # what a stream yields; all else is sent at once
            except Sent as sent:
                return sent.request
    raise AssertionError("nothing was sent")


CALLERS: list[tuple[Method, str, Any]] = [
    (lambda c: c.call("t@1.0.0", debug=True), "POST /v1/tools/t@1.0.0/call",
     {"arguments": {}, "options": {"debug": True}}),
    (lambda c: c.stream("t", {"a": 1}), "POST /v1/tools/t/sse",
     {"arguments": {"a": 1}, "options": {}}),
    (lambda c: c.follow("call_1", "3:40"), "GET /v1/calls/call_1/events", None),
    (lambda c: c.decide("Bash", {"command": "ls"}, context={"cwd": "/"}, session_id="s"),
     "POST /v1/decisions",
     {"tool": "Bash", "arguments": {"command": "ls"}, "context": {"cwd": "/"},
      "options": {"session_id": "s"}}),
    (lambda c: c.batch([{"tool": "t"}], max_parallel=2), "POST /v1/calls",
     {"calls": [{"tool": "t"}], "options": {"max_parallel": 2}}),
    (lambda c: c.tools_page(), "GET /v1/tools", None),
    (lambda c: c.export("openai"), "GET /v1/tools?format=openai", None),
    (lambda c: c.export("gemini", agent_id="a", tools=["x", "y"]),
     "GET /v1/tools?format=gemini&agent_id=a&tools=x%2Cy", None),
    (lambda c: c.handle({"tool_calls": []}, format="openai", max_length=5), "POST /v1/tool_calls",
     {"format": "openai", "message": {"tool_calls": []}, "options": {"max_length": 5}}),
    (lambda c: c.tools_page(limit=2, cursor="x=y", category="a b", tag=None),
     "GET /v1/tools?limit=2&cursor=x%3Dy&category=a+b", None),
    (lambda c: c.agent_tools("a/b", categories=["x", "y"], max_cost=Decimal("0.10"), at_most=3),
     "GET /v1/tools?agent_id=a%2Fb&categories=x%2Cy&exclude_dangerous=true&max_cost=0.10&at_most=3",
     None),
    (lambda c: c.calls(since=datetime(2030, 1, 1, tzinfo=UTC), limit=2),
     "GET /v1/calls?since=2030-01-01T00%3A00%3A00%2B00%3A00&limit=2", None),
    (lambda c: c.usage(["day", "tool"], agent="a", since=None),
     "GET /v1/usage?by=day%2Ctool&agent=a", None),
    (lambda c: c.call_record("call_1"), "GET /v1/calls/call_1", None),
    (lambda c: c.openapi(), "GET /v1/openapi.json", None),
    (lambda c: c.blob(BLOB), f"GET {BLOB}", None),
    (lambda c: c.session_files("sess_1", "a b", recursive=True, limit=5, cursor="x="),
     "GET /v1/sessions/sess_1/files?path=a+b&recursive=true&limit=5&cursor=x%3D", None),
    (lambda c: c.put_file("sess_1", "d/a b.csv", b""), "PUT /v1/sessions/sess_1/files/d/a%20b.csv", None),
    (lambda c: c.put_file("sess_1", "a%2fb?", b"", mode="create"),
     "PUT /v1/sessions/sess_1/files/a%252fb%3F?mode=create", None),
    (lambda c: c.get_file("sess_1", "ü\n#"), "GET /v1/sessions/sess_1/files/%C3%BC%0A%23", None),
    (lambda c: c.put_directory("sess_1", Path(__file__).parent, "a b"),
     "PUT /v1/sessions/sess_1/archive?path=a+b", None),
    (lambda c: c.get_directory("sess_1", "", Path("never-made")),
     "GET /v1/sessions/sess_1/archive", None),
    (lambda c: c.delete_file("sess_1", "d", recursive=True),
     "DELETE /v1/sessions/sess_1/files/d?recursive=true", None),
]  # fmt: skip
CONTROL: list[tuple[Method, str, Any]] = [
    (lambda c: c.agents.create("a", **CREATED), "POST /v1/agents",
     {"id": "a", "description": "d", "principals": ["uid:0"], "is_enabled": True}),
    (lambda c: c.agents.update("a", principals=[]), "PATCH /v1/agents/a", {"principals": []}),
    (lambda c: c.agents.disable("a"), "PATCH /v1/agents/a", {"is_enabled": False}),
    (lambda c: c.tokens.new("n", **TOKEN), "POST /v1/tokens",
     {"name": "n", "scopes": ["call", "admin"], "agents": ["a"],
      "expires_at": "2030-01-01T00:00:00+00:00"}),
    (lambda c: c.calls.dry_run("call_1"), "POST /v1/calls/call_1/dry-run", None),
    (lambda c: c.calls.blob("call_1", BLOB), f"GET {BLOB.replace('/v1', '/v1/calls/call_1')}", None),
    (lambda c: c.sessions.download_file("sess_1", "d/a b", print),
     "GET /v1/sessions/sess_1/files/d/a%20b", None),
    (lambda c: c.policy.explain("t", {"a": 1}, principal_id=None, agent_id="a", session_id=None),
     "POST /v1/policy/explain", {"tool": "t", "arguments": {"a": 1}, "agent_id": "a"}),
    (lambda c: c.approvals.deny("apr_1", version=3, reason="r"),
     "POST /v1/approvals/apr_1/decision", {"decision": "deny", "reason": "r"}),
    (lambda c: c.approvals.approve("apr_1", version=None, arguments={"a": None}),
     "POST /v1/approvals/apr_1/decision",
     {"decision": "approve", "reason": None, "arguments": {"a": None}, "remember": None,
      "action_digest": None}),
    (lambda c: c.approvals.decide_all([OneOfSeveral(approval_id="apr_1", decision=NewDecision(decision="deny"))]),
     "POST /v1/approvals/decisions",
     {"items": [{"approval_id": "apr_1", "decision": {"decision": "deny"}}]}),
    (lambda c: c.approvals.next_change(4, wait_s=2.5), "GET /v1/approvals/changes?after=4&wait=2.5", None),
]  # fmt: skip


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("kind", "method", "line", "body"),
    [(Client, *row) for row in CALLERS] + [(ControlClient, *row) for row in CONTROL],
    ids=[line for _, line, _ in [*CALLERS, *CONTROL]],
)
def test_client_method_sends_its_request(
    kind: type[BaseClient], method: Method, line: str, body: Any
) -> None:
    api_request = sent_by(method, kind)
    assert f"{api_request.method} {api_request.path}" == line
    assert (None if api_request.content is None else json.loads(api_request.content)) == body


WITHOUT_A_METHOD = {"replaceAgent", "receiveCallback", "showMetrics"}
"""What `update` does as well, and what other programs than clients send."""


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("operations", "requests"), [(OPERATIONS, CALLERS), (CONTROL_OPERATIONS, CALLERS + CONTROL)]
)
def test_every_operation_without_a_generated_client_method_has_a_written_one(
    operations: Any, requests: Any
) -> None:
    sent = [line.split(" ") for _, line, _ in requests]
    unsent = {
        operation.id
        for operation in operations
        if operation.client is None
        and not any(
            method == operation.method and operation.address.fullmatch(path.partition("?")[0])
            for method, path in sent
        )
    }
    assert unsent <= WITHOUT_A_METHOD


SAMPLES: dict[str, Any] = {
    "str": "x", "list[str]": ["x"], "int": 1, "float": 1.5, "bool": True, "JsonObject": {"k": None},
    "datetime": datetime(2030, 1, 1, tzinfo=UTC), "Iterable[str]": ["x"], "dict[str, str]": {"A": "x"},
    "Literal['done', 'failed']": "done", "Literal['running']": "running", "Literal['hour', 'day']": "day", "RememberWish": RememberWish(uses=1),
    "Iterable[OneOfSeveral]": [OneOfSeveral(approval_id="x", decision=NewDecision(decision="deny"))],
}  # fmt: skip
"""A value for each type that a parameter of a generated method has, by the first of its types."""

GENERATED = [
    (kind, operation)
    for kind, operations in ((Client, OPERATIONS), (ControlClient, CONTROL_OPERATIONS))
    for operation in operations
    if operation.client is not None
]


@pytest.mark.row("D1")
@pytest.mark.parametrize(
    ("kind", "operation"), GENERATED, ids=[operation.id for _, operation in GENERATED]
)
def test_generated_method_sends_what_its_operation_takes(
    kind: type[BaseClient], operation: Operation
) -> None:
    method = attrgetter(operation.client.name)
    parameters = inspect.signature(method(kind("/s", credential="secret"))).parameters.values()
    values = {p.name: SAMPLES[p.annotation.partition(" | ")[0]] for p in parameters}
    required = {p.name: values[p.name] for p in parameters if p.default is p.empty}
    renamed = operation.client.renamed
    in_path = {renamed.get(name, name) for name in operation.parameters}

    def sent_fields(model: type[BaseModel] | None, given: dict[str, Any]) -> set[str]:
        return {
            name
            for name, field in (model.model_fields if model is not None else {}).items()
            if renamed.get(name, name) not in in_path and (given is values or field.is_required())
        }

    for given in (values, required):
        sent = sent_by(lambda c, given=given: method(c)(**given), kind)
        path, _, query = sent.path.partition("?")
        assert sent.method == operation.method
        assert operation.address.fullmatch(path)
        assert sent.work_s == operation.work_s
        assert set(parse_qs(query)) == sent_fields(operation.query, given)
        if operation.body is None:
            assert sent.content is None
        elif operation.client.whole is None:
            assert set(json.loads(sent.content or b"")) == sent_fields(operation.body, given)
        else:
            assert sent.content


BATCH = [{"tool": "t", "options": {"timeout_seconds": 1000}}, {"tool": "t"}, 7, {"options": 7}]


@pytest.mark.parametrize(
    ("method", "work_s"),
    [
        (lambda c: c.health(), 0),
        *(
            (lambda c, asked=asked: c.call("t", timeout_seconds=asked), work_s)
            for asked, work_s in (
                (2, 2.0), (0.5, 0.5), (900, 900.0), (None, 600.0), ("2", 600.0), (True, 600.0), (-1, 600.0),
            )
        ),
        *(
            (lambda c, wait=wait: c.call("t", timeout_seconds=2, wait_for_approval=wait), work_s)
            for wait, work_s in ((None, 2.0), (False, 2.0), (True, 3602.0), (60, 62.0), (0.5, 2.5))
        ),
        (lambda c: c.batch(BATCH), 4000),
        (lambda c: c.batch(BATCH, timeout_seconds=5), 1005),
        (lambda c: c.batch([{"tool": "t"}], timeout_seconds="5"), 600),
    ],
)  # fmt: skip
def test_client_timeout_covers_time_limits_and_the_wait_for_approval(
    method: Method, work_s: float
) -> None:
    assert sent_by(method).work_s == work_s


@pytest.mark.row("A6")
def test_decision_carries_the_seen_version() -> None:
    seen = sent_by(lambda c: c.approvals.approve("apr_1", version=3), ControlClient)
    assert seen.headers == {"if-match": '"3"'}
    unseen = sent_by(lambda c: c.approvals.approve("apr_1", version=None), ControlClient)
    assert unseen.headers == {"if-match": "*"}
    sent = Endpoint(Path("/s"), "secret", 1, 1).headers(seen)
    assert sent["if-match"] == '"3"'
    assert sent["authorization"] == "Bearer secret"


def test_one_string_is_not_a_list_of_names() -> None:
    """It would make an agent that `a`, `b` and `c` may speak for."""
    client = ControlClient("/s", credential="secret")
    for make in (
        lambda: client.agents.create("a", principals="abc"),
        lambda: client.agents.update("a", principals="abc"),
        lambda: client.tokens.new("n", agents="abc"),
        lambda: client.approvers.add("n", scopes="admin"),
        lambda: Client("/s").agent_tools("a", categories="xy"),
    ):
        with pytest.raises(ValueError, match="A list of names is needed"):
            make()


@pytest.mark.row("S6")
@pytest.mark.parametrize("path", ["", "/a", "a/", "../a", "a/../b", ".", "a//b"])
def test_path_that_would_change_the_url_is_not_sent(path: str) -> None:
    client = Client("/s")
    for send in (
        lambda: client.put_file("sess_1", path, b""),
        lambda: client.get_file("sess_1", path),
        lambda: client.delete_file("sess_1", path),
    ):
        with pytest.raises(
            ValueError, match=r"is absolute|is empty|has a part that|can be no name"
        ):
            send()


@pytest.mark.parametrize(
    "method",
    [
        lambda c: c.call("t", timeout=1),
        lambda c: next(c.stream("t", timeout=1)),
        lambda c: c.tools_page(timeout=1),
        lambda c: c.tools(timeout=1),
        lambda c: c.calls(timeout=1),
        lambda c: c.usage(timeout=1),
        lambda c: c.approvals.list(timeout=1),
    ],
)
def test_unknown_keyword_is_refused_before_anything_is_sent(method: Method) -> None:
    with pytest.raises(TypeError, match="keyword argument 'timeout'"):
        method(Client("/s"))
