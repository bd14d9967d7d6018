"""A byte order mark before text changes nothing, at every entrance of text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.batches.command import _parsed
from fumehood.cli.options import json_object
from fumehood.cli.reach import _private_line
from fumehood.config import load_config
from fumehood.core.tool import ToolDefinition
from fumehood.devtools.golden import read_golden
from fumehood.http.bodies import parse_json
from fumehood.mcp.client.wire import Request, _Reader, served
from fumehood.mcp.command import _read_file
from fumehood.mcp.server.messages import read_message
from fumehood.outgoing.secret_values import SecretValues
from fumehood.outgoing.upstreams import UpstreamAnswer
from fumehood.pipeline.coerce import coerce
from fumehood.policy.loader import parse_policy
from fumehood.projects.rules import IgnoreRules, plain_names
from fumehood.protocol.engine_paths import read_engine_paths
from fumehood.protocol.files import read_values
from fumehood.protocol.strict_json import StrictJsonError, loads
from fumehood.redaction.redactor import Redactor
from fumehood.registry.arguments import all_arguments, source_of
from fumehood.registry.secrets import SecretBindings, SecretSettings
from fumehood.rest.executor import _data
from fumehood.rest.fetch import page_data
from fumehood.rest.openapi import read_document
from fumehood.sandbox.images.recipe import read_recipe
from fumehood.webhook.channel import read_secret
from fumehood_tools.calculator import calculator
from support.docker_images import write_image_folder
from support.recording import bench

pytestmark = pytest.mark.row("T2")

MARK = b"\xef\xbb\xbf"
DOCUMENT = b'{"a": ["\xc3\xa9", 1]}'
MESSAGE = b'{"jsonrpc": "2.0", "id": 1, "result": {"tools": []}}'
OPENAPI = b'{"openapi": "3.1.0", "paths": {}}'
POLICY = b'[[rules]]\nid = "no"\ncategories = ["web"]\ndecision = "deny"\n'
RECIPE = 'release = "bookworm"\ndescription = "x"\n'


def answer(body: bytes, kind: str) -> UpstreamAnswer:
    return UpstreamAnswer(200, {"content-type": kind}, body, "https://api.example/")


def rest(body: bytes, kind: str) -> Any:
    return _data(answer(body, kind), SecretValues(()), Redactor())


def over_http(body: bytes, kind: str) -> Any:
    heard: list[Any] = []
    reader = _Reader(heard.append, SecretValues(()), 1000)
    reader.feed(body, kind)
    reader.finish()
    return heard


def over_streams(line: bytes) -> Any:
    class Program:
        said = b""

        async def read(self) -> bytes:
            await asked.wait()
            asked.clear()
            return line + b"\n"

        async def write(self, data: bytes) -> None:
            asked.set()

        async def stop(self) -> None:
            """It is not a process."""

    async def first() -> Any:
        async with served(Program()) as (wire, _):
            return await wire.send(Request("tools/list", {}))

    asked = asyncio.Event()
    return asyncio.run(first())


def in_file(tmp: Path, read: Callable[[Path], Any], name: str = "file") -> Callable[[bytes], Any]:
    def entrance(data: bytes) -> Any:
        file = tmp / name
        file.write_bytes(data)
        file.chmod(0o600)
        return read(file)

    return entrance


def configured(read: Callable[[], Any]) -> Callable[[Path], Any]:
    def named(file: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FUMEHOOD_CONFIG", str(file))
            return read()

    return named


def secret_in(file: Path) -> str:
    setting = SecretSettings(file=file, tools=("a",), hosts=("b",))
    return SecretBindings({"key": setting}).value("key")


def ignored(data: bytes) -> Any:
    rules = IgnoreRules()
    rules.add("", data.decode())
    found = [rules.leave_out(path, is_directory=False) for path in ("secret.env", "main.py")]
    return found, plain_names(data.decode())


def image(tmp: Path) -> Callable[[bytes], Any]:
    def entrance(data: bytes) -> Any:
        folder = write_image_folder(tmp / data[:3].hex(), image=data.decode())
        return read_recipe("python", folder=folder).settings

    return entrance


ENTRANCES: dict[str, tuple[bytes, Callable[[Path], Callable[[bytes], Any]]]] = {
    "JSON": (DOCUMENT, lambda _: loads),
    "body of a request": (DOCUMENT, lambda _: parse_json),
    "arguments of a command": (DOCUMENT, lambda _: lambda data: json_object(data, "They")),
    "calls by line": (b'{"a": 1}\n{"a": 2}', lambda _: lambda data: list(_parsed(data))),
    "calls as array": (b'[{"a": 1}]', lambda _: lambda data: list(_parsed(data))),
    "golden sequence": (b'{"calls": []}', lambda tmp: in_file(tmp, read_golden)),
    "file in JSON": (DOCUMENT, lambda _: lambda data: read_values("a.json", data)),
    "file in TOML": (b"a = 1\n", lambda _: lambda data: read_values("a.toml", data)),
    "file in YAML": (b"a: 1\n", lambda _: lambda data: read_values("a.yaml", data)),
    "policy": (POLICY, lambda _: lambda data: parse_policy("policy.toml", data, ()).rules),
    "configuration": (
        b"drain_seconds = 7\n",
        lambda tmp: in_file(tmp, configured(lambda: load_config().drain_seconds)),
    ),
    "configuration of a client": (
        b'socket = "/a/b.sock"\n',
        lambda tmp: in_file(tmp, configured(lambda: read_engine_paths({
            "FUMEHOOD_CONFIG": str(tmp / "file")
        }))),
    ),
    "configuration that is edited": (
        b"[mcp_servers.a]\nurl = 'https://a'\n",
        lambda tmp: in_file(tmp, configured(lambda: _read_file()[1:])),
    ),
    "secret": (b"s3cret-0123\n", lambda tmp: in_file(tmp, secret_in)),
    "webhook's secret": (b"0" * 64 + b"\n", lambda tmp: in_file(tmp, read_secret)),
    "token": (b"fht_0123\n", lambda tmp: in_file(tmp, _private_line)),
    "recipe of an image": (RECIPE.encode(), image),
    "rules of a project": (b"secret.env\n", lambda _: ignored),
    "OpenAPI in JSON": (OPENAPI, lambda _: lambda data: read_document("openapi", data)),
    "OpenAPI in YAML": (b"openapi: 3.1.0\n", lambda _: lambda d: read_document("a.yaml", d)),
    "REST answer in JSON": (DOCUMENT, lambda _: lambda data: rest(data, "application/json")),
    "REST answer in text": (b"a;b", lambda _: lambda data: rest(data, "text/csv")),
    "page in JSON": (
        DOCUMENT, lambda _: lambda data: page_data(answer(data, "text/json"), raw=False, start=0)
    ),
    "page in text": (
        b"a", lambda _: lambda data: page_data(answer(data, "text/plain"), raw=False, start=0)
    ),
    "page of another charset": (
        "é".encode(),
        lambda _: lambda data: page_data(
            answer(data, "text/plain; charset=utf-8" if data[:1] != b"\xef" else
                   "text/plain; charset=latin1"), raw=False, start=0
        )["text"],
    ),
    "message of an MCP client": (MESSAGE, lambda _: read_message),
    "first line of an MCP program": (MESSAGE, lambda _: over_streams),
    "answer of an MCP server": (MESSAGE, lambda _: lambda d: over_http(d, "application/json")),
    "events of an MCP server": (
        b"data: " + MESSAGE + b"\n\n", lambda _: lambda d: over_http(d, "text/event-stream")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRANCES)
def test_byte_order_mark_before_text_changes_nothing(name: str, tmp_path: Path) -> None:
    text, make = ENTRANCES[name]
    entrance = make(tmp_path)
    found = entrance(text)
    assert found
    assert entrance(MARK + text) == found


@pytest.mark.parametrize("executor", [name for name in all_arguments() if source_of(name)])
def test_policy_and_sandbox_get_a_program_without_its_byte_order_mark(executor: str) -> None:
    source = source_of(executor)
    tool = ToolDefinition(
        name="tool", description="A tool.", executor=executor, dangerous=True, strict=True,
        parameters={"type": "object", "properties": {source: {"type": "string"}}},
    )  # fmt: skip
    assert coerce({source: "\ufeffrm -rf ."}, tool) == ({source: "rm -rf ."}, ())
    # Only the first one is a mark, and only at the beginning.
    assert coerce({source: "\ufeff\ufeffa\ufeff"}, tool)[0] == {source: "\ufeffa\ufeff"}


def test_every_executor_with_a_program_is_in_the_table() -> None:
    assert {source_of(name) for name in all_arguments()} == {"", "code", "command", "expression"}
    for model in all_arguments().values():
        fields = model.model_fields.keys() & {"code", "command", "expression"}
        assert fields == ({model.source} if model.source else set())


def test_file_that_a_call_sends_keeps_its_byte_order_mark() -> None:
    tool = ToolDefinition(
        name="tool", description="A tool.", executor="workspace:write",
        parameters={"type": "object", "properties": {"content": {"type": "string"}}},
    )  # fmt: skip
    assert coerce({"content": "\ufeffa"}, tool)[0] == {"content": "\ufeffa"}


@pytest.mark.anyio
async def test_marked_program_runs_as_the_plain_one(home: Path) -> None:
    async with bench(home) as b:
        for expression in ("6 * 7", "\ufeff6 * 7"):
            await b.engine.call(calculator.name, {"expression": expression})
        assert [run.arguments["expression"] for run in b.wall.runs] == ["6 * 7", "6 * 7"]


@given(st.text())
def test_mark_never_changes_what_json_means(text: str) -> None:
    data = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
    assert loads(MARK + data) == loads(data)


@pytest.mark.parametrize("data", [MARK * 2 + b"{}", b"{}" + MARK, b" " + MARK + b"{}", MARK])
def test_mark_anywhere_else_is_no_json(data: bytes) -> None:
    with pytest.raises(StrictJsonError, match="not JSON"):
        loads(data)
