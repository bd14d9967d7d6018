"""No process that fumehood starts imports code from the working directory."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD, Daemon, make_first_approver
from fumehood import Config, Engine
from fumehood.web.pages import health
from support import host_tools, jailed_tools
from support.wait import DEADLINE_S, wait_until

PACKAGES = ("fumehood", "fumehood_tools", "pip", "pydantic")
MODULES = (
    "anyio", "asyncio", "ctypes", "docker", "json", "sitecustomize", "socket", "starlette",
    "struct", "typing", "usercustomize", "uvicorn",
)  # fmt: skip


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plants modules in the working directory; the file records each import of one."""
    canary, planted = tmp_path / "canary", tmp_path / "planted"
    program = f"with open({str(canary)!r}, 'a') as file: file.write(__name__ + '\\n')\n"
    for name in PACKAGES:
        (planted / name).mkdir(parents=True)
        (planted / name / "__init__.py").write_text(program)
    for name in MODULES:
        (planted / f"{name}.py").write_text(program)
    monkeypatch.chdir(planted)
    return canary


def imported(canary: Path) -> set[str]:
    return set(canary.read_text().splitlines()) if canary.exists() else set()


def test_control_python_without_isolation_options_imports_planted_modules(canary: Path) -> None:
    """Control: what a child that is started without `-P` or `-I` imports."""
    for module in ("fumehood.web", "pip"):
        command = [sys.executable, "-m", module]
        subprocess.run(command, capture_output=True, timeout=600, check=False)
    assert {"fumehood", "pip"} <= imported(canary)


@pytest.mark.row("A6", "S1")
def test_daemon_console_and_guests_import_nothing_from_the_working_directory(
    canary: Path, home: Path
) -> None:
    make_first_approver(home)
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)}
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(  # by the interpreter's path, so that nothing is loaded ahead
            [sys.executable, str(FUMEHOOD), "serve", "--web", "--web-port", "0"],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    daemon = Daemon(process, home, environment)
    try:
        said = re.compile(r"The console listens on (http://127\.0\.0\.1:\d+)")
        wait_until(lambda: process.poll() is not None or said.search(daemon.log) is not None)
        address = said.search(daemon.log)
        assert address is not None, daemon.log
        with urllib.request.urlopen(f"{address[1]}/login", timeout=600) as page:
            assert page.status == 200
        client = daemon.client()
        try:
            assert client.call("calculator", {"expression": "6 * 7"}).body["data"]["value"] == 42
        finally:
            client.close()
        (child,) = (
            Path(f"/proc/{each.pid}") for each in psutil.Process(process.pid).children()
            if str(daemon.control) in " ".join(each.cmdline())
        )  # fmt: skip
        assert (child / "cwd").readlink() == Path("/")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=DEADLINE_S)
    wait_until(lambda: not child.exists())  # the console ends with its daemon
    assert imported(canary) == set()


@pytest.mark.anyio
@pytest.mark.needs("landlock")
@pytest.mark.row("S1")
async def test_embedded_engine_imports_nothing_from_the_working_directory(
    canary: Path, home: Path
) -> None:
    """Interpreter, jail and worker."""
    tools = [host_tools.who, jailed_tools.add]
    async with Engine(tools=tools, config=Config(home=home)) as engine:
        assert (await engine.call("calculator", {"expression": "6 * 7"})).data["value"] == 42
        assert (await engine.call("add_up", {"first": 1})).data["sum"] == 2
        assert (await engine.call("who")).error is None
    assert imported(canary) == set()


@pytest.mark.anyio
@pytest.mark.row("A6")
async def test_health_page_checks_import_nothing_from_the_working_directory(
    canary: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUMEHOOD_HOME", str(home))
    shown: dict[str, Any] = {}
    view = SimpleNamespace(render=lambda _, **values: shown.update(values))
    await health.check(cast("Any", view))
    assert imported(canary) == set()
    assert shown["error"] == ""
    assert {"platform", "python"} <= {one["check"] for one in shown["findings"]}
