"""T3 through the socket: results in parts, streamed, resumed and without events."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conftest import FUMEHOOD, StartDaemon
from support.definition_files import DefinitionDirectory
from support.packages import install
from support.streaming import call_id_of, resuming, streaming
from upstream import Reply, Upstream

pytestmark = [pytest.mark.needs("landlock"), pytest.mark.row("T3", "P11", "D2", "S8")]

POET = '''
from fumehood import tool

@tool(streaming=True)
def poem(lines: int):
    """Write a poem."""
    for number in range(lines):
        yield f"line {number}\\n"

@tool(streaming=True, sandboxed=False)
def numbers(count: int):
    """Count, in a worker."""
    for number in range(count):
        yield {"n": number}

tools = [poem, numbers]
'''


def test_result_parts_are_streamed_resumable_and_omitted_if_disabled(
    start_daemon: StartDaemon,
    tmp_path: Path,
    definitions: DefinitionDirectory,
    upstream: Upstream,
) -> None:
    body = b"data: 1\n\ndata: 2\n\n"
    upstream.script("/parts", Reply(body=body, content_type="text/event-stream"))
    relay = {"name": "relay", "type": "REST", "description": "Relay.", "method": "GET",
             "endpoint": f"{upstream.url}/parts", "streaming": True}  # fmt: skip
    definitions.put("relay.json", relay)
    daemon = start_daemon(
        variables=install(tmp_path / "packages", "poet", POET),
        host_tools="numbers",
        tools_directory=str(definitions.path),
        rest__allowed_hosts=json.dumps([upstream.authority]),
    )
    for tool, arguments, text, data in (
        ("poem", {"lines": 3}, "line 0\nline 1\nline 2\n", {"value": "line 0\nline 1\nline 2\n"}),
        ("numbers", {"count": 2}, '{"n":0}\n{"n":1}\n', {"value": [{"n": 0}, {"n": 1}]}),
        ("relay", {}, body.decode(), {"text": body.decode(), "content_type": "text/event-stream"}),
    ):
        with streaming(daemon.socket, tool, arguments) as stream:
            frames = list(stream.events())
        told = [json.loads(frame.data) for frame in frames]
        parts = [data for frame, data in zip(frames, told, strict=True) if "text" in data]
        assert "".join(part["text"] for part in parts) == text
        assert {part["stream"] for part in parts} == {"stdout"}
        assert (frames[-1].kind, told[-1]["data"]) == ("tool_result", data)
        with resuming(daemon.socket, call_id_of(frames[0]), frames[0].id) as again:
            assert [frame.data for frame in again.events()] == [f.data for f in frames[1:]]
        with streaming(daemon.socket, tool, arguments, enable_streaming=False) as stream:
            ((kind, answer),) = stream.data()
        assert (kind, answer["data"]) == ("tool_result", data)
        client = daemon.client()
        assert client.call(tool, arguments).body["data"] == data
    shown = subprocess.run(
        [FUMEHOOD, "call", "--stream", "poem", '{"lines": 2}', "--json"],
        env=daemon.environment, capture_output=True, timeout=600,
    )  # fmt: skip
    assert b"line 0\nline 1\n" in shown.stderr
    assert json.loads(shown.stdout)["data"] == {"value": "line 0\nline 1\n"}
