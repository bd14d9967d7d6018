"""The audit log verifies until a row is altered or deleted."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.site import Site


@pytest.mark.row("A7")
def test_audit_verification_detects_altered_and_deleted_rows(site: Site, tmp_path: Path) -> None:
    waiting = site.parked("audited", "a text that is nobody's business")
    assert site.decide(waiting.approval_id).code is None
    assert site.answer(waiting.call_id)["success"]
    intact = site.audit("verify")
    assert intact.returncode == 0, intact.stdout
    assert json.loads(intact.stdout)["intact"] is True
    every = site.audit_rows("")
    rows = [row for row in every if row.get("approval_id") == waiting.approval_id]
    kinds = ["approval.created", "approval.approved", "approval.started", "approval.done"]
    assert [row["kind"] for row in rows] == kinds
    assert "nobody's business" not in json.dumps(every)

    site.restart()
    twin = copied(site, tmp_path / "twin")
    assert verified(site, twin)["intact"] is True
    changed = copied(site, tmp_path / "changed")
    with sqlite3.connect(changed / "state.db") as database:
        altered = database.execute(
            "UPDATE audit SET body = replace(body, 'approver:owner', 'approver:other') "
            "WHERE body LIKE '%approval.approved%' AND body LIKE ?",
            [f"%{waiting.approval_id}%"],
        )
        assert altered.rowcount == 1
    database.close()
    found = verified(site, changed)
    assert found["intact"] is False
    assert [one["problem"] for one in found["findings"]] == ["altered"]
    cut = copied(site, tmp_path / "cut")
    with sqlite3.connect(cut / "state.db") as database:
        database.execute("DELETE FROM audit WHERE seq > (SELECT max(seq) FROM audit) - 3")
    database.close()
    assert verified(site, cut)["intact"] is False


def copied(site: Site, target: Path) -> Path:
    """A copy of a running daemon's state, as someone with access to the disk would take it."""
    target.mkdir(mode=0o700)
    for file in site.state.glob("audit*"):
        shutil.copy2(file, target)
    with sqlite3.connect(site.state / "state.db") as source:
        source.execute("VACUUM INTO ?", [str(target / "state.db")])
    source.close()
    (target / "state.db").chmod(0o600)
    return target


def verified(site: Site, state: Path) -> Any:
    """Verify a copied state directory as root, which may read it."""
    done = subprocess.run(
        [*site.command, "audit", "verify", "--json"],
        env={**site.environment, "FUMEHOOD_HOME": str(state)},
        cwd="/", capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == (0 if json.loads(done.stdout)["intact"] else 1), done.stderr
    return json.loads(done.stdout)
