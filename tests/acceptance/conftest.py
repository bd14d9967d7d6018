"""One daemon per mode with a caller and an approver, shared by the approval tests; a browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from conftest import Daemon
from support.http import SocketClient
from support.site import Site, running_site

if TYPE_CHECKING:  # a machine without a browser need not have playwright
    from playwright.sync_api import Browser

    from support.browser import NewPerson, Person

POLICY = """
[[rules]]
id = "no-rivals"
decision = "deny"
tools = ["send_mail"]
reason = "Rivals get no mail."
[[rules.when]]
argument = "/to"
glob = "*@rival.example"

[[rules]]
id = "board-needs-two"
decision = "ask"
tools = ["send_mail"]
quorum = 2
reason = "Two agree to what the board reads."
[[rules.when]]
argument = "/to"
prefix = "board"

[[rules]]
id = "more-words"
decision = "ask"
tools = ["look_up"]
over_budget = true
reason = "More words than there are."
"""

BUDGETS = """
[[budgets]]
name = "sums"
per = ["principal"]
tools = ["calculator"]
calls = 2

[[budgets]]
name = "words"
per = ["principal"]
tools = ["look_up"]
period = "total"
calls = 1
"""


@pytest.fixture(scope="session", params=["service" if os.geteuid() == 0 else "single-user"])
def shared_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """The audit log must verify at the end, whatever the tests did.

    Uses two real users if the machine allows creating them. Behaviour that is the same in both
    modes is tested with one user in `tests/integration/test_approvals.py`.
    """
    with running_site(
        is_service=request.param == "service", policy=POLICY, extra=BUDGETS
    ) as running:
        yield running
        verified = running.audit("verify")
        assert json.loads(verified.stdout)["intact"], verified.stdout
        assert running.stop() == 0, running.log
        assert "internal_error" not in running.log


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """The shared site, restored after a failed test so that the next one is unaffected."""
    yield shared_site
    shared_site.go_on()
    if not shared_site.takes_calls():
        shared_site.kill()
        shared_site.start(BUDGETS)


@pytest.fixture
def http(daemon: Daemon) -> Iterator[SocketClient]:
    """A client of the module's own daemon."""
    client = daemon.client()
    yield client
    client.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    from support.browser import running_browser

    with running_browser() as browser:
        yield browser


@pytest.fixture
def person(chromium: Browser) -> Iterator[NewPerson]:
    """A person with a browser window; a content-policy violation or script error fails the test."""
    from support.browser import Person

    people: list[Person] = []

    def make(**given: Any) -> Person:
        people.append(Person(chromium, **given))
        return people[-1]

    yield make
    complaints = [said for one in people for said in one.complaints]
    for one in people:
        one.context.close()
    assert complaints == []
