"""Code mode: a tool called by a program in a container, against the same call through the socket.

All requests are made in turn (A B A B …) to one daemon. A call from inside is timed inside, by the
program itself. A turn is what an agent without code mode does for the same work: one `POST /call`
of a program for each call of a tool.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.bench_daemon import CALL_BODY, CALL_PATH, Running, bare_client
from benchmarks.line import Line

PATH = "/v1/tools/run_python/call"
EXPRESSION, VALUE = "5! + 2**10", 1144
CALLS = 100
ROUNDS = 20
WARM_UP = 5
ONE = f"tools.calculator({EXPRESSION!r})['value']"
MANY = f"sum(tools.calculator({EXPRESSION!r})['value'] for _ in range({CALLS}))"
TIMED = f"""\
import time
taken = []
for _ in range({CALLS}):
    before = time.perf_counter()
    tools.calculator({EXPRESSION!r})
    taken.append(time.perf_counter() - before)
sorted(taken)[{CALLS // 2}]
"""


def code_mode_lines(daemon: Running) -> Iterator[Line]:
    """Both targets of code mode, and what is left of the second where nothing but HTTP is saved."""
    inside, many, one = (program(daemon, code) for code in (TIMED, MANY, ONE))
    plain = bare_client(daemon.socket, CALL_PATH, CALL_BODY)
    for _ in range(WARM_UP):
        inside(), many(), one(), plain()
    taken: dict[str, list[float]] = {name: [] for name in ("inside", "plain", "many", "turns")}
    for _ in range(ROUNDS):
        taken["inside"].append(inside())
        taken["plain"].append(timed(lambda: calls_of(plain)) / CALLS)
        taken["many"].append(timed(lambda: require(many(), CALLS * VALUE)))
        taken["turns"].append(timed(lambda: [require(one(), VALUE) for _ in range(CALLS)]))
    ms = {name: statistics.median(times) * 1e3 for name, times in taken.items()}
    ratio = ms["inside"] / ms["plain"]
    yield Line(
        "a tool called from inside the sandbox / the same call through the daemon",
        "≤ 2", f"{ratio:.2f} ({ms['inside']:.3f} ms / {ms['plain']:.3f} ms)", ratio <= 2,
    )  # fmt: skip
    ratio = ms["turns"] / ms["many"]
    yield Line(
        f"{CALLS} turns of POST /call, a program with one call each / one program with {CALLS}",
        "≥ 5", f"{ratio:.1f} ({ms['turns']:.0f} ms / {ms['many']:.0f} ms)", ratio >= 5,
    )  # fmt: skip
    ratio = ms["plain"] * CALLS / ms["many"]
    yield Line(f"{CALLS} bare calls through the daemon / that program", "–", f"{ratio:.2f}", None)


def program(daemon: Running, code: str) -> Callable[[], float]:
    """Runs it; its value."""
    body = json.dumps({"arguments": {"code": code, "tools": ["calculator"]}}).encode()
    request = bare_client(daemon.socket, PATH, body)

    def run() -> float:
        answer = json.loads(request())
        if not answer["success"]:
            raise RuntimeError(f"wrong answer: {str(answer['error'])[:200]}")
        value: float = answer["data"]["value"]
        return value

    return run


def calls_of(plain: Callable[[], bytes]) -> None:
    for _ in range(CALLS):
        require(json.loads(plain())["data"]["value"], VALUE)


def require(value: float, expected: float) -> None:
    """A benchmark of wrong answers measures nothing."""
    if value != expected:
        raise RuntimeError(f"wrong answer: {value!r}")


def timed(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before
