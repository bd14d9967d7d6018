"""Tasks of somebody who debugs an agent in the console, by what is on the screen alone.

Every step follows a link, a button or a field by the words that a reader sees.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from conftest import Daemon
from fumehood import Client, ControlClient
from support.browser import Console, Person, running_console
from support.wait import DEADLINE_S, wait_until
from support.workshop import workshop

pytestmark = [
    pytest.mark.row("D5"), pytest.mark.needs("browser"), pytest.mark.needs("docker")
]  # fmt: skip

POLICY = """
[[rules]]
id = "ask-for-sums"
decision = "ask"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
prefix = "1 +"
"""
PRINTS = (
    "import time\nfor n in range(600):\n    print('step', n, flush=True)\n    time.sleep(0.1)\n"
)
FAILS = "prices = {'tea': 3}\nprint('reading prices')\nprices['coffee']\n"
CALLS_TOOLS = "from tools import calculator\nprint(calculator(expression='6 * 7'))\n"


@dataclass
class Scene:
    """A daemon in which an agent has worked, and a console."""

    daemon: Daemon
    console: Console


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    place = tmp_path_factory.mktemp("scene")
    rules, project = place / "policy.toml", place / "shop"
    rules.write_text(POLICY, encoding="utf-8")
    rules.chmod(0o600)
    project.mkdir()
    (project / "shop.py").write_text("total = max\n")
    with workshop(
        "python", approver=True, policy_file=str(rules), sessions__pause_seconds="3600"
    ) as daemon:
        with ControlClient(daemon.control, credential=daemon.credential) as control:
            control.agents.create("clerk", principals=[f"uid:{os.geteuid()}"])
            for tool in ("run_python", "calculator", "run_shell"):
                control.agents.bind("clerk", tool)
        with Client(daemon.socket) as client:
            _work(client, project)
        with running_console(daemon) as console:
            yield Scene(daemon, console)


def _work(client: Client, project: Path) -> None:
    for code in ("1 + 1", FAILS, "2 + 2"):
        client.call("run_python", {"code": code}, agent_id="clerk")
    client.call("run_python", {"code": CALLS_TOOLS, "tools": ["calculator"]}, agent_id="clerk")
    session = client.create_session_from(project, name="till", agent_id="clerk")
    edit = {"command": "sed -i s/max/sum/ shop.py; echo new > notes.txt"}
    client.call("run_shell", edit, session_id=session.id, agent_id="clerk").raise_for_error()


@pytest.fixture(scope="module")
def visitor(chromium: Browser, scene: Scene) -> Iterator[Person]:
    """One person for all tasks."""
    one = Person(chromium)
    one.log_in(scene.console, scene.daemon.credential)
    yield one
    one.context.close()


@pytest.fixture
def page(visitor: Person, scene: Scene) -> Iterator[Page]:
    visitor.page = visitor.new_page()
    yield visitor.open(f"{scene.console.address}/inbox")
    visitor.page.close()  # a navigation that has begun would interrupt the next task's
    assert visitor.complaints == []


@contextmanager
def running_call(
    scene: Scene, tool: str, arguments: dict[str, Any], **options: Any
) -> Iterator[Any]:
    answers: list[Any] = []

    def work() -> None:
        with Client(scene.daemon.socket) as client:
            answers.append(client.call(tool, arguments, **options))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield answers
    finally:
        with Client(scene.daemon.socket) as client:
            for one in client.calls(state="running").items:
                client.cancel(one.call_id)
        thread.join(DEADLINE_S)


def go(page: Page, name: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()


def test_find_the_call_that_failed_and_why(page: Page) -> None:
    go(page, "Calls")
    page.get_by_label("Result").fill("execution_error")
    page.get_by_label("Time").select_option("last day")
    page.get_by_role("button", name="Filter", exact=True).click()
    page.locator("#calls").get_by_role("link", name="run_python").first.click()
    expect(page.get_by_text("KeyError: 'coffee'").first).to_be_visible()
    expect(page.get_by_text("prices['coffee']").first).to_be_visible()
    expect(page.get_by_text("reading prices").first).to_be_visible()


def test_see_what_an_agent_sent(page: Page) -> None:
    go(page, "Agents")
    page.get_by_role("link", name="its calls").first.click()
    expect(page.get_by_role("textbox", name="Agent")).to_have_value("clerk")
    page.locator("#calls").get_by_role("link", name="run_shell").first.click()
    expect(
        page.get_by_text("sed -i s/max/sum/ shop.py; echo new > notes.txt").first
    ).to_be_visible()


def test_find_the_call_that_has_a_word(page: Page) -> None:
    go(page, "Calls")
    page.get_by_label("Words").fill("coffee prices")
    page.get_by_label("Words").press("Enter")
    expect(page.locator("#calls tbody tr")).to_have_count(1)


def test_stop_what_runs_now(page: Page, scene: Scene) -> None:
    with running_call(scene, "run_python", {"code": PRINTS}) as answers:
        go(page, "Calls")
        page.get_by_role("button", name="Cancel run_python").click()
        expect(page.get_by_text("CANCELLED").first).to_be_visible()
        wait_until(lambda: answers)
        assert answers[0].error.code == "CANCELLED"


def test_watch_what_a_program_prints(page: Page, scene: Scene) -> None:
    with running_call(scene, "run_python", {"code": PRINTS}):
        go(page, "Calls")
        page.locator("#now").get_by_role("link", name="run_python").click()
        output = page.get_by_role("region", name="stdout")
        expect(output).to_contain_text("step 3")
        expect(output).to_contain_text("step 20")


def test_see_the_calls_of_a_program(page: Page) -> None:
    go(page, "Calls")
    page.get_by_label("Words").fill("import calculator")
    page.get_by_label("Words").press("Enter")
    page.locator("#calls").get_by_role("link", name="run_python").first.click()
    section = page.locator("section", has_text="Calls that its program made")
    section.get_by_role("link", name="calculator").click()
    expect(page.get_by_text("6 * 7").first).to_be_visible()


def test_see_what_changed_in_a_project(page: Page) -> None:
    go(page, "Sessions")
    page.get_by_role("link", name="till").click()
    changes = page.locator("section", has_text="Changes in its project")
    expect(changes).to_contain_text("+total = sum")
    expect(changes).to_contain_text("notes.txt")


def test_read_a_file_of_a_session(page: Page) -> None:
    page.keyboard.press("g")
    page.keyboard.type("till")
    page.get_by_role("link", name="session till").click()
    page.get_by_role("link", name="notes.txt", exact=True).click()
    expect(page.locator("#preview")).to_contain_text("new")


def test_repeat_a_call_with_other_arguments(page: Page) -> None:
    go(page, "Tools")
    page.get_by_role("link", name="calculator").first.click()
    page.get_by_role("link", name="Try it").click()
    page.get_by_label("expression").fill("7 * 8")
    page.get_by_role("button", name="Call it").click()
    expect(page.locator("#tried")).to_contain_text("56")


def test_see_when_calls_failed(page: Page) -> None:
    go(page, "Charts")
    expect(page.get_by_text(re.compile(r"calls, \d+ failed"))).to_be_visible()
    page.get_by_role("textbox", name="Tool", exact=True).fill("run_python")
    page.get_by_role("button", name="Show").click()
    page.locator("svg a:has(rect.inner)").last.click()
    expect(
        page.locator("#calls").get_by_text("EXECUTION_ERROR").locator("visible=true")
    ).not_to_have_count(0)


def test_make_a_rule_stop_asking(page: Page, scene: Scene) -> None:
    sums = {"expression": "1 + 1"}
    with Client(scene.daemon.socket) as client:
        asked = client.call("calculator", sums)
        assert asked.error.code == "REQUIRES_HUMAN_APPROVAL"
    go(page, "Policy")
    file = page.get_by_label("The policy file", exact=True)
    file.fill(file.input_value().replace('decision = "ask"', 'decision = "allow"'))
    page.get_by_role("button", name="Try these rules").click()
    expect(page.get_by_text("would have decided").first).to_be_visible()
    page.get_by_role("button", name="Save these rules").click()
    expect(page.locator("tr", has_text="ask-for-sums")).to_contain_text("allow")
    with Client(scene.daemon.socket) as client:
        assert client.call("calculator", {"expression": "1 + 2"}).success
    go(page, "Health")
    expect(page.get_by_text("loaded the policy").first).to_be_visible()


def test_take_a_tool_from_an_agent(page: Page, scene: Scene) -> None:
    go(page, "Agents")
    page.get_by_text("Take away run_shell").click()
    page.get_by_role("button", name="Yes, take it away").locator("visible=true").click()
    expect(page.get_by_text("Take away run_shell")).to_have_count(0)
    with Client(scene.daemon.socket) as client:
        refused = client.call("run_shell", {"command": "true"}, agent_id="clerk")
    assert refused.error.code == "PERMISSION_DENIED"
