"""`make soak`: hours of use in minutes. Calls, attacks, deaths and rude clients, mixed.

Then a writer of the state is killed again and again (`soak_crashes`), and an engine while humans
approve its calls (`soak_approvals`) or have very many to approve (`soak_pending`). Prints a report
in Markdown and exits 1 where an answer was wrong or something grew. The mix is drawn from a fixed
seed; the run is bounded by its number of rounds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.bench_daemon import CALL_PATH, JSON, Running, bare_client, run_daemon
from benchmarks.run import Footprint, footprint
from benchmarks.soak_approvals import report_approvals
from benchmarks.soak_cluster import report_cluster
from benchmarks.soak_containers import report_containers
from benchmarks.soak_crashes import report_crashes, report_every_commit, report_left_to_soak
from benchmarks.soak_killed import report_killed
from benchmarks.soak_living import report_living
from benchmarks.soak_pending import report_pending
from benchmarks.soak_sessions import report_sessions
from benchmarks.soak_standby import report_standby

ROUNDS = 200
CALLS_PER_ROUND = 300
SETTLING_ROUNDS = 40
"""Until the database has filled its page cache, a few megabytes, once."""

MAX_GROWTH_MB = 3.0
MAX_CALLS_TO_NOTICE = 100
"""Residents answer without the supervisor (ADR 0006), so a dead zygote costs its one answer
only when the supervisor has noticed, which on a busy machine is some calls later."""


GOOD = {"5! + 2**10": 1144, "sqrt(16)": 4.0, "sum([1, 2, 3])": 6, "comb(52, 5)": 2598960}
BAD = {
    "9**9**9": "SANDBOX_VIOLATION",
    "().__class__": "SANDBOX_VIOLATION",
    "1/0": "EXECUTION_ERROR",
    "2^3": "INVALID_PARAMS",
    "[10**4299]*9999": "OUTPUT_LIMIT_EXCEEDED",
}
DEATHS = ("supervisor", "zygote", "child")


@dataclass
class Tally:
    """What happened."""

    calls: int = 0
    wrong: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    calls_since_death: int = 1_000_000
    lost_since_death: int = 0
    killed_last: int = 0


def main() -> int:
    chance = random.Random(20261121)
    tally = Tally()
    started = time.monotonic()
    with run_daemon() as daemon:
        for _ in range(SETTLING_ROUNDS):
            play_round(daemon, chance, tally, deadly=False)
        before = footprint(daemon)
        for _ in range(ROUNDS):
            play_round(daemon, chance, tally, deadly=True)
        for _ in range(SETTLING_ROUNDS):
            play_round(daemon, chance, tally, deadly=False)
        after = footprint(daemon)
        family = [daemon.process, *daemon.guest()]
    seconds = time.monotonic() - started
    left = [process for process in family if psutil.pid_exists(process.pid) and is_running(process)]
    is_sound = report(tally, before, after, left, seconds)
    crashes_are_sound = report_crashes(chance) & report_every_commit()
    approvals_are_sound = report_approvals(chance) & report_pending()
    containers_are_sound = report_containers(chance)
    sessions_are_sound = report_sessions(chance) & report_living(chance) & report_killed(chance)
    parts = (
        is_sound, crashes_are_sound, approvals_are_sound, containers_are_sound,
        sessions_are_sound, report_standby(chance), report_cluster(chance), report_left_to_soak(),
    )  # fmt: skip
    return 0 if all(parts) else 1


def play_round(daemon: Running, chance: random.Random, tally: Tally, *, deadly: bool) -> None:
    """Some hundred calls, a few rude clients and, in deadly rounds, one death in between."""
    dies_at = chance.randrange(CALLS_PER_ROUND) if deadly else -1
    for number in range(CALLS_PER_ROUND):
        if number == dies_at:
            what, tally.killed_last = kill_something(daemon, chance)
            tally.deaths[what] += 1
            tally.calls_since_death = tally.lost_since_death = 0
        one_call(daemon, chance, tally)
    for _ in range(3):
        leave_in_the_middle(daemon.socket, chance)


def one_call(daemon: Running, chance: random.Random, tally: Tally) -> None:
    is_good = chance.random() < 0.8
    expression, expected = chance.choice(list((GOOD if is_good else BAD).items()))
    body = json.dumps({"arguments": {"expression": expression}}).encode()
    answer = json.loads(bare_client(daemon.socket, CALL_PATH, body)())
    tally.calls += 1
    code = answer["error"]["code"] if answer["error"] else "OK"
    tally.codes[code] += 1
    got = answer["data"].get("value") if is_good else code
    tally.calls_since_death += 1
    if got != expected and not is_excused(tally, code):
        tally.wrong.append(f"{expression}: {answer['error'] or answer['data']}")


def is_excused(tally: Tally, code: str) -> bool:
    """Each process that died may cost one answer: that of the call that met it."""
    if code != "SANDBOX_UNAVAILABLE" or tally.calls_since_death > MAX_CALLS_TO_NOTICE:
        return False
    tally.lost_since_death += 1
    return tally.lost_since_death <= tally.killed_last


def kill_something(daemon: Running, chance: random.Random) -> tuple[str, int]:
    """End one process of the guest, or all children; what, and how many processes that was."""
    supervisor = daemon.process.children()[0]
    inside = sorted(supervisor.children(), key=lambda process: process.create_time())
    what = chance.choice(DEATHS)
    victims = {"supervisor": [supervisor], "zygote": inside[:1], "child": inside[1:]}[what]
    for victim in victims:
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return what, len(victims)


def leave_in_the_middle(path: Path, chance: random.Random) -> None:
    head = f"POST {CALL_PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: {JSON['content-type']}\r\n"
    whole = (
        head + "content-length: 38\r\n\r\n" + '{"arguments": {"expression": "2 + 2"}}'
    ).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(whole[: chance.randrange(len(whole) + 1)])


def is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def report(
    tally: Tally, before: Footprint, after: Footprint, left: list[psutil.Process], seconds: float
) -> bool:
    grown = after.written_mb - before.written_mb
    verdicts = {
        "every answer was right": not tally.wrong,
        f"memory is flat (≤ {MAX_GROWTH_MB:g} MB)": grown <= MAX_GROWTH_MB,
        "descriptors are flat": after.files <= before.files,
        "processes are flat": after.processes <= before.processes,
        "nothing is left after the stop": not left,
    }
    print("# Soak report\n")
    print(f"{tally.calls} calls in {seconds:.0f} s, {sum(tally.deaths.values())} processes killed "
          f"({', '.join(f'{n} × {what}' for what, n in sorted(tally.deaths.items()))}).\n")  # fmt: skip
    print("| code | answers |\n|---|---|")
    for code, count in sorted(tally.codes.items()):
        print(f"| {code} | {count} |")
    print("\n| what | before | after |\n|---|---|---|")
    print(f"| written private memory, MB | {before.written_mb:.1f} | {after.written_mb:.1f} |")
    print(f"| open descriptors | {before.files} | {after.files} |")
    print(f"| processes | {before.processes} | {after.processes} |\n")
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for wrong in tally.wrong[:10]:
        print(f"- wrong: {wrong[:300]}")
    return all(verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
