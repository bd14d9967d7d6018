"""The sessions' crash harness: a daemon is killed at random moments while sessions change.

One session in memory and, where the engine runs as root, one with a disk and a package are made,
paused, stopped, resumed, called, copied, restored, forked and ended beside others. After each death
the next daemon must have what it promised: the files, and of the session in memory also the
variables. At the end nothing is left.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.bench_daemon import SMALLEST_IMAGE, run_daemon
from benchmarks.soak_containers import containers_of
from fumehood.client import Client
from fumehood.storage.directory import owner_id
from support.wheels import only_from, write_wheel

KILLS = 200
FEW = 3
"""Snapshots that stay from life to life."""

FORK = "fork"
PACKAGE = "killed"
AT_ONCE = 2
LONGEST_S = 0.5
"""Most seconds from the beginning of two changes to the death."""

LEAVING_S = 5

Act = Callable[[Client], object]


def report_killed(chance: random.Random) -> bool:
    """Kill, look, and print a section of the report; whether every promise was kept."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    write_wheel(home / "index", PACKAGE)
    settings = {
        **SMALLEST_IMAGE, **only_from(home / "index"), "FUMEHOOD_PACKAGES__ALLOW": '["*"]',
        "FUMEHOOD_HOME": str(home), "FUMEHOOD_CONTAINER__POOL_MIN": "0"
    }  # fmt: skip
    socket, started, faults = home / "engine.sock", time.monotonic(), list[str]()
    names = ["memory", "disk"] if os.geteuid() == 0 else ["memory"]
    with run_daemon(settings, socket=socket) as daemon, Client(socket) as client:
        for name in names:
            create(client, name)
            write = {"code": "x = 1\nopen('a', 'w').write('kept')"}
            client.call("run_python", write, session_id=client.session(name).id)
        daemon.process.kill()
    for life in range(KILLS):
        with run_daemon(settings, socket=socket) as daemon, Client(socket) as client:
            there = [one.name for one in client.sessions() if not one.state.is_over]
            faults += [
                f"life {life}: {name}: {why}"
                for name in (*names, f"{FORK}-1", f"{FORK}-2")
                if (name in names or name in there) and (why := fault(client, name))
            ]
            while len(snapshots := client.snapshots(names[-1])) > FEW:
                client.delete_snapshot(names[-1], snapshots[0].id)
            acts = chance.choices(changes(names), k=AT_ONCE)
            threads = [threading.Thread(target=tried, args=(act, socket)) for act in acts]
            for thread in threads:
                thread.start()
            time.sleep(chance.uniform(0, LONGEST_S))
            daemon.process.kill()
            for thread in threads:
                thread.join()
    with run_daemon(settings, socket=socket), Client(socket) as client:
        for session in client.sessions():
            client.end_session(session.id)
        time.sleep(LEAVING_S)
    disks = os.listdir(home / "disks") if (home / "disks").exists() else []
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True).stdout
    left = [
        *map(str, containers_of(owner_id(home))),
        *disks,
        *[one for one in loops.splitlines() if str(home) in one],
    ]
    shutil.rmtree(home, ignore_errors=True)
    verdicts = {
        "every file and every variable that was promised is there": not faults,
        "no container, disk or loop device is left": not left,
    }
    print("\n## Sessions whose daemon is killed\n")
    print(
        f"{KILLS} daemons killed in {time.monotonic() - started:.0f} s, sessions: {', '.join(names)}.\n"
    )
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for one in [*faults, *left][:10]:
        print(f"- wrong: {one[:300]}")
    return all(verdicts.values())


def changes(names: list[str]) -> list[Act]:
    """What may happen when the daemon dies."""
    acts: list[Act] = [
        lambda client: create(client, "other"),
        lambda client: client.end_session("other"),
    ]
    for name in names:
        acts += [
            lambda client, name=name: client.pause_session(name),
            lambda client, name=name: client.resume_session(name),
            lambda client, name=name: look(client, name),
        ]
    if "disk" in names:
        acts += [
            *[lambda client: client.stop_session("disk")] * 2,
            lambda client: client.snapshot_session("disk", "one"),
            lambda client: client.snapshot_session("disk"),
            lambda client: client.delete_snapshot("disk", "one"),
            lambda client: client.restore_session("disk", "one"),
            lambda client: client.fork_session("disk", name=FORK, count=2),
            lambda client: client.end_session(f"{FORK}-1"),
            lambda client: look(client, f"{FORK}-2"),
            lambda client: client.end_session(f"{FORK}-2"),
            lambda client: client.end_session(client.create_session(packages=[PACKAGE]).id),
        ]
    return acts


def create(client: Client, name: str) -> None:
    has_disk = name != "memory" and os.geteuid() == 0
    client.create_session(
        name=name,
        memory_mb=128,
        disk_mb=16 if has_disk else None,
        packages=[PACKAGE] if name == "disk" else None,
    )


def look(client: Client, name: str) -> Any:
    code = "['x' in globals(), open('a').read()]"
    if name not in ("memory", "other"):
        code = f"import {PACKAGE}\n{code}"
    return client.call("run_python", {"code": code}, session_id=client.session(name).id)


def fault(client: Client, name: str) -> str | None:
    """What is wrong with a session, or None. Only one in memory promises its variables."""
    envelope = look(client, name)
    if envelope.error is not None:
        return envelope.error.message
    has_variables, content = envelope.data["value"]
    is_right = content == "kept" and (has_variables or name != "memory")
    return None if is_right else f"it has {envelope.data['value']}"


def tried(act: Act, socket: Path) -> None:
    with suppress(Exception), Client(socket) as client:
        act(client)
