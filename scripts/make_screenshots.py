"""The screenshots of the console in `docs/images`: every page, wide and narrow, light and dark.

Usage: `PYTHONPATH=tests python scripts/make_screenshots.py [DIRECTORY]`. It needs Chromium and the
image `python-data`. It starts a daemon in its own directory, with calls of a few agents: some wait
for approval, and some appear to be from the days before. With `serve` it is that daemon.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from conftest import CLEAN_ENVIRONMENT, Daemon, make_first_approver, wait_until_ready
from fumehood import Client, ControlClient, tool
from support.browser import NARROW, Person, running_browser, running_console

ROOT = Path(__file__).parents[1]
WIDE = (1280, 860)

POLICY = """
[[rules]]
id = "files-of-a-session"
decision = "ask"
tools = ["write_file"]
reason = "Changes to the configuration are looked at first."
when = [{ argument = "/path", glob = "*.toml" }]

[[rules]]
id = "no-network-for-interns"
decision = "deny"
tools = ["fetch_url"]
agents = ["intern"]
reason = "Interns work with the data that they are given."

[[rules]]
id = "look-at-large-sums"
mode = "shadow"
decision = "ask"
tools = ["calculator"]
reason = "Would a person have wanted to see it?"
when = [{ argument = "/expression", glob = "*000*" }]

[[rules]]
id = "tables-need-two"
decision = "ask"
tools = ["drop_table"]
quorum = 2
reason = "What is dropped is gone."
"""
BUDGETS = [
    {"name": "daily-calls", "calls": 200, "per": ["agent"]},
    {"name": "monthly", "money": "5", "period": "total"},
]
AGENTS = {
    "accountant": ("Adds up what the month has cost.", ["calculator", "read_file", "write_file"]),
    "intern": ("", ["calculator"]),
    "researcher": (
        "Reads tables and draws figures.",
        ["calculator", "delete_files", "read_file", "run_python", "write_file"],
    ),
    "support": ("Answers customers from the files that it is given.", ["read_file", "send_mail"]),
}
BEFORE = """\
[database]
host = "db1.internal"
port = 5432
pool_size = 10
timeout_s = 30

[cache]
ttl_s = 300
backend = "memory"
"""
AFTER = BEFORE.replace("pool_size = 10", "pool_size = 40").replace(
    'backend = "memory"\n', 'backend = "redis"\nurl = "redis://cache1.internal:6379"\n'
)
FIGURE = """\
import matplotlib.pyplot as plt
import pandas as pd

months = ["Jul", "Aug", "Sep", "Oct", "Nov"]
table = pd.DataFrame({"month": months, "eur": [412, 380, 455, 610, 540]})
table["share"] = (table["eur"] / table["eur"].sum()).round(3)
plt.figure(figsize=(6, 2.6))
plt.bar(table["month"], table["eur"], color="#0f766e")
plt.title("Spent on tools, EUR")
print(f"{table['eur'].sum()} EUR in {len(table)} months")
table.to_dict("records")
"""


@tool(sandboxed=False, dangerous=True, cost_per_use="0.002")
async def send_mail(to: str, subject: str, text: str) -> dict[str, str]:
    """Send a mail to a customer."""
    return {"sent_to": to}


@tool(sandboxed=False, dangerous=True)
async def drop_table(name: str, options: dict[str, Any]) -> dict[str, str]:
    """Drop a table of the data warehouse."""
    return {"dropped": name}


def serve() -> None:
    """`fumehood serve`, with these tools."""
    from fumehood.cli.main import main as command
    from fumehood.http import server

    server.serve = partial(server.serve, tools=[send_mail, drop_table])  # type: ignore[assignment]
    sys.argv = ["fumehood", "serve"]
    command()


@contextmanager
def running_daemon(home: Path) -> Iterator[Daemon]:
    policy = home / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    policy.chmod(0o600)
    environment = {
        **CLEAN_ENVIRONMENT,
        "FUMEHOOD_HOME": str(home),
        "FUMEHOOD_POLICY_FILE": str(policy),
        "FUMEHOOD_BUDGETS": json.dumps(BUDGETS),
        "FUMEHOOD_PRICES": json.dumps({"currency": "EUR", "cpu_second": "0.1"}),
        "FUMEHOOD_CONTAINER__IMAGES__PYTHON": "python-data",
        "FUMEHOOD_SESSIONS__IMAGE": "python-data",
    }
    credential = make_first_approver(home)
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-P", __file__, "serve"],
            env={**environment, "PYTHONPATH": str(ROOT / "tests")},
            cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    daemon = Daemon(process, home, environment, credential)
    try:
        yield wait_until_ready(daemon)
    finally:
        daemon.stop()


class Scene:
    """The state of the daemon for the screenshots."""

    def __init__(self, daemon: Daemon) -> None:
        self.chance = random.Random(7)  # noqa: S311 - the same scene each time
        self.daemon = daemon
        with (
            ControlClient(daemon.control, credential=daemon.credential) as control,
            Client(daemon.socket) as client,
        ):
            self._people(control)
            self._work(client, 60)
            self._as_of_the_days_before()
            self._work(client, 12)
            self.session = self._session(client)
            self.call = self._figure(client)
            self.open = self._ask(client, control)

    def _people(self, control: ControlClient) -> None:
        for name, (description, tools) in AGENTS.items():
            principals = [f"uid:{os.getuid()}"]
            control.agents.create(name, description=description, principals=principals)
            for one in tools:
                fixed = {"precision": 2} if (name, one) == ("accountant", "calculator") else {}
                control.agents.bind(name, one, fixed=fixed)
        control.approvers.add("bea")

    def _work(self, client: Client, number: int) -> None:
        for _ in range(number):
            match self.chance.randrange(16):
                case 0:
                    client.call("calculator", {"expression": "1 / 0"}, agent_id="researcher")
                case 1 | 2:
                    code = {"code": "sum(n * n for n in range(1000))"}
                    client.call("run_restricted_python", code)
                case 3 | 4:
                    client.call("run_python", {"code": "print(6 * 7)"}, agent_id="researcher")
                case number:
                    sums = {"expression": f"{self.chance.randrange(9000)} * 1.19"}
                    agent = "accountant" if number % 2 else "researcher"
                    client.call("calculator", sums, agent_id=agent)

    def _as_of_the_days_before(self) -> None:
        """Spread the calls over the last week, with invented costs."""
        with closing(sqlite3.connect(self.daemon.home / "state.db")) as state:
            state.row_factory = sqlite3.Row
            rows = [dict(row) for row in state.execute("SELECT * FROM calls ORDER BY seq")]
            state.execute("DELETE FROM calls")
            seq = 0
            for day in range(6, 0, -1):
                at = datetime.now(UTC) - timedelta(days=day)
                for row in self.chance.choices(rows, k=self.chance.randrange(12, 55)):
                    seq += 1
                    row = {**row, "seq": seq, "id": f"call_{seq:024x}", "audit_seq": None}
                    row["at"] = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
                    if row["tool"] == "run_python":
                        row["cost"] = f"{self.chance.randrange(2000, 30_000) / 1e6:.6f}"
                    names = ", ".join(row)
                    marks = ", ".join("?" * len(row))
                    state.execute(
                        f"INSERT INTO calls ({names}) VALUES ({marks})",  # noqa: S608 - our names
                        list(row.values()),
                    )
            state.commit()

    def _session(self, client: Client) -> str:
        session = client.create_session(agent_id="researcher", memory_mb=512).id
        for name, text in (
            ("app.toml", BEFORE), ("report.csv", "month,eur\nJul,412\nAug,380\nSep,455\n"),
            ("old/report-1.csv", "1,2,3,4\n"), ("old/report-2.csv", "5,6,7,8\n"),
            ("\u202egnp.invoice.txt", "hello"),
        ):  # fmt: skip
            client.put_file(session, name, text.encode())
        return session

    def _figure(self, client: Client) -> str:
        given: dict[str, Any] = {"agent_id": "researcher", "idempotency_key": "figure"}
        found = client.call("run_python", {"code": FIGURE}, **given)
        assert found.success, found.error
        return str(found.metadata.call_id)

    def _ask(self, client: Client, control: ControlClient) -> str:
        mail = {"subject": "Invoice 2026-11", "text": "Dear customer,\nplease find it below."}
        asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("drop_table", {"name": "orders_2018", "options": {"cascade": True}}, {}),
            ("send_mail", {"to": "sales\u202eten.elpmaxe@example.com", **mail}, {}),
            ("send_mail", {"to": "finance@example.com", **mail}, {"agent_id": "support"}),
            ("delete_files", {"paths": ["old/report-1.csv", "old/report-2.csv"]}, self._inside()),
            (
                "write_file",
                {"path": "app.toml", "content": AFTER, "mode": "replace"},
                self._inside(),
            ),
        ]
        denied = client.call("send_mail", {"to": "all@example.com", **mail}, agent_id="support")
        control.approvals.deny(_approval(denied), version=1, reason="Not to everybody.")
        return [_approval(client.call(name, given, **rest)) for name, given, rest in asked][-1]

    def _inside(self) -> dict[str, Any]:
        return {"session_id": self.session, "agent_id": "researcher"}


def _approval(envelope: Any) -> str:
    assert envelope.error is not None, envelope
    assert envelope.error.approval_id is not None, envelope.error
    return str(envelope.error.approval_id)


def explain(page: Page) -> None:
    """Fill both forms of the page Policy."""
    page.fill("#tool", "delete_files")
    page.fill("#arguments", '{"paths": ["report.csv"]}')
    page.click("button:text-is('Explain')")
    page.wait_for_selector("#explained .badge")
    page.click("button:text-is('Try')")
    page.wait_for_selector("#tried .badge")
    page.evaluate("scrollTo(0, 0)")


def shoot(scene: Scene, daemon: Daemon, into: Path) -> None:
    pages = {
        "inbox": f"/inbox/{scene.open}", "calls": "/calls", "call": f"/calls/{scene.call}",
        "tools": "/tools", "agents": "/agents",
        "session": f"/sessions/{scene.session}?file=report.csv", "usage": "/usage",
        "policy": "/policy", "health": "/health", "charts": "/charts?hours=720",
        "try": "/tools/run_python/try",
    }  # fmt: skip
    time.sleep(6)  # what is new is coloured
    with running_browser() as browser, running_console(daemon) as console:
        for size in (WIDE, NARROW):
            for scheme in ("light", "dark"):
                person = Person(browser, size=size, scheme=scheme)
                page = person.log_in(console, daemon.credential)
                for name, path in pages.items():
                    page.goto(f"{console.address}{path}")
                    page.wait_for_selector("main")
                    if name == "policy":
                        explain(page)
                    page.wait_for_timeout(500)
                    file = into / f"{name}-{size[0]}-{scheme}.png"
                    page.screenshot(path=file, full_page=name == "call")
                person.context.close()


def main() -> None:
    """Make the scene and take the screenshots."""
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))  # sockets have short paths
    try:
        with running_daemon(home) as daemon:
            shoot(Scene(daemon), daemon, into)
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
