"""A caller that died and asks again, as frameworks do: one human, one action."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from support.site import Site
from support.wait import wait_until

pytestmark = pytest.mark.row("A2", "A5")


def asked_for(site: Site, to: str) -> list[dict[str, Any]]:
    """Every approval that was ever asked for this receiver, newest first."""
    answer = site.ask("caller", "GET", "/v1/approvals?tool=send_mail&limit=100")
    return [one for one in answer.body["data"]["items"] if one["arguments"]["to"] == to]


def begun(site: Site, to: str, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A caller's process that waits for its answer, and what it waits for."""
    process = site.begin("caller", "call", "send_mail", json.dumps({"to": to}), "--wait", *options)
    wait_until(lambda: asked_for(site, to))
    return process, asked_for(site, to)[0]["id"]


@pytest.mark.parametrize("how", ["plain", "stream"])
def test_caller_killed_while_it_waited_gets_its_answer_when_it_asks_again(
    site: Site, how: str
) -> None:
    to = f"rita-{how}"
    process, approval_id = begun(site, to, *(["--stream"] if how == "stream" else []))
    process.kill()
    process.communicate(timeout=30)
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
def test_caller_that_got_its_answer_asks_anew(site: Site, how: str) -> None:
    """The harmless twin."""
    to = f"rosa-{how}"
    process, approval_id = begun(site, to, *(["--stream"] if how == "stream" else []))
    assert site.decide(approval_id).code is None
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert site.parked(to).approval_id != approval_id
    assert site.done(to) == ["begun", "sent"]


def test_control_call_that_says_it_is_new_is_asked_and_done_again(site: Site) -> None:
    first = site.parked("rolf")
    second = site.parked("rolf", new_call=True)
    assert second.approval_id != first.approval_id
    for one in (first, second):
        assert site.decide(one.approval_id).code is None
        site.until(one.approval_id, "done")
    assert site.done("rolf") == ["begun", "sent"] * 2


def test_engine_killed_while_a_call_waits_knows_its_repeat(site: Site) -> None:
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


def test_repeat_on_the_command_line_names_the_call_that_has_the_answer(site: Site) -> None:
    first = site.parked("roy")
    again = site.run("caller", "call", "send_mail", '{"to": "roy", "text": ""}')
    assert again.returncode == 3
    assert f"fumehood calls answer {first.call_id}" in again.stderr
    new = site.run("caller", "call", "send_mail", '{"to": "roy", "text": ""}', "--new-call")
    assert first.approval_id not in new.stdout


def test_answer_looked_up_is_fetched_and_that_of_another_caller_is_nobodys(site: Site) -> None:
    first = site.parked("rob")
    token = site.do("POST", "/v1/tokens", {"name": "robs", "scopes": ["call"]})["secret"]
    other = site.call("send_mail", {"to": "rob", "text": ""}, credential=token)
    assert other.body["error"]["approval_id"] != first.approval_id
    assert site.decide(first.approval_id).code is None
    site.answer(first.call_id)
    assert site.parked("rob").approval_id != first.approval_id
    assert site.done("rob") == ["begun", "sent"]
