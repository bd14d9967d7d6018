"""The soak of many living sessions, half of them with a disk: two minutes in `make soak`, or as long
as the command line says: `PYTHONPATH=tests python -m benchmarks.soak_living MINUTES`.

Each session counts in a variable and in a file. At any moment one is called, paused, stopped,
copied, restored, forked, or replaced. What the daemon and the host hold is measured at the same
number of sessions, in the first and in the last third.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import psutil

from benchmarks.bench_daemon import MB, SMALLEST_IMAGE, Running, run_daemon, written_bytes
from benchmarks.soak_containers import containers_of
from fumehood.client import Client
from fumehood.storage.directory import owner_id

SESSIONS = 30
LOOK_S = 5.0
MAX_GROWTH_MB = 6.0
BETWEEN_S = 0.1
"""Seconds between two acts, so that the hour is one of sessions and not of the processor alone."""

SETTINGS = {
    **SMALLEST_IMAGE, "FUMEHOOD_CONTAINER__POOL_MIN": "0", "FUMEHOOD_SESSIONS__MAX": "40",
    "FUMEHOOD_SESSIONS__MAX_PER_PRINCIPAL": "40", "FUMEHOOD_SESSIONS__PAUSE_SECONDS": "10",
}  # fmt: skip

BEGIN = "n = 0\nopen('n', 'w').write('0')"
COUNT = (
    "n = globals().get('n', -1) + 1\nm = int(open('n').read()) + 1\nopen('n', 'w').write(str(m))\n"
    "[n, m]"
)


@dataclass
class Living:
    """A session, what its file must say, and its variable if that is still there."""

    id: str
    has_disk: bool
    in_file: int = 0
    in_variable: int | None = 0


@dataclass(frozen=True)
class Held:
    """What the daemon and the host hold for the sessions."""

    memory_mb: float
    files: int
    containers: int
    devices: int
    disks_mb: float


def report_living(chance: random.Random, minutes: float = 2.0) -> bool:
    """Run it all and print a section of the report; whether everything held."""
    started, done, wrong, looks = time.monotonic(), Counter[str](), list[str](), list[Held]()
    with run_daemon(SETTINGS) as daemon, Client(daemon.socket) as client:
        owner = owner_id(daemon.socket.parent)
        living = [begin(client, n % 2 == 0 and os.geteuid() == 0) for n in range(SESSIONS)]
        next_look = 0.0
        while time.monotonic() < started + 60 * minutes:
            one = chance.choice(living)
            acts = [count, count, count, count, pause, replace]
            act = chance.choice(acts + [stop, go_back, fork] * one.has_disk)
            done[act.__name__] += 1
            fault = act(client, one)
            wrong += [f"{act.__name__}: {fault}"] * bool(fault)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_S
                looks.append(look(daemon, owner))
            time.sleep(BETWEEN_S)
        for one in living:
            client.end_session(one.id)
        time.sleep(LOOK_S)
        left = look(daemon, owner)
    third = len(looks) // 3
    before, after = middle(looks[third // 2 : third]), middle(looks[-third:])
    verdicts = {
        "every variable and every file was as it must be": not wrong,
        f"the daemon's memory is flat (≤ {MAX_GROWTH_MB:g} MB)":
            after.memory_mb - before.memory_mb <= MAX_GROWTH_MB,
        "descriptors are flat": after.files <= before.files + 3,
        "containers and loop devices do not grow":
            after.containers <= before.containers + 4 and after.devices <= before.devices + 4,
        "what the disks take is flat": after.disks_mb <= 1.2 * before.disks_mb + 5,
        "no container, disk or device is left":
            (left.containers, left.devices, left.disks_mb) == (0, 0, 0),
    }  # fmt: skip
    print("\n## Living sessions\n")
    acts_done = ", ".join(f"{name} {number}" for name, number in sorted(done.items()))
    print(f"{SESSIONS} sessions for {minutes:g} minutes: {acts_done}.\n")
    print("| what | first third | last third |\n|---|---|---|")
    for name in ("memory_mb", "files", "containers", "devices", "disks_mb"):
        print(f"| {name} | {getattr(before, name):.1f} | {getattr(after, name):.1f} |")
    print()
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for fault in wrong[:10]:
        print(f"- wrong: {fault[:300]}")
    return all(verdicts.values())


def begin(client: Client, has_disk: bool) -> Living:
    made = client.create_session(memory_mb=128, disk_mb=16 if has_disk else None)
    assert client.call("run_python", {"code": BEGIN}, session_id=made.id).error is None
    return Living(made.id, has_disk)


def count(client: Client, one: Living) -> str | None:
    answer = client.call("run_python", {"code": COUNT}, session_id=one.id)
    if answer.error is not None:
        return answer.error.message
    one.in_file += 1
    one.in_variable = 0 if one.in_variable is None else one.in_variable + 1
    found, must = answer.data["value"], [one.in_variable, one.in_file]
    return None if found == must else f"{found} instead of {must}"


def pause(client: Client, one: Living) -> None:
    client.pause_session(one.id)


def stop(client: Client, one: Living) -> None:
    client.stop_session(one.id)
    one.in_variable = None


def go_back(client: Client, one: Living) -> str | None:
    """Restore what was before one more call."""
    made = client.snapshot_session(one.id)
    fault = count(client, one)
    client.restore_session(one.id, made.id)
    client.delete_snapshot(one.id, made.id)
    one.in_file, one.in_variable = one.in_file - 1, None
    return fault


def fork(client: Client, one: Living) -> str | None:
    forks = client.fork_session(one.id, count=2)
    faults = [count(client, Living(made.id, True, one.in_file, None)) for made in forks]
    for made in forks:
        client.end_session(made.id)
    return next((fault for fault in faults if fault), None)


def replace(client: Client, one: Living) -> None:
    client.end_session(one.id)
    new = begin(client, one.has_disk)
    one.id, one.in_file, one.in_variable = new.id, 0, 0


def look(daemon: Running, owner: str) -> Held:
    home = daemon.socket.parent
    disks = home / "disks"
    taken = [path.stat().st_blocks * 512 for path in disks.iterdir()] if disks.exists() else []
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    return Held(
        written_bytes([daemon.process]) / MB,
        psutil.Process(daemon.process.pid).num_fds(),
        len(containers_of(owner)),
        loops.count(str(home)),
        sum(taken) / MB,
    )


def middle(looks: list[Held]) -> Held:
    """The median of each number."""
    fields = zip(
        *((h.memory_mb, h.files, h.containers, h.devices, h.disks_mb) for h in looks), strict=True
    )
    return Held(*(statistics.median(values) for values in fields))  # type: ignore[arg-type]


if __name__ == "__main__":
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    sys.exit(not report_living(random.Random(seed), float(sys.argv[1])))
