"""The demo: commands as a user types them, against a daemon in its own directory.

Usage: `python scripts/demo.py [--json]`. It starts the daemon, builds the images that the default
tools need, makes calls and shows one whole envelope and two lines for every other command; with
`--json` one JSON object a step. On a terminal it ends with the link of an inbox where a call waits,
and stays until that is decided. The figure that a program draws stays in `fumehood-demo`.

Invariant: every step has an expected ending; any other gives exit status 1. If images cannot be
built, the steps without containers are shown, and the status is 0.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

FUMEHOOD = Path(sys.executable).with_name("fumehood")
KEPT = Path("fumehood-demo")
"""Stays: the program that draws a figure, and the figure."""

FIGURE = KEPT / "figure-1.png"
PACKAGE = "humanize"
START_DEADLINE_S = 120
ANSWER_DEADLINE_S = 20
COMMAND_DEADLINE_S = 120
INVITED_S = 300
"""How long the demo waits on a terminal for a decision; the link works for as long."""

LOOK_S = 0.1
WIDEST = 110

PLOT = """\
import matplotlib.pyplot as plt
import pandas as pd

sales = pd.DataFrame({"month": ["Jan", "Feb", "Mar"], "amount": [120, 150, 90]})
sales.plot(x="month", y="amount", kind="bar", title="Sales")
int(sales["amount"].sum())
"""

CALLS_TOOLS = """\
degrees = tools.get_weather("Oslo")["degrees"]
tools.calculator(f"{degrees} * 9 / 5 + 32")["value"]
"""

HOST = "127.0.0.2"
"""Of the demo's service. On loopback, and not an address that clients reach without a proxy."""

ORDERS = """\
import os, urllib.request as web
key = os.environ["SHOP_KEY"]
print(key)
web.urlopen("http://@SHOP@/weather/Oslo").read()
asked = web.Request("http://@SHOP@/orders", b"2 umbrellas", {"Authorization": f"Bearer {key}"})
web.urlopen(asked).status
"""
KEY = f"key-{secrets.token_hex(8)}"

SHOP = """\
import http.server


def total(prices):
    return max(prices)


class Shop(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"total %d" % total([1, 2]))


if __name__ == "__main__":
    http.server.HTTPServer(("127.0.0.1", 8000), Shop).serve_forever()
"""
EDIT = """\
text = open("shop.py").read().replace("max(", "sum(")
open("shop.py", "w").write(text)
total = sum(range(101))
total
"""
CHANGED = ["-return max(prices)", "+return sum(prices)"]

WEAKEST = {"FUMEHOOD_CONTAINER__LEAST_GRADE": "watched"}
"""The demo runs programs by whatever grade the host has, and names it."""

GRADES = {
    "kernel": "they have a kernel of their own",
    "namespaces": "the operating system enforces all limits",
    "watched": "memory and CPU time are watched every 0.1 s, see docs/howto/run-without-docker.md",
}

SLOW = "pow(7, 10**4200, 10**4200 + 9)"


@dataclass(frozen=True)
class Ran:
    """One command that has ended. `shown` is the command as a user types it."""

    shown: str
    status: int
    seconds: float
    output: str
    complaint: str

    @property
    def answer(self) -> Any:
        """Its output as JSON, or None for other output."""
        try:
            return json.loads(self.output)
        except ValueError:
            return None

    @property
    def envelope(self) -> dict[str, Any] | None:
        """Its output as an envelope."""
        answer = self.answer
        return answer if isinstance(answer, dict) and "metadata" in answer else None


def value(data: Any) -> str:
    """The value of a program's last expression."""
    return f"value {json.dumps(data['value'])}"


@dataclass
class Demo:
    """The commands, the display of them, and the steps that ended otherwise than expected."""

    home: Path
    as_json: bool
    settings: dict[str, str] = field(default_factory=dict)
    """Variables of the daemon in addition to its directory."""
    steps: int = 0
    failed: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Identifiers and the variables that the display shows in their place."""
    process: subprocess.Popen[bytes] | None = None
    """The daemon."""

    @property
    def environment(self) -> dict[str, str]:
        """The caller's without settings of another engine."""
        others = {name: value for name, value in os.environ.items() if "FUMEHOOD_" not in name}
        return {**others, **WEAKEST, **self.settings, "FUMEHOOD_HOME": str(self.home)}

    def fumehood(self, *arguments: str, stdin: str = "") -> Ran:
        """Run one command to its end."""
        started = time.monotonic()
        done = subprocess.run(  # noqa: S603 - the demo's own commands
            [FUMEHOOD, *arguments], env=self.environment, input=stdin,
            capture_output=True, text=True, timeout=COMMAND_DEADLINE_S,
        )  # fmt: skip
        seconds = time.monotonic() - started
        return Ran(self.typed(arguments), done.returncode, seconds, done.stdout, done.stderr)

    def conversation(self, *arguments: str, line: str) -> Ran:
        """Run one command that gets a line, and the end of its input after it has answered."""
        started = time.monotonic()
        process = subprocess.Popen(  # noqa: S603 - the demo's own commands
            [FUMEHOOD, *arguments], env=self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        impatient = threading.Timer(COMMAND_DEADLINE_S, process.kill)
        impatient.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            rest, complaints = process.communicate()
        finally:
            impatient.cancel()
        seconds = time.monotonic() - started
        return Ran(self.typed(arguments), process.returncode, seconds, answer + rest, complaints)

    def typed(self, arguments: tuple[str, ...]) -> str:
        """The command line, with variables for identifiers."""
        words = (self.names.get(word) or shlex.quote(word) for word in arguments)
        return f"fumehood {' '.join(words)}"

    def call(
        self,
        tool: str,
        arguments: dict[str, Any],
        *options: str,
        gives: str | None = None,
        shows: Callable[[Any], str] = value,
        status: int = 0,
        ends: str | None = "ok",
    ) -> Ran:
        """Make one call and show its ending; `shows` of its data must equal `gives`."""
        ran = self.fumehood("call", tool, json.dumps(arguments), *options)
        self.show_call(ran, gives=gives, shows=shows, status=status, ends=ends)
        return ran

    def show_call(
        self,
        ran: Ran,
        *,
        gives: str | None,
        shows: Callable[[Any], str],
        status: int = 0,
        ends: str | None = "ok",
    ) -> None:
        """Show a call. `ends` is the expected ending of its program, or None if none ran."""
        envelope = ran.envelope
        ended_by = (envelope["metadata"]["sandbox"] or {}).get("ended_by") if envelope else None
        came = shows(envelope["data"]) if envelope and envelope["success"] else None
        is_right = (ran.status, ended_by) == (status, ends) and came == gives
        self.show(ran, is_right, outcome(envelope, came) if envelope else "no envelope")

    def show(self, ran: Ran, is_right: bool, *lines: str) -> None:
        """Show one step: its command, and its result in one line."""
        self.steps += 1
        if not is_right:
            self.failed.append(ran.shown)
        if self.as_json:
            document = {
                "command": ran.shown, "as_expected": is_right, "exit_status": ran.status,
                "seconds": round(ran.seconds, 3), "answer": ran.answer or ran.output.strip(),
            }  # fmt: skip
            print(json.dumps(document), flush=True)
            return
        print(f"  $ {ran.shown}")
        for line in lines:
            print(f"    {line}")
        if not is_right:
            print(f"    NOT AS EXPECTED (exit status {ran.status}) {ran.complaint.strip()[-300:]}")
        sys.stdout.flush()

    def head(self, title: str) -> None:
        """The title of the next steps."""
        self.say(f"\033[1m{title}:\033[0m" if sys.stdout.isatty() else f"{title}:")

    def say(self, *lines: str) -> None:
        """Text between the steps."""
        if not self.as_json:
            print(*lines, sep="\n", flush=True)


def main() -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="fumehood-demo-") as directory:
        demo = Demo(Path(directory), as_json="--json" in sys.argv[1:])
        demo.head("A daemon, and a person who may say yes")
        credential = make_approver(demo)
        with service() as port:
            define_tool(demo, port)
            with daemon(demo):
                has_containers = build_images(demo)
                calls(demo)
                call_service(demo)
                call_over_mcp(demo)
                if has_containers:
                    programs(demo)
                    order(demo, credential, f"{HOST}:{port}")
                    session(demo, credential)
                verify(demo)
                with inbox(demo, credential, has_containers=has_containers) as waiting:
                    seconds = time.monotonic() - started
                    conclude(demo, seconds, waiting, has_containers=has_containers)
    return 1 if demo.failed else 0


def make_approver(demo: Demo) -> str:
    """The credential of the first approver. It is not shown."""
    made = demo.fumehood("approvers", "init", "demo")
    ran = Ran(made.shown, made.status, made.seconds, "", made.complaint)
    demo.show(ran, made.status == 0, "its credential stays in this script, away from all callers")
    return made.output.strip()


class FailsTwice(BaseHTTPRequestHandler):
    """A service that fails two requests, then answers. It takes orders from who has its key."""

    failures: ClassVar[list[int]] = [503, 503]

    def do_GET(self) -> None:
        status = self.failures.pop() if self.failures else 200
        body = b'{"city": "Oslo", "degrees": -3}' if status == 200 else b"{}"
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        has_key = self.headers.get("authorization") == f"Bearer {KEY}"
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(201 if has_key else 401)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def service() -> Iterator[int]:
    """Run that service on loopback until the end of the block; yields its port."""
    with ThreadingHTTPServer((HOST, 0), FailsTwice) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()


def define_tool(demo: Demo, port: int) -> None:
    """A REST tool for that service. Addresses that are not public must be allowed by name."""
    tools = demo.home / "tools"
    tools.mkdir()
    definition = {
        "name": "get_weather", "type": "REST", "method": "GET", "read_only": True,
        "description": "Read the weather of a city.", "retry_count": 3,
        "endpoint": f"http://{HOST}:{port}/weather/{{city}}",
        "parameters": {"properties": {"city": {"type": "string"}}, "required": ["city"]},
    }  # fmt: skip
    (tools / "get_weather.json").write_text(json.dumps(definition), encoding="utf-8")
    demo.settings["FUMEHOOD_PACKAGES__ALLOW"] = json.dumps([PACKAGE])
    demo.settings["FUMEHOOD_TOOLS_DIRECTORY"] = str(tools)
    hosts = [f"{HOST}:{port}"]
    demo.settings["FUMEHOOD_REST__ALLOWED_HOSTS"] = json.dumps(hosts)
    demo.settings["FUMEHOOD_GATEWAY__HOSTS"] = json.dumps(hosts)
    demo.settings["FUMEHOOD_GATEWAY__ALLOWED_HOSTS"] = json.dumps(hosts)
    bound = {"env": "SHOP_KEY", "hosts": hosts, "inside": "SHOP_KEY"}
    demo.settings |= {"FUMEHOOD_SECRETS": json.dumps({"shop": bound}), "SHOP_KEY": KEY}


def call_service(demo: Demo) -> None:
    """A REST tool whose service fails twice: the request is repeated until it answers."""
    ran = demo.fumehood("call", "get_weather", json.dumps({"city": "Oslo"}))
    told = (ran.envelope or {"metadata": {}})["metadata"]
    came = f"{told.get('retry_count')} retries"
    demo.show_call(
        ran,
        shows=lambda data: f"{data['degrees']} degrees after {came}",
        gives="-3 degrees after 2 retries",
    )


@contextmanager
def daemon(demo: Demo) -> Iterator[None]:
    """Run `fumehood serve` until the end of the block."""
    try:
        serve(
            demo,
            "fumehood serve &",
            "answers after {took:.1f} s on a socket that only you can open",
        )
        yield
    finally:
        if demo.process is not None:
            demo.process.terminate()
            demo.process.wait(timeout=START_DEADLINE_S)


def serve(demo: Demo, shown: str, words: str) -> None:
    """Start the daemon, and wait until it answers."""
    started = time.monotonic()
    log = demo.home / "log"
    with log.open("ab") as file:
        demo.process = subprocess.Popen(  # noqa: S603 - the demo's own command
            [FUMEHOOD, "serve"], env=demo.environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file,
        )  # fmt: skip
    while not listens(demo.home / "engine.sock"):
        if demo.process.poll() is not None or time.monotonic() - started > START_DEADLINE_S:
            sys.exit(f"The daemon did not start:\n{log.read_text()[-2000:]}")
        time.sleep(LOOK_S)
    took = time.monotonic() - started
    demo.show(Ran(shown, 0, took, "", ""), True, words.format(took=took))


def crash(demo: Demo) -> None:
    """Kill the daemon and start it again, as after a crash."""
    assert demo.process is not None
    demo.process.kill()
    demo.process.wait(timeout=START_DEADLINE_S)
    serve(demo, "kill -9 %1; fumehood serve &", "answers again after {took:.1f} s")


def listens(address: Path) -> bool:
    """Whether a program accepts connections there."""
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(str(address)) == 0


def build_images(demo: Demo) -> bool:
    """Build the images of the default tools, and return whether they exist."""
    started = time.monotonic()
    heard: list[str] = []
    with subprocess.Popen(  # noqa: S603 - the demo's own command
        [FUMEHOOD, "images", "build"], env=demo.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        for line in process.stderr or ():
            heard.append(line.strip())
            show_progress(demo, heard[-1])
    show_progress(demo, "")
    built = [line.split(", sha256:")[0] for line in heard if ", sha256:" in line]
    seconds, is_built = time.monotonic() - started, process.returncode == 0
    shown = demo.typed(("images", "build"))
    ran = Ran(shown, process.returncode, seconds, "\n".join(built if is_built else heard), "")
    without = "The demo goes on without containers."
    demo.show(ran, True, *(["; ".join(built)] if is_built else [*heard[-4:], without]))
    return is_built


def show_progress(demo: Demo, step: str) -> None:
    """The current step, on a line of the terminal that the next one overwrites."""
    if sys.stdout.isatty() and not demo.as_json:
        print(f"\r\033[K  {step[: width() - 3]}" if step else "\r\033[K", end="", flush=True)


def calls(demo: Demo) -> None:
    """Expressions: they need no container."""
    demo.head("One call, with its whole envelope")
    ran = demo.fumehood("call", "calculator", json.dumps({"expression": "5! + 2**10"}))
    envelope = ran.envelope or {"data": None, "metadata": {}}
    is_right = ran.status == 0 and envelope["data"] == {"value": 1144, "text": "1144"}
    demo.show(ran, is_right, *whole(envelope))
    demo.head("Refused before it ran; stopped by its time limit; a REST tool, retried twice; MCP")
    demo.call("calculator", {"expression": "9**9**9"}, status=1, ends="policy")
    demo.call("calculator", {"expression": SLOW}, "--timeout", "0.05", status=1, ends="wall_time")


def call_over_mcp(demo: Demo) -> None:
    """One call as an MCP client makes it, which needs no more than lines of JSON."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    call = {"name": "calculator", "arguments": {"expression": "6 * 7"}, "_meta": meta}
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    ran = demo.conversation("mcp", line=json.dumps(request))
    result = (ran.answer or {}).get("result", {})
    came = json.dumps(result.get("structuredContent"))
    is_right = (ran.status, came) == (0, '{"value": 42, "text": "42"}')
    demo.show(ran, is_right, f"calculator 6 * 7 over standard input and output: {came}")


def programs(demo: Demo) -> None:
    """Run whole programs, each language in its own image."""
    demo.head("Programs in containers without a network")
    draw(demo)
    ran = demo.call("run_javascript", {"code": "[3, 4].map(n => n ** 2)"}, gives="value [9, 16]")
    sandbox = (ran.envelope or {"metadata": {}})["metadata"].get("sandbox") or {}
    grade = sandbox.get("grade", "")
    demo.say(f"    Containers of this host have the grade {grade}: {GRADES.get(grade, 'unknown')}.")
    demo.head("A program that calls two other tools; their results stay inside")
    arguments = {"code": CALLS_TOOLS, "tools": ["get_weather", "calculator"]}
    demo.names[json.dumps(arguments)] = '"$arguments"'
    demo.call(
        "run_python", arguments,
        shows=lambda data: f"{value(data)} after {data['tool_calls']['made']} calls",
        gives="value 26.6 after 2 calls",
    )  # fmt: skip


def order(demo: Demo, credential: str, shop: str) -> None:
    """A program that reads from a service and then writes to it, with a key that it never sees."""
    demo.head("A program reads from an API; what it sends waits for a yes; its key stays outside")
    arguments = json.dumps({"code": ORDERS.replace("@SHOP@", shop)})
    demo.names[arguments] = '"$order"'
    with ThreadPoolExecutor() as threads:
        running = threads.submit(demo.fumehood, "call", "run_python", arguments, "--network", shop)
        asked = await_approval(demo, running)
        sends = asked.get("arguments", {})
        shown = demo.typed(("call", "run_python", arguments, "--network", shop)) + " &"
        is_right = sends.get("body") == "2 umbrellas"
        words = f"waits: {sends.get('method')} {sends.get('url')}, body: {sends.get('body')}"
        demo.show(Ran(shown, 0, 0.0, json.dumps(asked), ""), is_right, words)
        approval = asked.get("id", "none")
        demo.names[approval] = "$request"
        yes = demo.fumehood(
            "approvals", "approve", approval, "--yes", "--credential-stdin", stdin=f"{credential}\n"
        )
        demo.show(yes, yes.status == 0, "approved; exactly this request is sent, once")
        ended = running.result()
    told = ended.envelope or {"data": {}, "metadata": {}}
    sent = (told["metadata"].get("sandbox") or {}).get("network") or {}
    counts = f"{sent.get('requests')} requests, {sent.get('held')} held"
    printed = (told["data"] or {}).get("stdout", "")
    key = printed[:12] if KEY not in ended.output else "its key"
    demo.show_call(
        replace(ended, shown="wait %2"),
        shows=lambda data: f"printed {key}…, {value(data)}, {counts}",
        gives=f"printed fhs_{printed[4:12]}…, value 201, 2 requests, 1 held",
    )  # fmt: skip


def await_approval(demo: Demo, running: Future[Ran]) -> dict[str, Any]:
    """The request that waits for approval, once it does."""
    started = time.monotonic()
    while not running.done() and time.monotonic() - started < ANSWER_DEADLINE_S:
        if listed := demo.fumehood("approvals", "list", "--mine", "--json").answer:
            return dict(listed[0])
        time.sleep(LOOK_S)
    return {}


def draw(demo: Demo) -> None:
    """A program that draws; the figure stays when the demo has ended."""
    KEPT.mkdir(exist_ok=True)
    FIGURE.unlink(missing_ok=True)
    (KEPT / "plot.py").write_text(PLOT, encoding="utf-8")
    ran = demo.fumehood("run", str(KEPT / "plot.py"), "--save", str(KEPT), "--json")
    is_drawn = FIGURE.is_file() and FIGURE.read_bytes().startswith(b"\x89PNG")
    drew = f"drew {FIGURE}"
    demo.show_call(ran, shows=lambda _: drew if is_drawn else "drew nothing", gives=drew)


def session(demo: Demo, credential: str) -> None:
    """An agent's work on a project: a copy, its variables and its server outlive the daemon, and
    its changes wait for a yes.

    The session has a disk and a package where that is possible: for root, and with an index.
    """
    demo.head("An agent works on a copy of a project; a call that is stopped loses nothing")
    shop = KEPT / "shop"
    shop.mkdir(parents=True, exist_ok=True)
    (shop / "shop.py").write_text(SHOP, encoding="utf-8")
    source = "--from", str(shop)
    made = demo.fumehood("sessions", "new", *source, "--disk", "64", "--package", PACKAGE)
    has_disk = made.status == 0
    made = made if has_disk else demo.fumehood("sessions", "new", *source)
    identifier = made.output.strip()
    shown = Ran(f"session=$({made.shown})", made.status, made.seconds, identifier, "")
    demo.show(shown, made.status == 0, identifier)
    demo.names[identifier] = "$session"
    here = "--session", identifier
    demo.call("run_python", {"code": EDIT}, *here, gives="value 5050")
    demo.call(
        "run_python", {"code": "total = 0\nwhile True: pass"}, *here, "--timeout", "1",
        status=1, ends="wall_time",
    )  # fmt: skip
    start = demo.fumehood(
        "sessions", "start", identifier, "--name", "web", "--", "python3", "shop.py"
    )
    demo.show(start, start.status == 0, "its server runs beside the session's calls")
    demo.head("Its changes wait for a yes; killing the daemon loses neither them nor the session")
    asked = demo.fumehood("sessions", "apply", identifier)
    told = (asked.envelope or {"error": {}})["error"] or {}
    demo.show(asked, asked.status == 3, f"{told.get('code')}: nothing is written yet")
    crash(demo)
    words = f"import {PACKAGE}\n{PACKAGE}.intcomma(total)" if has_disk else "total"
    gives = 'value "5,050"' if has_disk else "value 5050"
    demo.call("run_python", {"code": words}, *here, gives=gives)
    ask_server(demo, identifier)
    if asked.status == 3:
        approve(demo, asked, credential, shop / "shop.py")
    demo.fumehood("sessions", "end", identifier)


def ask_server(demo: Demo, session: str) -> None:
    """A request to the session's server, through its port."""
    path = f"/v1/sessions/{session}/ports/8000/"
    started = time.monotonic()
    body = b""
    while not body and time.monotonic() - started < ANSWER_DEADLINE_S:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(demo.home / "engine.sock"))
            link.sendall(f"GET {path} HTTP/1.1\r\nhost: shop\r\n\r\n".encode())
            head, _, body = b"".join(iter(lambda: link.recv(4096), b"")).partition(b"\r\n\r\n")
        if not head.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")):
            body = b""
            time.sleep(LOOK_S)
    shown = "curl --unix-socket engine.sock http://shop/v1/sessions/$session/ports/8000/"
    came = body.decode()
    demo.show(Ran(shown, 0, 0.0, json.dumps(came), ""), came == "total 3", came)


def approve(demo: Demo, asked: Ran, credential: str, file: Path) -> None:
    """Show the diff, approve, and wait for the answer."""
    approval, call = asked.answer["error"]["approval_id"], asked.answer["metadata"]["call_id"]
    demo.names |= {approval: "$approval", call: "$call"}
    line = f"{credential}\n"
    seen = demo.fumehood("approvals", "show", approval, "--credential-stdin", stdin=line)
    preview = (seen.answer or {}).get("preview") or {"changed": []}
    diffs = [entry.get("diff", "") for entry in preview["changed"]]
    lines = [one.replace("    ", "") for one in "".join(diffs).splitlines() if one[:1] in "+-"]
    demo.show(seen, lines == CHANGED, f"changes shop.py: {'  '.join(lines)}")
    decided = demo.fumehood(
        "approvals", "approve", approval, "--yes", "--credential-stdin", stdin=line
    )
    demo.show(decided, decided.status == 0, "approved; the engine carries it out once")
    ran = await_answer(demo, call)
    is_written = file.read_text(encoding="utf-8") == SHOP.replace("max(", "sum(")
    demo.show_call(
        ran,
        shows=lambda data: f"{data['files'][0]['change']} {file}" if is_written else "nothing",
        gives=f"modified {file}",
    )


def await_answer(demo: Demo, call: str) -> Ran:
    """The answer of a call that was waiting, once it has ended."""
    started = time.monotonic()
    while True:
        ran = demo.fumehood("calls", "answer", call)
        if ran.status != 3 or time.monotonic() - started > ANSWER_DEADLINE_S:
            return ran
        time.sleep(LOOK_S)


def verify(demo: Demo) -> None:
    """The audit chain, by which any change of the records shows."""
    ran = demo.fumehood("audit", "verify")
    found = ran.answer or {}
    demo.show(ran, ran.status == 0, f"intact: {found.get('intact')}, {found.get('rows')} rows")


@dataclass(frozen=True)
class Waiting:
    """A call that waits in the inbox, and the link to the inbox."""

    call: str
    link: str


@contextmanager
def inbox(demo: Demo, credential: str, *, has_containers: bool) -> Iterator[Waiting | None]:
    """Run `fumehood web` until the end of the block, with a deletion that waits for a person."""
    if not has_containers:
        yield None
        return
    session = demo.fumehood("sessions", "new").output.strip()
    text = json.dumps({"path": "notes.txt", "content": "milk\nbread\n"})
    demo.fumehood("call", "write_file", text, "--session", session)
    paths = json.dumps({"paths": ["notes.txt"]})
    asked = demo.fumehood("call", "delete_files", paths, "--session", session)
    started = time.monotonic()
    with subprocess.Popen(  # noqa: S603 - the demo's own command
        [FUMEHOOD, "web", "--port", "0", "--credential-stdin"], env=demo.environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            print(credential, file=process.stdin, flush=True)
            lines = (line.strip() for line in process.stdout or ())
            link = next((line for line in lines if line.startswith("http")), "")
            ran = Ran("fumehood web &", 0, time.monotonic() - started, link, "")
            is_right = asked.status == 3 and is_page(link)
            demo.show(ran, is_right, "an inbox in the browser, where another deletion waits")
            told = (asked.answer or {}).get("metadata") or {}
            yield Waiting(str(told.get("call_id")), link)
        finally:
            process.terminate()


def is_page(link: str) -> bool:
    """Whether a browser would get a page there, which loads nothing from elsewhere."""
    try:
        with urlopen(link, timeout=START_DEADLINE_S) as page:  # noqa: S310 - printed by the command
            policy = page.headers.get("content-security-policy", "")
            return page.status == 200 and policy.startswith("default-src 'none'")
    except (OSError, ValueError):
        return False


def invite(demo: Demo, waiting: Waiting) -> None:
    """On a terminal print the link, and keep the engine until the person has decided."""
    if demo.failed or not sys.stdout.isatty():
        demo.say("On a terminal the demo waits until you have decided in the inbox.")
        return
    demo.say("Open the inbox in a browser and decide (Ctrl-C ends the demo):", waiting.link)
    started = time.monotonic()
    while time.monotonic() - started < INVITED_S:
        ran = demo.fumehood("calls", "answer", waiting.call)
        if ran.status != 3:
            if ran.envelope is not None:
                demo.say(f"You decided: {decision(ran.envelope)}")
            return
        time.sleep(1)


def decision(envelope: dict[str, Any]) -> str:
    """Show the result of the user's decision."""
    error = envelope["error"]
    if error is None:
        return f"approved; the engine deleted {', '.join(envelope['data']['deleted'])}."
    if error["code"] == "APPROVAL_DENIED":
        reason = re.search(r"The reason: (.*) Do not retry", error["message"])
        return f"denied; nothing was deleted. {reason[0][:-13] if reason else ''}".rstrip()
    return f"{error['code']}: {error['message']}"


def conclude(demo: Demo, seconds: float, waiting: Waiting | None, *, has_containers: bool) -> None:
    """Show the result, the place of the figure, the next commands, and the inbox."""
    for step in demo.failed:
        print(f"This step did not end as expected: {step}", file=sys.stderr)
    figure = str(FIGURE.resolve()) if has_containers else None
    if demo.as_json:
        last = {"seconds": round(seconds, 1), "failed": demo.failed, "figure": figure}
        print(json.dumps(last))
        return
    missing = "" if figure else ", without containers: see docs/howto/set-up-docker.md"
    right = demo.steps - len(demo.failed)
    stays = f" The figure stays: {figure}" if figure else ""
    took = f"in {seconds:.0f} s{missing}."
    demo.say("", f"{right} of {demo.steps} steps ended as expected, {took}{stays}")
    plot = shlex.quote(str(KEPT.resolve() / "plot.py"))
    again = f"run {plot}" if figure else 'call calculator \'{"expression": "6 * 7"}\''
    demo.say(
        "Next, in two terminals:",
        f"  export {' '.join(settings())}",
        "  fumehood serve    # in the first",
        f"  fumehood {again}    # in the second",
    )
    if waiting is not None:
        invite(demo, waiting)


def settings() -> list[str]:
    """The variables by which another terminal finds the command and the user's own engine."""
    path = f'PATH={shlex.quote(str(FUMEHOOD.parent.absolute()))}:"$PATH"'
    names = ("FUMEHOOD_CONFIG", "FUMEHOOD_HOME", "FUMEHOOD_SOCKET")
    given = [f"{name}={shlex.quote(os.environ[name])}" for name in names if name in os.environ]
    return [path, *(f"{name}={one}" for name, one in WEAKEST.items()), *given]


def outcome(envelope: dict[str, Any], came: str | None) -> str:
    """Summarise a call in one line: result, ending, time and cost."""
    error, told = envelope["error"], envelope["metadata"]
    if error is not None:
        came = f"{error['code']}: {error['message'].split('. ')[0]}"
    tail = (
        f" | {stopped(told['sandbox'])}, {told['execution_time_ms']:.1f} ms, {cost(told['usage'])}"
    )
    return textwrap.shorten(came or "", width() - len(tail) - 4, placeholder=" …") + tail


def stopped(sandbox: dict[str, Any] | None) -> str:
    """Return the ending of the program."""
    if sandbox is None:
        return "did not run"
    return "ok" if sandbox["ended_by"] == "ok" else f"stopped by {sandbox['ended_by']}"


def cost(usage: dict[str, Any]) -> str:
    """Return the tokens, and the money if prices are configured."""
    tokens = f"{usage['input_tokens'] + usage['output_tokens']} tokens"
    price = float(usage["cost"])
    return f"{tokens}, {price:g} {usage['currency']}" if price else tokens


def whole(envelope: dict[str, Any]) -> list[str]:
    """All of an envelope, folded between its keys."""
    outer = {key: part for key, part in envelope.items() if key != "metadata"}
    first, told = json.dumps(outer)[:-1], json.dumps(envelope["metadata"])[1:]
    return [*folded(f"{first},"), ' "metadata": {', *folded(f"   {told}}}")]


def folded(text: str) -> list[str]:
    """Lines that do not part a key from its value, unless that is an object."""
    kept = re.sub(r": (?!\{)", ":\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(kept, width() - 5, subsequent_indent="   ", break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def width() -> int:
    """Columns of the terminal, or as many as are easily read."""
    return min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
