"""Two engines on one state and four nodes, all of which are killed again and again.

Callers run programs, with keys and in sessions, and make calls that wait for approval. Each program
in a session writes to a file there as it begins and as it ends, up to two seconds later, so that
one that ran twice, or not to its end, is seen. What was answered must be there at the end: the same
answer for the same key, in the call log what the caller was told, every successful program in its
session's file, from its beginning to its end, and none twice. Half of the sessions are durable, and
none of these may be lost.

Usage: `python -m benchmarks.soak_cluster [SECONDS]`: for an hour, a node is killed every minute and
the active engine every five. `make soak` runs it faster: 50 nodes are killed.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench_daemon import FUMEHOOD, SMALLEST_IMAGE, Running, run_daemon
from benchmarks.soak_standby import POLICY, TAKEN_OVER_S, is_ready, waiting_approvals
from fumehood.client import Client, ControlClient
from fumehood.core.envelope import Envelope
from fumehood.core.errors import FumehoodError
from fumehood.docker.api import open_docker
from fumehood.sandbox.container.spec import LABEL_ENGINE, LABEL_OWNER
from fumehood.storage.directory import owner_id
from support.postgres import running_postgres
from support.ray_cluster import Cluster, running_cluster

NODES = 4
SLOTS = 3
CALLERS = 4
KILLED_NODES = 50
CALLS_OF_SESSION = 30
"""Calls in one session until its caller makes another."""

LOST_CODES = ("RESOURCE_NOT_FOUND",)
"""What the caller of a session is told that was lost or has ended."""

BACK_S = 60.0
"""Seconds for all nodes to be there again at the end."""


@dataclass
class Told:
    """What callers were told."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: threading.Event = field(default_factory=threading.Event)
    answers: dict[str, tuple[str | None, object]] = field(default_factory=dict)
    """Key → call id and value."""
    calls: dict[str, bool] = field(default_factory=dict)
    """Call id → whether it was successful."""
    written: dict[str, list[int]] = field(default_factory=dict)
    """Session → the numbers of successful calls."""
    tried: dict[str, list[int]] = field(default_factory=dict)
    durable: set[str] = field(default_factory=set)
    cut_off: int = 0
    """Runs that were lost with their nodes."""
    unread: int = 0
    """Sessions that were lost, or ended, as their callers were told."""
    waiting: set[str] = field(default_factory=set)
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Engines:
    """The active engine and its standby."""

    def __init__(self, stack: ExitStack, root: Path, settings: dict[str, str]) -> None:
        self._stack = stack
        self._settings = settings
        self.homes = [root / "a", root / "b"]
        for home in self.homes:
            home.mkdir(mode=0o700)
        made = subprocess.run(
            [str(FUMEHOOD), "approvers", "init"], check=True, capture_output=True,
            env={**settings, "FUMEHOOD_HOME": str(self.homes[0])},
        )  # fmt: skip
        self.credential = made.stdout.decode().strip()
        shutil.copy(self.homes[0] / "audit.key", self.homes[1])
        self.active = self._started(self.homes[0])
        self.standby = self._started(self.homes[1])
        self.took: list[float] = []

    def _started(self, home: Path) -> Running:
        daemon = run_daemon(
            {**self._settings, "FUMEHOOD_HOME": str(home)}, socket=home / "engine.sock"
        )
        return self._stack.enter_context(daemon)

    @property
    def home(self) -> Path:
        """The state directory of the active engine."""
        return self.active.socket.parent

    def kill(self) -> None:
        """Kill the active engine, wait for the other one, and start a new standby."""
        dead = self.active
        dead.process.kill()
        killed = time.monotonic()
        while not is_ready(self.standby.socket):
            time.sleep(0.02)
        self.took.append(time.monotonic() - killed)
        self.active = self.standby
        self.standby = self._started(dead.socket.parent)

    def joined(self) -> int:
        """The number of nodes that have joined the active engine."""
        with (
            suppress(FumehoodError),
            ControlClient(self.home / "control.sock", credential=self.credential) as control,
        ):
            return sum(node.state == "joined" for node in control.nodes.list())
        return 0


def report_cluster(
    chance: random.Random,
    *,
    seconds: float = 3600.0,
    killed_nodes: int | None = KILLED_NODES,
    node_every_s: float = 0.0,
    engine_every_s: float = 45.0,
) -> bool:
    """Kill, look, and print a section of the report; whether every promise was kept. It ends after
    so many nodes, or so many seconds.
    """
    begun, told, nodes_killed = time.monotonic(), Told(), 0
    root = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    (root / "policy.toml").write_text(POLICY)
    with running_postgres() as server, running_cluster(NODES, SLOTS) as cluster, ExitStack() as s:
        settings = {
            **SMALLEST_IMAGE, **cluster.environment,
            "FUMEHOOD_STATE__URL": server.state_url(root),
            "FUMEHOOD_FILES__URL": str(root / "files"),
            "FUMEHOOD_CLUSTER__ADDRESS": cluster.address,
            "FUMEHOOD_POLICY_FILE": str(root / "policy.toml"),
        }  # fmt: skip
        (root / "files").mkdir(mode=0o700)
        engines = Engines(s, root, settings)
        until(lambda: engines.joined() == NODES, BACK_S)
        callers = [
            threading.Thread(target=call_on, args=(engines, told, number))
            for number in range(CALLERS)
        ]
        for caller in callers:
            caller.start()
        next_node = next_engine = time.monotonic()
        next_engine += engine_every_s
        while time.monotonic() - begun < seconds and nodes_killed != killed_nodes:
            now = time.monotonic()
            if now >= next_engine:
                engines.kill()
                next_engine = now + engine_every_s
            if now >= next_node:
                replace_node(cluster, chance)
                nodes_killed += 1
                next_node = now + node_every_s
            time.sleep(chance.uniform(0.1, 1.0))
        told.is_over.set()
        for caller in callers:
            caller.join()
        until(lambda: engines.joined() == NODES, BACK_S)
        joined = engines.joined()
        faults = told.faults + broken(engines, told)
        with Client(engines.active.socket) as client:
            for session in told.tried:
                with suppress(FumehoodError):  # it was lost
                    client.end_session(session)
        until(lambda: not left_behind(cluster), BACK_S)
        left = left_behind(cluster)
        answers_without_head, back_s = restart_head(cluster, engines)
        chain = subprocess.run(
            [str(FUMEHOOD), "audit", "verify"], stdout=subprocess.DEVNULL, check=False,
            stderr=subprocess.DEVNULL, env={**settings, "FUMEHOOD_HOME": str(engines.home)},
        )  # fmt: skip
    shutil.rmtree(root, ignore_errors=True)
    took = sorted(engines.took) or [0.0]
    print("\n## A cluster whose nodes and engines are killed\n")
    print(
        f"{nodes_killed} nodes and {len(engines.took)} active engines killed in "
        f"{time.monotonic() - begun:.0f} s; {len(told.calls)} answered calls, "
        f"{sum(told.calls.values())} of them successful, {len(told.answers)} with keys, in "
        f"{len(told.written)} sessions, of which {len(told.durable)} are durable and {told.unread} "
        f"others were lost; {told.cut_off} runs were cut off; {len(told.waiting)} waiting approvals. The standby served "
        f"after {took[len(took) // 2]:.1f} s at the median, {took[-1]:.1f} s at most. Codes: "
        f"{', '.join(f'{code} {count}' for code, count in told.codes.most_common())}.\n"
    )
    verdicts = {
        "no answer changed, none was lost, no program ran twice": not faults,
        f"the standby served within {TAKEN_OVER_S:g} s": bool(engines.took)
        and took[-1] <= TAKEN_OVER_S,
        f"all {NODES} nodes were there at the end": joined == NODES,
        "half of all calls were successful at least": sum(told.calls.values()) * 2
        >= len(told.calls),
        "a tenth of the killed nodes ran something at least": told.cut_off * 10 >= nodes_killed,
        "half of the sessions could be read at least": told.unread * 2 <= len(told.written),
        "the audit chain is intact": chain.returncode == 0,
        "no container of a killed node was left": not left,
        "while Ray's head was away, calculations went on, and programs were refused": (
            answers_without_head == ("OK", "SANDBOX_UNAVAILABLE")
        ),
        f"a head and nodes that were started again served within {BACK_S:g} s": back_s < BACK_S,
    }
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for fault in faults[:10]:
        print(f"- wrong: {fault[:300]}")
    return all(verdicts.values())


def replace_node(cluster: Cluster, chance: random.Random) -> None:
    """Kill a node, and start another one in its place."""
    cluster.kill(chance.choice([one for one in cluster.processes if one is not cluster.head]))
    time.sleep(chance.uniform(0.0, 2.0))
    cluster.add(SLOTS)


def left_behind(cluster: Cluster) -> dict[str, set[str]]:
    """The lives of nodes that have containers, by their directories, unless it is the one of the
    node that is there, with its warm ones: as each session has ended, no other is needed.
    """
    directories = [one.parent for one in (cluster.directory / "nodes").glob("node-*/*/owner")]
    lives: dict[str, set[str]] = {owner_id(directory): set() for directory in directories}
    with closing(open_docker(timeout_s=30)) as docker:
        for one in docker.containers(all=True, filters={"label": LABEL_OWNER}):
            if one["Labels"][LABEL_OWNER] in lives:
                lives[one["Labels"][LABEL_OWNER]].add(one["Labels"][LABEL_ENGINE])
    return {owner: engines for owner, engines in lives.items() if len(engines) != 1}


def restart_head(cluster: Cluster, engines: Engines) -> tuple[tuple[str, str], float]:
    """Kill Ray's head and, as it had no Redis, all nodes, and start them again. Return the codes of
    a calculation and of a program meanwhile, and after how many seconds programs ran again.
    """
    cluster.kill(cluster.head)
    with Client(engines.active.socket) as client:
        until(lambda: engines.joined() == 0, BACK_S)
        codes = (
            code_of(client.call("calculator", {"expression": "6 * 7"})),
            code_of(client.call("run_python", {"code": "6 * 7"})),
        )
        for node in list(cluster.processes):
            cluster.kill(node)
        begun = time.monotonic()
        cluster.head = cluster.start("--head", "--port", str(cluster.port), "--slots", "0")
        for _ in range(NODES):
            cluster.add(SLOTS)
        until(lambda: client.call("run_python", {"code": "6 * 7"}).success, BACK_S)
        return codes, time.monotonic() - begun


def code_of(answer: Envelope) -> str:
    return answer.error.code if answer.error is not None else "OK"


def until(condition: object, seconds: float) -> None:
    """Wait for a condition, for so long at most."""
    last = time.monotonic() + seconds
    while not condition() and time.monotonic() < last:  # type: ignore[operator]
        time.sleep(0.2)


def call_on(engines: Engines, told: Told, caller: int) -> None:
    """Make calls of all kinds on whichever engine is active, until the end."""
    number, session = 0, None
    while not told.is_over.is_set():
        try:
            with Client(engines.active.socket) as client:
                while not told.is_over.is_set():
                    number += 1
                    if number % CALLS_OF_SESSION == 1 or session is None:
                        durable = number // CALLS_OF_SESSION % 2 == 1
                        session = client.create_session(
                            memory_mb=128, idle_seconds=1800, durable=durable
                        ).id
                        if durable:
                            told.durable.add(session)
                    code = make_calls(client, told, f"{caller}-{number}", number, session)
                    if code == "RESOURCE_NOT_FOUND":
                        session = None
                    elif code in ("DAEMON_UNAVAILABLE", "SHUTTING_DOWN"):
                        break
        except FumehoodError:
            session = None
        time.sleep(0.1)


def make_calls(client: Client, told: Told, key: str, number: int, session: str) -> str | None:
    """Make one call of each kind. Return the code of the last that failed."""
    code = None
    kept = client.call("run_python", {"code": f"{number} * 3"}, idempotency_key=key)
    code = note(told, kept) or code
    if kept.success:
        with told.lock:
            told.answers[key] = (kept.metadata.call_id, kept.data["value"])
    program = (
        f"import time\nlog = open('log', 'a', buffering=1)\nlog.write('begin {number}\\n')\n"
        f"time.sleep({number % 5 / 2})\nlog.write('end {number}\\n')"
    )
    with told.lock:
        told.tried.setdefault(session, []).append(number)
    written = client.call("run_python", {"code": program}, session_id=session)
    code = note(told, written) or code
    if written.success:
        with told.lock:
            told.written.setdefault(session, []).append(number)
    if number % 10 == 0:
        asked = client.call("run_restricted_python", {"code": f"{number}"})
        if asked.error is not None and asked.error.approval_id is not None:
            with told.lock:
                told.waiting.add(asked.error.approval_id)
    return code


def note(told: Told, answer: Envelope) -> str | None:
    """Note what a caller was told. Return the error's code."""
    code = answer.error.code if answer.error is not None else None
    with told.lock:
        told.codes[code or "OK"] += 1
        sandbox = answer.metadata.sandbox
        told.cut_off += sandbox is not None and sandbox.ended_by == "sandbox_lost"
        if answer.metadata.call_id is not None and code != "DAEMON_UNAVAILABLE":
            told.calls[answer.metadata.call_id] = answer.success
    return code


def broken(engines: Engines, told: Told) -> list[str]:
    """Faults of what the active engine answers at the end."""
    faults = []
    with Client(engines.active.socket) as client:
        for key, expected in told.answers.items():
            number = int(key.partition("-")[2])
            again = client.call("run_python", {"code": f"{number} * 3"}, idempotency_key=key)
            found = again.metadata.call_id, again.data.get("value")
            if found != expected or not again.metadata.idempotent_replay:
                faults.append(f"{key}: was {expected}, is {found}: {again.error}")
        left = list(told.written.items())
        full = 0  # how many in a row found no place
        while left:
            session, numbers = left.pop(0)
            read = client.call("run_python", {"code": "open('log').read()"}, session_id=session)
            if read.error is not None and read.error.code == "QUOTA_EXCEEDED" and full < len(left):
                left.append((session, numbers))
                full += 1
                continue
            full = 0
            with suppress(FumehoodError):  # it was lost
                client.end_session(session)  # another that was stopped may need its place
            if read.error is not None and session not in told.durable:
                told.unread += 1
                if read.error.code not in LOST_CODES:
                    faults.append(f"{session}: {read.error}")
                continue
            if read.error is not None:
                faults.append(f"{session}: it was durable: {read.error}")
                continue
            lines = read.data["value"].splitlines()
            if len(lines) != len(set(lines)):
                faults.append(f"{session}: a program ran twice")
            wanted = {f"{what} {number}" for number in numbers for what in ("begin", "end")}
            if missing_lines := wanted - set(lines):
                faults.append(f"{session}: {sorted(missing_lines)[:5]} are missing")
            if {int(line.split()[1]) for line in lines} - set(told.tried[session]):
                faults.append(f"{session}: numbers that nobody sent")
        logged, cursor = dict[str, bool](), None
        while True:
            page = client.calls(limit=100, cursor=cursor)
            logged |= {one.call_id: one.code == "OK" for one in page.items}
            cursor = page.next_cursor
            if cursor is None:
                break
        # The log's row of a call that just ended may be lost with its engine.
        different = [one for one, ok in told.calls.items() if logged.get(one, ok) != ok]
        faults += [f"{one}: the log says the opposite of the answer" for one in different]
        missing = sum(one not in logged for one in told.calls)
        if missing > len(told.calls) // 10:
            faults.append(f"{missing} of {len(told.calls)} calls are not in the log")
        faults += [f"{one} is not waiting" for one in told.waiting - waiting_approvals(client)]
    return faults


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3600.0
    held = report_cluster(
        random.Random(1), seconds=seconds, killed_nodes=None, node_every_s=60.0,
        engine_every_s=300.0,
    )  # fmt: skip
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
