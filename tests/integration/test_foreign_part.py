"""A part of another package: the example of the documentation, in a real daemon."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT, make_first_approver
from fumehood import Client, ControlClient
from support.http import SocketClient
from support.pages import TOML, read
from support.wait import wait_until
from upstream import Upstream, running_upstream

PAGE = "docs/howto/add-a-part.md"
MOST_LINES = 100
POLICY = """
[[rules]]
id = "ask"
decision = "ask"
tools = ["calculator"]
"""


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with running_upstream() as running:
        yield running


def example() -> str:
    (text,) = re.findall(r"^```python example\n(.*?)^```$", read(PAGE), re.MULTILINE | re.DOTALL)
    return str(text)


def installed(directory: Path) -> Path:
    """The example's package as pip would install it."""
    info = directory / "fumehood_slack-1.0.dist-info"
    info.mkdir(parents=True)
    (directory / "fumehood_slack.py").write_text(example(), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fumehood-slack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fumehood.parts]\nslack = fumehood_slack:PART\n")
    return directory


def environment(home: Path, site: Path, config: str) -> dict[str, str]:
    file = home / "config.toml"
    file.write_text(config, encoding="utf-8")
    known = {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "FUMEHOOD_CONFIG": str(file)}
    return {**known, "PYTHONPATH": str(site)}


def fumehood(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command from nothing: the parts are read when its process begins."""
    command = [sys.executable, "-m", "fumehood.cli.main", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)


def test_example_posts_a_waiting_call(home: Path, tmp_path: Path, upstream: Upstream) -> None:
    assert example().count("\n") <= MOST_LINES
    (config,) = TOML.findall(read(PAGE))
    url = f"http://127.0.0.1:{upstream.port}/hook"
    config = re.sub(r'url = ".*"', f'url = "{url}"', config)
    variables = environment(home, installed(tmp_path / "site"), config)
    variables["FUMEHOOD_POLICY_FILE"] = str(home / "policy.toml")
    (home / "policy.toml").write_text(POLICY)
    shown = json.loads(fumehood(variables, "doctor", "--parts", "--json").stdout)
    assert {"name": "slack", "adds": {"settings": ["slack"], "in the engine": ["Slack"]}} in shown[
        "parts"
    ]
    rows = json.loads(fumehood(variables, "config", "show", "--json").stdout)["settings"]
    assert rows["slack.url"]["value"] == "http://127.0.0.1/***"
    credential = make_first_approver(home)
    command = [sys.executable, "-m", "fumehood.cli.main", "serve"]
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(command, env=variables, stderr=log) as daemon,
    ):
        try:
            wait_until(
                lambda: daemon.poll() is not None or SocketClient.answers(home / "engine.sock")
            )
            with Client(home / "engine.sock") as client:
                refused = client.call("calculator", {"expression": "<!channel>"})
            assert refused.error is not None, (home / "log").read_text()
            assert refused.error.code == "REQUIRES_HUMAN_APPROVAL"
            wait_until(lambda: upstream.count("/hook") >= 1)
            (message,) = [request.json["text"] for request in upstream.requests]
            assert str(refused.error.approval_id) in message
            assert "*calculator* waits for approval" in message
            assert "&lt;!channel&gt;" in message
            with ControlClient(home / "control.sock", credential=credential) as control:
                control.approvals.deny(refused.error.approval_id, version=None)
        finally:
            daemon.terminate()
    assert daemon.returncode == 0
    assert upstream.count("/hook") == 1


def test_part_that_nobody_names_is_not_imported(home: Path, tmp_path: Path) -> None:
    site = installed(tmp_path / "site")
    (site / "fumehood_slack.py").write_text("raise SystemExit('imported')")
    variables = environment(home, site, "")
    shown = json.loads(fumehood(variables, "doctor", "--parts", "--json").stdout)
    assert shown["not_loaded"] == ["slack (fumehood_slack:PART)"]
    assert "slack" not in [part["name"] for part in shown["parts"]]
    (home / "config.toml").write_text("[slack]\nurl = 'https://example.org'")
    refused = fumehood(variables, "config", "show")
    assert refused.returncode != 0
    assert "slack: there is no such key" in refused.stderr


def test_named_part_that_is_not_installed_stops_the_daemon(home: Path) -> None:
    variables = environment(home, Path(os.devnull), 'parts = ["slack"]')
    refused = fumehood(variables, "serve")
    assert refused.returncode == 4
    assert "No installed package has the part 'slack'" in refused.stderr
