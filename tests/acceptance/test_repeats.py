"""A crashed caller that repeats its call, as frameworks do: one approval, one execution."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from support.site import Site
from support.wait import DEADLINE_S, wait_until

pytestmark = pytest.mark.row("A2", "A5")


def asked_for(site: Site, to: str) -> list[dict[str, Any]]:
    """All approvals requested for this receiver, newest first."""
    answer = site.ask("caller", "GET", "/v1/approvals?tool=send_mail&limit=100")
    return [one for one in answer.body["data"]["items"] if one["arguments"]["to"] == to]


def begun(site: Site, to: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A caller process that waits for its answer, and the id of its approval."""
    process = site.begin("caller", "call", "send_mail", json.dumps({"to": to}), "--wait", *options)
    wait_until(lambda: asked_for(site, to))
    return process, asked_for(site, to)[0]["id"]


@pytest.mark.parametrize("how", ["plain", "stream"])
def test_repeat_after_caller_was_killed_gets_the_approved_answer(site: Site, how: str) -> None:
    to = f"rita-{how}"
    process, approval_id = begun(site, to, *(["--stream"] if how == "stream" else []))
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert site.decide(approval_id).code is None
    site.until(approval_id, "done")

    again = site.mail(to)
    assert again.code is None
    assert again.body["metadata"]["idempotent_replay"] is True
    assert site.done(to) == ["begun", "sent"]
    assert [one["id"] for one in asked_for(site, to)] == [approval_id]

    assert site.parked(to).approval_id != approval_id  # it has its answer: this is another one
    assert site.done(to) == ["begun", "sent"]


@pytest.mark.parametrize("how", ["plain", "stream"])
def test_twin_repeat_after_answer_was_received_needs_new_approval(site: Site, how: str) -> None:
    to = f"rosa-{how}"
    process, approval_id = begun(site, to, *(["--stream"] if how == "stream" else []))
    assert site.decide(approval_id).code is None
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert site.parked(to).approval_id != approval_id
    assert site.done(to) == ["begun", "sent"]


def test_control_new_call_option_requests_approval_and_runs_again(site: Site) -> None:
    first = site.parked("rolf")
    second = site.parked("rolf", new_call=True)
    assert second.approval_id != first.approval_id
    for one in (first, second):
        assert site.decide(one.approval_id).code is None
        site.until(one.approval_id, "done")
    assert site.done("rolf") == ["begun", "sent"] * 2


def test_repeat_after_engine_kill_maps_to_the_same_pending_call(site: Site) -> None:
    first = site.parked("ruth")
    site.kill()
    site.start()
    assert site.parked("ruth") == first
    assert site.decide(first.approval_id).code is None
    site.until(first.approval_id, "done")
    site.kill()
    site.start()
    answer = site.mail("ruth")
    assert (answer.code, answer.body["data"]) == (None, {"sent": "ruth"})
    assert answer.body["metadata"]["call_id"] == first.call_id
    assert site.done("ruth") == ["begun", "sent"]


def test_command_line_repeat_names_the_original_call_unless_new(site: Site) -> None:
    first = site.parked("roy")
    again = site.run("caller", "call", "send_mail", '{"to": "roy", "text": ""}')
    assert again.returncode == 3
    assert f"fumehood calls answer {first.call_id}" in again.stderr
    new = site.run("caller", "call", "send_mail", '{"to": "roy", "text": ""}', "--new-call")
    assert first.approval_id not in new.stdout


def test_fetched_answer_ends_repeat_window_and_callers_are_separate(site: Site) -> None:
    first = site.parked("rob")
    token = site.do("POST", "/v1/tokens", {"name": "robs", "scopes": ["call"]})["secret"]
    other = site.call("send_mail", {"to": "rob", "text": ""}, credential=token)
    assert other.body["error"]["approval_id"] != first.approval_id
    assert site.decide(first.approval_id).code is None
    site.answer(first.call_id)
    assert site.parked("rob").approval_id != first.approval_id
    assert site.done("rob") == ["begun", "sent"]
