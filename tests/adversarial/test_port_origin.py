"""Attacks on the console by a page that a session serves through `fumehood sessions port`.

A person opens the page in the browser that is logged in to the console. The page knows the
console's address, an approval that waits, and the name of the cookie. What happened is looked at
in the browser's own lists, in the engine, and by what the hostile server was sent.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request

from conftest import FUMEHOOD, Daemon
from fumehood import Client, ControlClient
from support.browser import Console, Person, running_browser, running_console
from support.preloaded import PYTHON
from support.wait import wait_until

pytestmark = [
    pytest.mark.row("A6"), pytest.mark.needs("docker", "browser"),
    pytest.mark.usefixtures("python_image"),
]  # fmt: skip

SERVER = """
import http.server, json, sys

port, stolen = sys.argv[1:]
seen = []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        seen.append(self.headers.get("cookie", ""))
        path, _, target = self.path.partition("?")
        texts = {"/seen": json.dumps(seen), "/worker.js": ""}
        body = texts.get(path, "<!doctype html><title>Hostile</title>")
        self.send_response(307 if path == "/to" else 200)
        if path == "/to":
            self.send_header("location", target)
        self.send_header("set-cookie", "own=1; Path=/")
        for domain in ("localhost", "127.0.0.1"):
            self.send_header("set-cookie", f"{stolen}=evil; Path=/; Domain={domain}")
        self.send_header("content-type", "text/javascript" if path == "/worker.js" else "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
"""Remembers the cookies that it is sent, tries to set the console's, and redirects anywhere."""

SCRIPTED = """async ({console, decision, cookie}) => {
  const ended = (attempt) => attempt.then((found) => found?.type ?? "done", (error) => error.name);
  const send = {method: "POST", credentials: "include", body: new URLSearchParams({version: "1"})};
  const frame = Object.assign(document.createElement("iframe"), {src: `${console}/inbox`});
  const loaded = new Promise((done) => frame.addEventListener("load", done));
  document.body.append(frame);
  await loaded;
  for (const domain of ["", "; domain=localhost", "; domain=127.0.0.1"])
    document.cookie = `${cookie}=evil; path=/inbox${domain}`;
  const worker = (script, scope) => navigator.serviceWorker.register(script, {scope});
  return {
    read: await ended(fetch(`${console}/inbox`, {credentials: "include"})),
    post: await ended(fetch(decision, {...send, mode: "no-cors"})),
    redirectedPost: await ended(fetch(`/to?${decision}`, {...send, mode: "no-cors"})),
    worker: await ended(worker(`${console}/static/app.js`, `${console}/`)),
    redirectedWorker: await ended(worker(`/to?${console}/static/app.js`, "/")),
    frame: frame.contentDocument === null ? "another origin" : "readable",
  };
}"""
"""What a script of the page can try. Returns how each attempt ended."""

FORM = """(target) => {
  const form = Object.assign(document.createElement("form"),
    {method: "post", action: target, target: "_blank"});
  form.innerHTML = '<input name="version" value="1">';
  document.body.append(form);
  form.submit();
}"""


@dataclass
class House:
    """A console with an approval that waits, and a session that serves a hostile page."""

    daemon: Daemon
    console: Console
    link: str
    """The page's address, as `fumehood sessions port` prints it."""
    approval: str
    browser: Browser

    @property
    def cookie(self) -> str:
        """The name of the console's cookie."""
        return f"fumehood_{self.console.address.rpartition(':')[2]}"

    @property
    def decision(self) -> str:
        """The address that approves the call."""
        return f"{self.console.address}/inbox/{self.approval}/approve"

    def state(self) -> str:
        with ControlClient(self.daemon.control, credential=self.daemon.credential) as control:
            return control.approvals.show(self.approval).state.value


@pytest.fixture(scope="module")
def house(administered_daemon: Daemon, python_image: Any) -> Iterator[House]:
    daemon = administered_daemon
    with ExitStack() as stack:
        browser = stack.enter_context(running_browser())
        console = stack.enter_context(running_console(daemon))
        client = stack.enter_context(Client(daemon.socket))
        session = client.create_session().id
        stack.callback(client.end_session, session)
        made = House(daemon, console, "", "", browser)
        argv = ["python3", "-u", "-c", SERVER, "8000", made.cookie]
        started = client.call("start_process", {"name": "web", "argv": argv}, session_id=session)
        assert started.success, started.error
        wait_until(lambda: "8000" in client.process_output(session, "web", wait_seconds=5).text)
        client.put_file(session, "precious.txt", b"kept")
        asked = client.call("delete_files", {"paths": ["precious.txt"]}, session_id=session)
        assert asked.error.approval_id is not None
        made.approval = asked.error.approval_id
        command = [str(FUMEHOOD), "sessions", "port", session, "8000"]
        made.link = stack.enter_context(printed(command, daemon.environment))
        yield made


@contextmanager
def printed(command: list[str], environment: dict[str, str] | None = None) -> Iterator[str]:
    """Run a command in the background. Yields the first line that it prints."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@pytest.fixture
def owner(house: House) -> Iterator[Page]:
    """The page of an administrator who is logged in to the console."""
    person = Person(house.browser)
    yield person.log_in(house.console, house.daemon.credential)
    person.context.close()


def seen_by(page: Page) -> str:
    """Everything that the server of a page was sent as cookies."""
    return str(page.evaluate("fetch('/seen').then((answer) => answer.text())"))


def cookies_of(context: BrowserContext) -> set[tuple[str, str, str]]:
    return {(one["name"], one["domain"], one["value"]) for one in context.cookies()}


def test_page_of_a_sessions_port_cannot_touch_the_console(house: House, owner: Page) -> None:
    context, console = owner.context, house.console.address
    before = cookies_of(context)
    sent: list[Request] = []
    context.on("request", lambda request: sent.append(request))
    # Opened from the console itself, which no link of it does.
    with owner.expect_popup() as opened:
        owner.evaluate("address => { window.open(address) }", house.link)
    page = opened.value
    page.wait_for_load_state()
    assert page.title() == "Hostile"
    assert page.evaluate("window.opener") is None

    known = {"console": console, "decision": house.decision, "cookie": house.cookie}
    assert page.evaluate(SCRIPTED, known) == {
        "read": "TypeError", "post": "TypeError", "redirectedPost": "TypeError",
        "worker": "SecurityError", "redirectedWorker": "SecurityError",
        "frame": "another origin",
    }  # fmt: skip
    assert {one.url.partition(":")[0] for one in page.frames[1:]} == {"chrome-error"}
    assert not any(console in one.url for one in context.service_workers)
    for target in (house.decision, f"/to?{house.decision}"):
        with context.expect_page() as answered:
            page.evaluate(FORM, target)
        answered.value.wait_for_url(house.decision)
        assert "Pages of other origins" in answered.value.inner_text("body")
    with page.expect_popup() as taken:
        page.evaluate("address => { window.taken = window.open(address) }", f"{console}/inbox")
    taken.value.wait_for_load_state()
    assert page.evaluate("window.taken.closed")  # it has lost the window
    page.goto(f"{house.link}to?{console}/logout")

    decisions = [one for one in sent if (one.method, one.url) == ("POST", house.decision)]
    assert len(decisions) == 4  # the attempts were made
    assert not any("cookie" in one.all_headers() for one in decisions)
    assert house.state() == "pending"
    own = house.link.removeprefix("http://").partition(":")[0]
    added = cookies_of(context) - before
    assert {domain for _, domain, _ in added} == {own}
    assert before <= cookies_of(context)
    assert page.goto(house.link) is not None
    assert house.cookie in {name for name, _, _ in before}
    secret = next(value for name, _, value in before if name == house.cookie)
    assert secret not in seen_by(page)
    owner.goto(f"{console}/inbox/{house.approval}")
    owner.wait_for_selector(f'[data-open="{house.approval}"]')  # still logged in
    own_request = next(one for one in sent if one.url == owner.url)
    assert house.cookie in own_request.all_headers()["cookie"]  # so it would be seen above


def test_page_of_a_sessions_port_works_on_its_own_origin(house: House, owner: Page) -> None:
    page = owner.context.new_page()
    page.goto(house.link)
    page.reload()
    assert "own=1" in page.evaluate("document.cookie")
    assert "own=1" in json.loads(seen_by(page))[-1]
    register = "navigator.serviceWorker.register('/worker.js').then((made) => made.scope)"
    assert page.evaluate(register) == house.link


def test_control_same_page_on_the_consoles_host_is_sent_its_cookie(
    house: House, owner: Page
) -> None:
    (secret,) = (value for name, _, value in cookies_of(owner.context) if name == house.cookie)
    with printed([PYTHON, "-u", "-c", SERVER, "0", house.cookie]) as port:
        page = owner.context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        assert secret in seen_by(page)
