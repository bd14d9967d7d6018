"""A full or failing disk under a running daemon: it reports the failure and keeps serving.

The kernel's file size limit, set on the daemon from outside, simulates the failure: writes beyond
it fail as on a full disk.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from conftest import Daemon, StartDaemon
from fumehood.storage import sqlite as sqlite_module
from fumehood.storage.database import open_database
from fumehood.storage.errors import StoreError, WriteFailed
from support.http import SocketClient
from support.state import Events, keys, put
from support.wait import DEADLINE_S, wait_until

pytestmark = pytest.mark.row("D6")

INFINITE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def let_files_grow_to(daemon: Daemon, size: int) -> None:
    psutil.Process(daemon.process.pid).rlimit(resource.RLIMIT_FSIZE, (size, INFINITE[1]))


def events(daemon: Daemon, name: str) -> list[dict]:
    lines = [line for line in daemon.log.splitlines() if line.startswith("{")]
    return [event for event in map(json.loads, lines) if event["event"] == name]


def state_of(client: SocketClient) -> dict:
    answer = client.get("/v1/ready")
    assert answer.status == 200
    return answer.body["state"]


def test_failing_disk_is_logged_once_while_calls_still_succeed(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    client = daemon.client()
    for _ in range(20):  # so that the log of writes is longer than the daemon's own
        client.calculate("1 + 1")
        assert client.get("/v1/calls").code is None
    kept = len(client.get("/v1/calls?limit=100").body["data"]["items"])
    assert state_of(client) == {"failing": False, "lost_rows": 0}
    wal = daemon.home / "state.db-wal"
    size = wal.stat().st_size
    assert size > (daemon.home / "log").stat().st_size + 30_000
    let_files_grow_to(daemon, size)
    for _ in range(5):
        answer = client.calculate("5! + 2**10")
        assert answer.body["data"]["value"] == 1144
        assert len(client.get("/v1/calls?limit=100").body["data"]["items"]) == kept
    assert state_of(client) == {"failing": True, "lost_rows": 5}
    assert len(events(daemon, "state.write_failed")) <= 1
    let_files_grow_to(daemon, INFINITE[0])
    client.calculate("1 + 1")
    assert len(client.get("/v1/calls?limit=100").body["data"]["items"]) == kept + 1
    assert state_of(client) == {"failing": False, "lost_rows": 5}
    wait_until(lambda: events(daemon, "state.write_works_again"))
    assert len(events(daemon, "state.write_failed")) == 1
    assert events(daemon, "state.write_works_again")[0]["lost_rows"] == 5
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Dear diary, " * 500, "is damaged"),
        (None, "newer engine"),
    ],
    ids=["damaged", "newer"],
)
def test_damaged_or_newer_state_refuses_the_start_and_is_left_unchanged(
    start_daemon: StartDaemon, home: Path, content: bytes | None, words: str
) -> None:
    path = home / "state.db"
    if content is not None:
        path.write_bytes(content)
    else:
        database = open_database(path)
        database.write_now(lambda c: c.exec_driver_sql("PRAGMA user_version = 99") and None)
        database.close()
    before = path.read_bytes()
    daemon = start_daemon(ready=False)
    assert daemon.process.wait(timeout=DEADLINE_S) == 4
    assert words in daemon.log
    assert "Traceback" not in daemon.log
    assert path.read_bytes() == before
    assert not daemon.socket.exists()


APPROVER = "INSERT INTO approvers VALUES ('{0}', 'x', x'00', x'00', '{1}', '{2}', 'init', NULL)"
TOKEN = "INSERT INTO tokens VALUES ('{0}', 'x', 'x', x'00', '{1}', '[]', '{2}', 'x', NULL, NULL)"
AGENT = "INSERT INTO agents VALUES ('x', '', '{1}', 1, '{2}', NULL, NULL)"
NEW_YEAR = "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (APPROVER.format("a", '["root"]', NEW_YEAR), "approvers"),
        (APPROVER.format("a", "no JSON", NEW_YEAR), "approvers"),
        (APPROVER.format("a", '["admin"]', "yesterday"), "approvers"),
        (TOKEN.format("a", "5", NEW_YEAR), "tokens"),
        (AGENT.format("a", "5", NEW_YEAR), "agents"),
    ],
    ids=["scope", "no-json", "time", "token", "agent"],
)
def test_invalid_row_refuses_the_start_and_names_its_table(
    start_daemon: StartDaemon, home: Path, row: str, words: str
) -> None:
    path = home / "state.db"
    database = open_database(path)
    database.write_now(lambda connection: connection.exec_driver_sql(row) and None)
    database.close()
    before = path.read_bytes()
    daemon = start_daemon(ready=False)
    assert daemon.process.wait(timeout=DEADLINE_S) == 4
    assert f"The state holds {words} that cannot be read" in daemon.log
    assert "Traceback" not in daemon.log
    assert path.read_bytes() == before


def test_online_backup_of_a_running_engine_opens_and_is_complete(home: Path) -> None:
    """The documented procedure: SQLite's online backup."""
    seen = Events()
    database = open_database(home / "state.db", seen)
    for number in range(100):
        database.write_now(put(f"k{number}"))
    program = (
        "import sqlite3, sys\n"
        "source, copy = (sqlite3.connect(path) for path in sys.argv[1:])\n"
        "source.backup(copy)\n"
        "source.close(), copy.close()\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(home / "state.db"), str(home / "copy.db")],
        check=True, timeout=600,
    )  # fmt: skip
    assert database.write_now(put("later")) == "later"
    database.close()
    copy = open_database(home / "copy.db")
    assert copy.read_now(keys) == {f"k{number}" for number in range(100)}
    copy.close()
    assert seen.seen == []


def test_write_blocked_by_a_foreign_lock_fails_and_later_writes_succeed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds an open transaction."""
    monkeypatch.setattr(sqlite_module, "BUSY_TIMEOUT_S", 0.05)
    database = open_database(home / "state.db")
    program = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('BEGIN IMMEDIATE')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(home / "state.db")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as shell:  # fmt: skip
        assert shell.stdout is not None
        assert shell.stdin is not None
        shell.stdout.readline()
        with pytest.raises(WriteFailed, match="locked"):
            database.write_now(put("k0"))
        assert database.read_now(keys) == set()
        shell.stdin.close()
        shell.wait(timeout=DEADLINE_S)
    assert database.write_now(put("k1")) == "k1"
    assert database.read_now(keys) == {"k1"}
    database.close()


def test_unwritable_state_directory_is_refused_at_start(home: Path) -> None:
    """Uses /proc, which even root cannot write to, in place of a read-only disk."""
    with pytest.raises(StoreError, match="cannot be"):
        open_database(Path("/proc/self/state.db"))
