"""`run_javascript` and `run_shell` as they are configured by default, against the bare programs."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

from benchmarks.bench_daemon import Running, bare_client
from benchmarks.line import Line

ROUNDS = 30
WARM_UP = 3
PACE_S = 0.2
PROGRAM = "6 * 7"


def javascript_lines(daemon: Running) -> Iterator[Line]:
    """Node that waits for a program, against Node that is started for it; and a shell."""
    code = _call(daemon, "javascript", {"code": PROGRAM})
    node = shutil.which("node")
    with_node = _command(node, "-e", PROGRAM) if node is not None else None
    call_ms, node_ms = _in_turn(code, with_node)
    shown = "run_javascript paced by 200 ms / node -e on the host"
    if node_ms is None:
        yield Line(shown, "≤ 0.3", f"{call_ms:.1f} ms; there is no node on this host", None)
    else:
        ratio = call_ms / node_ms
        yield Line(
            shown, "≤ 0.3", f"{ratio:.2f} ({call_ms:.1f} ms / {node_ms:.1f} ms)", ratio <= 0.3
        )
    back_to_back = statistics.median(_timed_ms(code) for _ in range(ROUNDS))
    yield Line("run_javascript back to back", "–", f"{back_to_back:.1f} ms", None)
    command = _call(daemon, "shell", {"command": "echo 42"})
    shell_ms, bash_ms = _in_turn(command, _command("bash", "-c", "echo 42"), pace_s=0.05)
    yield Line(
        "run_shell paced by 50 ms, and bash -c on the host", "–",
        f"{shell_ms:.1f} ms, {bash_ms:.1f} ms", None,
    )  # fmt: skip


def _call(daemon: Running, language: str, arguments: dict[str, str]) -> Callable[[], None]:
    body = json.dumps({"arguments": arguments}).encode()
    request = bare_client(daemon.socket, f"/v1/tools/run_{language}/call", body)

    def call() -> None:
        data = json.loads(request())["data"]
        if data.get("exit_code") != 0 or data.get("value", 42) != 42:
            raise RuntimeError(f"wrong answer: {data}")

    return call


def _command(*command: str) -> Callable[[], None]:
    def run() -> None:
        subprocess.run(command, capture_output=True, check=True, timeout=60)

    return run


def _in_turn(
    one: Callable[[], None], other: Callable[[], None] | None, pace_s: float = PACE_S
) -> tuple[float, float | None]:
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP + ROUNDS):
        for what, taken in zip((one, other), times, strict=True):
            time.sleep(pace_s)
            if what is not None:
                took_ms = _timed_ms(what)
                if number >= WARM_UP:
                    taken.append(took_ms)
    return statistics.median(times[0]), statistics.median(times[1]) if times[1] else None


def _timed_ms(what: Callable[[], None]) -> float:
    before = time.perf_counter()
    what()
    return (time.perf_counter() - before) * 1e3
