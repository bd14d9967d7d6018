"""`fumehood audit`, the audit API and the standalone verifier, on a real chain."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from conftest import FUMEHOOD, Daemon, StartDaemon, make_first_approver
from fumehood.cli.main import app
from fumehood.client import ControlClient
from support.audit import make_chain, rows_of, run_sql
from support.wait import DEADLINE_S

pytestmark = pytest.mark.row("A7")


@pytest.fixture
def chain(home: Path) -> Path:
    """A state directory with an audit chain at rest: 20 rows, two keys, two anchors."""
    make_chain(home)
    return home


@pytest.fixture
def daemon(home: Path, start_daemon: StartDaemon) -> Daemon:
    credential = make_first_approver(home)
    started = start_daemon(log_format="json")
    started.credential = credential
    return started


@pytest.fixture
def control(daemon: Daemon) -> Iterator[ControlClient]:
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        yield client


def audit(state: Path, *arguments: str, credential: str = "") -> Result:
    environment = {"FUMEHOOD_HOME": str(state), "XDG_RUNTIME_DIR": None}
    return CliRunner(env=environment).invoke(app, ["audit", *arguments], input=f"{credential}\n")


def export_to(path: Path, state: Path, *arguments: str) -> list[dict[str, object]]:
    done = audit(state, "export", *arguments)
    assert done.exit_code == 0, done.stderr
    path.write_text(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def elsewhere(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program without fumehood, installed packages or environment variables."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(program), *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env={}, cwd="/",
    )  # fmt: skip


def test_verify_reports_findings_and_exits_1_for_a_removed_row(chain: Path) -> None:
    done = audit(chain, "verify")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["intact"], told["rows"], told["anchored_to"]) == (True, 20, 18)
    run_sql(chain, "DELETE FROM audit WHERE seq = 5")
    done = audit(chain, "verify")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [(found["problem"], found["seq"]) for found in told["findings"]] == [("removed", 6)]


def test_verify_warns_that_truncation_is_undetectable_without_anchors(chain: Path) -> None:
    assert "No anchor" not in audit(chain, "verify").stderr
    (chain / "audit-anchors.jsonl").unlink()
    run_sql(chain, "DELETE FROM audit")
    assert "No anchor was compared" in audit(chain, "verify").stderr


def test_external_anchor_reveals_truncation_if_local_anchors_are_gone(chain: Path) -> None:
    kept = chain / "elsewhere.jsonl"
    (chain / "audit-anchors.jsonl").rename(kept)
    run_sql(chain, "DELETE FROM audit WHERE seq > 12")
    assert audit(chain, "verify").exit_code == 0  # without an anchor nobody can tell
    done = audit(chain, "verify", "--anchor", str(kept))
    assert done.exit_code == 1
    assert json.loads(done.stdout)["findings"][0]["problem"] == "cut"


def test_key_copy_reveals_a_chain_replaced_together_with_its_keys(
    chain: Path, tmp_path: Path
) -> None:
    """A chain forged under a new key verifies locally, but not against the copied key."""
    copies = [str(shutil.copy(path, tmp_path)) for path in chain.glob("audit*.key")]
    keys = [part for copy in copies for part in ("--key", copy)]
    assert audit(chain, "verify", *keys).exit_code == 0
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    make_chain(other)
    for path in other.iterdir():
        shutil.copy(path, chain)
    assert audit(chain, "verify").exit_code == 0
    assert audit(chain, "verify", *keys).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--anchor", "{home}/nowhere"), 2, "No such file"),
        (("--anchor", "{home}/audit.key"), 2, "no anchors"),
        (("--export", "{home}/nowhere"), 2, "No such file"),
        (("--export", "{home}/audit.key"), 1, "line 1"),
        (("--export", "{home}/state.db"), 1, "UTF-8|line 1"),
        (("--key", "{home}/state.db"), 1, "not a key"),
        (("--part",), 2, "--export"),
    ],
)
def test_unreadable_verify_input_is_reported_without_traceback(
    chain: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = audit(chain, "verify", *(part.format(home=chain) for part in arguments))
    assert done.exit_code == code
    assert any(word in done.stderr for word in words.split("|"))
    assert "Traceback" not in done.stderr


def test_audit_commands_do_not_create_a_missing_state(home: Path) -> None:
    for command in ("verify", "export"):
        done = audit(home, command)
        assert done.exit_code == 4
        assert "There is no database" in done.stderr
    assert list(home.iterdir()) == []


def test_export_verifies_with_key_copies_and_no_state_directory(
    chain: Path, tmp_path: Path
) -> None:
    exported = tmp_path / "audit.jsonl"
    export_to(exported, chain)
    keys = [part for path in chain.glob("audit*.key") for part in ("--key", str(path))]
    nowhere = tmp_path / "nowhere"
    assert audit(nowhere, "verify", "--export", str(exported), *keys).exit_code == 0
    done = audit(nowhere, "verify", "--export", str(exported))
    assert done.exit_code == 4
    assert "Set FUMEHOOD_HOME" in done.stderr


def test_standalone_verifier_accepts_an_export_and_rejects_tampered_ones(
    chain: Path, tmp_path: Path
) -> None:
    place, exported = tmp_path / "verifier", tmp_path / "audit.jsonl"
    rows = export_to(exported, chain, "--with-verifier", str(place))
    assert [row["seq"] for row in rows] == list(range(1, 21))
    keys = [part for path in chain.glob("audit*.key") for part in ("--key", path)]
    anchors = ("--anchors", place / "audit-anchors.jsonl")
    program = place / "audit_verify.py"
    done = elsewhere(program, exported, *keys, *anchors)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Anchored up to row 18" in done.stdout
    lines = exported.read_text().splitlines(keepends=True)
    for name, tampered in {
        "changed": [*lines[:4], lines[4].replace("5", "6"), *lines[5:]],
        "removed": [*lines[:4], *lines[5:]],
        "cut": lines[:12],
        "cut in a line": [*lines[:12], lines[12][:100]],
        "empty": [],
    }.items():
        exported.write_text("".join(tampered))
        done = elsewhere(program, exported, *keys, *anchors)
        assert done.returncode in ((1, 2) if name in ("cut in a line", "changed") else (1,)), name
        ours = audit(
            chain, "verify", "--export", str(exported), "--anchor", str(anchors[1])
        ).exit_code
        assert ours == 1, name


def test_time_range_export_verifies_only_with_the_part_option(chain: Path, tmp_path: Path) -> None:
    exported = tmp_path / "part.jsonl"
    rows = export_to(
        exported, chain, "--since", "2026-01-01T00:00:03+00:00", "--until", "2026-01-01T00:00:08Z"
    )
    assert [row["seq"] for row in rows] == [3, 4, 5, 6, 7]
    assert audit(chain, "verify", "--export", str(exported)).exit_code == 1
    assert audit(chain, "verify", "--export", str(exported), "--part").exit_code == 0
    exported.write_text(exported.read_text().replace("number", "numbed"))
    assert audit(chain, "verify", "--export", str(exported), "--part").exit_code == 1
    assert audit(chain, "export", "--since", "yesterday").exit_code == 2


def test_verify_of_older_schema_asks_to_start_the_engine_once(chain: Path) -> None:
    run_sql(chain, "PRAGMA user_version = 3")
    done = audit(chain, "verify")
    assert done.exit_code == 4
    assert "Start this one once" in done.stderr


def test_running_engine_rotates_its_key_verifies_and_anchors_its_chain_in_the_log(
    daemon: Daemon, control: ControlClient, tmp_path: Path
) -> None:
    secret = (daemon.home / "audit.key").read_text().strip()
    control.agents.create("clerk")
    done = audit(daemon.home, "rotate", "--credential-stdin", credential=daemon.credential)
    assert done.exit_code == 0, done.stderr
    rotation = json.loads(done.stdout)
    client = daemon.client()
    client.calculate("1 + 1")
    client.close()
    verdict = control.audit.verify()
    assert verdict.intact
    assert verdict.key_ids == (rotation["previous_key_id"], rotation["key_id"])
    page = control.audit.page(limit=2)
    rest = control.audit.page(after=int(page.pagination.next_cursor or 0), limit=1000)
    kinds = [json.loads(row.body)["kind"] for row in (*page.items, *rest.items)]
    assert kinds == [
        "change.approver.init", "audit.anchored", "change.agent.create", "audit.rotated",
        "audit.anchored", "call.ended",
    ]  # fmt: skip
    assert not rest.pagination.has_more
    assert audit(daemon.home, "verify").exit_code == 0  # while it runs
    export_to(tmp_path / "export", daemon.home)
    assert daemon.stop() == 0
    for shown in (daemon.log, (tmp_path / "export").read_text()):
        assert secret not in shown
        assert daemon.credential not in shown
    log = tmp_path / "log"
    shutil.copy(daemon.home / "log", log)
    (daemon.home / "audit-anchors.jsonl").unlink()
    done = audit(daemon.home, "verify", "--anchor", str(log))
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["anchored_to"] == told["rows"] == len(rows_of(daemon.home))


def test_export_into_a_closed_pipe_exits_1_without_traceback(chain: Path) -> None:
    connection = sqlite3.connect(chain / "state.db")
    with connection:
        connection.executemany(
            "INSERT INTO audit VALUES (?, 'k', ?, x'00')",
            ((number, "x" * 200) for number in range(100, 5000)),
        )
    connection.close()
    process = subprocess.Popen(
        [str(FUMEHOOD), "audit", "export"],
        env={**os.environ, "FUMEHOOD_HOME": str(chain)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.readline()
    process.stdout.close()
    _, told = process.communicate(timeout=DEADLINE_S)
    assert b"Traceback" not in told
    assert process.returncode == 1
