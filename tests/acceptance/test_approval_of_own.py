"""Self-approval: every route is refused and recorded in the audit log."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from support.site import Site, parked
from support.wait import wait_until


def refusals(site: Site, approval_id: str) -> list[Any]:
    """Audit rows of the refused decisions on an approval."""
    rows = site.audit_rows("approval.refused")
    return [row for row in rows if row["approval_id"] == approval_id]


@pytest.mark.row("A4")
def test_callers_socket_serves_no_decision_routes_even_to_approvers(site: Site) -> None:
    waiting = site.parked("own-1")
    address = f"/v1/approvals/{waiting.approval_id}"
    for path, body in (
        (f"{address}/decision", {"decision": "approve"}),
        (f"{address}/resolve", {"outcome": "done"}),
        ("/v1/approvals/decisions", {"items": []}),
        ("/v1/approvals/callback", {"approval_id": waiting.approval_id}),
    ):
        for credential in (None, site.owner):
            answer = site.ask(
                "caller", "POST", path, body, credential=credential, headers={"if-match": "*"}
            )
            assert answer.code in ("RESOURCE_NOT_FOUND", "METHOD_NOT_ALLOWED"), path
    assert site.approval(waiting.approval_id)["state"] == "pending"
    assert site.done("own-1") == []


@pytest.mark.row("A4", "D4", "A7")
def test_decision_without_approver_credential_is_refused_and_audited(site: Site) -> None:
    waiting = site.parked("own-2")
    token = site.do("POST", "/v1/tokens", {"name": "only-calls"})["secret"]
    if site.is_service:  # the door is shut to its uid
        reached = site.installation.ask_as(
            site.users["caller"], site.control_socket, "GET", "/v1/health"
        )
        assert reached == errno.EACCES
        said = site.run("caller", "approvals", "approve", waiting.approval_id, "--yes",
                        credential=token)  # fmt: skip
        assert said.returncode == 4
    for who in ("approver", "both"):
        address = f"/v1/approvals/{waiting.approval_id}/decision"
        bare = site.ask(who, "POST", address, {"decision": "approve"}, control=True)
        assert bare.code == "UNAUTHORIZED"
        refused = site.decide(waiting.approval_id, who=who, credential=token)
        assert refused.code == "PERMISSION_DENIED"
    wait_until(lambda: site.log.count("authority.refused") >= 4)
    found = refusals(site, waiting.approval_id)
    assert [one["why"] for one in found] == ["no scope", "no scope"]
    assert {one["by"] for one in found} == {"token:only-calls"}
    assert site.approval(waiting.approval_id)["decisions"] == []
    assert site.done("own-2") == []


@pytest.mark.row("A4", "D4")
def test_token_cannot_have_both_call_and_approve_scopes(site: Site) -> None:
    both = site.ask(
        "approver", "POST", "/v1/tokens", {"name": "b", "scopes": ["call", "approve"]},
        control=True, credential=site.owner,
    )  # fmt: skip
    assert both.code == "INVALID_PARAMS"
    made = site.do("POST", "/v1/tokens", {"name": f"a-{site.is_service}", "scopes": ["approve"]})
    assert site.mail("own-3", credential=made["secret"]).code in (
        "UNAUTHORIZED",
        "PERMISSION_DENIED",
    )
    waiting = site.parked("own-3")
    assert site.decide(waiting.approval_id, credential=made["secret"]).code is None  # twin
    assert site.answer(waiting.call_id)["success"]
    assert site.done("own-3") == ["begun", "sent"]


@pytest.mark.row("A4", "D4", "A7")
def test_self_approval_is_refused_even_with_approver_credential(site: Site) -> None:
    asked = site.ask("both", "POST", "/v1/tools/send_mail/call", {"arguments": {"to": "own-5"}})
    waiting = parked(asked)
    if not site.is_service:  # one Unix user is both here, and the credential tells them apart
        assert site.decide(waiting.approval_id, who="both", credential="").code == "UNAUTHORIZED"
        assert site.decide(waiting.approval_id, who="both").code is None
        return
    for credential in (site.owner, site.second):
        refused = site.decide(waiting.approval_id, who="both", credential=credential)
        assert refused.code == "PERMISSION_DENIED"
    typed = site.run("both", "approvals", "approve", waiting.approval_id, "--yes",
                     credential=site.owner)  # fmt: skip
    assert typed.returncode == 1
    assert json.loads(typed.stdout)["error"]["code"] == "PERMISSION_DENIED"
    denied = site.decide(waiting.approval_id, who="both", decision="deny")
    assert denied.code == "PERMISSION_DENIED"
    found = refusals(site, waiting.approval_id)
    assert len(found) == 4
    assert {one["peer"] for one in found} == {f"uid:{site.users['both'].uid}"}
    assert site.done("own-5") == []

    others = site.parked("own-6")
    assert site.decide(others.approval_id, who="both").code is None  # twin
    assert site.answer(others.call_id)["success"]
    assert site.decide(waiting.approval_id).code is None  # twin: by a user who did not ask
    site.until(waiting.approval_id, "done")
    assert site.done("own-5") == ["begun", "sent"]
