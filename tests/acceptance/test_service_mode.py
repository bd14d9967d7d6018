"""Service mode with real users: isolation between two callers and their approvers.

The daemon runs as its own user; callers and approvers are groups. Processes of those users send all
requests over the sockets, and root inspects the result from outside.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fumehood.http.peer import MAX_CONNECTIONS
from support.authority import make_first_approver
from support.http import Answer, SocketClient
from support.processes import children_of_guest, guest_of, is_gone
from support.users import NOBODY, Installation, User, accounts, readable_installation
from support.wait import DEADLINE_S, wait_until

pytestmark = pytest.mark.needs("root")

MEMBERS = {
    "engine": ["callers", "approvers"],
    "alice": ["callers"],
    "bob": ["callers"],
    "carol": ["approvers"],
    "dave": ["callers", "approvers"],
    "mallory": [],
}
WORK = "pow(7, 10**900, 10**900 + 7)"
"""An expression that computes for under 0.1 s: visible in the kernel's CPU accounting, and far
below the second after which a resident process is replaced, even on a busy machine."""


@dataclass
class Service:
    """A running service with its users and groups."""

    installation: Installation
    place: Path
    process: subprocess.Popen[bytes]
    gids: dict[str, int]
    users: dict[str, User]
    owner: str

    @property
    def engine_socket(self) -> Path:
        return self.place / "run" / "engine" / "engine.sock"

    @property
    def control_socket(self) -> Path:
        return self.place / "run" / "control" / "control.sock"

    @property
    def log(self) -> str:
        return (self.place / "log").read_text(encoding="utf-8")

    def ask(
        self, who: str, method: str, address: str, *, control: bool = False, **more: Any
    ) -> Any:
        """Send a request as this user; return an `Answer`, or an error number."""
        socket = self.control_socket if control else self.engine_socket
        return self.installation.ask_as(self.users[who], socket, method, address, **more)

    def call(
        self, who: str, expression: str = "1 + 1", credential: str | None = None, **options: Any
    ) -> Answer:
        body = {"arguments": {"expression": expression}, "options": options}
        address = "/v1/tools/calculator/call"
        answer = self.ask(who, "POST", address, body=body, credential=credential)
        assert isinstance(answer, Answer)
        return answer

    def do(self, method: str, address: str, body: Any = None) -> Any:
        """Send a request that must succeed, as an approver with the owner's credential."""
        answer = self.ask("carol", method, address, control=True, body=body, credential=self.owner)
        assert answer.code is None, answer.body["error"]
        return answer.body["data"]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    prefix = f"fht{os.getpid()}"
    place = Path(tempfile.mkdtemp(prefix="fhs-", dir="/tmp"))
    place.chmod(0o711)
    try:
        with accounts(prefix, ["callers", "approvers"], MEMBERS) as (gids, users):
            engine = users["engine"]
            environment = _prepare(place, prefix, users)
            installation = readable_installation(place)
            environment |= installation.environment
            owner = make_first_approver(
                installation.command, environment, cwd="/", **engine.identity
            )
            process = _serve(installation, place, environment, engine)
            try:
                yield Service(installation, place, process, gids, users, owner)
            finally:
                installation.close()
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=DEADLINE_S)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _prepare(place: Path, prefix: str, users: dict[str, User]) -> dict[str, str]:
    """Create the engine's directories and a configuration owned by root, as a unit file does."""
    engine = users["engine"]
    for name, mode in (("run", 0o711), ("state", 0o700)):
        (place / name).mkdir()
        os.chown(place / name, engine.uid, engine.gid)
        (place / name).chmod(mode)
    (place / "config.toml").write_text(
        f'mode = "service"\nhome = "{place}/state"\n'
        f'[service]\nrun_directory = "{place}/run"\n'
        f'callers_group = "{prefix}-callers"\napprovers_group = "{prefix}-approvers"\n'
        f'[[principals]]\nid = "alice"\nuids = [{users["alice"].uid}]\n',
        encoding="utf-8",
    )
    (place / "config.toml").chmod(0o644)
    return {"FUMEHOOD_CONFIG": str(place / "config.toml")}


def _serve(
    installation: Installation, place: Path, environment: dict[str, str], engine: User
) -> subprocess.Popen[bytes]:
    before = os.umask(0)  # the modes may not depend on it
    try:
        with (place / "log").open("ab") as log:
            process = subprocess.Popen(
                [*installation.command, "serve"], env=environment, cwd="/",
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, **engine.identity,
            )  # fmt: skip
    finally:
        os.umask(before)
    callers = place / "run" / "engine" / "engine.sock"
    wait_until(lambda: process.poll() is not None or SocketClient.answers(callers))
    assert process.poll() is None, (place / "log").read_text()
    return process


# -- files ---------------------------------------------------------------------------------


def _found(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid


@pytest.mark.row("D1", "D4")
def test_directories_and_sockets_have_restrictive_owners_and_modes(service: Service) -> None:
    engine = service.users["engine"]
    callers, approvers = service.gids["callers"], service.gids["approvers"]
    run = service.place / "run"
    assert _found(run)[:2] == (0o711, engine.uid)
    assert _found(run / "engine") == (0o750, engine.uid, callers)
    assert _found(run / "control") == (0o750, engine.uid, approvers)
    assert _found(service.engine_socket) == (0o660, engine.uid, callers)
    assert _found(service.control_socket) == (0o660, engine.uid, approvers)
    assert _found(service.place / "state")[:2] == (0o700, engine.uid)
    kept = list((service.place / "state").rglob("*"))
    assert {"state.db", "engine.lock"} <= {path.name for path in kept}
    assert {_found(path)[0] & 0o077 for path in kept} == {0}
    assert service.engine_socket.is_socket()
    assert [path.name for path in (run / "engine").iterdir()] == ["engine.sock"]
    assert [path.name for path in (run / "control").iterdir()] == ["control.sock"]


REACHES = {
    "alice": (None, errno.EACCES),
    "bob": (None, errno.EACCES),
    "carol": (errno.EACCES, None),
    "dave": (None, None),
    "mallory": (errno.EACCES, errno.EACCES),
}


@pytest.mark.row("D1", "D4", "A4")
@pytest.mark.parametrize("who", REACHES)
def test_each_socket_is_reachable_only_by_its_group(service: Service, who: str) -> None:
    for control, expected in zip((False, True), REACHES[who], strict=True):
        answer = service.ask(who, "GET", "/v1/health", control=control)
        if expected is None:
            assert answer.body == {"status": "ok"}
        else:
            assert answer == expected


TAMPER = """
import json, os, socket, sys
directory, name, other = json.load(sys.stdin)
path = os.path.join(directory, name)
def bind():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(directory, "bound"))
attempts = {
    "unlink": lambda: os.unlink(path),
    "rename": lambda: os.rename(path, os.path.join(directory, "moved")),
    "rename over": lambda: os.rename(other, path),
    "bind beside": bind,
    "create beside": lambda: os.close(os.open(os.path.join(directory, "new"), os.O_CREAT)),
    "chmod": lambda: os.chmod(path, 0o666),
    "chmod directory": lambda: os.chmod(directory, 0o777),
    "chown": lambda: os.chown(path, os.getuid(), -1),
    "rename directory": lambda: os.rename(directory, directory + "-moved"),
    "symlink": lambda: os.symlink("/tmp", os.path.join(directory, "link")),
}
done = {}
for name, attempt in attempts.items():
    try:
        attempt()
        done[name] = 0
    except OSError as error:
        done[name] = error.errno
print(json.dumps(done))
"""


@pytest.mark.row("D1", "D4")
@pytest.mark.parametrize("who", ["alice", "carol", "dave", "mallory"])
def test_users_cannot_replace_or_tamper_with_the_engines_sockets(
    service: Service, who: str
) -> None:
    user = service.users[who]
    with tempfile.TemporaryDirectory(prefix="fhs-", dir="/tmp") as outside:
        Path(outside).chmod(0o711)
        own = Path(outside, "own")
        own.mkdir()
        os.chown(own, user.uid, user.gid)
        other = own / "other"
        for socket in (service.engine_socket, service.control_socket):
            other.touch()
            os.chown(other, user.uid, user.gid)
            given = json.dumps([str(socket.parent), socket.name, str(other)])
            done = json.loads(service.installation.run_as(user, TAMPER, given))
            assert set(done.values()) <= {errno.EACCES, errno.EPERM}, done
            assert len(done) == 10
        # Control: where the directory is his, most of it works.
        given = json.dumps([str(own), "other", str(other)])
        done = json.loads(service.installation.run_as(user, TAMPER, given))
        assert done["unlink"] == done["bind beside"] == done["create beside"] == 0
    assert service.call("alice").code is None
    assert service.ask("carol", "GET", "/v1/health", control=True).status == 200


READ = """
import json, sys
try:
    open(json.load(sys.stdin)).close()
    print(0)
except OSError as error:
    print(error.errno)
"""


@pytest.mark.row("D4")
@pytest.mark.parametrize("who", ["alice", "carol", "dave", "mallory"])
def test_engine_state_and_environment_are_unreadable_to_users(service: Service, who: str) -> None:
    state = service.place / "state" / "state.db"
    for path in (state, Path(f"/proc/{service.process.pid}/environ")):
        found = service.installation.run_as(service.users[who], READ, json.dumps(str(path)))
        assert int(found) == errno.EACCES
    config = json.dumps(str(service.place / "config.toml"))
    assert int(service.installation.run_as(service.users[who], READ, config)) == 0  # twin


# -- two principals ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agents(service: Service) -> dict[str, str]:
    """One agent per caller; bob has no name in the configuration, so his principal is his uid."""
    principals = {"alice": "alice", "bob": f"uid:{service.users['bob'].uid}"}
    for who, principal in principals.items():
        service.do("POST", "/v1/agents", {"id": f"of-{who}", "principals": [principal]})
        service.do("PUT", f"/v1/agents/of-{who}/tools/calculator", {})
    return {who: f"of-{who}" for who in principals}


@pytest.mark.row("D4", "R3")
def test_other_callers_agent_is_indistinguishable_from_unknown_agent(
    service: Service, agents: dict[str, str]
) -> None:
    for who, other in (("alice", "bob"), ("bob", "alice")):
        assert service.call(who, agent_id=agents[who]).code is None
        answers = set()
        for agent_id in (agents[other], "unheard-of"):
            answer = service.call(who, agent_id=agent_id)
            assert answer.code == "RESOURCE_NOT_FOUND"
            answers.add(json.dumps(answer.body["error"]).replace(agent_id, "…"))
        assert len(answers) == 1


@pytest.mark.row("D4")
def test_other_callers_calls_are_indistinguishable_from_unknown_calls(service: Service) -> None:
    calls = {who: service.call(who).body["metadata"]["call_id"] for who in ("alice", "bob")}
    for who, other in (("alice", "bob"), ("bob", "alice")):

        def listed(who: str = who) -> list[str]:
            answer = service.ask(who, "GET", "/v1/calls?limit=100")
            return [call["call_id"] for call in answer.body["data"]["items"]]

        wait_until(lambda who=who, listed=listed: calls[who] in listed())
        assert calls[other] not in listed()
        mine = service.ask(who, "GET", f"/v1/calls/{calls[who]}")
        assert mine.code is None
        theirs = service.ask(who, "GET", f"/v1/calls/{calls[other]}")
        unheard_of = service.ask(who, "GET", "/v1/calls/call_000000000000000000000000")
        assert theirs.code == unheard_of.code == "RESOURCE_NOT_FOUND"
        assert theirs.body["error"] == unheard_of.body["error"]


@pytest.mark.row("D4", "R3")
def test_agent_access_follows_its_configured_principals(
    service: Service, agents: dict[str, str]
) -> None:
    bob = f"uid:{service.users['bob'].uid}"
    service.do("POST", "/v1/agents", {"id": "moving", "principals": ["alice"]})
    service.do("PUT", "/v1/agents/moving/tools/calculator", {})
    assert service.call("alice", agent_id="moving").code is None
    assert service.call("bob", agent_id="moving").code == "RESOURCE_NOT_FOUND"
    service.do("PATCH", "/v1/agents/moving", {"principals": [bob]})
    assert service.call("alice", agent_id="moving").code == "RESOURCE_NOT_FOUND"
    assert service.call("bob", agent_id="moving").code is None
    # The name in the configuration is alice's; her number is nobody.
    service.do("PATCH", "/v1/agents/moving", {"principals": [f"uid:{service.users['alice'].uid}"]})
    assert service.call("alice", agent_id="moving").code == "RESOURCE_NOT_FOUND"


@pytest.mark.row("D4", "R3")
def test_token_is_its_own_principal_regardless_of_uid_until_revoked(
    service: Service, agents: dict[str, str]
) -> None:
    made = service.do("POST", "/v1/tokens", {"name": "job", "agents": [agents["bob"]]})
    token = made["secret"]
    for who in ("alice", "bob"):
        assert service.call(who, credential=token, agent_id=agents["bob"]).code is None
        # Not what the uid behind it may do besides.
        refused = service.call(who, credential=token, agent_id=agents["alice"])
        assert refused.code == "RESOURCE_NOT_FOUND"
    service.do("DELETE", f"/v1/tokens/{made['token']['id']}")
    assert service.call("bob", credential=token).code == "UNAUTHORIZED"
    assert service.call("bob").code is None


def _cpu_by_process(service: Service) -> dict[tuple[int, float], float]:
    """CPU seconds of every guest process, as accounted by the kernel."""
    found = {}
    for child in children_of_guest(guest_of(service.process.pid)):
        try:
            times = child.cpu_times()
            found[child.pid, child.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            pass
    return found


def _served_by(service: Service, who: str, **options: Any) -> tuple[int, float]:
    """The process that computed a call from this caller."""
    before = _cpu_by_process(service)
    answer = service.call(who, WORK, **options)
    assert answer.code is None
    assert answer.body["metadata"]["sandbox"]["isolation"] == "resident"
    after = _cpu_by_process(service)
    used = {which: cpu - before.get(which, 0.0) for which, cpu in after.items()}
    return max(used, key=lambda which: used[which])


@pytest.mark.row("D4", "S2", "S5")
def test_callers_and_agents_never_share_a_resident_process(
    service: Service, agents: dict[str, str]
) -> None:
    served = {
        "alice": _served_by(service, "alice"),
        "bob": _served_by(service, "bob"),
        "alice's agent": _served_by(service, "alice", agent_id=agents["alice"]),
        "bob's agent": _served_by(service, "bob", agent_id=agents["bob"]),
    }
    assert len(set(served.values())) == 4
    # Control: the same caller comes to the same process again, so the accounts tell them apart.
    assert _served_by(service, "alice") == served["alice"]
    assert _served_by(service, "bob") == served["bob"]


# -- authority -----------------------------------------------------------------------------


@pytest.mark.row("D4", "A4")
def test_approvers_group_membership_alone_grants_no_authority(service: Service) -> None:
    for who in ("carol", "dave"):
        for method, address in (("GET", "/v1/tokens"), ("POST", "/v1/approvers")):
            body = {"name": "intruder", "scopes": ["admin"]} if method == "POST" else None
            answer = service.ask(who, method, address, control=True, body=body)
            assert answer.code == "UNAUTHORIZED"
    call_token = service.do("POST", "/v1/tokens", {"name": "caller"})["secret"]
    refused = service.ask("dave", "GET", "/v1/tokens", control=True, credential=call_token)
    assert refused.code == "PERMISSION_DENIED"
    names = [approver["name"] for approver in service.do("GET", "/v1/approvers")["items"]]
    assert names == ["owner"]


@pytest.mark.row("D4", "A4")
def test_approver_credential_is_rejected_for_calls(service: Service) -> None:
    assert service.call("dave").code is None
    assert service.call("dave", credential=service.owner).code == "UNAUTHORIZED"


@pytest.mark.row("D4")
def test_overflow_uid_is_rejected_as_unauthenticated(service: Service) -> None:
    body = {"arguments": {"expression": "1 + 1"}}
    ended = {}
    for uid in (NOBODY, NOBODY - 1):
        user = User("?", uid, uid, (service.gids["callers"],))
        answer = service.installation.ask_as(
            user, service.engine_socket, "POST", "/v1/tools/calculator/call", body
        )
        assert isinstance(answer, Answer)
        ended[uid] = answer.code
    assert ended == {NOBODY: "UNAUTHORIZED", NOBODY - 1: None}


# -- setting it up wrongly, and stopping ------------------------------------------------------


def _fails(service: Service, config: str, directory: Path | None = None) -> str:
    """The error output of `serve`, run as the engine's user with an invalid configuration."""
    engine = service.users["engine"]
    home = Path(tempfile.mkdtemp(prefix="fhs-", dir="/tmp"))
    try:
        os.chown(home, engine.uid, engine.gid)
        file = service.place / "wrong.toml"
        run = directory if directory is not None else home / "run"
        file.write_text(config.format(run=run, home=home), encoding="utf-8")
        file.chmod(0o644)
        environment = {**service.installation.environment, "FUMEHOOD_CONFIG": str(file)}
        done = subprocess.run(
            [*service.installation.command, "serve"], env=environment, cwd="/",
            capture_output=True, timeout=600, **engine.identity,
        )  # fmt: skip
    finally:
        shutil.rmtree(home, ignore_errors=True)
    words = re.sub(r"(?m)^{.*\n", "", done.stderr.decode())
    assert done.returncode == 4, words
    assert "Traceback" not in words
    return words


BASE = 'mode = "service"\nhome = "{home}"\n'


@pytest.mark.row("D1")
def test_missing_group_or_membership_fails_startup_with_remedy(service: Service) -> None:
    run = '[service]\nrun_directory = "{run}"\n'
    for group, words in (
        ("fht-no-such-group", "groupadd --system fht-no-such-group"),
        (service.users["mallory"].name, "the engine's user must be in it"),
    ):
        groups = f'callers_group = "{group}"\napprovers_group = "{group}"\n'
        assert words in _fails(service, BASE + run + groups)
    assert "service.run_directory" in _fails(
        service, 'socket = "{home}/engine.sock"\n' + BASE + run
    )


@pytest.mark.row("D1", "D4")
def test_run_directory_replaceable_by_another_user_is_refused(service: Service) -> None:
    run = '[service]\nrun_directory = "{run}"\n'
    alice, state = service.users["alice"], service.place / "state"
    kept = sorted(path.name for path in state.iterdir())
    link = service.place / "link"
    link.symlink_to(state)
    assert "cannot be used" in _fails(service, BASE + run, link)
    with tempfile.TemporaryDirectory(prefix="fhs-", dir="/tmp") as own:
        Path(own).chmod(0o777)
        assert "could be replaced" in _fails(service, BASE + run, Path(own, "run"))
        os.chown(own, alice.uid, alice.gid)
        assert "belongs to another user" in _fails(service, BASE + run, Path(own))
        Path(own).chmod(0o755)
        assert "could be replaced" in _fails(service, BASE + run, Path(own, "run"))
    assert _found(state)[0] == 0o700
    assert sorted(path.name for path in state.iterdir()) == kept


HOLD = """
import resource, socket, sys
path, count = sys.argv[1], int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for _ in range(count):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(path)
    held[-1].sendall(b"GET /v1/ready HTTP/1.1\\r\\nx: ")
print("held", flush=True)
sys.stdin.read()
"""


def _is_served(service: Service, who: str) -> bool:
    """False if refused, or if the connection was closed before the request was written."""
    answer = service.ask(who, "GET", "/v1/tools")
    return isinstance(answer, Answer) and answer.code is None


@pytest.mark.row("D4")
def test_caller_holding_all_connections_blocks_only_itself(service: Service) -> None:
    program = [service.installation.command[0], "-c", HOLD, str(service.engine_socket)]
    holding = subprocess.Popen(
        [*program, str(MAX_CONNECTIONS)], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        **service.users["alice"].identity,
    )  # fmt: skip
    try:
        assert holding.stdout.readline() == b"held\n"
        wait_until(lambda: not _is_served(service, "alice"))
        assert service.call("bob").body["data"]["value"] == 2
        assert service.call("dave").body["data"]["value"] == 2
        assert service.do("GET", "/v1/tokens") is not None
    finally:
        holding.communicate(timeout=DEADLINE_S)
    wait_until(lambda: _is_served(service, "alice"))
    assert service.call("alice").body["data"]["value"] == 2


@pytest.mark.row("D6")
def test_stopped_service_leaves_no_socket_or_process(service: Service) -> None:
    """The last one, because it stops the service of all others."""
    assert service.call("alice").body["data"]["value"] == 2
    family = [guest_of(service.process.pid), *children_of_guest(guest_of(service.process.pid))]
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(timeout=DEADLINE_S) == 0
    assert not service.engine_socket.exists()
    assert not service.control_socket.exists()
    wait_until(lambda: all(is_gone(process) for process in family))
    assert "internal_error" not in service.log
    assert service.owner[-43:] not in service.log
