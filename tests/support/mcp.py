"""MCP clients: the official library's, and raw lines and requests."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from conftest import FUMEHOOD, Daemon
from support.authority import ask
from support.http import Answer, SocketClient

PATIENCE_S = 120
MODES = ("auto", "legacy")
"""The two protocol eras; the library's client negotiates 2026-07-28 by itself."""

WAYS = ("stdio", "http")
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
ASKING = {**META, "io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}


@asynccontextmanager
async def connected(
    daemon: Daemon, way: str, mode: str, *options: str, query: str = "", **more: Any
) -> AsyncIterator[Client]:
    """The library's unmodified client, connected to this daemon."""
    more.setdefault("read_timeout_seconds", PATIENCE_S)
    if way == "stdio":
        server = StdioServerParameters(
            command=str(FUMEHOOD), args=["mcp", *options], env=daemon.environment
        )
        async with Client(server, mode=mode, **more) as client:
            yield client
        return
    transport = httpx2.AsyncHTTPTransport(uds=str(daemon.socket))
    async with httpx2.AsyncClient(transport=transport, timeout=PATIENCE_S) as http:
        address = streamable_http_client(f"http://fumehood/mcp{query}", http_client=http)
        async with Client(address, mode=mode, **more) as client:
            yield client


@dataclass
class RawClient:
    """A `fumehood mcp` process with lines written and read by the test."""

    process: subprocess.Popen[bytes]
    _lines: queue.Queue[bytes] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Any) -> None:
        """Send one message; bytes are sent unchanged with a newline."""
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.process.stdin.write(raw + b"\n")
        self.process.stdin.flush()

    def request(self, request_id: Any, method: str, **params: Any) -> None:
        """Send one request."""
        message = {"jsonrpc": "2.0", "id": request_id, "method": method}
        self.send({**message, "params": params} if params else message)

    def notify(self, method: str, **params: Any) -> None:
        """Send one notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def call(self, request_id: Any, tool: str, **arguments: Any) -> None:
        """Call a tool in the handshake era."""
        self.request(request_id, "tools/call", name=tool, arguments=arguments)

    def initialize(self, **capabilities: Any) -> dict[str, Any]:
        """Perform the handshake."""
        self.request(
            "first", "initialize", protocolVersion="2025-11-25", capabilities=capabilities,
            clientInfo={"name": "raw", "version": "1"},
        )  # fmt: skip
        answer = self.receive()
        self.notify("notifications/initialized")
        return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message."""
        return json.loads(self._lines.get(timeout=PATIENCE_S))

    def answers(self, number: int) -> dict[Any, dict[str, Any]]:
        """The next responses, by their ids."""
        found = [self.receive() for _ in range(number)]
        return {answer["id"]: answer for answer in found}

    def end(self) -> int:
        """Close the input, as a disconnecting client does."""
        self.process.stdin.close()
        return self.process.wait(timeout=PATIENCE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)


@contextmanager
def raw_client(daemon: Daemon, *options: str) -> Iterator[RawClient]:
    """A raw client; its process is ended afterwards."""
    process = subprocess.Popen(
        [str(FUMEHOOD), "mcp", *options], env=daemon.environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            yield RawClient(process)
        finally:
            process.kill()


def post(socket: Path, message: Any, credential: str | None = None, **headers: str) -> Answer:
    """Post one message to `/mcp`, by default with the headers of its era."""

    sent = {"content-type": "application/json", **headers_of(message), **headers}
    if credential is not None:
        sent["authorization"] = f"Bearer {credential}"
    raw = message if isinstance(message, bytes) else json.dumps(message).encode()
    client = SocketClient(socket)
    try:
        return client.request("POST", "/mcp", raw, sent)
    finally:
        client.close()


def headers_of(message: Any) -> dict[str, str]:
    """The fields that a 2026-07-28 request repeats in its headers."""
    params = message.get("params", {}) if isinstance(message, dict) else {}
    version = params.get("_meta", {}).get("io.modelcontextprotocol/protocolVersion")
    if version is None:
        return {}
    headers = {"mcp-protocol-version": version, "mcp-method": message["method"]}
    name = params.get("uri" if message["method"] == "resources/read" else "name")
    return headers if name is None else {**headers, "mcp-name": name}


def modern(request_id: Any, method: str, meta: Any = META, **params: Any) -> dict[str, Any]:
    """A request of 2026-07-28."""
    return {
        "jsonrpc": "2.0",
        "id": request_id,
        "method": method,
        "params": {**params, "_meta": meta},
    }


def decide(daemon: Daemon, words: str, decision: str, reason: str | None = None) -> None:
    """Decide the approval named in the text."""
    found = re.search("apr_[0-9a-f]+", words)
    assert found is not None, words
    path = f"/v1/approvals/{found[0]}"
    version = ask(daemon.control, "GET", path, None, daemon.credential).headers["etag"]

    client = SocketClient(daemon.control)
    body = {"decision": decision} | ({} if reason is None else {"reason": reason})
    headers = {
        "content-type": "application/json", "if-match": version,
        "authorization": f"Bearer {daemon.credential}",
    }  # fmt: skip
    try:
        answer = client.request("POST", f"{path}/decision", json.dumps(body).encode(), headers)
    finally:
        client.close()
    assert answer.code is None, answer.body["error"]
