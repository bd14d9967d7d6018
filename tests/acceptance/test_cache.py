"""The result cache through sockets and the command line, and across restarts."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from conftest import Daemon, StartDaemon, make_first_approver
from fumehood import Client, ControlClient, Refused
from fumehood.cli.main import app
from support.clients import LEAVES_SOCKETS
from support.packages import install
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.row("P4"), *LEAVES_SOCKETS]

TOOLS = """
import time
from pathlib import Path

from fumehood import ToolError, tool

PLACE = Path({place!r})

@tool(sandboxed=False, read_only=True, cacheable=True, cache_key_params=["city"])
def weather(city: str, note: str = "") -> dict:
    \"\"\"Read the weather of a city.\"\"\"
    with open(PLACE / "runs", "a") as file:
        file.write(city + "\\n")
    if city == "Atlantis":
        raise ToolError("CITY_NOT_FOUND", "There is no such city.")
    while city == "Slow" and not (PLACE / "go-on").exists():
        time.sleep(0.01)
    return {{"city": city, "degrees": 21}}

tools = [weather]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory the tool is installed from and records its runs in."""
    install(tmp_path, "sky", TOOLS.format(place=str(tmp_path)))
    return tmp_path


def runs(place: Path) -> list[str]:
    """The cities of all runs, as recorded by the tool."""
    file = place / "runs"
    return file.read_text().split() if file.exists() else []


def start(start_daemon: StartDaemon, place: Path, **settings: str) -> Daemon:
    return start_daemon(variables={"PYTHONPATH": str(place)}, host_tools="weather", **settings)


def command(daemon: Daemon, *arguments: str, typed: str = "") -> Result:
    environment = {"FUMEHOOD_HOME": str(daemon.home), "XDG_RUNTIME_DIR": None}
    return CliRunner(env=environment).invoke(app, list(arguments), input=typed)


def test_equal_call_hits_cache_until_cache_is_cleared(
    start_daemon: StartDaemon, place: Path, home: Path
) -> None:
    credential = make_first_approver(home)
    daemon = start(start_daemon, place)
    client = daemon.client()

    def call(**options: Any) -> dict[str, Any]:
        return client.call("weather", {"city": "Rome", "note": str(options)}, **options).body

    first, second = call(), call(trace_id="mine")
    assert first["metadata"]["cache"] == {"hit": False}
    assert second["data"] == first["data"] == {"city": "Rome", "degrees": 21}
    cache = second["metadata"]["cache"]
    assert cache["hit"] is True
    assert cache["cached_at"] == first["metadata"]["timestamp"]
    assert 290 < cache["ttl_remaining"] <= 300
    assert second["metadata"]["trace_id"] == "mine"
    assert second["metadata"]["call_id"] != first["metadata"]["call_id"]
    assert "cache" not in call(enable_cache=False)["metadata"]
    assert runs(place) == ["Rome", "Rome"]
    listed = json.loads(command(daemon, "calls", "list", "--json").stdout)
    assert [item["cache_hit"] for item in listed] == [False, True, False]

    def cache_command(*arguments: str) -> Any:
        done = command(
            daemon, "cache", *arguments, "--json", "--credential-stdin", typed=f"{credential}\n"
        )
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    shown = cache_command("show")
    assert (shown["entries"], shown["hits"], shown["misses"]) == (1, 1, 1)
    assert 0 < shown["size_bytes"] < 5000
    assert cache_command("clear") == {"cleared": 1}
    wait_until(lambda: "cache.cleared" in daemon.log)
    assert call()["metadata"]["cache"] == {"hit": False}
    assert len(runs(place)) == 3


def test_cache_is_per_principal_and_managed_only_by_administrators(
    start_daemon: StartDaemon, place: Path, home: Path
) -> None:
    credential = make_first_approver(home)
    daemon = start(start_daemon, place)
    with ControlClient(daemon.control, credential=credential) as control:
        token = control.tokens.new("robot").secret
        with Client(daemon.socket) as mine, Client(daemon.socket, credential=token) as robots:
            for client in (mine, robots):
                answer = client.call("weather", {"city": "Rome"})
                assert not answer.metadata.cache.hit
        assert runs(place) == ["Rome", "Rome"]
        assert control.cache.show().entries == 2
        with ControlClient(daemon.control, credential=token) as nobody:
            for ask in (nobody.cache.show, nobody.cache.clear):
                with pytest.raises(Refused) as refused:
                    ask()
                assert refused.value.code == "PERMISSION_DENIED"
        assert control.cache.show().entries == 2
    callers = daemon.client()
    assert callers.request("GET", "/v1/cache").code == "RESOURCE_NOT_FOUND"
    assert callers.request("DELETE", "/v1/cache").code == "RESOURCE_NOT_FOUND"


def test_concurrent_equal_calls_run_once_and_errors_are_not_cached(
    start_daemon: StartDaemon, place: Path
) -> None:
    daemon = start(start_daemon, place)

    def call(city: str) -> Any:
        with Client(daemon.socket) as client:
            return client.call("weather", {"city": city})

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call, "Slow") for _ in range(8)]
        wait_until(lambda: runs(place) == ["Slow"])
        (place / "go-on").touch()
        answers = [one.result(timeout=DEADLINE_S) for one in calls]
    assert all(answer.data["degrees"] == 21 for answer in answers)
    assert sum(answer.metadata.cache.hit for answer in answers) == 7
    assert runs(place) == ["Slow"]
    for _ in range(2):
        failed = call("Atlantis")
        assert failed.error.code == "CITY_NOT_FOUND"
        assert not failed.metadata.cache.hit
    assert runs(place) == ["Slow", "Atlantis", "Atlantis"]


def test_cache_is_empty_after_restart_and_disabled_by_zero_size(
    start_daemon: StartDaemon, place: Path
) -> None:
    for settings in ({}, {"cache__max_mb": "0"}):
        daemon = start(start_daemon, place, **settings)
        with Client(daemon.socket) as client:
            hits = [client.call("weather", {"city": "Rome"}).metadata.cache for _ in range(2)]
        assert [cache is not None and cache.hit for cache in hits] == [False, not settings]
        assert daemon.stop() == 0
    assert runs(place) == ["Rome"] * 3
