"""Calls both sockets with the clients that openapi-python-client made from their documents.

Usage: call.py SOCKET CONTROL CREDENTIAL. It runs in the environment of the generators.
"""

from __future__ import annotations

import sys
from io import BytesIO
from typing import Any

import fumehood_client
import fumehood_control_socket_client as control_client
import httpx
from fumehood_client.api.default import (
    call_tool,
    create_session,
    delete_session_file,
    get_session_file,
    list_tools,
    put_session_file,
    show_tool,
)
from fumehood_client.models import (
    CallBody,
    CallBodyArguments,
    CallOptions,
    NewSession,
    Refusal,
    ResultEnvelope,
)
from fumehood_client.types import File
from fumehood_control_socket_client.api.default import create_agent, show_agent, update_agent
from fumehood_control_socket_client.models import Agent, AgentFields

SOCKET, CONTROL, CREDENTIAL = sys.argv[1:]


def at(module: Any, path: str, **more: Any) -> Any:
    """A generated client over a Unix socket."""
    over = {"transport": httpx.HTTPTransport(uds=path)}
    return module(base_url="http://fumehood", httpx_args=over, **more)


callers = at(fumehood_client.Client, SOCKET)


def call(expression: str, **options: Any) -> Any:
    body = CallBody(CallBodyArguments.from_dict({"expression": expression}), CallOptions(**options))
    return call_tool.sync("calculator", client=callers, body=body)


answer = call("6 * 7")
assert isinstance(answer, ResultEnvelope), answer
assert answer.success is True
assert answer.data["value"] == 42
assert answer.metadata.tool_name == "calculator"
assert call("6 * 7", dry_run=True).data["approval"] == {"required": False}
refused = call("1 / 0")
assert isinstance(refused, Refusal), refused
assert (refused.success, refused.error.code) == (False, "EXECUTION_ERROR")
missing = show_tool.sync("nothing", client=callers)
assert isinstance(missing, Refusal), missing
assert missing.error.code == "TOOL_NOT_FOUND"
shown = show_tool.sync("calculator", client=callers)
assert shown.data.tool.name == "calculator"
exported = list_tools.sync(client=callers, format_="openai", tools="calculator")
assert exported.success is True, exported

session = create_session.sync(client=callers, body=NewSession(memory_mb=128)).data.session
content = bytes(range(256))
written = put_session_file.sync(
    session.id, "d/e/a b.bin", client=callers, body=File(BytesIO(content))
)
assert written.data.path == "d/e/a b.bin", written
assert get_session_file.sync(session.id, "d/e/a b.bin", client=callers).payload.read() == content
outside = get_session_file.sync(session.id, "../../etc/passwd", client=callers)
assert isinstance(outside, Refusal), outside
assert outside.error.code == "INVALID_PARAMS"
deleted = delete_session_file.sync(session.id, "d", client=callers, recursive=True)
assert deleted.success is True, deleted

control = at(control_client.AuthenticatedClient, CONTROL, token=CREDENTIAL)
made = create_agent.sync(
    client=control, body=Agent("generated", description="Sums.", principals=["uid:0"])
)
assert made.data.agent.principals == ["uid:0"], made
changed = update_agent.sync("generated", client=control, body=AgentFields(is_enabled=False))
assert changed.success is True, changed
agent = show_agent.sync("generated", client=control).data.agent
# A change of one field leaves the others.
assert (agent.is_enabled, agent.description, agent.principals) == (False, "Sums.", ["uid:0"])
print("all calls were answered as documented")
