"""The web console in a real browser: login, inbox and decisions; agent-written text is inert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from conftest import Daemon
from fumehood import Client, ControlClient
from fumehood.core.envelope import Envelope
from support.approvals import approval as made_approval
from support.approving import approving_daemon, ran
from support.browser import (
    NARROW,
    VIOLATIONS,
    WIDE,
    Console,
    NewPerson,
    Person,
    faults_of,
    running_console,
)
from support.wait import wait_until
from support.web import BASE, make_site

pytestmark = [pytest.mark.row("A6"), pytest.mark.needs("browser")]

TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Script that waits two frames, after which earlier responses have been rendered."""
SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with approving_daemon() as running:
        yield running


@pytest.fixture(scope="module")
def bob(daemon: Daemon) -> str:
    """A second approver's credential."""
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        return client.approvers.add("bob").secret


@pytest.fixture(scope="module")
def console(daemon: Daemon) -> Iterator[Console]:
    with running_console(daemon) as running:
        yield running


@pytest.fixture(scope="module")
def visitor(chromium: Browser, console: Console, daemon: Daemon) -> Iterator[Person]:
    """The first approver, logged in, in one window for all tests of `owner`."""
    one = Person(chromium)
    one.log_in(console, daemon.credential).goto("about:blank")
    yield one
    one.context.close()


@pytest.fixture
def owner(visitor: Person, console: Console) -> Iterator[Page]:
    """The first approver's inbox in a new tab."""
    page = visitor.new_page()
    page.goto(f"{console.address}/inbox")
    yield page
    page.close()
    assert visitor.complaints == []


def ask(daemon: Daemon, text: str, **arguments: Any) -> str:
    """Make a call that waits, and return its approval id."""
    with Client(daemon.socket) as client:
        answer = client.call("note", {"text": text, **arguments})
    assert answer.error.approval_id is not None, answer.error
    return answer.error.approval_id


def answer_of(daemon: Daemon, approval_id: str) -> Envelope:
    """The answer to a decided call."""
    with Client(daemon.socket) as client:
        call = client.approvals.show(approval_id).call_id
        wait_until(lambda: client.call_state(call).envelope is not None)
        found = client.call_state(call).envelope
    assert found is not None
    return found


def show(page: Page, approval_id: str) -> None:
    """Open one approval by a click on its row."""
    page.click(f'.row[data-id="{approval_id}"]')
    page.wait_for_selector(f'[data-open="{approval_id}"]')


def wait_for_state(page: Page, state: str) -> None:
    """Wait for the state of the decided call, which is shown above the next one if there is one."""
    expect(page.locator(":is(.result, .approval) .badge").first).to_have_text(state)


def approve(page: Page) -> None:
    """Approve the open call, which is dangerous, from the keyboard."""
    page.keyboard.press("a")
    expect(page.locator(".confirm [data-key=y]")).to_be_visible()
    page.keyboard.press("y")


def test_terminal_login_link_works_only_once(person: NewPerson, console: Console) -> None:
    first, second = person(), person()
    first.page.goto(console.link)
    first.page.wait_for_url("**/inbox")
    expect(first.page.locator(".who .name")).to_have_text("owner")
    second.page.goto(console.link)
    expect(second.page.locator(".banner.bad")).to_contain_text("used already")
    second.page.goto(f"{console.address}/inbox")
    expect(second.page).to_have_url(f"{console.address}/login")
    first.page.click("text=Log out")
    first.page.wait_for_url("**/login")
    first.page.goto(f"{console.address}/inbox")
    expect(first.page).to_have_url(f"{console.address}/login")


def test_new_call_appears_without_reload_and_is_approved_by_keyboard(
    owner: Page, daemon: Daemon
) -> None:
    approval = ask(daemon, "by keyboard")
    expect(owner.locator(f'.row[data-id="{approval}"]')).to_be_visible()
    expect(owner).to_have_title(re.compile(r"^\(\d+\) Inbox"))
    owner.keyboard.press("j")
    owner.wait_for_selector(f'[data-open="{approval}"]')
    expect(owner.locator(".argument code").first).to_have_text('"by keyboard"')
    approve(owner)
    wait_for_state(owner, "done")
    expect(owner).to_have_url(re.compile(f"/inbox/{approval}$"))
    assert answer_of(daemon, approval).success
    assert ran(daemon)[-1] == "'by keyboard' 1"
    expect(owner.locator(f'.row[data-id="{approval}"]')).to_have_count(0)
    expect(owner.locator(".votes")).to_contain_text("approver:owner")


def test_row_opens_although_a_call_arrives_while_the_mouse_is_down(
    owner: Page, daemon: Daemon
) -> None:
    first = ask(daemon, "before the press")
    row = owner.locator(f'.row[data-id="{first}"]')
    row.hover()
    owner.mouse.down()
    with owner.expect_response("**/inbox/list*"):
        second = ask(daemon, "during the press")
    owner.mouse.up()
    owner.wait_for_selector(f'[data-open="{first}"]')
    expect(owner.locator(f'.row[data-id="{second}"]')).to_be_visible()


@pytest.mark.parametrize("swallowed", ["right button", "menu", "other window"])
def test_list_is_updated_although_the_release_of_a_button_is_not_seen(
    owner: Page, daemon: Daemon, swallowed: str
) -> None:
    first = ask(daemon, f"before the {swallowed}")
    row = owner.locator(f'.row[data-id="{first}"]')
    row.hover()
    owner.mouse.down(button="right" if swallowed == "right button" else "left")
    if swallowed == "menu":
        row.dispatch_event("contextmenu")
    elif swallowed == "other window":
        owner.evaluate("window.dispatchEvent(new Event('blur'))")
    second = ask(daemon, f"after the {swallowed}")
    expect(owner.locator(f'.row[data-id="{second}"]')).to_be_visible()


def test_next_call_opens_below_decision_result_with_buttons_briefly_disabled(
    owner: Page, daemon: Daemon
) -> None:
    older, middle, newer = (ask(daemon, text) for text in ("the older", "the middle", "the newer"))
    show(owner, middle)
    owner.evaluate("""document.body.addEventListener("htmx:afterSettle", () => {
        if (!document.querySelector(".result")) return;
        window.held ??= document.querySelectorAll(".approval .actions > button:disabled").length; })""")
    approve(owner)
    owner.wait_for_selector(f'[data-open="{older}"]')
    wait_for_state(owner, "done")
    assert owner.evaluate("window.held") == 3  # a second click was not meant for this call
    expect(owner.locator(".approval .actions > button:disabled")).to_have_count(0)
    expect(owner).to_have_url(re.compile(f"/inbox/{older}$"))
    expect(owner.locator(f'.row[data-id="{middle}"]')).to_have_count(0)
    expect(owner.locator(".row[aria-current]")).to_have_attribute("data-id", older)
    owner.keyboard.press("d")
    expect(owner.locator("#reason")).to_be_focused()
    owner.keyboard.press("Enter")
    wait_for_state(owner, "denied")
    owner.click(".result a")
    owner.wait_for_selector(f'[data-open="{older}"]')
    show(owner, newer)
    expect(owner.locator(".result")).to_have_count(0)


def test_dangerous_call_needs_confirmation_key_to_approve(owner: Page, daemon: Daemon) -> None:
    approval = ask(daemon, "asked twice")
    show(owner, approval)
    owner.keyboard.press("y")  # no question is open
    owner.keyboard.press("a")
    expect(owner.locator(".confirm [data-key=y]")).to_be_visible()
    owner.keyboard.press("Escape")
    expect(owner.locator(".confirm [data-key=y]")).to_be_hidden()
    owner.keyboard.press("y")
    owner.evaluate(TWO_FRAMES)
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        assert client.approvals.show(approval).state == "pending"
    approve(owner)
    wait_for_state(owner, "done")
    assert ran(daemon)[-1] == "'asked twice' 1"


def test_dangerous_call_is_approved_in_two_steps_without_javascript(
    chromium: Browser, visitor: Person, console: Console, daemon: Daemon
) -> None:
    approval = ask(daemon, "without script")
    state = visitor.context.storage_state()
    without = chromium.new_context(java_script_enabled=False, storage_state=state)
    try:
        page = without.new_page()
        page.goto(f"{console.address}/inbox/{approval}")
        page.click(".confirm summary")
        page.click(".confirm button")
        assert answer_of(daemon, approval).success
    finally:
        without.close()


def test_empty_pane_heading_follows_the_pending_count(owner: Page, daemon: Daemon) -> None:
    count = owner.locator("#list .count")
    before = int(count.inner_text())
    heading = owner.locator("#detail h2")
    expect(heading).not_to_have_text(re.compile(f"^{before + 2} "))
    first = ask(daemon, "one more")
    second = ask(daemon, "and another")
    expect(count).to_have_text(str(before + 2))
    expect(heading).to_have_text(f"{before + 2} calls wait for you")
    expect(owner.locator("#main.has-open")).to_have_count(0)  # a phone shows the list
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        for one in (first, second):
            client.approvals.deny(one, version=1)
    expect(count).to_have_text(str(before))
    expect(heading).not_to_have_text(re.compile(f"^{before + 2} "))


def test_approve_key_while_next_call_loads_does_not_decide_shown_call(
    owner: Page, daemon: Daemon
) -> None:
    skipped, meant = ask(daemon, "skipped"), ask(daemon, "meant")
    owner.wait_for_selector(f'.row[data-id="{meant}"]')
    show(owner, skipped)
    held: list[Route] = []
    owner.route(f"**/inbox/{meant}*", lambda route: held.append(route), times=1)
    owner.keyboard.press("k")
    wait_until(lambda: owner.evaluate("1") == 1 and bool(held))
    owner.keyboard.press("a")
    held[0].continue_()
    owner.wait_for_selector(f'[data-open="{meant}"]')
    approve(owner)
    wait_for_state(owner, "done")
    assert ran(daemon)[-1] == "'meant' 1"
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        assert client.approvals.show(skipped).state == "pending"
        client.approvals.deny(skipped, version=1)


@pytest.mark.parametrize("late", ["a click", "an update"])
def test_late_response_does_not_replace_the_call_opened_meanwhile(
    owner: Page, daemon: Daemon, late: str
) -> None:
    left, opened = ask(daemon, f"left by {late}"), ask(daemon, f"opened after {late}")
    owner.wait_for_selector(f'.row[data-id="{opened}"]')
    if late == "an update":
        show(owner, left)
    held: list[Route] = []
    owner.route(f"**/inbox/{left}*", lambda route: held.append(route), times=1)
    if late == "an update":
        with Client(daemon.socket) as client:
            client.approvals.cancel(left)
    else:
        owner.click(f'.row[data-id="{left}"]')
    wait_until(lambda: owner.evaluate("1") == 1 and bool(held))
    show(owner, opened)
    with owner.expect_request_finished(lambda request: left in request.url):
        held[0].continue_()
    owner.evaluate(TWO_FRAMES)
    assert owner.locator("[data-open]").get_attribute("data-open") == opened
    approve(owner)
    wait_for_state(owner, "done")
    assert ran(daemon)[-1] == f"'opened after {late}' 1"


def test_console_fetches_a_result_again_if_it_changed_during_the_update(
    owner: Page, daemon: Daemon
) -> None:
    decided, _ = ask(daemon, "decided"), ask(daemon, "shown below it")
    show(owner, decided)
    approve(owner)
    expect(owner.locator(".result")).to_be_visible()
    wait_for_state(owner, "done")
    held: list[Route] = []
    owner.route(f"**/inbox/{decided}/result", lambda route: held.append(route), times=1)
    ask(daemon, "starts the update")
    wait_until(lambda: owner.evaluate("1") == 1 and bool(held))
    later = ask(daemon, "the change during it")
    owner.wait_for_selector(f'.row[data-id="{later}"]')
    answer = held[0].fetch()
    with owner.expect_response(f"**/inbox/{decided}/result"):
        held[0].fulfill(response=answer, body=answer.text().replace("done", "started"))
    wait_for_state(owner, "done")


def test_argument_whitespace_is_shown_exactly(owner: Page, daemon: Daemon) -> None:
    text = " rm a  b "
    show(owner, ask(daemon, text))
    assert owner.locator(".argument code").first.inner_text() == f'"{text}"'
    approve(owner)
    wait_for_state(owner, "done")


def test_editing_an_omitted_argument_marks_it_as_given(owner: Page, daemon: Daemon) -> None:
    show(owner, ask(daemon, "once"))
    owner.keyboard.press("e")
    expect(owner.locator("[name='text:text']")).to_be_focused()
    owner.locator("[name='given:times']").uncheck()
    owner.fill("[name='number:times']", "2")
    expect(owner.locator("[name='given:times']")).to_be_checked()


def test_enter_denies_and_shift_enter_inserts_line_break_in_reason(
    owner: Page, daemon: Daemon
) -> None:
    approval = ask(daemon, "denied by a key")
    show(owner, approval)
    owner.keyboard.press("d")
    expect(owner.locator("#reason")).to_be_focused()
    owner.keyboard.type("Not now")
    owner.keyboard.press("Shift+Enter")
    owner.keyboard.type("nor later.")
    owner.keyboard.press("Enter")
    wait_for_state(owner, "denied")
    error = answer_of(daemon, approval).error
    assert "Not now\nnor later." in error.message


@pytest.mark.parametrize("key", ["a", "d"])
def test_decision_key_with_selection_requires_confirmation(
    owner: Page, daemon: Daemon, key: str
) -> None:
    first, second = (ask(daemon, f"{name} with {key}") for name in ("the first", "the second"))
    for approval in (first, second):
        show(owner, approval)
        owner.keyboard.press("x")
    expect(owner.locator("#selection")).to_contain_text("2 selected")
    owner.keyboard.press(key)
    expect(owner.locator("#detail h2")).to_have_text("2 calls together")
    expect(owner.locator("#reason")).to_be_focused()
    owner.keyboard.press("Enter")  # in the field of the reason: it must not approve
    owner.evaluate(TWO_FRAMES)
    expect(owner.locator("#detail h2")).to_have_text("2 calls together")
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        states = {client.approvals.show(one).state.value for one in (first, second)}
    assert states == {"pending"}
    owner.click("text=Deny all")
    expect(owner.locator("#detail")).to_contain_text("2 denied")


def test_selected_calls_are_approved_together(owner: Page, daemon: Daemon) -> None:
    names = [f"one of several {number}" for number in range(3)]
    asked = [ask(daemon, name) for name in names]
    for approval in asked[:2]:
        owner.check(f'.item:has([data-id="{approval}"]) input')
    expect(owner.locator("#selection")).to_contain_text("2 selected")
    late = ask(daemon, "meanwhile")
    expect(owner.locator(f'.row[data-id="{late}"]')).to_be_visible()
    expect(owner.locator("#selection")).to_contain_text("2 selected")  # a new list forgets nothing
    owner.click("text=Decide together")
    owner.click("text=Approve all 2")
    assert not any("one of several" in line for line in ran(daemon))
    owner.click(".confirm button")
    expect(owner.locator("#detail")).to_contain_text("2 approved")
    wait_until(lambda: sum("one of several" in line for line in ran(daemon)) == 2)
    assert not any("one of several 2" in line for line in ran(daemon))
    expect(owner.locator("#selection")).to_be_hidden()


def test_decision_by_another_approver_appears_without_reload(
    owner: Page, person: NewPerson, console: Console, daemon: Daemon, bob: str
) -> None:
    approval = ask(daemon, "seen by two")
    second = person().log_in(console, bob)
    show(second, approval)
    show(owner, approval)
    approve(owner)
    wait_for_state(second, "done")
    expect(second.locator(".votes")).to_contain_text("approver:owner")


@pytest.mark.parametrize("text", [f"</pre></textarea>'\">{SCRIPT}", "a\u202eb\x1b[31m"])
def test_hostile_text_is_inert_on_every_view(owner: Page, daemon: Daemon, text: str) -> None:
    approval = ask(daemon, text)
    show(owner, approval)
    for key in ("", "e", "d", "r"):
        if key:
            owner.keyboard.press(key)
            owner.wait_for_selector(".panel :focus")
        assert owner.locator("#detail img, #detail script, #cards img").count() == 0
        assert not re.search("[\u202e\x1b]", owner.inner_text("body"))
        if key:
            owner.keyboard.press("Escape")
            owner.keyboard.press("Escape")
            owner.wait_for_selector("[data-open]")
    approve(owner)
    wait_for_state(owner, "done")
    assert ran(daemon)[-1] == f"{text!r} 1"


def test_control_content_policy_violation_is_detected(person: NewPerson, console: Console) -> None:
    somebody = person()
    page = somebody.open(f"{console.address}/login")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=alert(1)>')")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">x</p>')")
    wait_until(
        lambda: page.evaluate("1") == 1 and any(VIOLATIONS in one for one in somebody.complaints)
    )
    somebody.complaints.clear()


def test_cross_site_request_cannot_approve_a_call(
    owner: Page, console: Console, daemon: Daemon
) -> None:
    """In the logged-in browser; the server's own refusals are tested in tests/unit/web."""
    approval = ask(daemon, "from elsewhere")
    elsewhere = owner.context.new_page()
    elsewhere.goto("about:blank")
    sent = """(address) => fetch(address, {method: "POST", mode: "no-cors", credentials: "include",
        body: new URLSearchParams({version: "1"})}).then((answer) => answer.type, () => "blocked")"""
    address = f"{console.address}/inbox/{approval}/approve"
    assert elsewhere.evaluate(sent, address) in ("opaque", "blocked")
    show(owner, approval)
    assert not any("from elsewhere" in line for line in ran(daemon))


def test_expired_session_redirects_to_login_page(
    person: NewPerson, console: Console, daemon: Daemon
) -> None:
    page = person().log_in(console, daemon.credential)
    page.context.clear_cookies()
    ask(daemon, "for nobody")  # the list is fetched again
    page.wait_for_url("**/login")


def test_page_recovers_without_reload_after_engine_restart(person: NewPerson) -> None:
    with TemporaryDirectory(prefix="fh-", dir="/tmp") as home:
        with approving_daemon(Path(home)) as before:
            console = running_console(before)
            running = console.__enter__()
            page = person().log_in(running, before.credential)
            first = ask(before, "before the restart")
            show(page, first)
        expect(page.locator("#away")).to_be_visible()
        approve(page)
        expect(page.locator("#notices")).to_contain_text("away")
        with approving_daemon(Path(home), credential=before.credential) as after:
            expect(page.locator("#away")).to_be_hidden()
            second = ask(after, "after the restart")
            expect(page.locator(f'.row[data-id="{second}"]')).to_be_visible()
            approve(page)
            wait_for_state(page, "done")
            assert ran(after) == ["'before the restart' 1"]
            console.__exit__(None, None, None)


def test_page_shows_start_command_after_engine_is_away_for_a_minute(person: NewPerson) -> None:
    with approving_daemon() as daemon:
        console = running_console(daemon)
        running = console.__enter__()
        somebody = person()
        somebody.page.clock.install()
        page = somebody.log_in(running, daemon.credential)
        expect(page.locator("#away")).to_be_hidden()
    expect(page.locator("#away")).to_contain_text("The engine is away. Trying again …")
    page.clock.fast_forward(61_000)
    start = page.locator("#away [data-away=engine]")
    expect(start).to_contain_text("Start it again: fumehood serve.")
    expect(start).to_be_visible()
    console.__exit__(None, None, None)
    expect(page.locator("#away [data-away=console]")).to_be_visible()
    expect(start).to_be_hidden()
    assert faults_of(page) == []


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_tree_of_changed_files_passes_axe_and_unfolds_the_file_that_is_chosen(
    person: NewPerson, size: tuple[int, int]
) -> None:
    """A site without a daemon: what a tree is made of is hard to make with one."""
    diff = "@@ -1,2 +1,2 @@\n same\n-old\n+new\n"
    files = [f"src/{part}/{SCRIPT}file-{n:02}.py" for part in ("a", "b") for n in range(15)]
    changed = [{"path": path, "kind": "file", "diff": diff} for path in (*files, "x" * 3000)]
    removed = [{"path": "src/gone.py", "kind": "file", "size": 7}]
    preview = {"changed": changed, "removed": removed, "would_fail": "There is a conflict."}
    one = made_approval(preview=preview)
    server = make_site(one).browser()

    def serve(route: Route) -> None:
        path = route.request.url.removeprefix(BASE)
        if path == "/events":
            return route.abort()
        found = server.get(path)
        return route.fulfill(status=found.status_code, headers=found.headers, body=found.content)

    page = person(size=size).page
    page.route(f"{BASE}/**", serve)
    page.goto(f"{BASE}/inbox/{one.id}")
    assert faults_of(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("main img, main script").count() == 0
    last = page.locator("details.change", has_text="src/b/").last
    expect(last).not_to_have_attribute("open")
    page.locator(".tree a", has_text="file-14.py").last.click()
    expect(last).to_have_attribute("open")
    expect(last.locator(".diff")).to_be_in_viewport()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_inbox_pages_pass_axe_accessibility_check(
    person: NewPerson, console: Console, daemon: Daemon, size: tuple[int, int]
) -> None:
    approval = ask(daemon, f"looked at by axe\n{size}")
    somebody = person(size=size)
    page = somebody.open(f"{console.address}/login")
    assert faults_of(page) == []
    somebody.log_in(console, daemon.credential)
    for path in ("", "?tab=decided", f"/{approval}"):
        page.goto(f"{console.address}/inbox{path}")
        page.wait_for_selector("[data-open]" if approval in path else "#cards")
        assert faults_of(page) == [], path
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    page.click(".confirm summary")
    assert faults_of(page) == [], "confirm"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "confirm"
    for key in ("e", "d", "r"):
        page.click(f'[data-key="{key}"]')
        page.wait_for_selector(".panel")
        assert faults_of(page) == [], key
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), key
        page.click("[data-back]")
        page.wait_for_selector("[data-open]")
    page.keyboard.press("?")
    assert faults_of(page) == []
    page.keyboard.press("Escape")
    ask(daemon, f"the next one\n{size}")
    page.click('[data-key="d"]')
    page.click(".panel .danger")
    page.wait_for_selector(".result")
    expect(page.locator(".approval .actions > button:disabled")).to_have_count(0)
    assert faults_of(page) == [], "result"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "result"
