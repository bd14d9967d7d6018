"""A daemon with a caller and an approver, as one user or as separate users.

All requests use the sockets and the command line, from processes of the requesting user.
Tool effects are files that the host reads, independent of the engine's reports.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from support.authority import make_first_approver
from support.containers import remove_containers_of
from support.http import Answer
from support.packages import install
from support.preloaded import PYTHON
from support.users import Installation, User, accounts, readable_installation
from support.wait import wait_until

MEMBERS = {
    "engine": ["callers", "approvers"],
    "caller": ["callers"],
    "approver": ["approvers"],
    "both": ["callers", "approvers"],
}
TOOLS = '''
import json
import time
from pathlib import Path

from fumehood import tool

PLACE = Path({place!r})


def note(what, who):
    with open(PLACE / "done", "a") as file:
        file.write(json.dumps([what, who]) + "\\n")


def hold():
    end = time.monotonic() + 600
    while not (PLACE / "go-on").exists() and time.monotonic() < end:
        time.sleep(0.01)


@tool(sandboxed=False, dangerous=True)
def send_mail(to: str, text: str = "") -> dict:
    """Send a mail; with the text `slowly` not before the test says so."""
    note("begun", to)
    if text == "slowly":
        hold()
    note("sent", to)
    return {{"sent": to}}


@tool(sandboxed=False)
def keep_busy() -> str:
    """Run until the test says so."""
    note("begun", "busy")
    hold()
    return "over"


@tool(sandboxed=False, read_only=True)
def look_up(word: str) -> str:
    """Look a word up."""
    note("looked up", word)
    return word


tools = [send_mail, keep_busy, look_up]
'''
"""Host functions with effects visible from outside."""


@dataclass
class Site:
    """A running daemon with its caller and approvers."""

    place: Path
    command: list[str]
    environment: dict[str, str]
    installation: Installation
    users: dict[str, User]
    config: str
    process: subprocess.Popen[bytes] | None = None
    owner: str = ""
    """Credential of the first approver."""
    second: str = ""
    """Credential of another approver without the scope admin."""
    extra: str = ""
    """Additional tables of this daemon's configuration."""

    @property
    def is_service(self) -> bool:
        return bool(self.users)

    @property
    def state(self) -> Path:
        return self.place / "state"

    @property
    def work(self) -> Path:
        """The directory in which the tools record their effects."""
        return self.place / "work"

    @property
    def engine_socket(self) -> Path:
        return self._run / "engine" / "engine.sock" if self.users else self.state / "engine.sock"

    @property
    def control_socket(self) -> Path:
        name = "control.sock"
        return self._run / "control" / name if self.users else self.state / name

    @property
    def log(self) -> str:
        return (self.place / "log").read_text(encoding="utf-8")

    @property
    def caller_id(self) -> str:
        """The caller's principal."""
        return f"uid:{self.users['caller'].uid if self.users else os.geteuid()}"

    # The daemon.

    def start(self, extra: str | None = None) -> None:
        """Start the daemon, optionally with more settings, and wait until it answers."""
        self.configure(self.extra if extra is None else extra)
        before = os.umask(0o022)
        try:
            with (self.place / "log").open("ab") as log:
                process = subprocess.Popen(
                    [*self.command, "serve"], env=self.environment, cwd="/",
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._identity("engine"),
                )  # fmt: skip
        finally:
            os.umask(before)
        self.process = process
        wait_until(lambda: process.poll() is not None or self.takes_calls())
        assert process.poll() is None, self.log

    def configure(self, extra: str) -> None:
        """Write the configuration, including the policy if there is one."""
        self.extra = extra
        policy = self.place / "rules" / "policy.toml"
        top = f'policy_file = "{policy}"\n' if policy.exists() else ""
        file = self.place / "config.toml"
        file.write_text(f"{top}{self.config}{extra}", encoding="utf-8")
        file.chmod(0o644)

    def put_policy(self, text: str) -> None:
        """Replace the policy atomically, as an editor would."""
        rules = self.place / "rules"
        rules.mkdir(exist_ok=True)
        rules.chmod(0o755)
        unfinished = rules / ".policy.toml"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.chmod(0o644)
        unfinished.rename(rules / "policy.toml")

    def stop(self) -> int:
        """Stop the daemon cleanly."""
        self.process.terminate()
        return self.process.wait(timeout=600)

    def takes_calls(self) -> bool:
        """Whether the daemon runs and is not draining."""
        user = self.users.get("caller", ME)
        answer = self.installation.ask_as(user, self.engine_socket, "GET", "/v1/ready")
        return isinstance(answer, Answer) and answer.status == 200

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        self.process.kill()
        self.process.wait(timeout=600)

    def restart(self, extra: str | None = None) -> None:
        assert self.stop() == 0, self.log
        self.start(extra)

    # Everybody around it.

    def ask(
        self,
        who: str,
        method: str,
        address: str,
        body: Any = None,
        *,
        control: bool = False,
        credential: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Send one request as this user."""
        answer = self.installation.ask_as(
            self.users.get(who, ME), self.control_socket if control else self.engine_socket,
            method, address, body, credential, headers,
        )  # fmt: skip
        assert isinstance(answer, Answer), answer
        return answer

    def do(self, method: str, address: str, body: Any = None) -> Any:
        """Send a request as the owner to the control socket; it must succeed."""
        answer = self.ask(
            "approver", method, address, body, control=True, credential=self.owner
        )  # fmt: skip
        assert answer.code is None, answer.body["error"]
        return answer.body["data"]

    def run(
        self, who: str, *arguments: str, credential: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line as this user, with a credential on standard input."""
        more = () if credential is None else ("--credential-stdin",)
        return subprocess.run(
            [*self.command, *arguments, *more], env=self.environment, cwd="/", text=True,
            input="" if credential is None else f"{credential}\n",
            capture_output=True, timeout=600, **self._identity(who),
        )  # fmt: skip

    def begin(self, who: str, *arguments: str) -> subprocess.Popen[str]:
        """Start the command line in the background."""
        return subprocess.Popen(
            [*self.command, *arguments], env=self.environment, cwd="/", text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            **self._identity(who),
        )  # fmt: skip

    # Calls.

    def call(
        self, tool: str, arguments: Any, *, credential: str | None = None, **options: Any
    ) -> Answer:
        """Call a tool as the caller."""
        body = {"arguments": arguments, "options": options}
        return self.ask("caller", "POST", f"/v1/tools/{tool}/call", body, credential=credential)

    def mail(self, to: str, text: str = "", **options: Any) -> Answer:
        return self.call("send_mail", {"to": to, "text": text}, **options)

    def parked(self, to: str, text: str = "", **options: Any) -> Parked:
        """Call the mail tool, so that it waits for approval."""
        return parked(self.mail(to, text, **options))

    def done(self, to: str) -> list[str]:
        """The recorded effects for this receiver: `begun`, `sent`."""
        file = self.work / "done"
        lines = file.read_text().splitlines() if file.exists() else []
        return [what for what, who in map(json.loads, lines) if who == to]

    def go_on(self) -> None:
        """Release the tools that wait for this test."""
        (self.work / "go-on").touch()

    def hold_back(self) -> None:
        """Make tools wait from now on."""
        (self.work / "go-on").unlink(missing_ok=True)

    # Approvals.

    def show(self, approval_id: str) -> Answer:
        return self.ask(
            "approver", "GET", f"/v1/approvals/{approval_id}", control=True, credential=self.owner
        )

    def approval(self, approval_id: str) -> Any:
        return self.show(approval_id).body["data"]["approval"]

    def decide(
        self,
        approval_id: str,
        *,
        decision: str = "approve",
        match: str = "*",
        who: str = "approver",
        credential: str | None = None,
        **fields: Any,
    ) -> Answer:
        """Decide over HTTP, by default as the owner."""
        return self.ask(
            who, "POST", f"/v1/approvals/{approval_id}/decision",
            {"decision": decision, **fields}, control=True, headers={"if-match": match},
            credential=self.owner if credential is None else credential,
        )  # fmt: skip

    def resolve(self, approval_id: str, *, who: str = "approver") -> Answer:
        """Resolve an interrupted call as done, over HTTP."""
        return self.ask(
            who, "POST", f"/v1/approvals/{approval_id}/resolve", {"outcome": "done"},
            control=True, credential=self.owner,
        )  # fmt: skip

    def approvals(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `fumehood approvals` with the owner's credential."""
        return self.run("approver", "approvals", *arguments, credential=self.owner)

    def until(self, approval_id: str, state: str) -> Any:
        """Wait for the approval to reach this state and return it."""
        wait_until(lambda: self.approval(approval_id)["state"] == state)
        return self.approval(approval_id)

    def state_of_call(self, call_id: str) -> Any:
        """The state of the call as its caller sees it."""
        answer = self.ask("caller", "GET", f"/v1/calls/{call_id}")
        assert answer.code is None, answer.body["error"]
        return answer.body["data"]

    def answer(self, call_id: str) -> Any:
        """Wait for the envelope of a pending call."""
        wait_until(lambda: self.state_of_call(call_id)["envelope"] is not None)
        return self.state_of_call(call_id)["envelope"]

    # The audit log.

    def audit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `fumehood audit` as the engine's owner."""
        return self.run("engine", "audit", *arguments)

    def audit_rows(self, kind: str) -> list[Any]:
        """The exported audit rows whose kind has this prefix."""
        exported = self.audit("export")
        assert exported.returncode == 0, exported.stderr
        rows = [json.loads(json.loads(line)["body"]) for line in exported.stdout.splitlines()]
        return [row for row in rows if row["kind"].startswith(kind)]

    @property
    def _run(self) -> Path:
        return self.place / "run"

    def _identity(self, who: str) -> dict[str, Any]:
        return self.users[who].identity if self.users else {}


@dataclass(frozen=True)
class Parked:
    """A pending call: its approval id and call id."""

    approval_id: str
    call_id: str


def parked(answer: Answer) -> Parked:
    """The ids in the answer of a pending call."""
    assert answer.code == "REQUIRES_HUMAN_APPROVAL", answer.body
    error, metadata = answer.body["error"], answer.body["metadata"]
    return Parked(error["approval_id"], metadata["call_id"])


ME = User("", os.geteuid(), os.getegid(), tuple(os.getgroups()))


@contextmanager
def running_site(*, is_service: bool, policy: str = "", extra: str = "") -> Iterator[Site]:
    """A site with a running daemon; a service uses real users (root only)."""
    with ExitStack() as stack:
        place = Path(tempfile.mkdtemp(prefix="fha-", dir="/tmp"))
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        place.chmod(0o711)
        made = _service(place, stack) if is_service else _single_user(place)
        _put_tools(made)
        if policy:
            made.put_policy(policy)
        made.configure(extra)
        stack.callback(_end, made)
        stack.callback(made.installation.close)
        made.owner = make_first_approver(
            made.command, made.environment, cwd="/", **made._identity("engine")
        )
        made.start()
        fields = {"name": "second", "scopes": ["approve"]}
        made.second = made.do("POST", "/v1/approvers", fields)["secret"]
        yield made


def _single_user(place: Path) -> Site:
    (place / "state").mkdir(mode=0o700)
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_CONFIG": str(place / "config.toml")}
    installation = Installation(PYTHON)
    return Site(
        place, [str(FUMEHOOD)], environment, installation, {}, _config(place, "single-user")
    )


def _service(place: Path, stack: ExitStack) -> Site:
    prefix = f"fha{os.getpid()}x{time.monotonic_ns() % 1000}"
    _, users = stack.enter_context(accounts(prefix, ["callers", "approvers"], MEMBERS))
    users["engine"] = _with_docker(users["engine"])
    for name, mode in (("run", 0o711), ("state", 0o700)):
        (place / name).mkdir()
        os.chown(place / name, users["engine"].uid, users["engine"].gid)
        (place / name).chmod(mode)
    installation = readable_installation(place)
    environment = {
        **installation.environment,
        **{name: value for name, value in CLEAN_ENVIRONMENT.items() if "FUMEHOOD_" in name},
        "FUMEHOOD_CONFIG": str(place / "config.toml"),
    }
    config = _config(place, "service") + (
        f'[service]\nrun_directory = "{place}/run"\n'
        f'callers_group = "{prefix}-callers"\napprovers_group = "{prefix}-approvers"\n'
    )
    return Site(place, installation.command, environment, installation, users, config)


def _with_docker(engine: User) -> User:
    """Add the user to the group of the Docker socket, as an installation does."""
    try:
        group = Path("/var/run/docker.sock").stat().st_gid
    except OSError:
        return engine
    return replace(engine, groups=(*engine.groups, group))


def _config(place: Path, mode: str) -> str:
    return (
        f'mode = "{mode}"\nhome = "{place}/state"\n'
        'host_tools = ["send_mail", "keep_busy", "look_up"]\ndrain_seconds = 30\n'
    )


def _put_tools(made: Site) -> None:
    """Install a package with the tools in a place readable by every user."""
    package = made.place / "packages"
    install(package, "mails", TOOLS.format(place=str(made.work)))
    made.work.mkdir()
    if made.users:
        os.chown(made.work, made.users["engine"].uid, made.users["engine"].gid)
    before = made.environment.get("PYTHONPATH")
    made.environment["PYTHONPATH"] = f"{before}:{package}" if before else str(package)
    made.go_on()


def _end(made: Site) -> None:
    made.go_on()
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait(timeout=600)
    remove_containers_of(made.place)
