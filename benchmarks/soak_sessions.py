"""The sessions' part of the soak: thousands of calls on variables whose values are known.

Each session counts. Whatever a call does besides (fails, is killed, leaves threads and processes
behind), the count must be what its answer says of the variables: kept, or those from before.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.bench_daemon import (
    MB,
    SMALLEST_IMAGE,
    Running,
    bare_client,
    run_daemon,
    written_bytes,
)
from benchmarks.soak_containers import containers_of, first_processes
from fumehood.storage.directory import owner_id

SESSIONS = 3
CALLS = 2000
SETTLING_CALLS = 200
NEW_ONE_EVERY = 150
"""Calls after which a session is ended and another begun."""

MAX_GROWTH_MB = 4.0
MAX_GUEST_GROWTH_MB = 2.0

PYTHON = "/v1/tools/run_python/call"
SHELL = "/v1/tools/run_shell/call"

PROGRAMS: dict[str, tuple[str, str, bool, int]] = {
    "counts": ("n += 1", "OK", True, 60),
    "counts and fails": ("n += 1\n1 / 0", "EXECUTION_ERROR", True, 8),
    "counts and exits": ("n += 1\nraise SystemExit(2)", "EXECUTION_ERROR", True, 4),
    "ends its process": ("n += 1\nimport os\nos._exit(3)", "EXECUTION_ERROR", False, 4),
    "takes too long": ("n += 1\nwhile True: pass", "TIMEOUT", False, 3),
    "takes all memory": (
        "n += 1\nheld = []\nwhile True: held.append(bytearray(1 << 22))",
        "MEMORY_LIMIT_EXCEEDED", False, 1,
    ),
    "prints too much": ("n += 1\nwhile True: print('x' * 1000)", "OUTPUT_LIMIT_EXCEEDED", False, 2),
    "leaves a thread": (
        "n += 1\nfrom threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()",
        "OK", True, 5,
    ),
    "leaves a process": ("n += 1\nimport subprocess\nsubprocess.Popen(['sleep', '1000'])",
                         "OK", True, 5),
    "writes a file": ("n += 1\nopen(f'{n}.txt', 'w').write('x')", "OK", True, 8),
}  # fmt: skip
"""By name: the program, the code of its answer, whether its count stays, its weight in the mix."""


@dataclass
class Tally:
    """What happened."""

    calls: int = 0
    sessions: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Counting:
    """A session, and what its count must be."""

    id: str
    n: int = 0
    calls: int = 0


@dataclass(frozen=True)
class Traces:
    """What the daemon has, and what the oldest session's first process has."""

    files: int
    written_mb: float
    guest_files: int
    guest_mb: float


def report_sessions(chance: random.Random) -> bool:
    """Run it all and print a section of the report; whether everything held."""
    started = time.monotonic()
    tally = Tally()
    with run_daemon(SMALLEST_IMAGE) as daemon:
        counting = [begin(daemon, tally) for _ in range(SESSIONS)]
        oldest = first_processes(owner_id(daemon.socket.parent))
        for _ in range(SETTLING_CALLS):
            one_call(daemon, chance.choice(counting), chance, tally)
        before = traces(daemon, oldest)
        for _ in range(CALLS):
            one = chance.choice(counting)
            if one is not counting[0] and one.calls >= NEW_ONE_EVERY:
                ask(daemon, "DELETE", f"/v1/sessions/{one.id}")
                counting[counting.index(one)] = one = begin(daemon, tally)
            one_call(daemon, one, chance, tally)
        after = traces(daemon, oldest)
        for one in counting:  # a stopped daemon would leave them to the next one
            ask(daemon, "DELETE", f"/v1/sessions/{one.id}")
        owner = owner_id(daemon.socket.parent)
    seconds = time.monotonic() - started
    left = len(containers_of(owner))
    verdicts = {
        "every answer and every count was as it must be": not tally.wrong,
        f"the daemon's memory is flat (≤ {MAX_GROWTH_MB:g} MB)":
            after.written_mb - before.written_mb <= MAX_GROWTH_MB,
        "the daemon's descriptors are flat": after.files <= before.files,
        f"so is the memory of a session's supervisor (≤ {MAX_GUEST_GROWTH_MB:g} MB)":
            after.guest_mb - before.guest_mb <= MAX_GUEST_GROWTH_MB,
        "so are its descriptors": after.guest_files <= before.guest_files,
        "no container is left after the stop": not left,
    }  # fmt: skip
    print("\n## Sessions\n")
    print(f"{tally.calls} calls in {tally.sessions} sessions in {seconds:.0f} s.\n")
    print("| code | answers |\n|---|---|")
    for code, count in sorted(tally.codes.items()):
        print(f"| {code} | {count} |")
    print("\n| variables | answers |\n|---|---|")
    for state, count in sorted(tally.states.items()):
        print(f"| {state} | {count} |")
    print("\n| what | before | after |\n|---|---|---|")
    print(f"| the daemon's written private memory, MB | {before.written_mb:.1f} "
          f"| {after.written_mb:.1f} |")  # fmt: skip
    print(f"| its open descriptors | {before.files} | {after.files} |")
    print(f"| the oldest session's supervisor, MB | {before.guest_mb:.1f} "
          f"| {after.guest_mb:.1f} |")  # fmt: skip
    print(f"| its open descriptors | {before.guest_files} | {after.guest_files} |\n")
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for wrong in tally.wrong[:10]:
        print(f"- wrong: {wrong[:300]}")
    return all(verdicts.values())


def begin(daemon: Running, tally: Tally) -> Counting:
    made = ask(daemon, "POST", "/v1/sessions", {"memory_mb": 128})
    tally.sessions += 1
    one = Counting(made["data"]["session"]["id"])
    ask(daemon, "POST", PYTHON, call(one, "n = 0"))
    return one


def one_call(daemon: Running, one: Counting, chance: random.Random, tally: Tally) -> None:
    """A call of any kind, and then a look at the count, also through another language."""
    name = chance.choices(list(PROGRAMS), [weight for *_, weight in PROGRAMS.values()])[0]
    code, expected, stays, _ = PROGRAMS[name]
    timeout_s = 0.4 if expected == "TIMEOUT" else 20
    answer = ask(daemon, "POST", PYTHON, call(one, code, timeout_s))
    got = answer["error"]["code"] if answer["error"] else "OK"
    fields: dict[str, Any] = answer["data"] if got == "OK" else answer["error"].get("details") or {}
    state = fields.get("session", {}).get("state")
    one.n += stays
    one.calls += 1
    tally.calls += 1
    tally.codes[got] += 1
    tally.states[str(state)] += 1
    if (got, state) != (expected, "kept" if stays else "rolled_back"):
        tally.wrong.append(f"{name}: {state}, {answer['error'] or answer['data']}")
    seen = ask(daemon, "POST", PYTHON, call(one, "n"))["data"].get("value")
    if seen != one.n:
        tally.wrong.append(f"after {name}: the count is {seen} and must be {one.n}")
        one.n = seen if isinstance(seen, int) else 0
    if chance.random() < 0.05:
        shell = {"arguments": {"command": "ls | wc -l"}, "options": {"session_id": one.id}}
        if not ask(daemon, "POST", SHELL, shell)["success"]:
            tally.wrong.append("a command failed")


def call(one: Counting, code: str, timeout_s: float = 20) -> dict[str, Any]:
    options = {"session_id": one.id, "timeout_seconds": timeout_s}
    return {"arguments": {"code": code}, "options": options}


def ask(
    daemon: Running, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    content = None if body is None else json.dumps(body).encode()
    answer: dict[str, Any] = json.loads(bare_client(daemon.socket, path, content, method)())
    return answer


def traces(daemon: Running, supervisors: list[int]) -> Traces:
    time.sleep(2)  # what is being replaced is counted once, not twice
    oldest = psutil.Process(min(supervisors))
    return Traces(
        files=daemon.process.num_fds(),
        written_mb=written_bytes([daemon.process]) / MB,
        guest_files=oldest.num_fds(),
        guest_mb=written_bytes([oldest]) / MB,
    )
