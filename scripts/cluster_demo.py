"""The demo of a cluster on one machine: PostgreSQL, four nodes and two engines, two of them killed.

Usage: `make cluster-demo`. It installs PostgreSQL from Debian's packages if it is missing and this
is root, and starts everything in a directory of its own, on loopback. Exit status 1 if something
that was promised is not there at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fumehood.client import Client, ControlClient
from fumehood.core.envelope import Envelope
from fumehood.core.errors import FumehoodError
from support.postgres import programs, running_postgres
from support.ray_cluster import Cluster, running_cluster

FUMEHOOD = Path(sys.executable).with_name("fumehood")
NODES, SLOTS, CALLS = 4, 3, 24
START_S = 60.0
POLICY = '[[rules]]\nid = "ask"\ndecision = "ask"\ntools = ["run_restricted_python"]\n'


def main() -> int:
    demo = Demo()
    try:
        if programs() is None:
            install_postgres()
        with ExitStack() as stack:
            demo.run(stack)
    except DemoFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    return demo.end()


class DemoFailed(Exception):
    """The demo cannot go on."""


class Demo:
    """The steps, and what was not kept."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def run(self, stack: ExitStack) -> None:
        """Start everything, make calls, kill a node and the active engine, and look."""
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fc-", dir="/tmp")))
        say("Building the image of Python programs …")
        built = subprocess.run([str(FUMEHOOD), "images", "build", "python"], capture_output=True)
        if built.returncode != 0:
            raise DemoFailed(built.stderr.decode())
        server = stack.enter_context(running_postgres())
        cluster = stack.enter_context(running_cluster(NODES, SLOTS))
        say(f"PostgreSQL and {NODES} nodes of Ray run on loopback.")
        engines = Engines(stack, root, cluster, server.state_url(root))
        until(lambda: engines.nodes() == NODES, "the nodes did not join")
        say(f"Two engines share the state: {engines.homes[0].name} is active, the other stands by.")
        with Client(engines.active) as client:
            used = Counter(node_of(one) for one in many(engines.active, "sum(range(10**6))"))
            say(
                f"{CALLS} programs ran: "
                + ", ".join(f"{n} on {c}" for c, n in sorted(used.items()))
            )
            session = client.create_session(memory_mb=128).id
            home = node_of(client.call(
                "run_python", {"code": "x = 41; open('f', 'w').write('kept')"}, session_id=session
            ))  # fmt: skip
            say(f"A session on {home} has a variable and a file.")
            once = client.call("run_python", {"code": "6 * 7"}, idempotency_key="once")
            asked = client.call("run_restricted_python", {"code": "1 + 1"})
            approval = asked.error.approval_id if asked.error is not None else None
            say(f"A call with a key answered {once.data['value']}; another waits for approval.")
            self.kill_node(cluster, client, str(home))
        self.kill_engine(engines, session, once, approval)

    def kill_node(self, cluster: Cluster, client: Client, spared: str) -> None:
        """Kill a node in the middle of a run, and make another call."""
        with ThreadPoolExecutor(NODES * SLOTS) as threads:
            code = {"code": "import time; time.sleep(4)"}
            running = [
                threads.submit(client_call, client, code) for _ in range(NODES * SLOTS * 3 // 4)
            ]
            time.sleep(1.5)
            victim = next(one for one in cluster.nodes_by_name() if one != spared)
            cluster.kill(cluster.nodes_by_name()[victim])
            answers = [one.result() for one in running]
        lost = [one for one in answers if not one.success]
        say(f"Killed the node {victim}: {len(lost)} of its programs ended as lost, "
            f"{len(answers) - len(lost)} elsewhere went on.")  # fmt: skip
        for one in lost:
            self.check("a lost run says so", ended_by(one) == "sandbox_lost", one)
            self.check("a lost run names its node", node_of(one) == victim, one)
        after = client.call("run_python", {"code": "1"})
        self.check("the next program runs elsewhere", node_of(after) not in (None, victim), after)

    def kill_engine(
        self, engines: Engines, session: str, once: Envelope, approval: str | None
    ) -> None:
        """Kill the active engine, and ask its standby for what was promised."""
        took = engines.kill()
        say(f"Killed the active engine. The other one served after {took:.1f} s.")
        until(lambda: engines.nodes() == NODES - 1, "the nodes did not join again")
        with Client(engines.active) as client:
            again = client.call("run_python", {"code": "6 * 7"}, idempotency_key="once")
            same = again.metadata.call_id == once.metadata.call_id
            self.check(
                "the call with a key has its answer", same and again.data == once.data, again
            )
            waiting = [one.id for one in client.approvals.list("pending").items]
            self.check("the call still waits for approval", approval in waiting, waiting)
            code = {"code": "(x + 1, open('f').read())"}
            kept = client.call("run_python", code, session_id=session)
            value = kept.data.get("value")
            self.check("the session has its variable and its file", value == [42, "kept"], kept)

    def check(self, what: str, is_kept: bool, seen: object) -> None:
        """Print a promise, and whether it was kept."""
        say(f"{'kept' if is_kept else 'BROKEN'}: {what}")
        if not is_kept:
            self.broken.append(f"{what}: {seen}")

    def end(self) -> int:
        """Print what was not kept, and return the exit status."""
        for one in self.broken:
            print(one[:1000], file=sys.stderr)
        print("Everything was kept." if not self.broken else f"{len(self.broken)} broken.")
        return 1 if self.broken else 0


class Engines:
    """Two engines on one state and one cluster."""

    def __init__(self, stack: ExitStack, root: Path, cluster: Cluster, state: str) -> None:
        (root / "files").mkdir(mode=0o700)
        (root / "policy.toml").write_text(POLICY)
        image = {f"FUMEHOOD_CONTAINER__IMAGES__{name}": "python" for name in ("PYTHON", "SHELL")}
        settings = {
            "PATH": os.environ["PATH"], **cluster.environment, **image,
            "FUMEHOOD_SESSIONS__IMAGE": "python", "FUMEHOOD_STATE__URL": state,
            "FUMEHOOD_FILES__URL": str(root / "files"),
            "FUMEHOOD_CLUSTER__ADDRESS": cluster.address,
            "FUMEHOOD_POLICY_FILE": str(root / "policy.toml"),
        }  # fmt: skip
        self.homes = [root / "engine-1", root / "engine-2"]
        for home in self.homes:
            home.mkdir(mode=0o700)
        made = subprocess.run(
            [str(FUMEHOOD), "approvers", "init"], check=True, capture_output=True,
            env={**settings, "FUMEHOOD_HOME": str(self.homes[0])},
        )  # fmt: skip
        self._credential = made.stdout.decode().strip()
        shutil.copy(self.homes[0] / "audit.key", self.homes[1])
        self._processes = []
        for home in self.homes:
            self._processes.append(stack.enter_context(engine(home, settings)))
            until((home / "engine.sock").exists, f"{home.name} did not start")

    @property
    def active(self) -> Path:
        """The socket of the engine that is active."""
        return self.homes[0] / "engine.sock"

    def nodes(self) -> int:
        """The number of nodes that have joined it."""
        control = self.homes[0] / "control.sock"
        with suppress(FumehoodError), ControlClient(control, credential=self._credential) as client:
            return sum(node.state == "joined" for node in client.nodes.list())
        return 0

    def kill(self) -> float:
        """Kill the active engine; return the seconds until the other one serves."""
        self._processes.pop(0).kill()
        self.homes.pop(0)
        killed = time.monotonic()
        until(self.is_ready, "the standby did not take over")
        return time.monotonic() - killed

    def is_ready(self) -> bool:
        """Whether the active engine serves."""
        with suppress(FumehoodError), Client(self.active) as client:
            return client.ready().status == "ready"
        return False


@contextmanager
def engine(home: Path, settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """An engine with a state directory of its own, which is stopped after the block."""
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [str(FUMEHOOD), "serve"], env={**settings, "FUMEHOOD_HOME": str(home)},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def client_call(client: Client, arguments: dict[str, str]) -> Envelope:
    """Call from a thread of its own."""
    return client.call("run_python", arguments)


def many(socket: Path, code: str) -> list[Envelope]:
    """Run a program many times at once."""
    with Client(socket) as client, ThreadPoolExecutor(CALLS) as threads:
        return list(threads.map(lambda _: client.call("run_python", {"code": code}), range(CALLS)))


def node_of(answer: Envelope) -> str | None:
    """The node on which a call ran."""
    return answer.metadata.sandbox.node if answer.metadata.sandbox is not None else None


def ended_by(answer: Envelope) -> str | None:
    """How a run ended."""
    return answer.metadata.sandbox.ended_by if answer.metadata.sandbox is not None else None


def until(condition: object, fault: str) -> None:
    """Wait for a condition. Raises DemoFailed if it does not come true in time."""
    last = time.monotonic() + START_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > last:
            raise DemoFailed(f"{fault} within {START_S:g} s.")
        time.sleep(0.05)


def install_postgres() -> None:
    """Install Debian's package, without a cluster of the system's own."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise DemoFailed("PostgreSQL is not installed: apt-get install postgresql.")
    say("Installing PostgreSQL …")
    settings = Path("/etc/postgresql-common/createcluster.conf")
    if not settings.exists():
        settings.parent.mkdir(exist_ok=True)
        settings.write_text("create_main_cluster = false\n")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("apt-get update -qq", "apt-get install -y -qq postgresql"):
        done = subprocess.run(command.split(), env=environment, capture_output=True, check=False)
    if done.returncode != 0:
        raise DemoFailed("PostgreSQL could not be installed: apt-get install postgresql.")


def say(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    sys.exit(main())
