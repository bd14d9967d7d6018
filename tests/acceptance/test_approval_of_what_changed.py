"""An approval covers what was shown: it is void if tool, binding, policy or files have changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from acceptance.conftest import POLICY
from fumehood.cli.exits import ExitCode
from support.site import Parked, Site, parked
from support.wait import wait_until


def refused_as_changed(site: Site, waiting: Parked) -> Any:
    """Approve a call that must not run, and return the changes reported for it."""
    assert site.decide(waiting.approval_id).code is None
    error = site.answer(waiting.call_id)["error"]
    assert error["code"] == "APPROVAL_EXPIRED"
    after = site.approval(waiting.approval_id)
    assert (after["state"], after["changed"]) == ("expired", error["details"]["changed"])
    return after["changed"]


@pytest.mark.row("A2")
def test_approval_is_void_after_tool_code_changed(site: Site) -> None:
    waiting = site.parked("changed-1")
    file = site.place / "packages" / "mails.py"
    with file.open("a") as code:
        code.write("\n# Another word, and nobody knows what it does.\n")
    assert refused_as_changed(site, waiting) == ["definition"]
    assert site.done("changed-1") == []
    again = site.parked("changed-1")  # twin: what is shown now is approved and done
    assert site.decide(again.approval_id).code is None
    assert site.answer(again.call_id)["success"]


@pytest.mark.row("A2", "R3")
def test_approval_is_void_after_agent_binding_changed(site: Site) -> None:
    site.do("POST", "/v1/agents", {"id": "clerk", "principals": [site.caller_id]})
    address = "/v1/agents/clerk/tools/send_mail"
    site.do("PUT", address, {"fixed": {"text": "of the clerk"}})

    def ask(to: str) -> Parked:
        return parked(site.call("send_mail", {"to": to}, agent_id="clerk"))

    first, second, third = ask("bound-1"), ask("bound-2"), ask("bound-3")
    assert site.approval(first.approval_id)["arguments"]["text"] == "of the clerk"
    own = site.ask("caller", "GET", f"/v1/approvals/{first.approval_id}").body["data"]
    assert own["approval"]["arguments"] == {"to": "bound-1"}  # what is fixed is not the caller's
    assert site.decide(first.approval_id).code is None  # twin
    assert site.answer(first.call_id)["success"]
    site.do("PUT", address, {"fixed": {"text": "of somebody else"}})
    assert refused_as_changed(site, second) == ["agent_binding", "arguments"]
    site.do("DELETE", address)
    assert site.decide(third.approval_id).code is None
    assert site.answer(third.call_id)["error"]["code"] == "PERMISSION_DENIED"
    assert site.done("bound-2") == site.done("bound-3") == []
    site.do("DELETE", "/v1/agents/clerk")


@pytest.mark.row("A1", "A2")
def test_deny_rule_added_while_call_waits_overrides_approval(site: Site) -> None:
    forbidden, allowed = site.parked("ruled-1"), site.parked("ruled-2")
    before = site.do("GET", "/v1/policy")["version"]
    more = (
        '[[rules]]\nid = "new"\ndecision = "deny"\ntools = ["send_mail"]\nreason = "Not to them."\n'
        '[[rules.when]]\nargument = "/to"\nequals = "ruled-1"\n'
    )
    try:
        site.put_policy(POLICY + more)
        wait_until(lambda: site.do("GET", "/v1/policy")["version"] != before)
        for waiting in (forbidden, allowed):
            assert site.decide(waiting.approval_id).code is None
        error = site.answer(forbidden.call_id)["error"]
        assert (error["code"], error["details"]) == ("PERMISSION_DENIED", {"rule": "new"})
        assert site.answer(allowed.call_id)["success"]  # twin
        assert site.done("ruled-1") == []
    finally:
        site.put_policy(POLICY)
        site.do("POST", "/v1/policy/reload")
    assert site.do("GET", "/v1/policy")["version"] == before


@pytest.fixture
def session(site: Site) -> Iterator[str]:
    """A session owned by the caller."""
    made = [site.run("caller", "sessions", "new")]

    def is_made() -> bool:
        # A busy Docker may not answer in time.
        if made[0].returncode == ExitCode.UNAVAILABLE:
            made[0] = site.run("caller", "sessions", "new")
        return made[0].returncode != ExitCode.UNAVAILABLE

    wait_until(is_made)
    assert made[0].returncode == 0, made[0].stderr
    session_id = made[0].stdout.strip()
    yield session_id
    site.run("caller", "sessions", "end", session_id)


def files(site: Site, session: str) -> list[str]:
    listed = site.call("list_files", {"recursive": True, "limit": 100}, session_id=session)
    return [item["path"] for item in listed.body["data"]["items"]]


def write(site: Site, session: str, path: str, content: str, mode: str = "create") -> None:
    arguments = {"path": path, "content": content, "mode": mode}
    assert site.call("write_file", arguments, session_id=session).code is None


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
@pytest.mark.row("A2", "A6", "S6")
def test_deletion_approval_is_void_after_previewed_files_changed(site: Site, session: str) -> None:
    for path in ("old/a.txt", "old/b.txt", "keep.txt"):
        write(site, session, path, f"This is {path}.\n")
    asked = {"paths": ["old"], "recursive": True}
    waiting = parked(site.call("delete_files", asked, session_id=session))
    shown = json.loads(site.approvals("show", waiting.approval_id).stdout)["preview"]
    assert [one["path"] for one in shown["removed"]] == ["old", "old/a.txt", "old/b.txt"]
    assert (shown["added"], shown["changed"]) == ([], [])

    write(site, session, "old/a.txt", "Written after the question.\n", mode="replace")
    write(site, session, "old/c.txt", "New.\n")
    assert refused_as_changed(site, waiting) == ["workspace"]
    assert files(site, session) == ["keep.txt", "old", "old/a.txt", "old/b.txt", "old/c.txt"]

    again = parked(site.call("delete_files", asked, session_id=session))  # the caller asks again
    shown = json.loads(site.approvals("show", again.approval_id).stdout)["preview"]
    paths = [one["path"] for one in shown["removed"]]
    assert paths == ["old", "old/a.txt", "old/b.txt", "old/c.txt"]
    assert site.approvals("approve", again.approval_id, "--yes").returncode == 0
    assert site.answer(again.call_id)["data"]["deleted"] == ["old"]
    assert files(site, session) == ["keep.txt"]


@pytest.mark.needs("docker")
@pytest.mark.usefixtures("python_image")
@pytest.mark.row("A3", "S6")
def test_approval_remembered_for_session_applies_only_in_that_session(
    site: Site, session: str
) -> None:
    waiting = parked(site.mail("sess-1", session_id=session))
    wish = {"scope": "session", "uses": 2}
    shown = site.do("POST", f"/v1/approvals/{waiting.approval_id}/remember-preview", wish)["rule"]
    assert (shown["session_id"], shown["expires_at"]) == (session, None)
    more = ("--remember", "--uses", "2")
    assert site.approvals("approve", waiting.approval_id, "--yes", *more).returncode == 0
    assert site.answer(waiting.call_id)["success"]
    for _ in range(2):
        assert site.mail("sess-1", session_id=session).code is None
    assert site.mail("sess-1", session_id=session).code == "REQUIRES_HUMAN_APPROVAL"
    assert site.mail("sess-1").code == "REQUIRES_HUMAN_APPROVAL"  # outside the session
    outside = site.parked("sess-2")
    refused = site.decide(outside.approval_id, remember=wish)
    assert refused.code == "INVALID_PARAMS"
