"""The container part of the soak: thousands of programs, then an engine that is killed again and
again. Afterwards Docker, the process table, the mounts and the blob store are looked at.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.bench_containers import PATH, supervisors
from benchmarks.bench_daemon import (
    FUMEHOOD,
    MB,
    SMALLEST_IMAGE,
    Running,
    bare_client,
    run_daemon,
    written_bytes,
)
from fumehood.storage.directory import owner_id

CALLS = 5000
SETTLING_CALLS = 500
KILLS = 50
MAX_GROWTH_MB = 6.0
BLOB_LIFE_S = 5

PROGRAMS: dict[str, tuple[str, str, int]] = {
    "value": ("sum(range(100))", "OK", 70),
    "print": ("print('x' * 100)", "OK", 10),
    "exception": ("1/0", "EXECUTION_ERROR", 6),
    "exit": ("raise SystemExit(3)", "EXECUTION_ERROR", 3),
    "small files": ("for n in range(5): open(f'{n}.txt', 'w').write('x')", "OK", 4),
    "large file": ("open('big.bin', 'wb').write(bytes(2_000_000))", "OK", 1),
    "left behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)",
        "OK", 3,
    ),
    "much output": ("while True: print('x' * 1000)", "OUTPUT_LIMIT_EXCEEDED", 1),
    "no memory": ("held = []\nwhile True: held.append(bytearray(1 << 22))",
                  "MEMORY_LIMIT_EXCEEDED", 1),
    "too long": ("while True: pass", "TIMEOUT", 1),
}  # fmt: skip
"""By name: the program, the code that its answer must have, and its weight in the mix."""


@dataclass
class Tally:
    """What happened."""

    calls: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Traces:
    """What an engine leaves on its host while it runs, or after."""

    containers: int
    guests: int
    mounts: int
    files: int
    written_mb: float


def report_containers(chance: random.Random) -> bool:
    """Run it all and print a section of the report; whether everything held."""
    started = time.monotonic()
    tally = Tally()
    settings = {"FUMEHOOD_BLOBS_KEPT_HOURS": str(BLOB_LIFE_S / 3600), **SMALLEST_IMAGE}
    with run_daemon(settings) as daemon:
        for _ in range(SETTLING_CALLS):
            one_call(daemon, chance, tally)
        before = traces(daemon)
        for _ in range(CALLS):
            one_call(daemon, chance, tally)
        blobs = await_empty(daemon.socket.parent / "blobs")
        after = traces(daemon)
        owner = owner_id(daemon.socket.parent)
        guests = first_processes(owner)
    seconds = time.monotonic() - started
    left = len(containers_of(owner)) + sum(map(psutil.pid_exists, guests))
    kills = killed_engines(chance)
    grown = after.written_mb - before.written_mb
    verdicts = {
        "every program was answered as it must be": not tally.wrong,
        f"the daemon's memory is flat (≤ {MAX_GROWTH_MB:g} MB)": grown <= MAX_GROWTH_MB,
        "descriptors are flat": after.files <= before.files,
        "containers and mounts are no more than before": after.containers <= before.containers
        and after.mounts <= before.mounts,
        "no blob is left when its time is over": blobs == 0,
        "no container or guest is left after the stop": left == 0,
        f"an engine killed {KILLS} times leaves no container after the next start": not kills,
    }
    print("\n## Containers\n")
    print(f"{tally.calls} programs in {seconds:.0f} s; then {KILLS} engines killed.\n")
    print("| code | answers |\n|---|---|")
    for code, count in sorted(tally.codes.items()):
        print(f"| {code} | {count} |")
    print("\n| what | before | after |\n|---|---|---|")
    print(f"| the daemon's written private memory, MB | {before.written_mb:.1f} "
          f"| {after.written_mb:.1f} |")  # fmt: skip
    print(f"| open descriptors | {before.files} | {after.files} |")
    print(f"| containers | {before.containers} | {after.containers} |")
    print(f"| mounts of the host | {before.mounts} | {after.mounts} |\n")
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for wrong in [*tally.wrong[:10], *kills[:10]]:
        print(f"- wrong: {wrong[:300]}")
    return all(verdicts.values())


def one_call(daemon: Running, chance: random.Random, tally: Tally) -> None:
    name = chance.choices(list(PROGRAMS), [weight for _, _, weight in PROGRAMS.values()])[0]
    code, expected, _ = PROGRAMS[name]
    options = {"timeout_seconds": 0.3 if expected == "TIMEOUT" else 20, "memory_limit_mb": 128}
    body = json.dumps({"arguments": {"code": code}, "options": options}).encode()
    answer = json.loads(bare_client(daemon.socket, PATH, body)())
    got = answer["error"]["code"] if answer["error"] else "OK"
    tally.calls += 1
    tally.codes[got] += 1
    if got != expected:
        tally.wrong.append(f"{name}: {answer['error'] or answer['data']}")


def traces(daemon: Running) -> Traces:
    time.sleep(2)  # what is being replaced is counted once, not twice
    return Traces(
        containers=len(containers_of(owner_id(daemon.socket.parent))),
        guests=len(supervisors()),
        mounts=len(Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()),
        files=daemon.process.num_fds(),
        written_mb=written_bytes([daemon.process]) / MB,
    )


def containers_of(owner: str) -> list[str]:
    """Containers of one state directory, running or not."""
    listed = subprocess.run(
        ["docker", "ps", "--all", "--quiet", "--filter", f"label=fumehood.owner={owner}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return listed.stdout.split()


def first_processes(owner: str) -> list[int]:
    """Process ids, on this host, of the first processes of an owner's containers."""
    shown = subprocess.run(
        ["docker", "inspect", "--format={{.State.Pid}}", *containers_of(owner)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return [int(pid) for pid in shown.stdout.split()]


def await_empty(directory: Path) -> int:
    """How many files are left when the blobs' time is over and the sweep had its turn."""
    deadline = time.monotonic() + BLOB_LIFE_S + 90
    while time.monotonic() < deadline:
        left = [path for path in directory.rglob("*") if path.is_file()]
        if not left:
            return 0
        time.sleep(1)
    return len(left)


def killed_engines(chance: random.Random) -> list[str]:
    """Engines of one state directory, each killed at a random moment; what was wrong after."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    wrong = []
    try:
        for number in range(KILLS):
            _one_killed_engine(home, chance)
            # Seen at the end of every tenth life, so that leftovers of several lives add up.
            if number % 10 == 9 and (left := _left_after_a_start(home)):
                wrong.append(f"after {number + 1} kills: {left}")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return wrong


def _one_killed_engine(home: Path, chance: random.Random) -> None:
    engine = _serve(home)
    ends_at = time.monotonic() + chance.uniform(0.05, 3.0)
    stop = threading.Event()

    def use() -> None:
        body = json.dumps({"arguments": {"code": "import time; time.sleep(0.05)"}}).encode()
        while not stop.is_set():
            try:
                bare_client(home / "engine.sock", PATH, body)()
            except (OSError, ValueError):
                stop.wait(0.02)
            except Exception:
                return

    users = [threading.Thread(target=use, daemon=True) for _ in range(2)]
    for user in users:
        user.start()
    time.sleep(max(0.0, ends_at - time.monotonic()))
    engine.kill()
    engine.wait(timeout=30)
    stop.set()
    for user in users:
        user.join(timeout=30)


def _left_after_a_start(home: Path) -> str:
    """Containers of earlier engines that a start has not taken away within a while."""
    engine = _serve(home)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.5)
            ours = _of_engine(home, engine.pid)
            if not ours:
                return ""
        return f"{len(ours)} containers of other engines"
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(timeout=60)


def _of_engine(home: Path, pid: int) -> list[str]:
    """Containers of this directory whose engine is another process."""
    found = []
    for container in containers_of(owner_id(home)):
        shown = subprocess.run(
            ["docker", "inspect", "--format={{index .Config.Labels \"fumehood.pid\"}}", container],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if shown.returncode == 0 and shown.stdout.strip() != str(pid):
            found.append(container)
    return found


def _serve(home: Path) -> subprocess.Popen[bytes]:
    environment = {"PATH": os.environ["PATH"], "FUMEHOOD_HOME": str(home), **SMALLEST_IMAGE}
    return subprocess.Popen([str(FUMEHOOD), "serve"], env=environment, stderr=subprocess.DEVNULL)
