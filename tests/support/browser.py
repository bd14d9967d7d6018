"""A real browser for the console, and the console in front of a real daemon."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from conftest import AXE, CHROMIUM, FUMEHOOD, Daemon

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
"""Chromium cannot use its sandbox as root."""

WAIT_MS = 120_000
expect.set_options(timeout=WAIT_MS)
WIDE, NARROW = (1280, 800), (380, 780)
VIOLATIONS = "violations-of-the-policy"
NOTE_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error("violations-of-the-policy", event.violatedDirective, event.blockedURI, event.sample));
"""
HARMLESS = ("Failed to load resource", "net::ERR", "Response Status Error Code")
"""Browser console messages caused by error responses or an unreachable server."""


@dataclass
class Console:
    """A running `fumehood web`."""

    process: subprocess.Popen[str]
    link: str

    @property
    def address(self) -> str:
        return self.link.partition("/login")[0]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout=600)


@contextmanager
def running_console(
    daemon: Daemon, credential: str = "", options: Sequence[str] = ()
) -> Iterator[Console]:
    """Run the console of a daemon on a free port."""
    process = subprocess.Popen(
        [str(FUMEHOOD), "web", "--port", "0", "--credential-stdin", *options], env=daemon.environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdin.write(f"{credential or daemon.credential}\n")
    process.stdin.flush()
    lines = iter(process.stdout.readline, "")
    link = next(line.strip() for line in lines if "/login?token=" in line)
    console = Console(process, link)
    try:
        yield console
    finally:
        status = console.stop()
        process.stdin.close()
        process.stdout.close()
    assert status == 0, status


@contextmanager
def running_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Person:
    """A person with a browser window; browser errors are recorded."""

    def __init__(
        self, browser: Browser, size: tuple[int, int] = WIDE, scheme: Any = "light"
    ) -> None:
        self.complaints: list[str] = []
        self.context: BrowserContext = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
        )
        self.context.set_default_timeout(WAIT_MS)
        self.context.add_init_script(NOTE_VIOLATIONS)
        self.page = self.new_page()

    def new_page(self) -> Page:
        page = self.context.new_page()
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.on(
            "dialog",
            lambda dialog: (self._note("error", f"dialog {dialog.message}"), dialog.dismiss()),
        )
        return page

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and not any(words in text for words in HARMLESS):
            self.complaints.append(text)

    def log_in(self, console: Console, credential: str) -> Page:
        self.page.goto(f"{console.address}/login")
        self.page.fill("#credential", credential)
        self.page.click("button.primary")
        self.page.wait_for_url("**/inbox")
        return self.page

    def open(self, address: str) -> Page:
        """Open a page and wait for its script."""
        self.page.goto(address)
        self.page.wait_for_selector("main")
        return self.page


NewPerson = Callable[..., Person]
"""Factory of a person with a window of this size and colour scheme."""


def faults_of(page: Page) -> list[str]:
    """The accessibility faults axe finds on the current page, in both colour schemes."""
    if not page.evaluate("typeof axe === 'object'"):  # half a megabyte, once for each document
        page.evaluate(AXE.read_text(encoding="utf-8"))
    is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    own, other = ("dark", "light") if is_dark else ("light", "dark")
    found = _violations(page, {})
    page.emulate_media(color_scheme=other)
    found += _violations(page, {"runOnly": ["color-contrast"]})  # nothing else differs
    page.emulate_media(color_scheme=own)
    return found


def _violations(page: Page, options: dict[str, Any]) -> list[str]:
    found: dict[str, Sequence[Any]] = page.evaluate(
        "options => axe.run(document, options)", {"resultTypes": ["violations"], **options}
    )
    return [
        f"{one['id']}: {node['html'][:150]} {node['failureSummary'][:300]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
