"""SIGKILL at any moment: the next start works, and keeps every call that was listed."""

from __future__ import annotations

import http.client
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, StartDaemon
from support.crashing import examine
from support.http import SocketClient
from support.wait import DEADLINE_S, wait_until

pytestmark = pytest.mark.row("D6")

SEED = 20261121


def test_database_killed_during_schema_creation_opens_afterwards(home: Path) -> None:
    path = home / "state.db"
    program = (
        "import sys, os\n"
        "from pathlib import Path\n"
        "from fumehood.storage import sqlite\n"
        "step = sqlite.STEPS[0]\n"
        "def die(connection):\n"
        "    step(connection)\n"
        "    os.kill(os.getpid(), 9)\n"
        "sqlite.STEPS = (die,)\n"
        "sqlite.open_file(Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    assert examine(path, set()) is None


@pytest.mark.row("D1")
def test_killed_daemon_restarts_and_keeps_every_listed_call(
    start_daemon: StartDaemon,
) -> None:
    """Three callers and one reader; only listed calls are guaranteed to survive."""
    chance = random.Random(SEED)
    listed: set[str] = set()
    for _ in range(2):
        daemon = start_daemon()
        answers: list[str] = []
        crowd = [
            threading.Thread(target=_until_it_dies, args=(daemon.client(), _call, answers.append))
            for _ in range(3)
        ]
        crowd.append(
            threading.Thread(target=_until_it_dies, args=(daemon.client(), _list, listed.update))
        )
        for thread in crowd:
            thread.start()
        before, enough = len(listed), chance.randrange(30, 300)
        wait_until(lambda answers=answers, n=enough: len(answers) >= n)
        wait_until(lambda n=before: len(listed) > n)
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(timeout=DEADLINE_S)
        for thread in crowd:
            thread.join(timeout=DEADLINE_S)
    daemon = start_daemon()
    done = subprocess.run(
        [str(FUMEHOOD), "calls", "list", "--limit", "1000"],
        env=daemon.environment, capture_output=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = {record["call_id"] for record in json.loads(done.stdout)}
    assert len(listed) > 30
    assert listed <= kept or len(kept) == 1000


def _until_it_dies(
    client: SocketClient, ask: Callable[[SocketClient], Any], note: Callable[[Any], None]
) -> None:
    try:
        while True:
            note(ask(client))
    except (OSError, ValueError, http.client.HTTPException):
        client.close()


def _call(client: SocketClient) -> str:
    return client.calculate("1 + 1").body["metadata"]["call_id"]


def _list(client: SocketClient) -> set[str]:
    items = client.get("/v1/calls?limit=100").body["data"]["items"]
    return {item["call_id"] for item in items}


def test_clean_stop_loses_no_row_of_the_call_log(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    client = daemon.client()
    ids = [client.calculate("1 + 1").body["metadata"]["call_id"] for _ in range(50)]
    assert daemon.stop() == 0
    assert not daemon.home.joinpath("state.db-wal").exists()
    again = start_daemon().client()
    items = again.get("/v1/calls?limit=50").body["data"]["items"]
    assert [item["call_id"] for item in items] == ids[::-1]
