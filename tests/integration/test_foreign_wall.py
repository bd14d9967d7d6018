"""A wall of another package: the example of the documentation, in a real engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from conftest import CLEAN_ENVIRONMENT
from fumehood.core.errors import EndedBy
from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limit, Limits
from fumehood.interpreter.wall import InterpreterWall
from fumehood.testing import FakeWall
from support.cloud import example, example_module, running_service

pytestmark = pytest.mark.anyio

MOST_LINES = 60
PROGRAM = """
import asyncio, json, sys
from fumehood import Engine
async def main():
    properties = {"expression": {"type": "string"}}
    tool = {
        "name": "compute", "description": "Compute.", "executor": "cloud",
        "parameters": {"properties": properties, "required": ["expression"]},
    }
    async with Engine([tool]) as engine:
        answer = await engine.call("compute", {"expression": sys.argv[1]})
        print(json.dumps([answer.model_dump(mode="json"), engine.walls]))
asyncio.run(main())
"""


async def called(site: Path, home: Path, text: str, url: str | None) -> Any:
    """The answer to a call of the example's tool, and the walls, from an engine of its own."""
    info = site / "fumehood_cloud-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "fumehood_cloud.py").write_text(text, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fumehood-cloud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fumehood.parts]\ncloud = fumehood_cloud:PART\n")
    known = {
        **CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home), "FUMEHOOD_PARTS": "cloud",
        "PYTHONPATH": str(site), **({"FUMEHOOD_CLOUD__URL": url} if url is not None else {}),
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, "6 * 7"]
    done = await anyio.run_process(command, env=known, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.decode()


async def test_tool_of_the_example_runs_at_its_service(home: Path, tmp_path: Path) -> None:
    wall = example().split("class CloudWall")[1].split("class CloudExecutor")[0]
    assert wall.count("\n") <= MOST_LINES
    async with InterpreterWall() as interpreter, running_service(interpreter) as url:
        answer, walls = await called(tmp_path, home, example(), url)
    assert answer["data"]["value"] == 42, answer
    assert answer["metadata"]["sandbox"]["isolation"] == "call"
    assert walls["cloud"]["ready"] is True
    assert walls["cloud"]["enforced"] == sorted(Limit)


@pytest.mark.parametrize("enforced", [[], [limit for limit in Limit if limit != "network"], "no"])
async def test_service_that_enforces_too_little_is_never_used(
    home: Path, tmp_path: Path, enforced: Any
) -> None:
    wall = FakeWall()
    async with running_service(wall, enforced) as url:
        answer, walls = await called(tmp_path, home, example(), url)
    assert answer["error"]["code"] == "SANDBOX_UNAVAILABLE"
    assert walls["cloud"]["ready"] is False
    assert wall.runs == []


async def test_wall_that_requires_nothing_stops_the_start(home: Path, tmp_path: Path) -> None:
    lying = example().replace("EVERY = frozenset(Limit)", "EVERY = frozenset()")
    async with running_service(FakeWall(), []) as url:
        said = await called(tmp_path, home, lying, url)
    assert "Cloud adds the wall 'cloud', which does not require cpu_time, disk" in said


async def test_without_settings_no_other_wall_is_used(home: Path, tmp_path: Path) -> None:
    answer, walls = await called(tmp_path, home, example(), None)
    assert answer["error"]["code"] == "SANDBOX_UNAVAILABLE"
    assert "no cloud wall" in answer["error"]["message"]
    assert list(walls) == ["interpreter"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b'{"ended_by": "ok"}', b"[" * 100_000, b"x" * 200_000,
        b'{"ended_by": "fine", "cpu_ms": 1, "result": {}, "message": null}',
        b'{"ended_by": "ok", "cpu_ms": "much", "result": {}, "message": null}',
    ],
    ids=["empty", "list", "fields", "deep", "long", "ending", "time"],
)  # fmt: skip
async def test_answer_that_cannot_be_read_is_never_a_success(body: bytes) -> None:
    limits = Limits(wall_s=5, cpu_s=5, memory_mb=64, output_bytes=65_536)
    async with (
        running_service(FakeWall(), answer=body) as url,
        example_module().CloudWall(url, FakeWall().limits) as wall,
        wall.lease(TrustDomain("uid:1"), fresh=True) as lease,
    ):
        ending = await lease.run("calculator", {"expression": "1"}, limits)
    assert (ending.ended_by, ending.result) == (EndedBy.SANDBOX_LOST, None)
