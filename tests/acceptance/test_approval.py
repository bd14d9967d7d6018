"""Calls that wait for approval: requested, decided and executed, through sockets and commands.

In service mode with two real users if the machine allows creating them, otherwise with one.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.site import Site, parked
from support.wait import DEADLINE_S, wait_until


@pytest.mark.row("A1", "A2", "A5", "A6", "D4")
def test_dangerous_call_runs_once_after_approval(site: Site) -> None:
    asked = site.run("caller", "call", "send_mail", '{"to": "ann"}')
    assert asked.returncode == 3
    error = json.loads(asked.stdout)["error"]
    assert error["code"] == "REQUIRES_HUMAN_APPROVAL"
    assert f"fumehood approvals approve {error['approval_id']}" in asked.stderr
    assert site.done("ann") == []

    listed = json.loads(site.approvals("list").stdout)
    (waiting,) = [one for one in listed if one["id"] == error["approval_id"]]
    assert (waiting["principal_id"], waiting["arguments"]["to"]) == (site.caller_id, "ann")
    call_id = waiting["call_id"]
    assert site.run("caller", "calls", "answer", call_id).returncode == 3

    said = site.approvals("approve", error["approval_id"], "--yes", "--reason", "Ann waits.")
    assert said.returncode == 0, said.stderr
    assert site.answer(call_id)["data"] == {"sent": "ann"}
    told = site.run("caller", "calls", "answer", call_id)
    assert told.returncode == 0
    assert json.loads(told.stdout)["metadata"]["call_id"] == call_id
    assert site.done("ann") == ["begun", "sent"]
    (word,) = site.until(error["approval_id"], "done")["decisions"]
    assert (word["approver"], word["channel"]) == ("approver:owner", "control")
    assert word["reason"] == "Ann waits."


@pytest.mark.row("A1", "D2")
@pytest.mark.parametrize("repeats", [False, True], ids=["new", "repeated"])
def test_waiting_command_says_in_one_line_what_it_waits_for(site: Site, repeats: bool) -> None:
    to = f"eve-{repeats}"
    known = site.parked(to, "hello").approval_id if repeats else None
    arguments = json.dumps({"to": to, "text": "hello"})
    with site.begin("caller", "call", "send_mail", arguments, "--wait=60") as running:
        assert running.stderr is not None
        line = running.stderr.readline()
        found = re.fullmatch(r"Waits for approval: (apr_\w+) \(send_mail\)\n", line)
        assert found, line
        assert known in (None, found[1])
        assert site.approvals("approve", found[1], "--yes").returncode == 0
        printed, rest = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 0
    assert json.loads(printed)["data"] == {"sent": to}
    assert rest == ""


@pytest.mark.row("A3")
def test_edited_arguments_are_validated_and_checked_against_policy_again(site: Site) -> None:
    waiting = site.parked("bea")
    wrong = site.decide(waiting.approval_id, arguments={"to": ["bea"], "text": ""})
    assert wrong.code == "INVALID_PARAMS"
    assert any("to" in name for name in wrong.body["error"]["fields"])
    forbidden = site.approvals(
        "approve", waiting.approval_id, "--yes", "--edit", '{"to": "x@rival.example"}'
    )
    assert forbidden.returncode == 1
    assert json.loads(forbidden.stdout)["error"]["code"] == "PERMISSION_DENIED"
    assert site.approval(waiting.approval_id)["state"] == "pending"

    edited = site.approvals(
        "approve", waiting.approval_id, "--yes", "--edit", '{"to": "bob", "text": "better"}'
    )
    assert edited.returncode == 0, edited.stdout
    assert site.answer(waiting.call_id)["data"] == {"sent": "bob"}
    assert (site.done("bea"), site.done("bob")) == ([], ["begun", "sent"])
    after = site.approval(waiting.approval_id)
    assert after["arguments"] == {"to": "bob", "text": "better"}
    assert after["decisions"][0]["edited"] is True
    assert site.done("x@rival.example") == []


@pytest.mark.row("A3", "A5")
def test_denial_reason_reaches_the_caller_and_answers_repeats_at_once(site: Site) -> None:
    waiting = site.parked("cleo", "first")
    said = site.approvals("deny", waiting.approval_id, "--reason", "Cleo asked for silence.")
    assert said.returncode == 0, said.stdout
    error = site.answer(waiting.call_id)["error"]
    assert error["code"] == "APPROVAL_DENIED"
    assert "Cleo asked for silence." in error["message"]

    again = site.mail("cleo", "first")
    assert again.code == "APPROVAL_DENIED"
    assert "Cleo asked for silence." in again.body["error"]["message"]
    assert again.body["error"]["approval_id"] == waiting.approval_id
    other = parked(site.mail("cleo", "second"))  # twin: another call is asked about
    assert other.approval_id != waiting.approval_id
    assert site.decide(waiting.approval_id).code == "IDEMPOTENCY_CONFLICT"
    assert site.done("cleo") == []


@pytest.mark.row("A1")
def test_deny_rule_refuses_call_without_asking_for_approval(site: Site) -> None:
    denied = site.mail("eve@rival.example")
    assert denied.code == "PERMISSION_DENIED"
    assert "Rivals get no mail." in denied.body["error"]["message"]
    assert denied.body["error"]["details"] == {"rule": "no-rivals"}
    planned = site.mail("eve", dry_run=True)
    assert planned.body["data"]["refused_with"] == "REQUIRES_HUMAN_APPROVAL"
    assert planned.body["data"]["policy"]["rule"].startswith("default: dangerous")
    assert site.done("eve@rival.example") == site.done("eve") == []


@pytest.mark.row("A5", "A3")
def test_approved_answer_arrives_by_waiting_streaming_and_polling(site: Site) -> None:
    polled = site.parked("dan-3")
    following = [
        site.begin("caller", "call", "send_mail", '{"to": "dan-1"}', "--wait=60"),
        site.begin("caller", "call", "send_mail", '{"to": "dan-2"}', "--wait=60", "--stream"),
    ]

    def waiting() -> dict[str, str]:
        page = site.do("GET", "/v1/approvals?state=pending&tool=send_mail&limit=100")["items"]
        return {one["arguments"]["to"]: one["id"] for one in page}

    wait_until(lambda: {"dan-1", "dan-2", "dan-3"} <= waiting().keys())
    ids = [waiting()[name] for name in ("dan-1", "dan-2", "dan-3")]
    assert ids[2] == polled.approval_id
    assert site.approvals("approve", *ids, "--yes").returncode == 0
    for number, process in enumerate(following, start=1):
        out, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        assert json.loads(out)["data"] == {"sent": f"dan-{number}"}
    assert site.answer(polled.call_id)["data"] == {"sent": "dan-3"}


@pytest.mark.row("P3", "A5")
def test_idempotency_key_maps_to_one_call_before_during_and_after_execution(site: Site) -> None:
    key = {"idempotency_key": f"mail-{site.is_service}"}
    site.hold_back()
    try:
        waiting = site.parked("fay", "slowly", **key)
        assert parked(site.mail("fay", "slowly", **key)).approval_id == waiting.approval_id
        assert site.mail("fay", "quickly", **key).code == "IDEMPOTENCY_CONFLICT"
        assert site.decide(waiting.approval_id).code is None
        wait_until(lambda: site.done("fay") == ["begun"])
        during = site.mail("fay", "slowly", **key)
        assert during.code == "CALL_IN_PROGRESS"
        assert during.body["error"]["retry_after_ms"] > 0
    finally:
        site.go_on()
    first = site.answer(waiting.call_id)
    after = site.mail("fay", "slowly", **key)
    assert after.body["metadata"].pop("idempotent_replay") is True
    assert after.body == first
    assert site.done("fay") == ["begun", "sent"]


@pytest.mark.row("A2", "D4")
def test_caller_can_cancel_only_its_own_pending_approval(site: Site) -> None:
    waiting = site.parked("gus")
    address = f"/v1/approvals/{waiting.approval_id}"
    if site.is_service:
        for method, path in (("GET", address), ("POST", f"{address}/cancel")):
            assert site.ask("both", method, path).code == "RESOURCE_NOT_FOUND"
    own = site.run("caller", "approvals", "show", waiting.approval_id, "--mine")
    assert json.loads(own.stdout)["binding"] is None
    cancelled = site.run("caller", "approvals", "cancel", waiting.approval_id)
    assert cancelled.returncode == 0, cancelled.stderr
    assert site.answer(waiting.call_id)["error"]["code"] == "CANCELLED"
    late = site.decide(waiting.approval_id)
    assert late.code == "IDEMPOTENCY_CONFLICT"
    assert late.body["error"]["details"]["state"] == "cancelled"
    assert site.done("gus") == []


@pytest.mark.row("A2", "A6")
def test_first_of_two_racing_decisions_wins_and_the_second_conflicts(site: Site) -> None:
    waiting = site.parked("hal")
    seen = site.show(waiting.approval_id).headers["etag"]

    def say(decision: str, credential: str) -> str | None:
        answer = site.decide(
            waiting.approval_id, decision=decision, match=seen, credential=credential
        )
        if answer.code is not None:
            assert answer.status == 409
            assert answer.body["error"]["details"]["version"] > 1
        return answer.code

    with ThreadPoolExecutor(2) as pool:
        yes = pool.submit(say, "approve", site.owner)
        no = pool.submit(say, "deny", site.second)
        heard = {yes.result(DEADLINE_S), no.result(DEADLINE_S)}
    assert heard == {None, "IDEMPOTENCY_CONFLICT"}
    envelope = site.answer(waiting.call_id)
    assert envelope["success"] is (yes.result() is None)
    assert site.done("hal") == (["begun", "sent"] if yes.result() is None else [])


@pytest.mark.row("A2", "A6")
def test_stale_unknown_or_repeated_decision_is_refused(site: Site) -> None:
    waiting = site.parked("board-ida")
    seen = site.show(waiting.approval_id).headers["etag"]
    assert site.decide(waiting.approval_id, credential=site.second, match=seen).code is None
    stale = site.decide(waiting.approval_id, match=seen)
    assert stale.code == "IDEMPOTENCY_CONFLICT"
    assert stale.body["error"]["details"] == {"state": "pending", "version": 2}
    for wrong in ("2", 'W/"2"', '"two"'):
        assert site.decide(waiting.approval_id, match=wrong).code == "INVALID_PARAMS"
    unknown = site.decide("apr_000000000000000000000000")
    assert unknown.code == "RESOURCE_NOT_FOUND"
    assert site.decide(waiting.approval_id, decision="deny").code is None
    assert site.decide(waiting.approval_id, decision="deny").code == "IDEMPOTENCY_CONFLICT"
    assert site.done("board-ida") == []


@pytest.mark.row("A3")
def test_quorum_of_two_needs_two_different_approvers(site: Site) -> None:
    waiting = site.parked("board-jim")
    once = site.decide(waiting.approval_id)
    assert once.body["data"]["approval"]["state"] == "pending"
    twice = site.decide(waiting.approval_id)
    assert twice.code == "IDEMPOTENCY_CONFLICT"
    assert site.approval(waiting.approval_id)["state"] == "pending"
    assert site.done("board-jim") == []
    assert site.decide(waiting.approval_id, credential=site.second).code is None
    assert site.answer(waiting.call_id)["data"] == {"sent": "board-jim"}
    assert site.done("board-jim") == ["begun", "sent"]
    ended = site.parked("board-kit")
    assert site.decide(ended.approval_id).code is None
    assert site.decide(ended.approval_id, decision="deny", credential=site.second).code is None
    assert site.answer(ended.call_id)["error"]["code"] == "APPROVAL_DENIED"
    assert site.done("board-kit") == []


@pytest.mark.row("A3")
def test_batch_of_decisions_is_atomic(site: Site) -> None:
    several = [site.parked(f"lea-{number}") for number in range(3)]
    ids = [one.approval_id for one in several]
    assert site.decide(ids[2], decision="deny").code is None

    def decide(chosen: list[str]) -> str | None:
        items = [{"approval_id": one, "decision": {"decision": "approve"}} for one in chosen]
        return site.ask(
            "approver", "POST", "/v1/approvals/decisions", {"items": items},
            control=True, credential=site.owner,
        ).code  # fmt: skip

    assert decide(ids) == "IDEMPOTENCY_CONFLICT"
    assert decide([ids[0], "apr_000000000000000000000000"]) == "RESOURCE_NOT_FOUND"
    assert [site.approval(one)["state"] for one in ids] == ["pending", "pending", "denied"]
    assert decide(ids[:2]) is None
    for one in several[:2]:
        assert site.answer(one.call_id)["success"]
    sent = [site.done(f"lea-{number}") for number in range(3)]
    assert sent == [["begun", "sent"], ["begun", "sent"], []]


@pytest.mark.row("A3")
def test_remembered_approval_is_previewed_limited_by_uses_and_revocable(site: Site) -> None:
    waiting = site.parked("mia", "1")
    until = "2099-01-01T00:00:00Z"
    wish = {"scope": "until", "until": until, "uses": 1}
    shown = site.do("POST", f"/v1/approvals/{waiting.approval_id}/remember-preview", wish)["rule"]
    assert (shown["arguments"], shown["any_others"]) == ({"to": "mia", "text": "1"}, False)
    assert (shown["uses_left"], shown["principal_id"]) == (1, site.caller_id)

    def remembered() -> list[dict[str, object]]:
        listed = json.loads(site.approvals("remembered").stdout)
        return [rule for rule in listed if rule["approval_id"] == waiting.approval_id]

    assert remembered() == []  # shown, not saved
    more = ("--remember-until", "2099-01-01T00:00", "--uses", "1")
    wider = site.approvals("approve", waiting.approval_id, "--yes", *more, "--same", "to")
    assert (wider.returncode, remembered()) == (1, [])  # the tool is dangerous
    assert site.approvals("approve", waiting.approval_id, "--yes", *more).returncode == 0
    assert site.answer(waiting.call_id)["success"]
    (rule,) = remembered()
    assert {"uses_left": 1, "arguments": shown["arguments"]}.items() <= rule.items()

    assert site.mail("mia", "2").code == "REQUIRES_HUMAN_APPROVAL"  # another text
    assert site.mail("mia", "1").body["data"] == {"sent": "mia"}
    third = parked(site.mail("mia", "1"))  # used up
    assert site.decide(third.approval_id, remember={**wish, "uses": 5}).code is None
    assert site.answer(third.call_id)["success"]
    listed = json.loads(site.approvals("remembered").stdout)
    (rule,) = [one for one in listed if one["approval_id"] == third.approval_id]
    assert site.mail("mia", "1").code is None
    assert site.approvals("forget", rule["id"]).returncode == 0
    assert site.mail("mia", "1").code == "REQUIRES_HUMAN_APPROVAL"
    assert site.approvals("forget", rule["id"]).returncode == 1
    assert site.done("mia").count("sent") == 4
