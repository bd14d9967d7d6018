"""Waiting calls across expiry, restarts and crashes of the engine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from acceptance.conftest import BUDGETS
from support.site import Site, parked
from support.wait import DEADLINE_S, wait_until


@pytest.mark.row("A2")
def test_undecided_approval_expires_without_counting_as_a_denial(site: Site) -> None:
    site.restart(f"{BUDGETS}[approvals]\nexpire_seconds = 1\n")
    try:
        waiting = site.parked("late-1")
        answer = site.answer(waiting.call_id)
        assert answer["error"]["code"] == "APPROVAL_EXPIRED"
        assert "was not denied" in answer["error"]["message"]
        after = site.approval(waiting.approval_id)
        assert (after["state"], after["decisions"]) == ("expired", [])
        late = site.decide(waiting.approval_id)
        assert late.code == "APPROVAL_EXPIRED"
        assert site.approvals("approve", waiting.approval_id, "--yes").returncode == 1
        again = parked(site.mail("late-1"))  # asked anew, and not answered by a no
        assert again.approval_id != waiting.approval_id
        waited = site.run("caller", "call", "send_mail", '{"to": "late-2"}', "--wait=30")
        assert json.loads(waited.stdout)["error"]["code"] == "APPROVAL_EXPIRED"
        assert site.done("late-1") == site.done("late-2") == []
        kinds = {row["kind"] for row in _rows_of(site, waiting.approval_id)}
        assert kinds == {"approval.created", "approval.expiring", "approval.expired"}
    finally:
        site.restart(BUDGETS)


def _rows_of(site: Site, approval_id: str) -> list[dict[str, Any]]:
    rows = site.audit_rows("approval.")
    return [row for row in rows if row.get("approval_id") == approval_id]


@pytest.mark.row("A2", "A5", "P3")
def test_pending_approval_survives_engine_kill(site: Site) -> None:
    key = {"idempotency_key": "kept"}
    waiting = site.parked("kept-1", **key)
    site.kill()
    site.start()
    assert site.approval(waiting.approval_id)["state"] == "pending"
    assert parked(site.mail("kept-1", **key)).approval_id == waiting.approval_id
    assert site.decide(waiting.approval_id).code is None
    assert site.answer(waiting.call_id)["data"] == {"sent": "kept-1"}
    assert site.done("kept-1") == ["begun", "sent"]
    replayed = site.mail("kept-1", **key).body["metadata"]
    assert (replayed["idempotent_replay"], replayed["call_id"]) == (True, waiting.call_id)


@pytest.mark.row("A5")
def test_approval_given_during_shutdown_is_executed_after_restart(site: Site) -> None:
    """While a call runs, a stopping engine serves the control socket but starts no call."""
    waiting = site.parked("back-1")
    site.hold_back()
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(site.call, "keep_busy", {})
        wait_until(lambda: site.done("busy"))
        site.process.terminate()
        wait_until(lambda: not site.takes_calls())
        assert site.decide(waiting.approval_id).code is None
        assert site.approval(waiting.approval_id)["state"] == "approved"
        site.go_on()
        assert busy.result(DEADLINE_S).code is None
    assert site.process.wait(DEADLINE_S) == 0
    assert site.done("back-1") == []
    site.start()
    assert site.answer(waiting.call_id)["data"] == {"sent": "back-1"}
    assert site.done("back-1") == ["begun", "sent"]


@pytest.mark.row("A5", "D6")
def test_running_approved_call_finishes_before_engine_stops(site: Site) -> None:
    waiting = site.parked("stop-1", "slowly")
    site.hold_back()
    assert site.decide(waiting.approval_id).code is None
    wait_until(lambda: site.done("stop-1") == ["begun"])
    site.process.terminate()
    wait_until(lambda: not site.takes_calls())
    site.go_on()
    assert site.process.wait(DEADLINE_S) == 0
    site.start()
    assert site.approval(waiting.approval_id)["state"] == "done"
    assert site.answer(waiting.call_id)["data"] == {"sent": "stop-1"}
    assert site.done("stop-1") == ["begun", "sent"]


@pytest.mark.row("A5", "P3")
def test_call_interrupted_by_engine_kill_is_outcome_unknown_until_resolved(site: Site) -> None:
    key = {"idempotency_key": "killed"}
    site.hold_back()
    waiting = site.parked("kill-1", "slowly", **key)
    assert site.decide(waiting.approval_id).code is None
    body = {"arguments": {"to": "kill-2", "text": "slowly"}}
    others = parked(site.ask("both", "POST", "/v1/tools/send_mail/call", body))
    assert site.decide(others.approval_id).code is None
    wait_until(lambda: site.done("kill-1") == site.done("kill-2") == ["begun"])
    site.kill()
    site.start()
    site.go_on()
    assert site.approval(waiting.approval_id)["state"] == "interrupted"
    answer = site.answer(waiting.call_id)
    assert answer["error"]["code"] == "OUTCOME_UNKNOWN"
    assert answer["error"]["retryable"] is False
    assert site.mail("kill-1", "slowly", **key).code == "OUTCOME_UNKNOWN"
    assert site.decide(waiting.approval_id).code == "IDEMPOTENCY_CONFLICT"

    more = ("--outcome", "failed", "--note", "The mail server has no such mail.")
    own = site.run("caller", "approvals", "resolve", waiting.approval_id, *more)
    # It has no credential, and of a service it does not even reach the control socket.
    assert own.returncode == (4 if site.is_service else 2)
    if site.is_service:  # nor does its caller resolve it who sits at the approvers' socket, too
        refused = site.resolve(others.approval_id, who="both")
        assert refused.code == "PERMISSION_DENIED"
    assert site.resolve(others.approval_id).code is None
    assert site.approvals("resolve", waiting.approval_id, *more).returncode == 0
    assert site.approval(waiting.approval_id)["state"] == "failed"
    assert site.approvals("resolve", waiting.approval_id, *more).returncode == 1
    (row,) = [r for r in _rows_of(site, waiting.approval_id) if r["kind"] == "approval.resolved"]
    assert row["note"] == "The mail server has no such mail."
    assert site.done("kill-1") == site.done("kill-2") == ["begun"]  # never run twice
