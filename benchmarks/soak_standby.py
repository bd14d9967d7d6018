"""Two daemons on one state in PostgreSQL: the active one is killed again and again.

Callers make calls with keys, of a calculator and of a tool that acts on a service, and calls that
wait for approval. What was answered must be there after each takeover: the same answer of the same
call, and every waiting approval. Calls that were cut off are repeated with their keys: the service,
which outlives all engines, counts each once at most, and those that were answered once. At the end
the audit chain is whole.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench_daemon import FUMEHOOD, SMALLEST_IMAGE, Running, run_daemon
from fumehood.client import Client
from fumehood.core.errors import FumehoodError
from support.postgres import running_postgres
from tests.upstream import running_upstream

KILLS = 100
CALLERS = 3
LIFE_S = (0.1, 0.8)
"""Seconds from a takeover to the next kill."""

TAKEN_OVER_S = 5.0
CHECKED = 20
"""Earlier answers that are repeated after each takeover, beside those of the last life."""

ACT = {
    "name": "act", "type": "REST", "description": "Act.", "method": "POST", "read_only": False,
    "dangerous": False, "idempotent": False,
    "parameters": [{"name": "label", "type": "string", "description": "What is done.", "max": 80}],
}  # fmt: skip
"""Without the endpoint, which has the label in its path."""

POLICY = '[[rules]]\nid = "ask"\ndecision = "ask"\ntools = ["run_restricted_python"]\n'


@dataclass
class Seen:
    """What callers were answered: key → call id and value, and ids of waiting approvals."""

    answers: dict[str, tuple[str | None, object]] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    acted: set[str] = field(default_factory=set)
    """Keys of calls that acted, as they were answered."""
    cut_off: set[str] = field(default_factory=set)
    """Keys of such calls that got no answer."""


def report_standby(chance: random.Random, kills: int = KILLS) -> bool:
    """Kill, look, and print a section of the report; whether every promise was kept."""
    begun, seen, faults, took = time.monotonic(), Seen(), list[str](), list[float]()
    root = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    (root / "policy.toml").write_text(POLICY)
    (root / "tools").mkdir()
    with running_postgres() as server, running_upstream() as service, ExitStack() as daemons:
        act = {**ACT, "endpoint": f"{service.url}/acts/{{label}}"}
        (root / "tools" / "act.json").write_text(json.dumps(act))
        settings = {
            "FUMEHOOD_TOOLS_DIRECTORY": str(root / "tools"),
            "FUMEHOOD_REST__ALLOWED_HOSTS": json.dumps([service.authority]),
            **SMALLEST_IMAGE, "FUMEHOOD_CONTAINER__POOL_MIN": "0",
            "FUMEHOOD_STATE__URL": server.state_url(root),
            "FUMEHOOD_POLICY_FILE": str(root / "policy.toml"),
        }  # fmt: skip
        homes = [root / "a", root / "b"]

        def started(home: Path) -> Running:
            return daemons.enter_context(
                run_daemon({**settings, "FUMEHOOD_HOME": str(home)}, socket=home / "engine.sock")
            )

        for home in homes:
            home.mkdir(mode=0o700)
        subprocess.run(
            [str(FUMEHOOD), "approvers", "init"], check=True, capture_output=True,
            env={**settings, "FUMEHOOD_HOME": str(homes[0])},
        )  # fmt: skip
        shutil.copy(homes[0] / "audit.key", homes[1])
        active, standby = started(homes[0]), started(homes[1])
        for life in range(kills):
            new = Seen()
            callers = [
                threading.Thread(target=call_until_it_dies, args=(active.socket, new, life, number))
                for number in range(CALLERS)
            ]
            for caller in callers:
                caller.start()
            time.sleep(chance.uniform(*LIFE_S))
            active.process.kill()
            killed = time.monotonic()
            while not is_ready(standby.socket):
                time.sleep(0.02)
            took.append(time.monotonic() - killed)
            for caller in callers:
                caller.join()
            earlier = chance.sample(sorted(seen.answers), min(CHECKED, len(seen.answers)))
            expected = new.answers | {key: seen.answers[key] for key in earlier}
            seen.answers |= new.answers
            seen.waiting |= new.waiting
            seen.acted |= new.acted
            seen.cut_off |= new.cut_off
            repeat(standby.socket, new)
            faults += [f"life {life}: {fault}" for fault in broken(standby.socket, expected, seen)]
            active, standby = standby, started(homes[life % 2])
        acts = Counter(request.path.rpartition("/")[2] for request in service.requests)
        faults += [f"{key} acted {acts[key]} times" for key in seen.acted if acts[key] != 1]
        faults += [f"{key} acted {count} times" for key, count in acts.items() if count > 1]
        chain = subprocess.run(
            [str(FUMEHOOD), "audit", "verify"], stdout=subprocess.DEVNULL, check=False,
            stderr=subprocess.DEVNULL, env={**settings, "FUMEHOOD_HOME": str(homes[kills % 2])},
        )  # fmt: skip
    shutil.rmtree(root, ignore_errors=True)
    print("\n## An active engine and its standby\n")
    print(
        f"{kills} active engines killed in {time.monotonic() - begun:.0f} s; {len(seen.answers)} "
        f"answers with keys, {len(seen.acted)} that acted, {len(seen.cut_off)} that were cut off and "
        f"repeated, {sum(acts[key] for key in seen.cut_off)} of which had acted, and "
        f"{len(seen.waiting)} waiting approvals. The standby served after "
        f"{sorted(took)[len(took) // 2]:.1f} s at the median, {max(took):.1f} s at most.\n"
    )
    verdicts = {
        "no answer changed, no approval was lost, nothing acted twice": not faults,
        "calls that act were cut off in every tenth life at least": len(seen.cut_off) >= kills / 10,
        f"the standby served within {TAKEN_OVER_S:g} s": max(took) <= TAKEN_OVER_S,
        "callers were answered in every third life at least": len(seen.answers) >= kills / 3,
        "the audit chain is intact": chain.returncode == 0,
    }
    for what, held in verdicts.items():
        print(f"- {'ok' if held else 'FAILED'}: {what}")
    for fault in faults[:10]:
        print(f"- wrong: {fault[:300]}")
    return all(verdicts.values())


def is_ready(socket: Path) -> bool:
    with suppress(FumehoodError), Client(socket) as client:
        return client.ready().status == "ready"
    return False


def call_until_it_dies(socket: Path, new: Seen, life: int, caller: int) -> None:
    """Alternate calls with keys and calls that ask, until the daemon is gone."""
    with suppress(FumehoodError), Client(socket) as client:
        for number in range(10_000):
            key = f"{life}-{caller}-{number}"
            answer = client.call("calculator", {"expression": f"{number} + {life}"},
                                 idempotency_key=key)  # fmt: skip
            if answer.success:
                new.answers[key] = (answer.metadata.call_id, answer.data["value"])
            elif answer.error is not None and answer.error.code == "DAEMON_UNAVAILABLE":
                return
            new.cut_off.add(key)  # until it is answered
            if client.call("act", {"label": key}, idempotency_key=f"act-{key}").success:
                new.cut_off.remove(key)
                new.acted.add(key)
            if number % 5 == 0:
                asked = client.call("run_restricted_python", {"code": f"{life}, {number}"})
                if asked.error is not None and asked.error.approval_id is not None:
                    new.waiting.add(asked.error.approval_id)


def repeat(socket: Path, new: Seen) -> None:
    """Repeat the calls that were cut off, as their callers would."""
    with Client(socket) as client:
        for key in new.cut_off:
            client.call("act", {"label": key}, idempotency_key=f"act-{key}")


def broken(socket: Path, expected: dict[str, tuple[str | None, object]], seen: Seen) -> list[str]:
    """Faults of what the new active engine answers."""
    faults = []
    with Client(socket) as client:
        for key, (call_id, value) in expected.items():
            life, _, number = key.split("-")
            again = client.call("calculator", {"expression": f"{number} + {life}"},
                                idempotency_key=key)  # fmt: skip
            found = again.metadata.call_id, again.data.get("value")
            if found != (call_id, value) or not again.metadata.idempotent_replay:
                faults.append(f"{key}: was {(call_id, value)}, is {found}")
        faults += [f"{one} is not waiting" for one in seen.waiting - waiting_approvals(client)]
    return faults


def waiting_approvals(client: Client) -> set[str]:
    """The ids of all calls that wait for approval."""
    waiting: set[str] = set()
    cursor = None
    while True:
        page = client.approvals.list("pending", limit=100, cursor=cursor)
        waiting |= {one.id for one in page.items}
        cursor = page.next_cursor
        if cursor is None:
            return waiting


if __name__ == "__main__":
    raise SystemExit(0 if report_standby(random.Random(1)) else 1)
