"""Functions of an installed package: sandboxed by default, on the host only if configured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conftest import FUMEHOOD, StartDaemon
from support.packages import install

SHOP = '''
import time
from fumehood import ToolError, tool

@tool
def price(item: str, count: int = 1) -> dict:
    """Look up what an item costs.

    Args:
        item: The item's name.
        count: How many.
    """
    if item != "apple":
        raise ToolError("NO_SUCH_ITEM", f"There is no {item}.")
    return {"item": item, "total": 3 * count}

@tool
def peek(path: str) -> str:
    """Read a file."""
    return open(path).read()

@tool(sandboxed=False)
def order(seconds: float = 0) -> str:
    """Order, on the host, and take a while."""
    time.sleep(seconds)
    return "ordered"

tools = [price, peek, order]
'''


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """An environment in which a package with these tools is installed."""
    installed = install(tmp_path / "packages", "shop", SHOP)
    return {**installed, "FUMEHOOD_TEST_SECRET": "not-for-functions"}


@pytest.mark.needs("landlock")
@pytest.mark.row("S1", "S4", "R4", "E1", "P8")
def test_jailed_and_host_functions_run_through_the_socket_within_limits(
    start_daemon: StartDaemon, variables: dict[str, str]
) -> None:
    daemon = start_daemon(variables=variables, host_tools="order")
    client = daemon.client()

    def call(tool: str, arguments: dict, **options: object) -> dict:
        return client.call(tool, arguments, **options).body

    bought = call("price", {"item": "apple", "count": "2"})
    assert bought["data"] == {"item": "apple", "total": 6}
    assert bought["metadata"]["sandbox"]["placement"] == "jail"
    assert call("price", {"item": "pear"})["error"]["code"] == "NO_SUCH_ITEM"
    plan = call("price", {"item": "apple"}, dry_run=True)
    assert plan["data"]["placement"]["kind"] == "jail"
    for path in ("/etc/passwd", f"/proc/{daemon.process.pid}/environ", str(daemon.socket)):
        refused = call("peek", {"path": path})
        assert refused["error"]["code"] == "EXECUTION_ERROR"
        assert refused["error"]["details"]["type"] in ("PermissionError", "OSError")
        assert "not-for-functions" not in json.dumps(refused)
    assert call("order", {})["data"] == {"value": "ordered"}
    late = call("order", {"seconds": 60}, timeout_seconds=1)
    assert late["error"]["code"] == "TIMEOUT"
    assert call("order", {})["success"]
    walls = client.get("/v1/ready").body["walls"]
    assert walls["jail"]["ready"] is True


@pytest.mark.row("R4")
def test_host_function_not_listed_in_host_tools_is_disabled(
    start_daemon: StartDaemon, variables: dict[str, str]
) -> None:
    client = start_daemon(variables=variables).client()
    assert client.call("order", {}).code == "TOOL_DISABLED"


@pytest.mark.needs("landlock")
@pytest.mark.row("S1", "D7")
def test_jailed_function_runs_locally_and_doctor_reports_the_jail(
    variables: dict[str, str], home: Path
) -> None:
    from conftest import CLEAN_ENVIRONMENT

    environment = {**CLEAN_ENVIRONMENT, **variables, "FUMEHOOD_HOME": str(home)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(FUMEHOOD), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )

    called = run("call", "price", '{"item": "apple"}', "--local", "--json")
    assert called.returncode == 0, called.stderr
    assert json.loads(called.stdout)["data"] == {"item": "apple", "total": 3}
    looked = json.loads(run("doctor", "--json").stdout)
    jail = {f["check"]: f["verdict"] for f in looked if f["check"].startswith("jail")}
    assert len(jail) == 7
    assert set(jail.values()) == {"ok"}
