"""A hit in the result cache, beside an empty request."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench_daemon import Request, bare_client, run_daemon, run_floor
from benchmarks.line import Line

ROUNDS = 9
PAIRS = 600
"""In each round. Of the rounds the one in the middle is taken: a machine's bad seconds count less."""
WARM_UP = 200
ARGUMENTS = {"expression": "5! + 2**10"}
MODULE = """
from fumehood import ToolDefinition

sums = ToolDefinition(
    name="cached_sums", description="Add numbers.", executor="expression", read_only=True,
    cacheable=True, cache_ttl=86_400,
    parameters={"properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
"""


def cache_lines() -> Iterator[Line]:
    """Every line of this file."""
    package = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        _write_package(package)
        with run_daemon({"PYTHONPATH": str(package)}) as daemon, run_floor() as floor:
            empty = bare_client(floor.socket, "/v1/empty", b"{}")
            address = "/v1/tools/cached_sums/call"
            hit = bare_client(daemon.socket, address, json.dumps({"arguments": ARGUMENTS}).encode())
            _check(hit(), is_hit=False)
            _paired(empty, hit, WARM_UP)
            rounds = [_paired(empty, hit, PAIRS) for _ in range(ROUNDS)]
    finally:
        shutil.rmtree(package, ignore_errors=True)
    ratio, hit_ms, empty_ms = sorted(rounds)[ROUNDS // 2]
    yield Line(
        "cache hit / empty request, both with the standard library's client",
        "≤ 1.3",
        f"{ratio:.2f} ({hit_ms:.3f} ms / {empty_ms:.3f} ms)",
        ratio <= 1.3,
    )


def _write_package(folder: Path) -> None:
    (folder / "cached_tools.py").write_text(MODULE, encoding="utf-8")
    about = folder / "cached_tools-1.0.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: cached-tools\nVersion: 1.0.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(
        "[fumehood.tools]\nsums = cached_tools:sums\n", encoding="utf-8"
    )


def _paired(empty: Request, hit: Request, pairs: int) -> tuple[float, float, float]:
    """The ratio of two requests made in turn, and the medians of both in milliseconds."""
    times: dict[Request, list[float]] = {empty: [], hit: []}
    for _ in range(pairs):
        for request, taken in times.items():
            before = time.perf_counter()
            answer = request()
            taken.append((time.perf_counter() - before) * 1e3)
        _check(answer, is_hit=True)
    empty_ms, hit_ms = statistics.median(times[empty]), statistics.median(times[hit])
    return hit_ms / empty_ms, hit_ms, empty_ms


def _check(answer: bytes, *, is_hit: bool) -> None:
    envelope = json.loads(answer)
    if envelope["data"] != {"value": 1144, "text": "1144"}:
        raise RuntimeError(f"wrong answer: {answer[:200]!r}")
    if envelope["metadata"]["cache"]["hit"] is not is_hit:
        raise RuntimeError("the answer is not from where it should be")
