"""The adapters, with the frameworks themselves: `tests/frameworks`, in an environment of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import FRAMEWORKS, Daemon
from support.workshop import workshop

pytestmark = [pytest.mark.needs("docker", "frameworks"), pytest.mark.row("S6", "T8")]

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "frameworks"
FILES = sorted(path.name for path in TESTS.glob("test_*.py"))


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
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    policy = tmp_path_factory.mktemp("policy") / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    with workshop("python-data", "python", approver=True, policy_file=str(policy)) as running:
        yield running


@pytest.mark.parametrize("file", FILES)
def test_adapter_works_with_the_framework_itself(file: str, daemon: Daemon) -> None:
    environment = {
        **daemon.environment,
        "FUMEHOOD_SOCKET": str(daemon.socket),
        "TEST_CONTROL_SOCKET": str(daemon.control),
        "TEST_CREDENTIAL": daemon.credential,
        "PYTHONPATH": str(ROOT / "engine"),
    }
    command = [FRAMEWORKS, "-m", "pytest", "-q", "-c", TESTS / "pytest.ini", TESTS / file]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_every_adapter_is_tested() -> None:
    modules = (ROOT / "engine" / "fumehood" / "integrations").glob("[!_]*.py")
    assert sorted(f"test_{path.name}" for path in modules) == FILES
