"""The audit chain: whoever tampers with it without the key is found out, and where."""

from __future__ import annotations

import json
import secrets
import shutil
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sqlalchemy import Connection

from fumehood.audit.service import add_anchor, own_anchors
from fumehood.audit.verify import MAX_FINDINGS, Anchor, read_anchors, read_export, verify
from fumehood.storage.audit_chain import all_rows
from fumehood.storage.audit_keys import all_keys, keep_key, new_key, open_key
from fumehood.storage.audit_rows import GENESIS, AuditKey, AuditRow, Unreadable, mac_of
from fumehood.storage.calls import CallLog
from fumehood.storage.changes import recorded, stamp
from fumehood.storage.database import open_database
from fumehood.storage.errors import AuditKeyLost, WriteFailed
from support.audit import (  # fmt: skip
    ANCHORED_AT,
    ROTATED_AT,
    ROWS,
    START,
    append,
    look,
    make_chain,
    rotate,
    rows_of,
    tamper,
)
from support.state import call_row, keys, put, writer_held

pytestmark = pytest.mark.row("A7")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("chain")
    state.chmod(0o700)
    make_chain(state)
    return state


@pytest.fixture
def state(made: Path, home: Path) -> Path:
    """A chain of one's own to tamper with."""
    return Path(shutil.copytree(made, home / "state"))


def run(*statements: str) -> Callable[[sqlite3.Connection], None]:
    def change(connection: sqlite3.Connection) -> None:
        for statement in statements:
            connection.execute(statement)

    return change


@dataclass(frozen=True)
class Tampering:
    """Something that somebody does to the table, and the first thing that is found."""

    name: str
    change: Callable[[sqlite3.Connection], None]
    problem: str
    seq: int


def renumbered(after: int, by: str) -> tuple[str, str]:
    """Numbers are unique at every moment: so by way of negative ones."""
    return (
        f"UPDATE audit SET seq = -seq WHERE seq > {after}",
        f"UPDATE audit SET seq = -seq {by} WHERE seq < 0",
    )


TAMPERINGS = [
    Tampering(
        "a body is changed",
        run("UPDATE audit SET body = replace(body, '5', '6') WHERE seq = 5"),
        "altered", 5,
    ),
    Tampering(
        "a body gets a space, which JSON does not mind",
        run("UPDATE audit SET body = body || ' ' WHERE seq = 5"),
        "altered", 5,
    ),
    Tampering(
        "a body is no text",
        run("UPDATE audit SET body = x'ff00fe' WHERE seq = 5"),
        "altered", 5,
    ),
    Tampering(
        "a mac is changed",
        run("UPDATE audit SET mac = randomblob(32) WHERE seq = 5"),
        "altered", 5,
    ),
    Tampering(
        "a mac is cut short",
        run("UPDATE audit SET mac = substr(mac, 1, 31) WHERE seq = 5"),
        "altered", 5,
    ),
    Tampering(
        "a row is said to be under the next key",
        run("UPDATE audit SET key_id = (SELECT key_id FROM audit WHERE seq = 20) WHERE seq = 5"),
        "key_changed", 5,
    ),
    Tampering(
        "a row is said to be under a key that there is not",
        run("UPDATE audit SET key_id = '0123456789abcdef' WHERE seq = 5"),
        "key_changed", 5,
    ),
    Tampering("a row is removed", run("DELETE FROM audit WHERE seq = 5"), "removed", 6),
    Tampering(
        "several rows are removed",
        run("DELETE FROM audit WHERE seq BETWEEN 3 AND 7"),
        "removed", 8,
    ),
    Tampering(
        "a row is removed and the others move up",
        run("DELETE FROM audit WHERE seq = 5", *renumbered(5, "- 1")),
        "altered", 5,
    ),
    Tampering("the first row is removed", run("DELETE FROM audit WHERE seq = 1"), "removed", 2),
    Tampering(
        "the first row is removed and the others move up",
        run("DELETE FROM audit WHERE seq = 1", *renumbered(0, "- 1")),
        "altered", 1,
    ),
    Tampering(
        "the first row is replaced",
        run("""UPDATE audit SET body = '{"kind":"test.row","at":"x"}' WHERE seq = 1"""),
        "altered", 1,
    ),
    Tampering(
        "a row is put in between",
        run(
            *renumbered(5, "+ 1"),
            "INSERT INTO audit SELECT 6, key_id, body, randomblob(32) FROM audit WHERE seq = 5",
        ),
        "altered", 6,
    ),
    Tampering(
        "a row is put before the first",
        run("INSERT INTO audit SELECT 0, key_id, body, mac FROM audit WHERE seq = 1"),
        "order", 0,
    ),
    Tampering(
        "a row is put far before the first",
        run("INSERT INTO audit SELECT -9000000000, key_id, body, mac FROM audit WHERE seq = 1"),
        "order", -9000000000,
    ),
    Tampering(
        "a row is put after the last",
        run("INSERT INTO audit SELECT 21, key_id, body, randomblob(32) FROM audit WHERE seq = 20"),
        "altered", 21,
    ),
    Tampering(
        "a row is repeated at the end",
        run("INSERT INTO audit SELECT 21, key_id, body, mac FROM audit WHERE seq = 20"),
        "altered", 21,
    ),
    Tampering(
        "two rows change places",
        run(
            "UPDATE audit SET seq = -5 WHERE seq = 5",
            "UPDATE audit SET seq = 5 WHERE seq = 6",
            "UPDATE audit SET seq = 6 WHERE seq = -5",
        ),
        "altered", 5,
    ),
    Tampering(
        "the whole chain is moved up by one",
        run(*renumbered(0, "+ 1")),
        "removed", 2,
    ),
    Tampering(
        "the announcement of a key is removed",
        run(f"DELETE FROM audit WHERE seq = {ROTATED_AT}"),
        "removed", 11,
    ),
    Tampering(
        "a key is announced that nobody announced",
        run(
            """UPDATE audit SET body = '{"kind":"audit.rotated","next_key_id":"'
            || (SELECT key_id FROM audit WHERE seq = 20) || '","commitment":""}' WHERE seq = 5"""
        ),
        "altered", 5,
    ),
    Tampering("the tail is cut", run("DELETE FROM audit WHERE seq > 12"), "cut", 13),
    Tampering(
        "the tail is cut at the anchored row", run("DELETE FROM audit WHERE seq >= 18"), "cut", 18
    ),
    Tampering("everything is removed", run("DELETE FROM audit"), "cut", 1),
]  # fmt: skip


@pytest.mark.sqlite
@pytest.mark.parametrize("tampering", TAMPERINGS, ids=lambda tampering: tampering.name)
def test_tampering_is_located_at_its_row(state: Path, tampering: Tampering) -> None:
    before = rows_of(state)
    assert look(state).is_intact  # the same chain, before anybody touched it
    tamper(state, tampering.change)
    assert rows_of(state) != before
    verdict = look(state)
    assert not verdict.is_intact
    assert (verdict.findings[0].problem, verdict.findings[0].seq) == (
        tampering.problem,
        tampering.seq,
    )


@pytest.mark.sqlite
def test_whole_chain_with_a_rotation_is_intact_and_anchored(state: Path) -> None:
    verdict = look(state)
    assert verdict.is_intact
    assert (verdict.rows, verdict.first_seq, verdict.last_seq) == (ROWS, 1, ROWS)
    assert (verdict.anchors, verdict.anchored_to) == (len(ANCHORED_AT), ANCHORED_AT[-1])
    assert len(verdict.key_ids) == 2
    assert verdict.head == rows_of(state)[-1].mac.hex()


@pytest.mark.sqlite
def test_chain_continued_after_a_cut_differs_from_its_anchor(state: Path) -> None:
    tamper(state, run("DELETE FROM audit WHERE seq > 12"))
    database = open_database(state / "state.db")
    for number in range(113, 131):
        append(database, number)
    database.close()
    (finding,) = look(state).findings
    assert (finding.problem, finding.seq) == ("anchor", 18)
    assert verify_without_anchors(state)  # the control: only the anchor tells


def verify_without_anchors(state: Path) -> bool:
    return verify(rows_of(state), all_keys(state)).is_intact


@pytest.mark.sqlite
def test_chain_forged_with_the_key_is_detected_by_anchors(state: Path) -> None:
    """The control of every row above: it is the mac that tells, and the key that protects."""
    secret = all_keys(state)
    rows, before = [], GENESIS
    for row in rows_of(state):
        body = row.body.replace(b'"number":5', b'"number":500')
        before = mac_of(secret[row.key_id], before, row.seq, body)
        rows.append((row.seq, row.key_id, body.decode(), before))
    tamper(state, run("DELETE FROM audit"))
    tamper(state, lambda c: c.executemany("INSERT INTO audit VALUES (?, ?, ?, ?)", rows))
    assert verify_without_anchors(state)
    found = look(state).findings
    assert [(finding.problem, finding.seq) for finding in found] == [
        ("anchor", seq) for seq in ANCHORED_AT
    ]


@pytest.mark.sqlite
def test_chain_with_a_swapped_key_can_be_neither_verified_nor_continued(state: Path) -> None:
    other = new_key()
    (state / "audit.key").write_text(other.secret.hex())
    for kept in state.glob("audit-*.key"):
        kept.write_text(other.secret.hex())
    verdict = look(state)
    assert not verdict.is_intact
    lacking = [found for found in verdict.findings if found.problem == "no_key"]
    assert len(lacking) == len({row.key_id for row in rows_of(state)})
    assert lacking[0].seq == 1
    before = (state / "state.db").read_bytes()
    with pytest.raises(AuditKeyLost, match="Restore the key"):
        open_database(state / "state.db")
    assert (state / "state.db").read_bytes() == before


@pytest.mark.sqlite
def test_rotation_to_an_unannounced_key_is_detected(state: Path) -> None:
    """An id is short; two keys with one id would need this."""
    rows = rows_of(state)
    known = all_keys(state)
    forged = secrets.token_bytes(32)
    second = {rows[-1].key_id: forged}
    before, forged_rows = rows[ROTATED_AT - 1].mac, rows[:ROTATED_AT]
    for row in rows[ROTATED_AT:]:
        before = mac_of(forged, before, row.seq, row.body)
        forged_rows.append(replace(row, mac=before))
    verdict = verify(forged_rows, known | second)
    assert [(f.problem, f.seq) for f in verdict.findings] == [("key_changed", ROTATED_AT)]


SECRETS = [AuditKey.of(bytes([number]) * 32) for number in range(2)]


def chain_of_rows(length: int) -> list[AuditRow]:
    rows, before = [], GENESIS
    for seq in range(1, length + 1):
        body = json.dumps({"kind": "test.row", "number": seq % 3}).encode()
        mac = mac_of(SECRETS[0].secret, before, seq, body)
        rows.append(AuditRow(seq, SECRETS[0].id, body, mac, before))
        before = mac
    return rows


WHOLE = chain_of_rows(12)


def test_part_of_a_chain_is_verified_from_its_first_row_on() -> None:
    known = {SECRETS[0].id: SECRETS[0].secret}
    part = WHOLE[4:9]
    anchors = [Anchor(row.seq, row.key_id, row.mac, "") for row in (WHOLE[2], part[1], WHOLE[-1])]
    verdict = verify(part, known, anchors, whole=False)
    assert (verdict.is_intact, verdict.anchors, verdict.anchored_to) == (True, 1, part[1].seq)
    assert not verify(part, known, whole=True).is_intact
    changed = [replace(part[0], body=part[1].body), *part[1:]]
    assert not verify(changed, known, whole=False).is_intact
    torn = [replace(part[0], before=part[0].mac), *part[1:]]
    assert not verify(torn, known, whole=False).is_intact


def test_many_findings_are_counted_and_the_first_listed() -> None:
    altered = [replace(row, mac=bytes(32)) for row in chain_of_rows(500)]
    verdict = verify(altered, {SECRETS[0].id: SECRETS[0].secret})
    assert verdict.problems == 500
    assert len(verdict.findings) == MAX_FINDINGS


@pytest.mark.parametrize(
    "line",
    ["", "no JSON", "[]", "{}", '{"seq": 1}', "9" * 5000, "[" * 100_000,
     '{"seq": true, "key_id": "", "before": null, "mac": "", "body": ""}',
     '{"seq": 0, "key_id": "", "before": null, "mac": "", "body": ""}',
     '{"seq": 18446744073709551616, "key_id": "", "before": null, "mac": "", "body": ""}',
     '{"seq": 1, "key_id": "", "before": null, "mac": "", "body": "", "more": 1}',
     '{"seq": 1, "key_id": "", "before": null, "mac": "zz", "body": ""}',
     '{"seq": 1, "key_id": "", "before": null, "mac": "", "body": "\\ud800"}'],
)  # fmt: skip
def test_malformed_export_line_is_named(line: str) -> None:
    with pytest.raises(Unreadable, match="line 1"):
        list(read_export([line]))
    assert read_anchors([line]) == []


def test_anchors_are_found_in_a_log() -> None:
    anchor = '{"seq": 3, "key_id": "k", "mac": "ab", "at": "t"%s}'
    lines = ["listens on …", anchor % "", '{"event": "call.ended"}', "{torn",
             anchor % ', "event": "audit.anchor", "level": "info"', anchor % ', "event": "x"']  # fmt: skip
    assert read_anchors(lines) == [Anchor(3, "k", b"\xab", "t")] * 2


def test_anchor_after_a_torn_line_is_written_on_its_own_line(home: Path) -> None:
    first, second = (Anchor(seq, "k", bytes(32), "t") for seq in (1, 2))
    add_anchor(home, first)
    path = home / "audit-anchors.jsonl"
    path.write_text(path.read_text() + '{"seq": 7, "ke')
    add_anchor(home, second)
    assert own_anchors(home) == [first, second]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# Keys


def test_audit_key_is_created_once_as_a_private_file(home: Path) -> None:
    first = open_key(home, None)
    assert open_key(home, None) == open_key(home, first.id) == first
    path = home / "audit.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in home.iterdir()] == ["audit.key"]
    assert first.secret.hex() not in repr(first)
    assert len(first.secret) == 32


@pytest.mark.sqlite
def test_audit_key_is_never_stored_in_the_database(state: Path) -> None:
    content = (state / "state.db").read_bytes()
    for secret in all_keys(state).values():
        assert secret not in content
        assert secret.hex().encode() not in content


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "Restore the key"),
    "empty": (lambda path: path.write_text(""), "is damaged"),
    "cut short": (lambda path: path.write_text(path.read_text()[:40]), "is damaged"),
    "no hexadecimal digits": (lambda path: path.write_bytes(b"\xff" * 64), "is damaged"),
    "open to others": (lambda path: path.chmod(0o640), "chmod 600"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
    "a link": (lambda path: (path.unlink(), path.symlink_to("/dev/null")), "neither read"),
}


@pytest.mark.sqlite
@pytest.mark.parametrize("name", UNUSABLE)
def test_chain_with_an_unusable_key_is_not_restarted(home: Path, name: str) -> None:
    spoil, words = UNUSABLE[name]
    database = open_database(home / "state.db")
    append(database, 1)
    database.close()
    kept = (home / "audit.key").read_text()
    before = (home / "state.db").read_bytes()
    spoil(home / "audit.key")
    for _ in range(2):
        with pytest.raises(AuditKeyLost, match=words):
            open_database(home / "state.db")
    assert (home / "state.db").read_bytes() == before
    # The twin: with its key it opens and goes on.
    if (home / "audit.key").is_dir():
        (home / "audit.key").rmdir()
    (home / "audit.key").unlink(missing_ok=True)
    (home / "audit.key").write_text(kept)
    (home / "audit.key").chmod(0o600)
    database = open_database(home / "state.db")
    assert append(database, 2) == 2
    database.close()
    assert look(home).is_intact


def test_key_id_in_the_database_cannot_be_a_path(home: Path) -> None:
    (home / "state").mkdir(mode=0o700)
    key = new_key()
    (home / "audit-x.key").write_text(key.secret.hex())
    with pytest.raises(AuditKeyLost):
        open_key(home / "state", "/../../audit-x")


@pytest.mark.sqlite
def test_backup_from_before_a_rotation_continues_with_its_own_key(home: Path, state: Path) -> None:
    """Its chain is intact; that rows are missing is what the anchors tell."""
    path = home / "state.db"
    database = open_database(path)
    append(database, 1)
    database.close()
    backup = path.read_bytes()
    database = open_database(path)
    rotate(database, home)
    append(database, 3)
    database.close()
    path.write_bytes(backup)
    database = open_database(path)
    assert append(database, 2) == 2
    database.close()
    assert look(home).is_intact
    assert len(list(home.glob("audit-*.key"))) == 2


def test_rotation_that_is_rolled_back_leaves_the_old_key(home: Path) -> None:
    database = open_database(home / "state.db")
    append(database, 1)
    key = new_key()
    keep_key(home, key)
    database.audit.learn(key)

    def fail(connection: Connection) -> None:
        database.audit.rotate(connection, "t", key, {})
        raise LookupError("changed its mind")

    with pytest.raises(LookupError):
        database.write_now(fail)
    append(database, 2)
    database.close()
    assert len({row.key_id for row in rows_of(home)}) == 1
    assert look(home).is_intact


# What goes into the chain


def test_change_and_its_audit_row_are_atomic(home: Path) -> None:
    database = open_database(home / "state.db")

    change = recorded(put("yes"), at=START, by="a", action="token.new", subject="t1")

    def fail(connection: Connection) -> None:
        change(connection)
        raise LookupError("changed its mind")

    with pytest.raises(LookupError):
        database.write_now(fail)
    database.write_now(change)
    with pytest.raises(WriteFailed):
        database.write_now(change)  # there already
    assert database.read_now(keys) == {"yes"}
    database.close()
    (row,) = rows_of(home)
    assert json.loads(row.body) == {
        "kind": "change.token.new", "at": stamp(START), "by": "a", "subject": "t1", "details": {},
    }  # fmt: skip


def test_audit_row_cannot_override_kind_or_time(home: Path) -> None:
    database = open_database(None)
    for field in ("kind", "at"):
        with pytest.raises(ValueError, match="already"):
            database.write_now(lambda c, f=field: database.audit.append(c, "x", "t", {f: "y"}))
    database.close()


def test_in_memory_chain_keeps_its_newest_rows_intact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fumehood.storage.database.IN_MEMORY_KEPT", 10)
    database = open_database(None)
    for number in range(25):
        append(database, number)
    rows = database.read_now(lambda connection: list(all_rows(connection)))
    assert [row.seq for row in rows] == list(range(16, 26))
    assert verify(rows, database.audit.keys, whole=database.audit.kept is None).is_intact
    database.close()


def test_audit_row_of_a_call_matches_its_log_entry(
    home: Path,
) -> None:
    database = open_database(home / "state.db")
    log = CallLog(database, kept_days=30, kept=100)
    row = call_row(1)
    with writer_held(database):
        log.record(row)
        log.record(call_row(2))
    database.close()
    first, second = (json.loads(row.body) for row in rows_of(home))
    expected = {key: value for key, value in row.items() if value is not None}
    assert first == {"kind": "call.ended", "call_id": expected.pop("id"), **expected}
    assert second["call_id"] == call_row(2)["id"]
    assert look(home).is_intact
