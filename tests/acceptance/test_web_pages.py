"""The console's monitoring pages in a real browser: they open, update live and stay inert."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Page, expect

from conftest import Daemon
from fumehood import Client, ControlClient
from support.browser import (
    NARROW,
    WIDE,
    Console,
    NewPerson,
    Person,
    faults_of,
    running_console,
)
from support.scripted_daemon import running_scripted_daemon

pytestmark = [pytest.mark.row("D5"), pytest.mark.needs("browser")]

SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'><script>alert(2)</script></svg>"
HTML = b"<!doctype html><script>alert(1)</script><body onload=alert(2)>"
ATTACK = "\u202egnp.<img src=x onerror=alert(1)>.txt"
POLICY = """
[[rules]]
id = "ask-for-sums"
decision = "ask"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
prefix = "2"
"""


@dataclass
class House:
    """A daemon with recorded activity, and a console connected to it."""

    daemon: Daemon
    console: Console
    session: str
    asked_call: str
    kept_call: str
    failed_call: str

    def address(self, path: str) -> str:
        return f"{self.console.address}{path}"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    rules = tmp_path_factory.mktemp("rules") / "policy.toml"
    rules.write_text(POLICY, encoding="utf-8")
    rules.chmod(0o600)
    with running_scripted_daemon(
        approver=True, policy_file=str(rules), sessions__pause_seconds="3600"
    ) as daemon:
        with ControlClient(daemon.control, credential=daemon.credential) as control:
            control.agents.create("reader", description=SCRIPT, principals=[f"uid:{os.getuid()}"])
            control.agents.bind("reader", "calculator", fixed={"precision": 2})
        with Client(daemon.socket) as client:
            client.call("calculator", {"expression": "1 + 1"}, agent_id="reader")
            client.call("calculator", {"expression": "1 / 0"})
            asked = client.call("calculator", {"expression": "2 + 2"}).metadata.call_id
            code = {"code": f"print({SCRIPT!r} * 20)\n[{{'a': 1, 'b': {SCRIPT!r}}}]"}
            broken = "# fails\nimport os\nraise ValueError('no ' + 'luck')"
            failed = client.call("run_restricted_python", {"code": broken}).metadata.call_id
            kept = client.call("run_restricted_python", code, idempotency_key="kept")
            session = client.create_session(memory_mb=128).id
            for name, content in (("a.svg", SVG), ("a.html", HTML), (ATTACK, b"hello")):
                client.put_file(session, name, content)
            for name in ("ended", "web"):
                start = {"name": name, "command": f"serving {SCRIPT}\n"}
                assert client.call("start_process", start, session_id=session).success
            client.stop_process(session, "ended")
        with ControlClient(daemon.control, credential=daemon.credential) as control:
            (waiting,) = control.approvals.list().items
            control.approvals.deny(waiting.id, version=waiting.version, reason="no")
        with running_console(daemon) as console:
            kept_call = str(kept.metadata.call_id)
            yield House(daemon, console, session, str(asked), kept_call, str(failed))


@pytest.fixture(scope="module")
def visitor(chromium: Browser, house: House) -> Iterator[Person]:
    """One person for all tests of `owner`."""
    one = Person(chromium)
    one.log_in(house.console, house.daemon.credential)
    yield one
    one.context.close()


@pytest.fixture
def owner(visitor: Person) -> Iterator[Page]:
    yield visitor.page
    assert visitor.complaints == []


def test_each_page_opens_and_passes_axe_accessibility_check(
    person: NewPerson, house: House
) -> None:
    page = person(size=WIDE).log_in(house.console, house.daemon.credential)
    paths = [
        "/calls", f"/calls/{house.asked_call}", f"/calls/{house.kept_call}", "/tools",
        "/tools/calculator", "/agents", "/sessions", f"/sessions/{house.session}", "/nodes",
        "/usage", "/usage?days=30&by=principal", "/policy", "/health", "/calls?tool=nothing",
        f"/calls/{house.failed_call}", "/calls?text=expression&hours=24", "/charts",
        "/charts?hours=720&agent=reader", "/tools/calculator/try", "/tools/run_restricted_python/try",
        "/search", "/calls?since=2026-01-01T00:00:00Z",
    ]  # fmt: skip
    found: list[tuple[str, str]] = []
    for path in paths:
        answer = page.goto(house.address(path))
        assert answer.status == 200, path
        for width, height in (WIDE, NARROW):
            page.set_viewport_size({"width": width, "height": height})
            found += [(path, fault) for fault in faults_of(page)]
            if not page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
                found.append((path, f"it is wider than {width}"))
    assert found == []


def test_live_call_list_adds_only_matching_calls(owner: Page, house: House) -> None:
    owner.goto(house.address("/calls?tool=calculator&hours=24"))
    rows = owner.locator("table.calls tbody tr")
    before = rows.count()
    with Client(house.daemon.socket) as client:
        new = client.call("calculator", {"expression": "5 * 5"}).metadata.call_id
        client.call("run_restricted_python", {"code": "1"})  # what does not fit stays out
    # In the list: while it runs, it is also among the running calls.
    expect(owner.locator(f'a[href="/calls/{new}"]:not(#now *)')).to_be_visible()
    expect(rows).to_have_count(before + 1)


def test_call_opens_although_the_list_is_updated_while_the_mouse_is_down(
    owner: Page, house: House
) -> None:
    owner.goto(house.address("/calls?tool=calculator"))
    owner.hover(f'a[href="/calls/{house.asked_call}"]')
    owner.mouse.down()
    with Client(house.daemon.socket) as client:
        new = client.call("calculator", {"expression": "6 * 6"}).metadata.call_id
    with owner.expect_response(
        lambda answer: "/calls/list" in answer.url and str(new) in answer.text()
    ):
        pass
    owner.mouse.up()
    owner.wait_for_url(f"**/calls/{house.asked_call}")


def test_call_list_filters_and_search_find_matching_calls(owner: Page, house: House) -> None:
    owner.goto(house.address("/calls"))
    owner.fill("#code", "execution_error")
    owner.click("button:text-is('Filter')")
    expect(owner).to_have_url(re.compile(r"/calls\?code=execution_error$"))  # and nothing empty
    badges = owner.locator("table.calls td.wide .badge")
    expect(badges).to_have_text(["EXECUTION_ERROR"])
    owner.click("text=Clear")
    owner.fill("#agent", "reader")
    owner.press("#agent", "Enter")
    expect(owner.locator("table.calls tbody tr")).to_have_count(1)
    owner.fill("#q", house.asked_call)
    owner.press("#q", "Enter")
    owner.wait_for_url(f"**/calls/{house.asked_call}")
    expect(owner.locator(".arguments")).to_contain_text("2 + 2")


def test_call_page_repeats_call_as_dry_run(owner: Page, house: House) -> None:
    owner.goto(house.address(f"/calls/{house.asked_call}"))
    owner.click("text=Run again as a dry run")
    expect(owner.locator("#dry-run .banner")).to_contain_text("REQUIRES_HUMAN_APPROVAL")
    expect(owner.locator("#dry-run .fields")).to_contain_text("1 approval")
    expect(owner.locator("#dry-run .fields")).not_to_contain_text("null")
    assert faults_of(owner) == []


def test_failed_call_begins_with_what_it_was_given_and_why_it_failed(
    owner: Page, house: House
) -> None:
    owner.goto(house.address("/calls"))
    owner.keyboard.press("/")
    owner.keyboard.type(house.failed_call)
    owner.keyboard.press("Enter")
    owner.wait_for_url(f"**/calls/{house.failed_call}")
    assert owner.locator("main h2").first.inner_text() == "Arguments"
    expect(owner.locator(".arguments .code .word", has_text="import")).to_be_visible()
    expect(owner.locator(".arguments .code .comment")).to_have_text("# fails")


def test_words_in_arguments_lead_to_their_call(owner: Page, house: House) -> None:
    owner.goto(house.address("/calls"))
    owner.fill("#text", '"ValueError no"')
    owner.press("#text", "Enter")
    rows = owner.locator("#calls table.calls tbody tr")
    expect(rows).to_have_count(1)
    rows.locator("a.tool").click()
    owner.wait_for_url(f"**/calls/{house.failed_call}")


def test_palette_is_opened_by_a_key_and_goes_to_what_is_typed(owner: Page, house: House) -> None:
    owner.goto(house.address("/health"))
    owner.keyboard.press("g")
    expect(owner.locator("#palette-results a").first).to_be_visible()
    assert faults_of(owner) == []
    owner.keyboard.type("calcu")
    expect(owner.locator("#palette-results a").first).to_contain_text("calculator")
    owner.keyboard.press("Enter")
    owner.wait_for_url("**/tools/calculator")


def test_filters_are_behind_one_button_on_a_phone(person: NewPerson, house: House) -> None:
    page = person(size=NARROW).log_in(house.console, house.daemon.credential)
    page.goto(house.address("/calls"))
    expect(page.locator("#code")).to_be_hidden()
    page.click("label:text-is('Filters')")
    expect(page.locator("#code")).to_be_visible()
    page.goto(house.address("/calls?code=OK"))
    expect(page.locator("#code")).to_be_visible()


def test_tool_is_tried_from_its_page(owner: Page, house: House) -> None:
    owner.goto(house.address("/tools/calculator"))
    owner.click("text=Try it")
    owner.fill("textarea[name='text:expression'], input[name='text:expression']", "6 * 7")
    owner.click("button:text-is('Call it')")
    expect(owner.locator("#tried")).to_contain_text("42")
    expect(owner.locator("#tried .badge").first).to_have_text("OK")
    owner.click("text=Copy this call")
    copies = owner.locator("#tried details", has_text="Copy this call").locator("pre")
    expect(copies.first).to_contain_text("fumehood call calculator")
    assert faults_of(owner) == []
    owner.click("a:text-is('The call')")
    expect(owner.locator(".arguments")).to_contain_text("6 * 7")


def test_column_of_a_chart_leads_to_its_calls(owner: Page, house: House) -> None:
    owner.goto(house.address("/charts?tool=calculator"))
    owner.locator("svg.columns a:has(rect.whole)").last.click()
    owner.wait_for_url(re.compile(r"/calls\?since=.*&tool=calculator"))
    assert owner.locator("table.calls tbody tr").count() > 0


def test_hostile_answer_is_rendered_as_inert_text_and_table(owner: Page, house: House) -> None:
    owner.goto(house.address(f"/calls/{house.kept_call}"))
    expect(owner.locator("main pre").first).to_contain_text(SCRIPT)
    expect(owner.locator("main td", has_text=SCRIPT)).to_be_visible()
    assert owner.locator("main img, main script").count() == 0


@pytest.mark.parametrize(("name", "content"), [("a.svg", SVG), ("a.html", HTML)])
def test_file_with_script_is_shown_as_text_and_downloaded(
    owner: Page, house: House, name: str, content: bytes
) -> None:
    owner.goto(house.address(f"/sessions/{house.session}"))
    owner.click(f"a:text-is('{name}')")
    expect(owner.locator("#preview pre")).to_contain_text("<script>alert(")
    assert owner.locator("main svg[onload], main script, main iframe").count() == 0
    row = owner.locator("li", has=owner.locator(f"a:text-is('{name}')"))
    with owner.expect_download() as download:
        row.locator("a[download]").click()
    assert download.value.path().read_bytes() == content
    # Asked for as a page, it is a download all the same.
    with owner.expect_download() as again:
        owner.evaluate(
            "address => { location.href = address }",
            f"/sessions/{house.session}/download?file={name}",
        )
    assert again.value.path().read_bytes() == content


def test_session_file_with_hostile_name_is_rendered_as_inert_text(
    owner: Page, house: House
) -> None:
    owner.goto(house.address(f"/sessions/{house.session}"))
    link = owner.locator(".tree a", has_text="onerror")
    expect(link.first).to_contain_text("\\u{202e}gnp.<img src=x")
    link.first.click()
    expect(owner.locator("#preview pre")).to_have_text("hello")
    assert owner.locator("main img").count() == 0
    assert "\u202e" not in owner.inner_text("body")


def test_output_of_a_process_is_inert_and_followed_to_its_end(owner: Page, house: House) -> None:
    owner.goto(house.address(f"/sessions/{house.session}"))
    output = owner.locator("#output pre")
    expect(output).to_contain_text(f"serving {SCRIPT}")
    lines = "".join(f"line {number}\n" for number in range(200))
    with Client(house.daemon.socket) as client:
        write = {"name": "web", "text": f"{lines}\u202ethe end\n"}
        assert client.call("write_process", write, session_id=house.session).success
    expect(output).to_contain_text("\\u{202e}the end")
    assert owner.locator("#output img, #output script").count() == 0
    at_end = "box => Math.abs(box.scrollTop) < 2 && box.scrollHeight > box.clientHeight"
    assert owner.locator(".tail").evaluate(at_end)
    # Somebody who reads further up is not taken away from there.
    owner.locator(".tail").evaluate("box => box.scrollTo(0, -box.scrollHeight)")
    with Client(house.daemon.socket) as client:
        write = {"name": "web", "text": "more\n"}
        assert client.call("write_process", write, session_id=house.session).success
    expect(output).to_contain_text("more")
    assert owner.locator(".tail").evaluate("box => box.scrollTop < -100")


def test_administrator_stops_a_process_of_a_session(owner: Page, house: House) -> None:
    with Client(house.daemon.socket) as client:
        start = {"name": "doomed", "command": "x"}
        assert client.call("start_process", start, session_id=house.session).success
    owner.goto(house.address(f"/sessions/{house.session}"))
    row = owner.locator("#processes tr", has_text="doomed")
    row.locator("summary").click()
    row.locator("text=Stop it").click()
    expect(row).to_contain_text("signal 15")
    with ControlClient(house.daemon.control, credential=house.daemon.credential) as control:
        change = control.changes()[0]
    assert (change.action, change.details["process"]) == ("process.stop", "doomed")


def test_policy_page_explains_decisions_and_tries_new_rules(owner: Page, house: House) -> None:
    owner.goto(house.address("/policy"))
    owner.fill("#tool", "calculator")
    owner.fill("#arguments", '{"expression": "2 * 2"}')
    owner.click("button:text-is('Explain')")
    expect(owner.locator("#explained")).to_contain_text("ask-for-sums")
    owner.fill("#rules", '[[rules]]\nid = "no"\ndecision = "deny"\ntools = ["calculator"]\n')
    owner.click("button:text-is('Try')")
    expect(owner.locator("#tried")).to_contain_text("calculator")
    owner.fill("#rules", "[[rules]]\nid = 7")
    owner.click("button:text-is('Try')")
    expect(owner.locator("#tried [role=alert]")).to_be_visible()
    assert faults_of(owner) == []


def test_administrator_ends_session_and_change_is_recorded(owner: Page, house: House) -> None:
    with Client(house.daemon.socket) as client:
        session = client.create_session(memory_mb=128).id
    owner.goto(house.address(f"/sessions/{session}"))
    owner.click("summary:has-text('End this session')")
    owner.click("text=End it and delete its files")
    expect(owner.locator(".headline .badge")).to_have_text("ended")
    with ControlClient(house.daemon.control, credential=house.daemon.credential) as control:
        assert control.changes()[0].action == "session.end"


def test_approver_without_admin_scope_sees_no_files_or_usage(
    person: NewPerson, house: House
) -> None:
    with ControlClient(house.daemon.control, credential=house.daemon.credential) as control:
        secret = control.approvers.add("carol").secret
    page = person().log_in(house.console, secret)
    page.goto(house.address(f"/calls/{house.kept_call}"))
    expect(page.locator("main")).to_contain_text("for administrators only")
    page.goto(house.address(f"/sessions/{house.session}"))
    expect(page.locator("main")).to_contain_text("are for administrators")
    expect(page.locator("main")).not_to_contain_text("a.svg")
    expect(page.locator("#processes")).to_contain_text("web")
    expect(page.locator("main")).not_to_contain_text("serving")
    page.goto(house.address("/usage"))
    expect(page.locator("main")).to_contain_text("For administrators")
