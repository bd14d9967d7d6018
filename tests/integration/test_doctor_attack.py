"""`fumehood doctor --attack` on this host: all attacks held, and failures for a weakened wall.

Each weakened wall lacks one defence. The expected failures are listed exactly: a missing one would
be an attack that cannot detect anything, an extra one a verdict without meaning.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from fumehood.attack.attack import JAILED, Attack, Topic
from fumehood.attack.containers import container_target
from fumehood.attack.run import run_attacks
from fumehood.attack.scorecard import Scorecard, Verdict
from fumehood.attack.targets import (
    Target,
    interpreter_target,
    jail_target,
    targets_of,
)
from fumehood.docker import api
from fumehood.sandbox.container.pool import PoolEntry, PoolState
from fumehood.sandbox.images.catalog import Image
from support import weakened
from support.containers import containers_of
from support.docker_images import DockerWith
from support.wait import DEADLINE_S, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.row("D7")]

HELD, FAILED, UNTRIED = Verdict.HELD, Verdict.FAILED, Verdict.UNTRIED


def everything(attack: Attack) -> bool:
    return True


async def attacked(target: Target, choose: Callable[[Attack], bool] = everything) -> Scorecard:
    return await run_attacks([target], engine_version="test", choose=choose)


def red(card: Scorecard) -> set[str]:
    """The ids of failed attacks. No attack may be untried."""
    lines = card.walls[0].attacks
    assert lines, card.walls[0].why
    assert [line for line in lines if line.verdict is UNTRIED] == []
    failed = {line.id: line.why for line in lines if line.verdict is FAILED}
    print(failed)  # shown if the test fails
    return set(failed)


def containers(
    image: Image, runtime: str = "runc", command: tuple[str, ...] | None = None
) -> Target:
    """Containers of exactly this image id, because its name can move to another image."""
    return container_target(runtime, DockerWith(image), command=command)


# -- the healthy host -----------------------------------------------------------------------


async def test_healthy_interpreter_holds_all_attacks() -> None:
    card = await attacked(interpreter_target())
    assert (card.verdict, red(card)) == (HELD, set())
    assert len(card.walls[0].attacks) >= 25


@pytest.mark.needs("landlock")
async def test_healthy_jail_holds_all_attacks() -> None:
    card = await attacked(jail_target())
    assert (card.verdict, red(card)) == (HELD, set())
    assert len(card.walls[0].attacks) >= 40


@pytest.mark.needs("docker")
@pytest.mark.parametrize(
    "runtime", ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]
)
async def test_healthy_containers_hold_all_attacks(runtime: str, python_image: Image) -> None:
    card = await attacked(containers(python_image, runtime))
    assert (card.verdict, red(card)) == (HELD, set())
    assert len(card.walls[0].attacks) >= 60
    differs = {line.id for line in card.walls[0].attacks if line.differs}
    # gVisor's published limits, and no others.
    assert differs == (
        set() if runtime == "runc" else {
            "fork-bomb", "sleep-past-deadline", "inode-flood", "make-device", "capabilities",
            "spare-itself",
        }
    )  # fmt: skip


# -- one defence less -------------------------------------------------------------------------


async def test_interpreter_without_language_rules_fails_the_language_attacks() -> None:
    target = interpreter_target(weakened.weak_interpreter(weakened.WITHOUT_LANGUAGE_RULES))
    assert red(await attacked(target)) == {
        "read-host-file", "read-host-file-full-width", "import-system", "get-attribute",
    }  # fmt: skip


@pytest.mark.needs("landlock")
async def test_jail_without_landlock_fails_the_file_attacks() -> None:
    target = jail_target(weakened.weak_jail(JAILED, weakened.WITHOUT_LANDLOCK))
    card = await attacked(target)
    assert red(card) == {
        "read-host-file", "list-host", "reopen-by-descriptor", "run-host-file", "host-processes",
    }  # fmt: skip
    why = {line.id: line.why for line in card.walls[0].attacks}
    assert "holds the word that only the host knows" in why["read-host-file"]


FILTERED = {
    "fork-bomb", "thread-flood", "reach-loopback", "reach-abstract-socket", "raw-socket",
    "netlink", "docker-socket", "end-host-process", "execute", "trace-supervisor",
    "read-other-memory", "unshare-user", "mount", "bpf", "keyring", "io-uring", "userfaultfd",
    "shared-memory-segment", "another-filter", "chroot", "become-root", "end-supervisor",
}  # fmt: skip


@pytest.mark.needs("landlock")
async def test_filter_attacks_are_reported_as_successful_in_a_jail_with_a_permissive_filter() -> (
    None
):
    target = jail_target(weakened.weak_jail(JAILED, weakened.FILTER_THAT_ALLOWS))
    assert red(await attacked(target)) == FILTERED


@pytest.mark.needs("docker")
async def test_container_without_child_seccomp_filter_fails_the_syscall_attacks(
    python_image: Image,
) -> None:
    """Docker's own seccomp profile blocks the other system calls."""
    command = weakened.weak_container(weakened.WITHOUT_FILTER)
    card = await attacked(
        containers(python_image, command=command),
        lambda attack: attack.topic in (Topic.KERNEL, Topic.NETWORK, Topic.GUEST),
    )
    assert red(card) >= {
        "netlink", "vsock", "shared-memory-segment", "semaphore-set", "message-queue",
        "watch-files", "wake-by-timer", "wake-by-child", "wake-by-parent", "wake-by-file",
    }  # fmt: skip
    assert red(card) <= {
        "netlink", "vsock", "shared-memory-segment", "semaphore-set", "message-queue",
        "watch-files", "wake-by-timer", "wake-by-child", "wake-by-parent", "wake-by-file", "io-uring", "userfaultfd", "perf-event",
    }  # fmt: skip  # the last three by the version of Docker's profile


@pytest.mark.needs("docker")
async def test_container_in_host_network_fails_the_network_attacks(
    python_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(body: dict[str, Any]) -> None:
        body["NetworkDisabled"] = False
        body["HostConfig"]["NetworkMode"] = "host"

    change_body(monkeypatch, shared)
    card = await attacked(
        containers(python_image, command=weakened.weak_container()),
        lambda attack: attack.topic in (Topic.NETWORK, Topic.HOST),
    )
    expected = {"reach-loopback", "reach-abstract-socket"}
    assert red(card) - {"reach-host-addresses", "find-a-route"} == expected
    assert ("reach-host-addresses" in red(card)) == has_other_addresses()
    assert ("find-a-route" in red(card)) == has_a_route()
    why = {line.id: line.why for line in card.walls[0].attacks}
    assert "it reached the host's listener on 127.0.0.1:" in why["reach-loopback"]
    assert "its container has the network 'host'" in why["reach-loopback"]


@pytest.mark.needs("docker")
async def test_container_with_excess_memory_fails_the_memory_attacks(
    python_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def roomy(body: dict[str, Any]) -> None:
        limits = body["HostConfig"]
        limits["Memory"] = limits["MemorySwap"] = 4 * limits["Memory"]

    change_body(monkeypatch, roomy)
    card = await attacked(
        containers(python_image, command=weakened.weak_container()),
        lambda attack: attack.topic is Topic.FLOOD and "memory" in attack.id,
    )
    assert red(card) == {"memory-hog", "memory-hog-in-grandchildren"}


@pytest.mark.needs("docker")
async def test_container_without_reset_fails_the_left_files_attack(
    python_image: Image,
) -> None:
    command = weakened.weak_container(weakened.WITHOUT_RESET)
    card = await attacked(
        containers(python_image, command=command), lambda attack: attack.topic is Topic.RESET
    )
    # Its processes are ended by somebody else, and another principal has another container.
    assert red(card) == {"left-files"}


@pytest.mark.needs("docker")
async def test_pool_sharing_containers_across_domains_fails_the_other_principal_attack(
    python_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(self: PoolState, request: Any, state: Any) -> PoolEntry | None:
        for entry in self.entries.values():
            if entry.state is state and entry.kind == request.kind:
                entry.domain = None if entry.domain is None else request.domain
                return entry
        return None

    monkeypatch.setattr(PoolState, "find", find)
    card = await attacked(containers(python_image), lambda attack: attack.topic is Topic.RESET)
    assert red(card) == {"another-principal"}


def change_body(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    honest = api.create_body

    def changed(*arguments: Any, **named: Any) -> dict[str, Any]:
        body = honest(*arguments, **named)
        change(body)
        return body

    monkeypatch.setattr(api, "create_body", changed)


def has_other_addresses() -> bool:
    return any(
        one.family == socket.AF_INET and not one.address.startswith("127.")
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
    )


def has_a_route() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        return caller.connect_ex(("192.0.2.1", 53)) == 0


# -- what cannot be tried ------------------------------------------------------------------------


@pytest.mark.needs("landlock")
async def test_jail_on_kernel_without_landlock_is_untried_with_its_cure() -> None:
    card = await attacked(jail_target(weakened.without_landlock(JAILED)))
    wall = card.walls[0]
    assert (card.verdict, wall.verdict, wall.attacks) == (UNTRIED, UNTRIED, ())
    # Its children die for want of it; which of them says so first is a matter of a moment.
    assert "no Landlock" in wall.why or "died before it was sealed" in wall.why
    assert "CONFIG_SECURITY_LANDLOCK" in wall.cure


async def test_interpreter_with_unsealed_children_is_untried() -> None:
    target = interpreter_target(weakened.weak_interpreter(weakened.WITHOUT_FILTER))
    card = await attacked(target)
    assert (card.verdict, card.walls[0].attacks) == (UNTRIED, ())
    assert "not sealed" in card.walls[0].why


@pytest.mark.needs("docker")
async def test_unregistered_container_runtime_is_untried() -> None:
    targets = await targets_of(["container"], "no-such-runtime", os.environ)
    card = await run_attacks(targets, engine_version="test")
    assert card.verdict is UNTRIED
    assert "no-such-runtime" in card.walls[0].why


async def test_attacks_over_the_total_time_are_untried() -> None:
    card = await run_attacks([interpreter_target()], engine_version="test", total_s=0.0)
    lines = card.walls[0].attacks
    assert card.verdict is UNTRIED
    assert {line.verdict for line in lines} == {UNTRIED}
    assert {line.why for line in lines} == {"The time for all attacks was used up."}


# -- the command ----------------------------------------------------------------------------


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FUMEHOOD, "doctor", *arguments],
        env={**CLEAN_ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def traces() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("fumehood-attack-*")}


def test_doctor_attack_prints_a_json_scorecard_and_exits_0() -> None:
    before = traces()
    done = doctor("--attack", "--wall", "interpreter", "--quick")
    card = json.loads(done.stdout)
    assert (done.returncode, card["verdict"], card["quick"]) == (0, "held", True), done.stdout
    (wall,) = card["walls"]
    assert (wall["wall"], wall["runtime"]) == ("interpreter", None)
    assert wall["counts"]["held"] == len(wall["attacks"]) >= 8
    assert traces() <= before


def test_doctor_attack_on_unavailable_wall_exits_4(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/docker.sock"
    done = doctor("--attack", "--wall", "container", "--json", DOCKER_HOST=nowhere)
    card = json.loads(done.stdout)
    assert (done.returncode, card["verdict"]) == (4, "untried")
    assert card["walls"][0]["cure"]


@pytest.mark.needs("docker")
def test_terminated_doctor_attack_removes_its_containers_and_processes(python_image: Image) -> None:
    before = traces()
    process = subprocess.Popen(
        [FUMEHOOD, "doctor", "--attack", "--wall", "container", "--runtime", "runc", "--json"],
        env=CLEAN_ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        label = f"fumehood.pid={process.pid}"
        wait_until(lambda: any(one["State"]["Running"] for one in containers_of(label)))
        children = psutil.Process(process.pid).children(recursive=True)
        assert traces() > before
        assert children
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()  # where it did not end
        process.wait()
    assert (process.returncode, out) == (4, "")
    assert "Interrupted" in error
    assert containers_of(label) == []
    assert traces() <= before
    assert not [child for child in children if child.is_running()]
