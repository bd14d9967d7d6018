"""What a call would send to another service, as approvers see it: before the yes, on every face."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from fumehood.approvals.model import StoredApproval, StoredRequest, own_view
from fumehood.approvals.preview import definition_digest
from fumehood.cli.approvals import MARK, approval_lines
from fumehood.client.wording import (
    hidden_in,
    network_in_words,
    place_in_words,
    sends_heading,
    sends_in_words,
)
from fumehood.core.errors import ArgumentsRefused, EngineError, SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.executors.kinds import EXECUTORS
from fumehood.mcp.client.servers import McpServer
from fumehood.mcp.client.settings import McpServerSettings
from fumehood.observe.log import quiet_logger
from fumehood.outgoing.upstreams import Upstreams
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import RegisteredTool, Source, tool_of_document
from fumehood.registry.secrets import SecretBindings, SecretSettings
from fumehood.rest.executor import fill_secrets, make_request
from support.approvals import NOW, approval
from support.definitions import function_definition, registered, rest_document
from support.web import make_site

pytestmark = pytest.mark.row("A1", "A6", "T5")

SECRET = "the value of the shop's key"
CURSORS = Cursors(b"k" * 32)
BOUND = SecretBindings({
    name: SecretSettings(env="KEY", tools=("create_order",), hosts=("shop.example",))
    for name in ("shop_key", "who")
})  # fmt: skip
ORDER = tool_of_document(
    rest_document(
        name="create_order", method="POST", endpoint="https://shop.example:8443/v1/{shop}/orders?by=${secret:who}",
        headers={"Authorization": "Bearer ${secret:shop_key}", "X-Note": "{note}", "X-Way": "web"},
        parameters={"properties": {"shop": {"type": "string"}, "note": {"type": "string"}, "item": {"type": "string"}}, "required": ["shop"]},
    ),
    Source.DIRECTORY, BOUND,
)  # fmt: skip


def sends(tool: RegisteredTool, arguments: JsonObject) -> JsonObject | None:
    executor = EXECUTORS[tool.definition.executor]
    return executor.sends(tool, arguments, CURSORS, "uid:1")


def as_executor(name: str) -> RegisteredTool:
    tool = registered(function_definition(name="files__read"))
    return replace(tool, definition=tool.definition.model_copy(update={"executor": name}))


def test_approver_sees_the_request_of_a_rest_tool_with_names_of_secrets() -> None:
    assert sends(ORDER, {"shop": "a b", "item": "tea"}) == {
        "method": "POST",
        "url": "https://shop.example:8443/v1/a%20b/orders?by=${secret:who}",
        "host": "shop.example:8443",
        "headers": {
            "authorization": "Bearer ${secret:shop_key}", "x-way": "web", "user-agent": "fumehood",
            "accept": "application/json, */*;q=0.5", "content-type": "application/json",
        },
        "body": '{"item":"tea"}',
        "secrets": {"who": ["url"], "shop_key": ["authorization"]},
    }  # fmt: skip


def test_shown_request_is_the_sent_one_but_for_the_trace_and_the_values_of_secrets() -> None:
    arguments: JsonObject = {"shop": "s", "note": "n", "item": "é\n${secret:who}"}
    shown = sends(ORDER, arguments)
    sent = make_request(ORDER.definition, arguments, "00-a-b-01")
    assert shown is not None
    assert sent.body is not None
    headers = dict((*sent.headers, *sent.secret_headers))
    assert headers.pop("traceparent") == "00-a-b-01"
    assert shown["headers"] == headers
    assert (shown["method"], shown["url"], shown["body"]) == (
        sent.method, sent.url, sent.body.decode()
    )  # fmt: skip
    filled = fill_secrets(sent, {"who": SECRET, "shop_key": SECRET})
    assert filled.url != sent.url  # the control: the values stand in what is sent
    assert SECRET not in str(shown)


def test_argument_cannot_pass_for_a_secret() -> None:
    plain = tool_of_document(
        rest_document(
            endpoint="https://a.example/{at}", headers={"X-Note": "{note}"},
            parameters={"properties": {"at": {"type": "string"}, "note": {"type": "string"}}, "required": ["at"]},
        ),
        Source.DIRECTORY,
    )  # fmt: skip
    shown = sends(plain, {"at": "${secret:who}", "note": "Bearer ${secret:who}"})
    assert shown is not None
    assert shown["secrets"] == {}
    assert "${secret" not in shown["url"]


def test_long_or_binary_body_is_shown_by_its_hash_and_size() -> None:
    shown = sends(ORDER, {"shop": "s", "item": "x" * 70_000})
    assert shown is not None
    assert "body" not in shown
    assert (shown["body_bytes"], len(shown["body_sha256"])) == (70_011, 64)


def test_call_whose_request_cannot_be_made_asks_nobody() -> None:
    with pytest.raises(ArgumentsRefused, match=r"'\.'"):
        sends(ORDER, {"shop": "..", "item": "tea"})


def test_fetch_shows_the_address_and_other_tools_send_nothing_of_their_own() -> None:
    shown = sends(as_executor("http:fetch"), {"url": "https://a.example/x#y"})
    assert shown is not None
    assert (shown["method"], shown["url"], shown["host"]) == (
        "GET", "https://a.example/x", "a.example",
    )  # fmt: skip
    assert sends(registered(function_definition()), {}) is None
    senders = {name for name, one in EXECUTORS.items() if "sends" in vars(type(one))}
    assert senders == {"http", "http:fetch", "mcp"}


def mcp_tool(**settings: Any) -> RegisteredTool:
    """The tool `files__read` of one configured server."""
    unused: Any = None
    server = McpServer(
        "files", McpServerSettings(**settings), Upstreams(), Redactor(), unused,
        lambda *given: None, quiet_logger(), unused,
    )  # fmt: skip
    server._own_names = {"files__read": "read file\u202e"}
    return replace(as_executor("mcp"), service=server)


def mcp(**settings: Any) -> JsonObject | None:
    """What a call of that tool would send."""
    return sends(mcp_tool(**settings), {})


KEY = "ghp_" + "a1B2" * 9
MCP: Mapping[str, tuple[JsonObject, JsonObject]] = MappingProxyType({
    "in a container": (
        {"command": ["npx", "-y", "server"], "env": {"API_KEY": SECRET}, "network": ["a.example"]},
        {"command": ["npx", "-y", "server"], "variables": ["API_KEY"], "place": "container",
         "image": "python", "network": ["a.example"]},
    ),
    "on the host": (
        {"command": ["/usr/bin/server"], "place": "host"},
        {"command": ["/usr/bin/server"], "variables": [], "place": "host"},
    ),
    "with a key in its command": (
        {"command": ["server", f"--token={KEY}", "--region=north"], "place": "host"},
        {"command": ["server", "--token=[redacted]", "--region=north"], "variables": [],
         "place": "host"},
    ),
    "by its address": (
        {"url": "https://m.example/mcp", "headers": {"authorization": "Bearer ${secret:key}"}},
        {"method": "POST", "url": "https://m.example/mcp", "host": "m.example",
         "headers": {"authorization": "Bearer ${secret:key}"}, "secrets": {"key": ["authorization"]}},
    ),
})  # fmt: skip


@pytest.mark.parametrize(("settings", "shown"), MCP.values(), ids=MCP)
@pytest.mark.anyio
async def test_approver_sees_the_server_of_an_mcp_tool(
    settings: JsonObject, shown: JsonObject
) -> None:
    found = mcp(**settings)
    assert found == {"server": "files", "tool": "read file\u202e", **shown}
    assert SECRET not in str(found)


@pytest.mark.parametrize("shown", [shown for _, shown in MCP.values()], ids=MCP)
def test_recipient_is_told_in_words_of_the_part_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch, shown: JsonObject
) -> None:
    waiting = approval().model_copy(update={"sends": {"server": "files", "tool": "t", **shown}})
    assert (sends_heading(waiting), sends_in_words(waiting)) == ("MCP server", "MCP server files")
    monkeypatch.setattr("fumehood.parts.parts", lambda: ())
    known = "POST m.example" if "method" in shown else ""
    assert (sends_heading(waiting), sends_in_words(waiting)) == ("Request", known)


def test_mcp_tool_without_a_configured_server_asks_nobody() -> None:
    with pytest.raises(SandboxUnavailable) as refused:
        sends(as_executor("mcp"), {})
    error: EngineError = refused.value
    assert not error.may_retry


# -- faces ---------------------------------------------------------------------------------

HOSTILE = '\x1b[2J\u202e"}<script>\n  method: GET\x9b'
REQUEST: JsonObject = {
    "method": "POST", "url": "https://shop.example/v1/orders", "host": "shop.example",
    "headers": {"x-note": HOSTILE, HOSTILE: "1"}, "body": HOSTILE, "secrets": {"shop_key": ["authorization"]},
}  # fmt: skip
ON_HOST = {"placement": "host", "network": "of the host", "limits": {}, "place": None}


def test_terminal_shows_the_request_and_escapes_what_others_wrote() -> None:
    one = approval(sends=REQUEST, binding=ON_HOST)
    lines = "\n".join(line.text for line in approval_lines(one, NOW, 200)).split("\n")
    start = lines.index("request") + 1
    assert lines[start : start + 3] == [
        '  method: "POST"', '  url: "https://shop.example/v1/orders"', '  host: "shop.example"',
    ]  # fmt: skip
    assert '  secrets: {"shop_key": ["authorization"]}' in lines
    assert sum(line.startswith("  method: ") for line in lines) == 1
    assert not any("\x1b" in line or "\u202e" in line or "\x9b" in line for line in lines)
    assert any(line.startswith(MARK) and "method: GET" in line for line in lines)
    assert any("runs:" in line and "the engine sends the request" in line for line in lines)
    assert "U+202E" in hidden_in(one)


@pytest.mark.parametrize("path", ["{id}", "several?item={id}@1"])
def test_console_shows_the_request_and_escapes_what_others_wrote(path: str) -> None:
    one = approval(sends=REQUEST, binding=ON_HOST)
    page = make_site(one).browser().get(f"/inbox/{path.format(id=one.id)}").text
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for expected in ("Request", "POST", "https://shop.example/v1/orders", "shop_key"):
        assert expected in words, expected
    assert "<script>\n" not in page
    assert not set("\x1b\u202e\x9b") & set(page)
    assert "Runs in host" not in words


def test_console_lists_to_whom_a_call_sends_and_offers_all_of_it() -> None:
    one = approval(sends=REQUEST)
    browser = make_site(one).browser()
    assert "POST shop.example" in browser.get("/inbox/list").text
    assert "shop.example/v1/orders" in browser.get(f"/inbox/{one.id}/raw?part=sends").text


def test_caller_does_not_see_what_the_operator_configured() -> None:
    stored = StoredApproval(approval(sends=REQUEST), StoredRequest({}, {}, None))
    assert own_view(stored).sends is None


PLACES = (
    ({"sends": REQUEST}, "At the service: the engine sends the request, and runs nothing"),
    ({"tool": "net"}, "At the service: the engine sends the request, and runs nothing"),
    (
        {"sends": MCP["on the host"][1]},
        "On this machine without a sandbox, as a program of the engine's user",
    ),
    ({}, "On this machine without a sandbox, with the rights of the engine's user"),
    ({"tool": "external:Bash"}, ""),
    ({"binding": None}, ""),
    (
        {"sends": MCP["in a container"][1], "binding": {"placement": "container"}},
        "container · python",
    ),
)


@pytest.mark.parametrize(("fields", "words"), PLACES)
def test_place_is_a_fact_that_a_person_can_use(fields: dict[str, Any], words: str) -> None:
    assert place_in_words(approval(**{"binding": ON_HOST, **fields})) == words


def test_network_is_shown_if_a_call_reaches_more_than_its_request() -> None:
    for fields in ({"sends": REQUEST}, {"tool": "net"}, {"binding": None}):
        assert network_in_words(approval(**{"binding": ON_HOST, **fields})) == ""
    function = approval(binding=ON_HOST)
    assert network_in_words(function) == "all that this machine reaches"
    program = approval(binding={"network": "by the gateway: a.example"})
    assert network_in_words(program) == "by the gateway: a.example"
    assert network_in_words(approval(binding={"network": "none"})) == "none"


@pytest.mark.anyio
async def test_attack_another_key_in_a_servers_command_is_another_action() -> None:
    """People see both redacted; approvals and remembered rules are bound to the command itself."""
    keys = [KEY, "ghp_" + "z9Y8" * 9]
    tools = [mcp_tool(command=["server", f"--token={key}"], place="host") for key in keys]
    shown = [sends(tool, {}) for tool in tools]
    assert shown[0] == shown[1]
    first, second = [
        definition_digest(tool, None, seen) for tool, seen in zip(tools, shown, strict=True)
    ]
    assert first != second
    # The twin, and the digest of a command without a key is that of what is shown.
    assert first == definition_digest(tools[0], None, shown[0])
    plain = mcp_tool(command=["server"], place="host")
    assert plain.service is not None
    assert sends(plain, {}) == (sends(plain, {}) or {}) | plain.service.bound()
