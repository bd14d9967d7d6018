"""Runs `tests/frameworks`, the tests against real agent frameworks, in their own environments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import FRAMEWORKS, FRAMEWORKS_MCP1, Daemon, has_disks, shell_path
from support.workshop import workshop

pytestmark = [pytest.mark.needs("docker", "frameworks"), pytest.mark.row("S6", "T8")]

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "frameworks"
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))
LONG = ("test_inspect_ai.py", "test_pydantic_ai.py")
PARTS = {
    "long": (FRAMEWORKS, [file for file in FILES if file in LONG]),
    "other": (FRAMEWORKS, [file for file in FILES if "/" not in file and file not in LONG]),
    "mcp1": (FRAMEWORKS_MCP1, [file for file in FILES if file.startswith("mcp1/")]),
}
"""The Python and the files of each process: few, because importing the shared libraries takes longer
than most tests."""

POLICY = """
[[rules]]
id = "ask-me"
decision = "ask"
tools = ["run_shell"]
[[rules.when]]
argument = "/command"
not = { missing = true }
[[rules.when]]
argument = "/command"
prefix = "echo ask-me"
[[rules]]
id = "deny-me"
decision = "deny"
tools = ["run_shell"]
[[rules.when]]
argument = "/command"
not = { missing = true }
[[rules.when]]
argument = "/command"
prefix = "echo deny-me"
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """One daemon per process, because its tests assume that every pending approval is their own."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    with workshop("python-data", "python", approver=True, policy_file=str(policy)) as running:
        yield running


@pytest.mark.parametrize("part", PARTS)
def test_framework_tests_pass_in_their_own_environment(part: str, daemon: Daemon) -> None:
    environment = {
        **daemon.environment,
        "FUMEHOOD_SOCKET": str(daemon.socket),
        "TEST_CONTROL_SOCKET": str(daemon.control),
        "TEST_CREDENTIAL": daemon.credential,
        "TEST_DISKS": "1" if has_disks() else "",
        "TEST_CI": os.environ.get("CI", ""),
        "PYTHONPATH": str(ROOT / "engine"),
        "PATH": shell_path(),
        # What these libraries would else do with the network.
        "CREWAI_DISABLE_TELEMETRY": "true",
        "CREWAI_TRACING_ENABLED": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        "OTEL_SDK_DISABLED": "true",
    }
    python, files = PARTS[part]
    paths = [TESTS / file for file in files]
    command = [python, "-m", "pytest", "-q", "-c", TESTS / "pytest.ini", *paths]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_every_framework_howto_and_adapter_has_a_test() -> None:
    modules = (ROOT / "engine" / "fumehood" / "integrations").glob("[!_]*.py")
    assert {f"test_{path.name}" for path in modules} <= {Path(file).name for file in FILES}
    tests = "".join((TESTS / file).read_text(encoding="utf-8") for file in FILES)
    pages = {path.stem for path in (ROOT / "docs" / "howto").glob("use-from-*.md")}
    assert [
        page for page in sorted(pages - {"use-from-frameworks"}) if f'page("{page}")' not in tests
    ] == []
