"""From an OpenAPI document to a call: import, serve, call, approve and retry."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD, Daemon, StartDaemon, make_first_approver
from support.definition_files import DefinitionDirectory
from support.wait import wait_until
from upstream import Reply, Upstream

SECRET = "canary-51be7d-of-the-shop"

SHOP = """
openapi: 3.1.0
info: {title: Shop, version: 1.4.0}
servers: [{url: /v1}]
security: [{shop_key: []}]
paths:
  /orders:
    get:
      operationId: list_orders
      summary: List the orders of a customer.
      parameters:
        - {name: customer, in: query, required: true, schema: {type: string}}
        - {name: status, in: query, schema: {type: array, items: {enum: [open, done]}}}
      responses: {200: {description: The orders.}}
    post:
      operationId: create_order
      summary: Order one item.
      parameters:
        - {name: 'notify[by]', in: query, schema: {type: string}}
        - {name: X-Channel, in: header, schema: {type: string}}
        - {name: X-Never, in: header, schema: {type: string}}
      requestBody: {content: {application/json: {schema: {$ref: '#/components/schemas/Order'}}}}
  /orders/{order id}:
    parameters: [{name: order id, in: path, required: true, schema: {type: integer}}]
    get: {operationId: read_order, summary: Read one order.}
  /receipts:
    post: {operationId: upload_receipt, requestBody: {content: {multipart/form-data: {}}}}
components:
  securitySchemes: {shop_key: {type: http, scheme: bearer}}
  schemas:
    Order:
      type: object
      required: [item]
      properties: {item: {type: string, minLength: 1}, count: {type: integer, default: 1}}
"""


def run(
    environment: dict[str, str], *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FUMEHOOD), *arguments], env=environment, capture_output=True, timeout=600, text=True,
        input=stdin,
    )  # fmt: skip


def call(daemon: Daemon, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    done = run(daemon.environment, "call", tool, json.dumps(arguments), "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.row("R4", "T5", "T1", "T2", "P6", "A1", "D1")
def test_imported_openapi_tools_are_called_approved_and_retried(
    start_daemon: StartDaemon, home: Path, definitions: DefinitionDirectory, upstream: Upstream
) -> None:
    upstream.script("/openapi.yaml", Reply(body=SHOP.encode(), content_type="text/yaml"))
    document = f"{upstream.url}/openapi.yaml"
    made = run(
        CLEAN_ENVIRONMENT, "tools", "import", "openapi", document, "--out", str(definitions.path)
    )
    assert made.returncode == 0, made.stderr
    assert "upload_receipt" not in {file.stem for file in definitions.path.iterdir()}
    assert "POST /receipts: its body is 'multipart/form-data'" in made.stderr

    said = tomllib.loads(made.stderr.partition("if the hosts are right:\n")[2])
    credential = make_first_approver(home)
    daemon = start_daemon(
        variables={"SHOP_KEY": SECRET},
        tools_directory=str(definitions.path),
        rest__allowed_hosts=json.dumps(said["rest"]["allowed_hosts"]),
        secrets=json.dumps(said["secrets"]),
    )

    listed = call(daemon, "list_orders", {"customer": "Ada", "status": ["open", "done"]})
    assert listed["success"] is True, listed
    asked = upstream.requests[-1]
    assert asked.target == "/v1/orders?customer=Ada&status=open&status=done"
    assert asked.headers["authorization"] == f"Bearer {SECRET}"
    assert listed["data"]["headers"]["authorization"] == "Bearer [redacted]"
    assert listed["metadata"]["tool_version"] == "1.4.0"
    assert call(daemon, "list_orders", {})["error"]["code"] == "INVALID_PARAMS"

    upstream.script("/v1/orders/7", Reply(503), Reply(502), Reply(body=b'{"id": 7}'))
    read = call(daemon, "read_order", {"order_id": 7})
    assert (read["data"], read["metadata"]["retry_count"]) == ({"id": 7}, 2)
    assert upstream.count("/v1/orders/7") == 3

    asked_for = {"item": "tea", "notify_by": "e-mail", "X-Channel": "agent"}
    order = call(daemon, "create_order", asked_for)
    assert order["error"]["code"] == "REQUIRES_HUMAN_APPROVAL"
    assert not any(request.method == "POST" for request in upstream.requests)
    approval_id = order["error"]["approval_id"]
    show = ("approvals", "show", approval_id, "--credential-stdin", "--json")
    shown = json.loads(run(daemon.environment, *show, stdin=f"{credential}\n").stdout)
    decision = ("approvals", "approve", approval_id, "--yes")
    done = run(daemon.environment, *decision, "--credential-stdin", stdin=f"{credential}\n")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: upstream.requests[-1].method == "POST")
    ordered = upstream.requests[-1]
    assert ordered.json == {"item": "tea", "count": 1}
    assert ordered.target == "/v1/orders?notify%5Bby%5D=e-mail"
    assert ordered.headers["x-channel"] == "agent"
    assert "x-never" not in ordered.headers
    sends = shown["sends"]
    assert (sends["method"], sends["url"]) == ("POST", f"{upstream.url}{ordered.target}")
    assert sends["host"] == ordered.headers["host"]
    assert json.loads(sends["body"]) == ordered.json
    assert sends["secrets"] == {"shop_key": ["authorization"]}
    assert shown["binding"]["secrets"] == ["shop_key"]
    assert sends["headers"].pop("authorization") == "Bearer ${secret:shop_key}"
    assert sends["headers"].items() <= ordered.headers.items()

    apart = home / "apart"
    upstream.script("/open.yaml", Reply(body=SHOP.replace("[{shop_key: []}]", "[]").encode()))
    for name, prefix in (("openapi.yaml", "closed_"), ("open.yaml", "open_")):
        arguments = (f"{upstream.url}/{name}", "--out", str(apart), "--prefix", prefix)
        imported = run(CLEAN_ENVIRONMENT, "tools", "import", "openapi", *arguments)
        assert imported.returncode == 0, imported.stderr
    add = ("tools", "add", "--credential-stdin")
    closed = str(apart / "closed_read_order.json")
    refused = run(daemon.environment, *add, closed, stdin=f"{credential}\n")
    assert "has no secret 'closed_shop_key'" in refused.stdout
    added = run(
        daemon.environment, *add, str(apart / "open_read_order.json"), stdin=f"{credential}\n"
    )
    assert added.returncode == 0, added.stdout
    assert call(daemon, "open_read_order", {"order_id": 7})["data"] == {"id": 7}
    assert "authorization" not in upstream.requests[-1].headers

    assert daemon.stop() == 0
    assert SECRET not in daemon.log


@pytest.mark.row("R4", "T5")
def test_imported_tool_needs_operator_configured_secret_and_host(
    start_daemon: StartDaemon, definitions: DefinitionDirectory, upstream: Upstream, tmp_path: Path
) -> None:
    """A document alone must not obtain an operator's secret or reach an internal host."""
    document = tmp_path / "shop.yaml"
    document.write_text(SHOP.replace("/v1}", f"{upstream.url}/v1}}"), encoding="utf-8")
    made = run(
        CLEAN_ENVIRONMENT, "tools", "import", "openapi", str(document), "--only", "read_order",
        "--out", str(definitions.path),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert f"Caution: the document chose {upstream.authority}" in made.stderr
    secret = {"env": "SHOP_KEY", "tools": ["read_order"], "hosts": ["shop.example"]}
    daemon = start_daemon(
        variables={"SHOP_KEY": SECRET}, tools_directory=str(definitions.path),
        secrets=json.dumps({"shop_key": secret}),
    )  # fmt: skip
    wait_until(lambda: "tools_directory.left_out" in daemon.log)
    assert "is not bound to the endpoint's host" in daemon.log
    assert call(daemon, "read_order", {"order_id": 7})["error"]["code"] == "TOOL_NOT_FOUND"
    open_document = SHOP.replace("security: [{shop_key: []}]", "").replace(
        "/v1}", f"{upstream.url}/v1}}"
    )
    document.write_text(open_document, encoding="utf-8")
    again = run(
        CLEAN_ENVIRONMENT, "tools", "import", "openapi", str(document), "--only", "read_order",
        "--out", str(definitions.path), "--force",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    wait_until(lambda: run(daemon.environment, "tools", "show", "read_order").returncode == 0)
    refused = call(daemon, "read_order", {"order_id": 7})
    assert refused["error"]["code"] == "PERMISSION_DENIED"
    assert upstream.requests == []
