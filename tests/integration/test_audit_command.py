"""`fumehood audit`, the control socket and the program that verifies elsewhere, on a real chain."""

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
from fumehood.core.errors import ERROR_CODES
from support.audit import make_chain, rows_of, run_sql
from support.authority import ask

pytestmark = pytest.mark.row("A7")


@pytest.fixture
def chain(home: Path) -> Path:
    """A state directory with a chain that nobody writes to; 20 rows, two keys, two anchors."""
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
    """With nothing of ours, nothing installed, and none of our environment."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(program), *map(str, arguments)],
        capture_output=True, text=True, timeout=60, env={}, cwd="/",
    )  # fmt: skip


def test_verify_tells_what_it_found_and_ends_with_it(chain: Path) -> None:
    done = audit(chain, "verify")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["intact"], told["rows"], told["anchored_to"]) == (True, 20, 18)
    run_sql(chain, "DELETE FROM audit WHERE seq = 5")
    done = audit(chain, "verify")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [(found["problem"], found["seq"]) for found in told["findings"]] == [("removed", 6)]


def test_it_is_said_where_a_cut_end_could_not_be_found(chain: Path) -> None:
    assert "No anchor" not in audit(chain, "verify").stderr
    (chain / "audit-anchors.jsonl").unlink()
    run_sql(chain, "DELETE FROM audit")
    assert "No anchor was compared" in audit(chain, "verify").stderr


def test_anchor_from_elsewhere_counts_where_the_own_ones_are_gone(chain: Path) -> None:
    kept = chain / "elsewhere.jsonl"
    (chain / "audit-anchors.jsonl").rename(kept)
    run_sql(chain, "DELETE FROM audit WHERE seq > 12")
    assert audit(chain, "verify").exit_code == 0  # without an anchor nobody can tell
    done = audit(chain, "verify", "--anchor", str(kept))
    assert done.exit_code == 1
    assert json.loads(done.stdout)["findings"][0]["problem"] == "cut"


def test_copy_of_a_key_counts_where_the_own_one_was_swapped_with_the_chain(
    chain: Path, tmp_path: Path
) -> None:
    """Whoever writes a chain of his own under a key of his own is found out by our copy."""
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
def test_what_cannot_be_read_is_said(
    chain: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = audit(chain, "verify", *(part.format(home=chain) for part in arguments))
    assert done.exit_code == code
    assert any(word in done.stderr for word in words.split("|"))
    assert "Traceback" not in done.stderr


def test_state_that_is_not_there_is_not_made(home: Path) -> None:
    for command in ("verify", "export"):
        done = audit(home, command)
        assert done.exit_code == 4
        assert "There is no database" in done.stderr
    assert list(home.iterdir()) == []


def test_copies_of_keys_and_an_export_are_enough_without_a_state(
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


def test_ages_are_understood_as_elsewhere(chain: Path, tmp_path: Path) -> None:
    assert export_to(tmp_path / "new", chain, "--since", "1h") == []
    assert len(export_to(tmp_path / "old", chain, "--until", "10m")) == 20
    done = audit(chain, "export", "--since", "banana")
    assert done.exit_code == 2
    assert "an age (30s, 10m, 1h, 7d)" in done.stderr


def test_export_is_verified_elsewhere_by_a_program_that_needs_nothing_of_ours(
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
        "reordered": [*lines[:4], lines[5], lines[4], *lines[6:]],
        "repeated": [*lines[:5], lines[4], *lines[5:]],
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


def test_part_of_the_chain_is_exported_by_time_and_verified_as_a_part(
    chain: Path, tmp_path: Path
) -> None:
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


def test_older_engine_s_state_is_read_after_a_start(chain: Path) -> None:
    run_sql(chain, "PRAGMA user_version = 3")
    done = audit(chain, "verify")
    assert done.exit_code == 4
    assert "Start this one once" in done.stderr


def test_running_engine_is_verified_from_outside_anchored_in_its_log_and_given_a_new_key(
    daemon: Daemon, control: ControlClient, tmp_path: Path
) -> None:
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
    assert daemon.stop() == 0
    log = tmp_path / "log"
    shutil.copy(daemon.home / "log", log)
    (daemon.home / "audit-anchors.jsonl").unlink()
    done = audit(daemon.home, "verify", "--anchor", str(log))
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["anchored_to"] == told["rows"] == len(rows_of(daemon.home))


def test_killed_engine_leaves_a_chain_that_is_intact(daemon: Daemon) -> None:
    client = daemon.client()
    for _ in range(20):
        client.calculate("1 + 1")
    client.get("/v1/calls")  # what a list has shown survives
    client.close()
    daemon.process.kill()
    daemon.process.wait(timeout=30)
    done = audit(daemon.home, "verify")
    assert done.exit_code == 0, done.stdout
    assert json.loads(done.stdout)["rows"] >= 22


def test_chain_is_nobody_s_to_see_without_admin(daemon: Daemon, control: ControlClient) -> None:
    approver = control.approvers.add("olga", scopes=["approve"]).secret
    caller = control.tokens.new("robot").secret
    for credential, code in (
        (approver, "PERMISSION_DENIED"),
        (caller, "PERMISSION_DENIED"),
        ("", "UNAUTHORIZED"),
    ):
        for method, path in (
            ("GET", "/v1/audit"),
            ("GET", "/v1/audit/verify"),
            ("POST", "/v1/audit/rotate"),
        ):
            answer = ask(daemon.control, method, path, credential=credential or None)
            assert answer.code == code
            assert answer.status == ERROR_CODES[code].http_status
    assert len(control.audit.verify().key_ids) == 1
    client = daemon.client()  # the callers' socket has no such address
    assert client.get("/v1/audit").code == "RESOURCE_NOT_FOUND"
    client.close()


def test_secrets_are_not_in_the_log_nor_in_the_export(daemon: Daemon, tmp_path: Path) -> None:
    secret = (daemon.home / "audit.key").read_text().strip()
    rows = export_to(tmp_path / "x", daemon.home)
    assert rows
    assert secret not in (tmp_path / "x").read_text()
    assert daemon.stop() == 0
    assert secret not in daemon.log
    assert daemon.credential not in (tmp_path / "x").read_text()


def test_reader_that_leaves_ends_an_export_quietly(chain: Path) -> None:
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
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    _, told = process.communicate(timeout=60)
    assert b"Traceback" not in told
    assert process.returncode == 1
