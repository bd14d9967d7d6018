"""An engine and its nodes in a real Ray cluster: started by their commands, killed with `kill -9`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fumehood.client import Client, ControlClient
from fumehood.cluster import ray_membership
from fumehood.cluster.ray_membership import RayMembership
from fumehood.core.errors import SandboxUnavailable
from support.containers import remove_containers_of
from support.ray_cluster import Cluster, running_cluster
from support.wait import DEADLINE_S, wait_until
from tests.conftest import (
    CLEAN_ENVIRONMENT,
    FUMEHOOD,
    Daemon,
    SocketClient,
    StartDaemon,
    launch,
    make_first_approver,
    wait_until_ready,
)
from tests.upstream import Reply, running_upstream

pytestmark = [
    pytest.mark.row("B10"), pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image")
]  # fmt: skip


AWAY = "127.0.0.2"
"""The host of a service; clients do not reach it without a proxy."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, one of which is beside the head."""
    with running_cluster(nodes=1, slots=3, head_slots=3) as made:
        yield made


@pytest.fixture(scope="module")
def daemon(cluster: Cluster) -> Iterator[Daemon]:
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    credential = make_first_approver(home)
    made = started(home, cluster)
    made.credential = credential
    wait_until(lambda: joined(made) == 2)
    yield made
    assert made.stop() == 0, made.log
    remove_containers_of(home)
    shutil.rmtree(home, ignore_errors=True)


def started(home: Path, cluster: Cluster) -> Daemon:
    return wait_until_ready(
        launch(
            home, cluster.environment, cluster__address=cluster.address,
            gateway__hosts=f'["{AWAY}"]', gateway__allowed_hosts=f'["{AWAY}"]', gateway__leave="node",
        )
    )  # fmt: skip


def nodes(daemon: Daemon) -> list[Any]:
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        return list(control.nodes.list())


def joined(daemon: Daemon) -> int:
    return sum(node.state == "joined" for node in nodes(daemon))


def run(client: SocketClient, code: str, **options: Any) -> Any:
    return client.call("run_python", {"code": code}, **options).body


def test_calls_run_on_nodes_and_sessions_outlive_an_engine_killed_in_a_call(
    daemon: Daemon, cluster: Cluster
) -> None:
    """First in this module: the other tests use the engine that takes over."""
    client = daemon.client()
    answer = run(client, "print('hello'); 40 + 2")
    assert (answer["data"]["value"], answer["data"]["stdout"]) == (42, "hello\n")
    assert answer["metadata"]["sandbox"]["node"] in {node.name for node in nodes(daemon)}
    assert "Usage stats collection is disabled" in cluster.log  # nothing is sent to Ray's makers
    with Client(daemon.socket) as one:
        made = one.create_session(memory_mb=128).id
    assert run(client, "x = 7", session_id=made)["success"]
    with ThreadPoolExecutor() as threads:
        lost = threads.submit(run, daemon.client(), "import time; time.sleep(30)")
        wait_until(lambda: client.get("/v1/calls?state=running").body["data"]["items"])
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(timeout=DEADLINE_S)
        assert lost.exception(timeout=DEADLINE_S) is not None
    daemon.close_clients()
    daemon.process = started(daemon.home, cluster).process
    wait_until(lambda: joined(daemon) == 2)
    client = daemon.client()
    assert run(client, "x + 1", session_id=made)["data"]["value"] == 8
    assert run(client, "1")["success"]
    with Client(daemon.socket) as one:
        one.end_session(made)


def test_program_on_a_node_reaches_a_host_by_the_engines_gateway(daemon: Daemon) -> None:
    """Reads pass, in both directions more than a window; a write is refused as elsewhere. As the
    operator said, the connection is one of the node's process.
    """
    with running_upstream(at=(AWAY, 0)) as service:
        service.script("/held", Reply(held=True))
        service.script("/much", Reply(body=b"x" * 2_000_000, content_type="text/plain"))
        url = f"http://{AWAY}:{service.port}"
        code = (
            "import urllib.request as web\nfrom urllib.error import HTTPError\n"
            f"size = len(web.urlopen('{url}/much').read())\n"
            f"try: web.urlopen('{url}/orders', b'one')\n"
            "except HTTPError as error: status = error.code\nsize, status"
        )
        answer = run(daemon.client(), code, network=[AWAY], wait_for_approval=False)
        assert answer["success"], answer
        assert answer["data"]["value"] == [2_000_000, 403]
        assert answer["metadata"]["sandbox"]["node"]
        assert answer["metadata"]["sandbox"]["network"]["bytes_in"] > 2_000_000
        assert service.count("/orders") == 0
        held = f"import urllib.request as web\nweb.urlopen('{url}/held', timeout=3)"
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(run, daemon.client(), held, network=[AWAY])
            wait_until(lambda: service.count("/held"))
            (pid,) = {
                one.pid
                for one in psutil.net_connections("tcp")
                if one.raddr == (AWAY, service.port) and one.status == psutil.CONN_ESTABLISHED
            }
            assert "NodeActor" in " ".join(psutil.Process(pid).cmdline())
            service.release()
            answer = waiting.result(timeout=DEADLINE_S)
            assert answer["success"], answer


def test_effect_of_a_trial_on_a_node_is_put_in_after_the_yes(daemon: Daemon) -> None:
    with Client(daemon.socket) as client:
        made = client.create_session(durable=True, memory_mb=128).id
        client.call("run_python", {"code": "x = 1"}, session_id=made)
        with (
            ThreadPoolExecutor() as threads,
            ControlClient(daemon.control, credential=daemon.credential) as control,
        ):
            code = "x += 1; open('a', 'w').write('a')"
            tried = threads.submit(run, daemon.client(), code, session_id=made, preview=True)
            wait_until(lambda: control.approvals.list(state="pending").items)
            seen = client.call("run_shell", {"command": "ls"}, session_id=made)
            assert seen.data["stdout"] == ""
            (approval,) = control.approvals.list(state="pending").items
            control.approvals.approve(approval.id, version=approval.version)
            assert tried.result(timeout=DEADLINE_S)["success"]
        found = client.call("run_python", {"code": "x, open('a').read()"}, session_id=made)
        assert found.data["value"] == [2, "a"]
        client.end_session(made)


def test_drained_node_is_left_alone_until_it_is_resumed(daemon: Daemon) -> None:
    name = nodes(daemon)[0].name
    with ControlClient(daemon.control, credential=daemon.credential) as control:
        assert control.nodes.drain(name).state == "drained"
        client = daemon.client()
        used = {run(client, "1")["metadata"]["sandbox"]["node"] for _ in range(5)}
        assert name not in used
        assert control.nodes.resume(name).state == "joined"


def test_node_whose_process_alone_is_killed_is_back_soon(daemon: Daemon, cluster: Cluster) -> None:
    """As the kernel does that runs out of memory: Ray on the machine goes on."""
    bridges = [one for one in _descendants(daemon.process.pid) if "ray_bridge" in one[1]]
    ((bridge, _),) = bridges
    assert os.getsid(bridge) != os.getsid(daemon.process.pid)  # so that Ctrl-C does not end it
    cluster.actor_of(cluster.processes[-1]).kill()
    wait_until(lambda: joined(daemon) == 1)
    wait_until(lambda: joined(daemon) == 2)
    assert run(daemon.client(), "1")["success"]


def test_node_that_is_cut_off_ends_its_run_once_and_joins_again(
    daemon: Daemon, cluster: Cluster
) -> None:
    """Its process is stopped, so it answers nothing and closes nothing, as behind a dead network."""
    marks = "open('/tmp/mark', 'a').write('x')"
    with Client(daemon.socket) as client:
        made = client.create_session(memory_mb=128).id
    where = run(daemon.client(), marks, session_id=made)["metadata"]["sandbox"]["node"]
    actor = cluster.actor_of(cluster.nodes_by_name()[where])
    slow = f"import time; time.sleep(3); {marks}"
    with ThreadPoolExecutor() as threads:
        running = threads.submit(run, daemon.client(), slow, session_id=made)
        time.sleep(1)
        actor.suspend()
        try:
            answer = running.result(timeout=DEADLINE_S)
            assert answer["metadata"]["sandbox"]["ended_by"] == "sandbox_lost"
            assert run(daemon.client(), "1")["metadata"]["sandbox"]["node"] != where
            refused = run(daemon.client(), marks, session_id=made)["error"]
            assert (refused["code"], refused["retryable"]) == ("SANDBOX_UNAVAILABLE", True)
        finally:
            actor.resume()
    wait_until(lambda: joined(daemon) == 2)
    found = run(daemon.client(), "open('/tmp/mark').read()", session_id=made)
    assert found["data"]["value"] in ("x", "xx")  # what was cut off ran once at most
    with Client(daemon.socket) as client:
        client.end_session(made)


def _descendants(pid: int) -> list[tuple[int, str]]:
    children = psutil.Process(pid).children(recursive=True)
    return [(one.pid, " ".join(one.cmdline())) for one in children]


def test_node_killed_in_a_call_ends_it_once_and_another_serves(
    daemon: Daemon, cluster: Cluster
) -> None:
    """After it there is one node. The call log says what the answers said. The soak test also starts
    another node.
    """
    with Client(daemon.socket) as client:
        sessions = [client.create_session(durable=True, memory_mb=128).id for _ in range(2)]
    write = "open('f', 'w').write('one')"
    written = [run(daemon.client(), write, session_id=one) for one in sessions]
    assert len({one["metadata"]["sandbox"]["node"] for one in written}) == 2
    with ThreadPoolExecutor() as threads:
        running = [
            threads.submit(run, daemon.client(), "import time; time.sleep(8)") for _ in range(3)
        ]
        time.sleep(1.5)
        cluster.kill(cluster.processes[-1])
        wait_until(lambda: run(daemon.client(), "1")["success"])
        answers = [one.result(timeout=DEADLINE_S) for one in running]
    lost = [one for one in answers if not one["success"]]
    assert 1 <= len(lost) <= 2
    assert {one["metadata"]["sandbox"]["ended_by"] for one in lost} == {"sandbox_lost"}
    assert "of the node" in lost[0]["error"]["message"]
    assert {one["metadata"]["sandbox"]["node"] for one in lost} <= {n.name for n in nodes(daemon)}
    for one in answers:
        call_id = one["metadata"]["call_id"]
        (record,) = [
            row
            for row in daemon.client().get("/v1/calls?limit=50").body["data"]["items"]
            if row["call_id"] == call_id
        ]
        assert (record["code"] == "OK") == one["success"]
    found = [run(daemon.client(), "open('f').read()", session_id=one) for one in sessions]
    assert [one["data"]["value"] for one in found] == ["one", "one"]
    assert sorted(one["data"]["session"]["state"] for one in found) == ["kept", "restored"]


def test_attack_cluster_without_token_that_others_reach_is_refused(
    start_daemon: StartDaemon, home: Path
) -> None:
    """Without a token, whoever reaches the head could run code on every node. This one has an
    address of loopback, and listens on all networks.
    """
    with running_cluster(0, environment={"RAY_AUTH_MODE": "disabled"}, head_slots=1) as open_to_all:
        membership = RayMembership(open_to_all.address, allow_unauthenticated=False)
        assert ray_membership._probed(open_to_all.address, mode="disabled") == (
            open_to_all.address,
            False,
        )
        with pytest.raises(SandboxUnavailable, match="no token authentication"):
            membership._checked()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_membership, "_is_open", lambda host, port: False)
            assert membership._checked() == (open_to_all.address, "disabled")
        control = start_daemon(
            home, variables=open_to_all.environment, cluster__address=open_to_all.address,
            cluster__allow_unauthenticated="true",
        )  # fmt: skip
        wait_until(lambda: run(control.client(), "1")["success"])


def test_engine_whose_cluster_does_not_answer_stops_at_once(
    start_daemon: StartDaemon, home: Path
) -> None:
    daemon = start_daemon(home, cluster__address="127.0.0.1:1")
    wait_until(lambda: any(" -c " in command for _, command in _descendants(daemon.process.pid)))
    began = time.monotonic()
    daemon.stop()
    assert time.monotonic() - began < 60


def test_attack_caller_without_the_token_or_with_another_reaches_no_cluster(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, start_daemon: StartDaemon, home: Path
) -> None:
    """Twin: every other test of this module has the token."""
    assert ray_membership._probed(cluster.address, mode="disabled") == (cluster.address, True)
    for token in ({}, {"RAY_AUTH_TOKEN": "0" * 64}):
        without = {**cluster.environment, "RAY_AUTH_TOKEN": "", "HOME": str(home), **token}
        (home / "state").mkdir(mode=0o700, exist_ok=True)
        stranger = start_daemon(home, variables=without, cluster__address=cluster.address)
        refused = run(stranger.client(), "1")
        assert refused["error"]["code"] == "SANDBOX_UNAVAILABLE"
        stranger.stop()
    done = _node(cluster.address, {**CLEAN_ENVIRONMENT, **without})
    assert (done.returncode, "refused this machine's token" in done.stderr) == (4, True), (
        done.stderr
    )


def _node(address: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(FUMEHOOD), "node", "--address", address], env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("nonsense", 2, "has the form HOST:PORT"),
        ("10.0.0.1:", 2, "has the form HOST:PORT"),
        ("127.0.0.1:1", 4, "cannot be reached: Connection refused"),
    ],
)
def test_node_whose_head_is_not_there_says_so_at_once(
    home: Path, address: str, code: int, words: str
) -> None:
    done = _node(address, {**CLEAN_ENVIRONMENT, "HOME": str(home)})
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert not (home / ".ray").exists()
