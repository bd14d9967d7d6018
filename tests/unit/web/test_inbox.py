"""The inbox: everything of a call is shown and inert, and what was looked at is decided or nothing."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest

from fumehood.approvals.model import ApprovalState, DecisionRecord
from fumehood.core.escaping import printable
from fumehood.web.text import MAX_DEPTH, brief
from support.approvals import NOW, approval
from support.web import BOB, make_site, many, refusal

pytestmark = pytest.mark.row("A6")

ID = approval().id
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
HOSTILE = [
    SCRIPT,
    "\x1b]0;title\x07\x1b[2J\x1b[31mred",
    "invoice\u202egpj.exe",
    "a\u200bb\u2066c\ufeff",
    "</pre></textarea></title><svg onload=alert(1)>",
    "' onclick=alert(1) x='",
    '"><a href="javascript:alert(1)">',
    "{{ 7*7 }}{% raw %}",
    "x" * 500_000,
    "line\n" * 50_000,
]


class Tags(HTMLParser):
    """The tags and attributes that a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.seen.append((tag, dict(attributes)))


def mail(**fields: Any) -> Any:
    given = {
        "tool": "send_mail",
        "arguments": {"to": "a@example.com", "text": "Hi"},
        "binding": None,
    }
    return approval(**{**given, **fields})


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_hostile_text_is_shown_inert_everywhere(text: str) -> None:
    entry = {
        "path": text,
        "kind": "file",
        "size": 3,
        "diff": f"@@ -1 +1 @@\n-{text}\n+b\n",
        "other": text,
    }
    one = mail(
        arguments={"to": text, text[:200]: text, "deep": [text, {"k": text}]}, agent_id=text[:100],
        session_id=text[:100], reason=text, rule=text[:100], tool_version="1.0.0",
        preview={"added": [entry], "kept": [{"path": text, "why": text}], "would_fail": text, "odd": text},
        stuck=text[:100], principal_id=text[:100],
        decisions=(DecisionRecord(at=NOW, approver=text[:100], channel="control", decision="deny", action_digest="0" * 64, reason=text[:500]),),
    )  # fmt: skip
    site = make_site(one)
    browser = site.browser()
    for path in (
        "",
        "/list",
        f"/{ID}",
        f"/{ID}/edit",
        f"/{ID}/deny",
        f"/{ID}/remember",
        f"/several?item={ID}@1",
    ):
        found = browser.get(f"/inbox{path}")
        is_too_long = path.endswith("edit") and len(text) > 10_000
        assert found.status_code == (400 if is_too_long else 200), path
        assert len(found.content) < 1_000_000, path
        tags = Tags(found.text)
        for tag, attributes in tags.seen:
            assert not any(name.startswith("on") or name == "style" for name in attributes), path
            assert tag not in ("svg", "iframe", "object", "embed", "base"), path
            for name in ("href", "src", "action"):
                assert (
                    not (attributes.get(name) or "").lower().startswith(("javascript", "data", "x"))
                ), path
            if tag in ("script", "img"):
                assert (attributes["src"] or "").startswith("/static/")
        shown = found.text.replace("\n", "").replace("\t", "")
        names = re.sub(r'(name|value)="[^"]*"', "", shown)  # what a form sends back is exact
        assert printable(names) == names, path


def test_approval_shows_everything_that_an_approver_needs() -> None:
    binding = {
        "placement": "container", "place": {"image": "python-data", "runtime": "runsc"}, "network": "none",
        "limits": {"timeout_seconds": 30.0, "memory_mb": 512, "output_bytes": 1048576}, "cost_ceiling": "0.250000",
    }  # fmt: skip
    preview = {
        "changed": [
            {"path": "a.txt", "kind": "file", "size": 4, "diff": "@@ -1 +1 @@\n-old\n+new\n"}
        ]
    }
    one = mail(
        binding=binding, preview=preview, agent_id="mailer", rule="no-mail", reason="Mail costs.", quorum=2,
        approvers=("approver:alice", "approver:bob"), counted=("approver:bob",), session_id="sess_1",
        budget={"budget": "daily", "left": "0", "limit": "5", "needed": "1"},
    )  # fmt: skip
    page = make_site(one).browser().get(f"/inbox/{ID}").text
    words = re.sub(r"<[^>]+>", " ", page)
    for expected in (
        "send_mail", "mailer", "no-mail", "Mail costs.", "container · python-data · runsc", "30 s", "512 MB",
        "1.0 MB of output", "Costs up to  0.25 ", "a.txt", "-old", "+new", "2 approvals from approver:alice, approver:bob",
        "1 so far", "sess_1", "daily", "a@example.com", one.call_id, "dangerous", "changes 1 file",
    ):  # fmt: skip
        assert expected in words, expected
    assert '<span class="removed">-old' in page
    assert '<span class="added">+new' in page


@pytest.mark.parametrize("where", [f"/{ID}", f"/several?item={ID}@1"])
def test_context_of_an_external_call_is_shown_completely(where: str) -> None:
    """It was on one line, and what was beyond a thousand characters was left out without a sign."""
    words = {"directory": "/home/alice", "note": "x" * 3000 + "and run as root"}
    one = approval(tool="external:Bash", arguments={"command": "ls"}, preview={"context": words})
    browser = make_site(one).browser()
    page = browser.get(f"/inbox{where}").text
    assert "and run as root" in page
    assert "/home/alice" in page
    assert "What will change" not in page
    assert page.index("&#34;ls&#34;") < page.index("/home/alice")  # no context hides what is done


def test_files_that_the_tools_of_the_approver_execute_come_first() -> None:
    """Also one whose entry is not on the page. Its name and tool are text of others."""
    added = [{"path": f"{n:03}", "kind": "file", "size": 1} for n in range(300)]
    executed = [{"path": "x\u202e/Makefile", "by": "<b>make"}]
    page = make_site(mail(preview={"added": added, "executed": executed})).browser()
    page = page.get(f"/inbox/{ID}").text
    assert "300 bytes; 1 executable by your tools" in page
    assert "Executable by your tools: <code>x\\u{202e}/Makefile</code> (&lt;b&gt;make)" in page
    assert page.index("Executable by") < page.index("000</code>")


@pytest.mark.parametrize(("number", "hidden"), [(200, None), (250, "50 more are removed, and")])
def test_preview_names_changes_whose_content_it_does_not_show(
    number: int, hidden: str | None
) -> None:
    removed = [{"path": f"file-{n}", "kind": "file", "size": 1} for n in range(number)]
    page = make_site(mail(preview={"removed": removed})).browser().get(f"/inbox/{ID}").text
    assert "file-199<" in page
    assert ("<code>file-200</code>" in page) is (hidden is not None)
    assert ("content is not shown here" in page) is (hidden is not None)
    assert hidden is None or hidden in page


@pytest.mark.parametrize(
    ("value", "is_cut"),
    [
        ({"command": "a" * 101}, True),
        ({"a": "b" * 100, "c": 1}, True),
        ({"n" * 41: 1, "b": 2}, True),
        (["a" * 100], True),
        ("a" * 101, True),
        ({"a": "b" * 100}, False),
        ({"n" * 40: 1, "b": 2}, False),
        (["a" * 96], False),
        ("a" * 100, False),
    ],
)
def test_shortened_text_is_marked_and_short_text_is_not(value: Any, is_cut: bool) -> None:
    assert ("…" in brief(value, 100)) is is_cut
    assert not is_cut or len(brief(value, 100)) <= 100


def test_text_that_needs_scrolling_is_marked() -> None:
    lines = mail(arguments={"text": "ls" + "\n" * 100 + "rm -r ."})
    line = mail(arguments={"text": "ls" + " " * 3000 + "; rm -r ."})
    short = mail(arguments={"text": "ls\nls"})
    for one, said in (
        (lines, "109 characters on 101 lines"),
        (line, "3,011 characters on 1 line"),
        (short, ""),
    ):
        page = make_site(one).browser().get(f"/inbox/{ID}").text
        assert ("scroll if its end is out of sight" in page) is bool(said)
        assert said in page


def test_argument_name_cannot_imitate_another_or_a_value() -> None:
    names = {"path": 1, "path ": 2, "": 3, "a\tb": 4, "dry run: true": 5}
    page = make_site(mail(arguments=names)).browser().get(f"/inbox/{ID}").text
    shown = re.findall(r"<dt>([^<]*)</dt>\s*<dd><code>\d", page)
    assert shown == [
        "path",
        "&#34;path &#34;",
        "&#34;&#34;",
        "&#34;a\\tb&#34;",
        "&#34;dry run: true&#34;",
    ]


def test_file_name_cannot_imitate_another() -> None:
    entries = [{"path": name, "kind": "file"} for name in ("a b", "a\tb", "a\nb", "a ⏎ b")]
    page = make_site(mail(preview={"removed": entries})).browser().get(f"/inbox/{ID}").text
    shown = re.findall(r'aria-label="removed">−</span> <code>([^<]*)</code>', page)
    assert shown == ["a b", "a\\u{0009}b", "a\\u{000a}b", "a ⏎ b"]


def changes(*paths: str) -> dict[str, Any]:
    entries = [
        {"path": path, "kind": "file", "diff": "@@ -1 +1,2 @@\n-a\n+b\n+c\n"} for path in paths
    ]
    return {"changed": entries}


def page_of(preview: dict[str, Any]) -> str:
    return str(make_site(mail(preview=preview)).browser().get(f"/inbox/{ID}").text)


def tree_in(page: str) -> str:
    """The tree of files on a page as text: one line for each name, below its directory."""
    (tree,) = re.findall(r'<nav class="tree".*?</nav>', page, re.DOTALL)
    depth, lines = -1, []
    pieces = re.split(r"<(/?ul|/?li)[^>]*>", tree)
    for tag, text in zip(pieces[1::2], pieces[2::2], strict=True):
        depth += {"ul": 1, "/ul": -1}.get(tag, 0)
        if tag == "li":
            lines.append(depth * "  " + re.sub("<[^>]+>", "", text).strip())
    return "\n".join(lines)


def test_changed_files_are_a_tree_of_links_with_their_lines() -> None:
    preview = changes("src/app/main.py", "src/app/util.py", "docs/deep/er/index.md")
    preview["added"] = [{"path": "new.bin", "kind": "file", "binary": True}]
    preview["removed"] = [{"path": "src/old.py", "kind": "file"}]
    page = page_of(preview)
    assert tree_in(page).splitlines() == [
        "changed: ~ docs/deep/er/index.md +2 −1", "added: + new.bin", "src/",
        "  app/", "    changed: ~ main.py +2 −1", "    changed: ~ util.py +2 −1",
        "  removed: − old.py",
    ]  # fmt: skip
    links = re.findall(rf'href="#({ID}-\d)"', page)
    assert len(links) == 5
    assert all(page.count(f'id="{one}"') == 1 for one in links)
    assert page.count('<details class="change changed" open>') == 3


def test_diffs_after_the_first_twenty_are_folded_and_counted() -> None:
    gone = {"removed": [{"path": "no diff to fold", "kind": "file"}]}
    page = page_of(changes(*(f"file-{n:02}" for n in range(23))) | gone)
    assert page.count('<details class="change changed" open>') == 20
    assert page.count('<details class="change changed">') == 3
    assert "3 of these files are folded" in page
    assert "are folded" not in page_of(changes(*(f"file-{n:02}" for n in range(20))))


def test_hostile_paths_stay_text_in_a_tree_of_bounded_depth() -> None:
    deep = [f"{'d/' * level}f" for level in (*range(40), 2000)]
    page = page_of(changes(*deep, "x" * 4000, SCRIPT, "a\u202eb/c\x1b[1m", "", "/", "a//b"))
    lines = tree_in(page).splitlines()
    assert max(len(line) - len(line.lstrip()) for line in lines) == 2 * MAX_DEPTH
    assert max(map(len, lines)) < 300
    assert "changed: ~ a\\u{202e}b/c\\u{001b}[1m +2 −1" in lines
    inert = Tags(page[page.index('<nav class="tree') :])
    assert not any(tag in ("script", "img") for tag, _ in inert.seen)


def test_download_contains_the_requested_part_of_an_approval() -> None:
    """Before the decision an edit is nowhere: beside it stood a link to the call as it was."""
    asked, now = "asked " * 9000, "edited " * 9000
    one = mail(arguments={"text": now}, asked_arguments={"text": asked}, preview={"odd": 1})
    browser = make_site(one).browser()
    page = browser.get(f"/inbox/{ID}").text
    addresses = re.findall(r'href="(/inbox/[^"]*name=text)"', page)
    assert [browser.get(one.replace("&amp;", "&")).text for one in addresses] == [now, asked]
    headers = browser.get(addresses[0].replace("&amp;", "&")).headers
    assert headers["content-type"] == "text/plain; charset=utf-8"
    assert headers["content-disposition"].startswith("attachment;")
    fields = [("given:text", "1"), ("text:text", "b" * 30_000), ("version", "1")]
    edited = browser.post(f"/inbox/{ID}/edit", fields).text
    assert "as edited" in edited
    assert "/raw" not in edited


@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_console_decision_carries_the_shown_version_and_digest(decision: str) -> None:
    site = make_site(approval(version=4, action_digest="d" * 64))
    browser = site.browser()
    sent = {"version": "4", "digest": "d" * 64, "reason": " because\r\nof it "}
    page = browser.post(f"/inbox/{ID}/{decision}", sent)
    ((who, item),) = site.engine.asked
    assert (who, item.approval_id, item.version) == ("approver:alice", ID, 4)
    assert item.decision.decision == decision
    assert item.decision.reason == "because\nof it"
    assert item.decision.action_digest == ("d" * 64 if decision == "approve" else None)
    assert "approver:alice" in page.text


LATER = NOW + timedelta(minutes=1)
EXPIRED, FAILED = ApprovalState.EXPIRED, ApprovalState.FAILED


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": EXPIRED, "decided_at": NOW, "changed": ("workspace",)}, "Changed since it was asked for: the files of its session. Nothing was done."),
        ({"state": EXPIRED, "decided_at": NOW, "changed": ("definition", "limits", "isolation")}, "Changed since it was asked for: the tool, its limits, isolation. Nothing was done."),
        ({"state": EXPIRED, "changed": ("session",)}, "Its session ended before anybody decided. Nothing was done."),
        ({"state": EXPIRED, "changed": ("program",)}, "The engine was restarted, and the program that wanted to send it has ended. Nothing was done."),
        ({"state": EXPIRED, "changed": ("trial",)}, "The engine was restarted, and the effect of this trial is not kept. Nothing was done."),
        ({"state": EXPIRED, "code": "APPROVAL_EXPIRED"}, "It was not decided in time. Nothing was done."),
        ({"state": EXPIRED, "decided_at": NOW, "code": "APPROVAL_EXPIRED"}, "It was not started in time. Nothing was done."),
        ({"state": ApprovalState.CANCELLED}, "The call was cancelled. Nothing was done."),
        ({"state": ApprovalState.CANCELLED, "decided_at": NOW}, "The call was cancelled. Nothing was done."),
        ({"state": ApprovalState.CANCELLED, "decided_at": NOW, "started_at": NOW}, "The call was cancelled. It may have done a part of its work."),
        ({"state": FAILED, "decided_at": NOW, "started_at": NOW, "code": "TIMEOUT"}, "The call was approved and started, but ended with TIMEOUT."),
        ({"state": FAILED, "decided_at": NOW, "started_at": NOW, "code": "NO_CITY"}, "The call was approved and started, but ended with NO_CITY."),
        ({"state": FAILED, "decided_at": NOW, "code": "QUOTA_EXCEEDED"}, "The call was approved, but could not start: QUOTA_EXCEEDED. Nothing was done."),
        ({"state": FAILED, "started_at": NOW, "code": "OUTCOME_UNKNOWN"}, "The engine ended while this call ran. Somebody recorded later how it ended."),
        ({"state": ApprovalState.DONE, "started_at": NOW, "code": "OUTCOME_UNKNOWN"}, "The engine ended while this call ran. Somebody recorded later how it ended."),
        ({"state": ApprovalState.INTERRUPTED, "started_at": NOW, "code": "OUTCOME_UNKNOWN"}, "The engine ended while this call ran. It may have taken effect."),
    ],
)  # fmt: skip
def test_page_says_if_an_approval_ended_differently_than_decided(
    fields: dict[str, Any], words: str
) -> None:
    """It was a word in a badge, and the reason stood at the bottom of the facts."""
    page = make_site(approval(**{"ended_at": LATER, **fields})).browser().get(f"/inbox/{ID}").text
    top = page[page.index("<article") : page.index('<header class="headline">')]
    assert words in re.sub(r"\s+", " ", re.sub("<[^>]+>", "", top))


def test_second_approver_sees_who_decided_first() -> None:
    site = make_site(approval())
    alice, bob = site.browser(), site.browser(BOB)
    assert alice.post(f"/inbox/{ID}/deny", {"version": "1"}).status_code == 200
    late = bob.post(f"/inbox/{ID}/approve", {"version": "1"})
    assert "approver:alice denied this first" in late.text
    assert "Your decision changed nothing" in late.text
    assert len(site.engine.asked) == 1
    assert "You denied this first" in alice.post(f"/inbox/{ID}/approve", {"version": "1"}).text


def test_decision_on_an_old_version_changes_nothing() -> None:
    site = make_site(approval(version=2))
    page = site.browser().post(f"/inbox/{ID}/approve", {"version": "1"})
    assert "Look again; nothing was decided" in page.text
    assert site.engine.asked == []


@pytest.mark.parametrize("version", ["", "x", "-1", "９", "1" * 12])
def test_console_decision_needs_a_version(version: str) -> None:
    site = make_site(approval())
    found = site.browser().post(f"/inbox/{ID}/approve", {"version": version})
    assert found.status_code in (200, 400)
    assert site.engine.asked == []


def test_open_approval_is_refreshed_only_if_it_changes() -> None:
    site = make_site(approval())
    browser = site.browser()
    (address,) = re.findall(
        r'hx-get="(/inbox/[^"]*\?version=[^"]*)"', browser.get(f"/inbox/{ID}").text
    )
    assert browser.part(address).status_code == 204
    site.engine.put(approval(counted=("approver:bob",), quorum=2))
    assert browser.part(address).status_code == 200


def test_edited_arguments_are_shown_again_before_approval() -> None:
    site = make_site(mail())
    browser = site.browser()
    form = browser.part(f"/inbox/{ID}/edit").text
    assert 'name="text:to" value="a@example.com"' in form
    assert 'name="choice:urgent"' in form
    fields = [
        ("given:to", "1"),
        ("text:to", "b@example.com"),
        ("given:text", "1"),
        ("text:text", "a\r\nb"),
        ("version", "1"),
    ]
    looked = browser.post(f"/inbox/{ID}/edit", fields, headers={"hx-request": "true"})
    assert site.engine.asked == []
    assert "b@example.com" in looked.text
    hidden = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', looked.text))
    import html

    arguments = html.unescape(hidden["arguments"])
    assert json.loads(arguments) == {"to": "b@example.com", "text": "a\nb"}
    sent = {"version": hidden["version"], "digest": hidden["digest"], "arguments": arguments}
    assert browser.post(f"/inbox/{ID}/approve", sent).status_code == 200
    ((_, item),) = site.engine.asked
    assert item.decision.arguments == {"to": "b@example.com", "text": "a\nb"}
    assert item.decision.action_digest == "e" * 64


def test_refused_edit_keeps_the_typed_text_and_shows_the_error() -> None:
    site = make_site(mail())
    site.engine.edit_refused = refusal("INVALID_PARAMS", "to is no address", ["to"])
    page = (
        site.browser()
        .post(f"/inbox/{ID}/edit", [("given:to", "1"), ("text:to", "typed"), ("version", "1")])
        .text
    )
    assert 'value="typed"' in page
    assert re.search(r'<p class="error"[^>]*>to is no address', page)
    site.engine.edit_refused = refusal("PERMISSION_DENIED", "The policy denies this.")
    page = site.browser().post(f"/inbox/{ID}/edit", [("version", "1")]).text
    assert re.search(r'role="alert">The policy denies this', page)


def test_rule_is_shown_before_it_is_remembered() -> None:
    site = make_site(mail())
    browser = site.browser()
    page = browser.part(f"/inbox/{ID}/remember").text
    assert "With exactly" in page
    assert "Approve and remember" in page
    page = browser.part(f"/inbox/{ID}/remember?scope=8h&uses=3").text
    assert "With ANY arguments." in page
    assert "3 more times" in page
    assert site.engine.asked == []
    browser.post(f"/inbox/{ID}/approve", {"version": "1", "scope": "8h", "uses": "3", "same": "to"})
    ((_, item),) = site.engine.asked
    wish = item.decision.remember
    assert (wish.scope, wish.uses, wish.arguments) == ("until", 3, ("to",))
    assert timedelta(hours=7.9) < wish.until - datetime.now(UTC) < timedelta(hours=8.1)


@pytest.mark.parametrize(
    "query", ["scope=9y", "scope=1h&uses=x", "scope=1h&uses=0", "scope=1h&uses=99999999999"]
)
def test_impossible_remembered_rule_is_refused(query: str) -> None:
    site = make_site(mail())
    page = site.browser().part(f"/inbox/{ID}/remember?{query}").text
    assert 'role="alert"' in page
    assert re.search(r"<button[^>]*disabled[^>]*>Approve and remember", page)
    fields = dict(pair.split("=") for pair in query.split("&"))
    assert (
        site.browser().post(f"/inbox/{ID}/approve", {"version": "1", **fields}).status_code == 400
    )
    assert site.engine.asked == []


def test_no_approval_is_decided_if_one_of_several_has_changed() -> None:
    site = make_site(*many(2))
    site.engine.put(many(2)[1].model_copy(update={"version": 2}))
    fields = [("item", f"{one.id}@1") for one in many(2)] + [("decision", "approve")]
    assert site.browser().post("/inbox/several", fields).status_code == 409
    assert site.engine.asked == []


def test_inbox_shows_many_approvals_in_pages_and_their_number() -> None:
    browser = make_site(*many(250)).browser()
    address, seen = "/inbox", set()
    for count in (100, 100, 50):
        page = browser.get(address).text
        assert page.count('class="row"') == count
        assert re.search(r'Waiting <span class="count">250</span>', page)
        seen |= set(re.findall(r'href="/inbox/(\w+)', page))
        older = re.search(r'href="(/inbox\?cursor=[^"]*)">Older', page)
        address = older[1] if older else ""
    assert (len(seen), address) == (250, "")


def test_inbox_lists_decided_calls_with_their_approvers() -> None:
    site = make_site(approval(1), approval(2, state=ApprovalState.INTERRUPTED))
    browser = site.browser()
    browser.post(f"/inbox/{ID}/deny", {"version": "1"})
    page = browser.get("/inbox?tab=decided").text
    assert "denied by alice" in page
    assert "interrupted" in page
    assert 'name="item"' not in page


@pytest.mark.parametrize("page", [f"{ID}", f"{ID}/remember", f"several?item={ID}@1"])
def test_call_of_an_external_tool_is_not_shown_as_sandboxed(page: str) -> None:
    binding = {"placement": "external", "limits": None, "network": None, "place": None}
    warning = '<p class="banner warn">Outside fumehood: no limits, no sandbox, network unknown.</p>'
    outside = approval(tool="external:Bash", arguments={"command": "ls"}, binding=binding)
    shown = make_site(outside).browser().get(f"/inbox/{page}").text
    assert warning in shown
    assert not any(f"<dt>{name}" in shown for name in ("Runs in", "Limits", "Network"))
    assert warning not in make_site(approval()).browser().get(f"/inbox/{page}").text


def test_preview_of_a_failing_call_does_not_claim_no_changes() -> None:
    browser = make_site(approval(preview={"would_fail": "There is no such file."})).browser()
    assert "would fail" in browser.get("/inbox").text
    page = browser.get(f"/inbox/{ID}").text
    assert "The call would fail: There is no such file." in page
    assert "changes nothing" not in page


def test_interrupted_call_is_resolved_by_a_person() -> None:
    site = make_site(approval(state=ApprovalState.INTERRUPTED))
    browser = site.browser()
    assert "may have taken effect" in browser.get(f"/inbox/{ID}").text
    assert browser.post(f"/inbox/{ID}/resolve", {"outcome": "maybe"}).status_code == 400
    browser.post(f"/inbox/{ID}/resolve", {"outcome": "done", "reason": "saw it"})
    assert site.engine.asked == [("approver:alice", (ID, "done", "saw it"))]


@pytest.mark.parametrize("name", ["x" * 101, "apr_" + "a" * 97, "apr_" + "a" * 3000])
def test_invalid_approval_id_is_not_found_at_every_address(name: str) -> None:
    browser = make_site(approval()).browser()
    fields = {"version": "1", "outcome": "done"}
    for path in ("", "/deny", "/edit", "/remember", "/result", "/raw"):
        assert browser.get(f"/inbox/{name}{path}").status_code == 404, path
    for path in ("/approve", "/deny", "/edit", "/resolve"):
        assert browser.post(f"/inbox/{name}{path}", fields).status_code == 404, path
    several = [("item", f"{name}@1"), ("decision", "approve")]
    assert browser.post("/inbox/several", several).status_code == 400
    assert browser.get(f"/inbox/several?item={name}@1").status_code == 400


def submits(page: str) -> list[dict[str, str | None]]:
    """The buttons that approve outside of a question."""
    outside = re.sub("<details class=.confirm.>.*?</details>", "", page, flags=re.DOTALL)
    return [
        one for tag, one in Tags(outside).seen if tag == "button" and one.get("value") == "approve"
    ]


@pytest.mark.parametrize("path", [ID, f"{ID}/remember", f"several?item={ID}@1", "edited"])
def test_dangerous_call_needs_a_second_confirmation_in_the_console(path: str) -> None:
    def page(*, dangerous: bool) -> str:
        browser = make_site(approval(dangerous=dangerous)).browser()
        if path == "edited":
            return browser.post(
                f"/inbox/{ID}/edit", {"json:paths": '["b"]', "given:paths": "1"}
            ).text
        return browser.get(f"/inbox/{path}").text

    assert submits(page(dangerous=True)) == []
    assert "Yes, run the dangerous call" in page(dangerous=True)
    assert len(submits(page(dangerous=False))) == 1
    assert "Yes, run the dangerous call" not in page(dangerous=False)
