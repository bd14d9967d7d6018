"""Lost containers: what is ours and left behind goes, what is another engine's stays."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from fumehood.docker.api import RUNNING_STATES, DockerNotRunning
from fumehood.sandbox.container import supply
from fumehood.sandbox.container.runtime import ContainerState, ListedContainer
from fumehood.sandbox.container.supply import AS_USUAL, ContainerSupply
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity
from support.fake_docker import FakeDocker

pytestmark = pytest.mark.anyio

NOW = 1_800_000_000
LONG_PAST, PAST, COMING = NOW - 3600, NOW - 10, NOW + 3600


def container(
    name: str, engine: str, owner: str, state: str = "running", deadline: object = COMING
) -> ListedContainer:
    labels = {
        "fumehood.engine": engine,
        "fumehood.owner": owner,
        "fumehood.deadline": str(deadline),
    }
    return ListedContainer(f"id-of-{name}", name, state not in RUNNING_STATES, labels)


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply.time, "time", lambda: NOW)


def reaper(docker: FakeDocker, *in_use: str) -> ContainerSupply:
    unused: Any = None  # it makes no containers
    return ContainerSupply(
        docker, ContainerSettings(), EngineIdentity("me", "my-state"), AS_USUAL, unused,
        lambda: in_use, unused, unused, lambda event, values: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "goes"),
    [
        (container("in-use", "me", "my-state"), False),
        (container("forgotten", "me", "my-state"), True),
        (container("forgotten-before-its-start", "me", "my-state", "created"), True),
        (container("predecessor's", "dead", "my-state"), True),
        (container("predecessor's-ended", "dead", "my-state", "exited"), True),
        (container("other-engine's", "other", "other-state"), False),
        (container("other-engine's-ended", "other", "other-state", "exited"), False),
        (container("other-engine's-late", "other", "other-state", "running", LONG_PAST), False),
        (container("other-engine's-paused", "other", "other-state", "paused", LONG_PAST), False),
        (container("somebody's-just-over", "other", "other-state", "exited", PAST), False),
        (container("somebody's-long-over", "other", "other-state", "exited", LONG_PAST), True),
        (container("somebody's-never-begun", "other", "other-state", "created", LONG_PAST), True),
        (container("without-a-deadline", "other", "other-state", "exited", ""), False),
        (container("deadline-of-nonsense", "other", "other-state", "exited", "-1"), False),
        (container("deadline-of-digits", "other", "other-state", "exited", "9" * 5000), False),
        (ListedContainer("x", "no-owner", True, {"fumehood.engine": "me"}), False),
        (ListedContainer("x", "foreign", True, {"com.example": "me"}), False),
    ],
    ids=lambda value: value.name if isinstance(value, ListedContainer) else "",
)  # fmt: skip
async def test_sweep_removes_exactly_the_unused_containers(
    found: ListedContainer, goes: bool
) -> None:
    docker = FakeDocker(None, containers={found.id: found})
    await reaper(docker, "in-use").sweep()
    assert docker.removed == ([found.name] if goes else [])


async def test_removal_is_retried_until_docker_answers() -> None:
    found = container("c", "me", "my-state")
    docker = FakeDocker(None, containers={found.id: found}, failing=DockerNotRunning("away"))
    async with anyio.create_task_group() as group:
        group.start_soon(reaper(docker).remove, "c")
        while docker.asked.count("remove") < 2:
            await anyio.sleep(0.001)
        docker.failing = None
    assert docker.removed == ["c"]


async def test_stop_removes_only_the_containers_of_this_engine() -> None:
    both = [container(f"c{n}", "me", "my-state") for n in range(20)]
    both.append(container("other", "other", "other-state"))
    docker = FakeDocker(None, containers={one.id: one for one in both})
    await reaper(docker, "c1", "c2").stop()
    assert [one.name for one in docker.containers.values()] == ["other"]


async def test_stop_succeeds_while_docker_is_unavailable() -> None:
    docker = FakeDocker(None, failing=DockerNotRunning("away"))
    await reaper(docker).stop()
    assert docker.asked == ["list"]


@pytest.mark.parametrize("is_local", [True, False])
async def test_pid_of_a_remote_docker_is_not_looked_up_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, *, is_local: bool
) -> None:
    docker = FakeDocker(None, last_state=ContainerState(is_running=True, is_paused=True, pid=4711))
    docker.is_local = is_local
    monkeypatch.setattr(supply, "is_killed", lambda pid: pid == 4711)
    assert await reaper(docker).is_dead("frozen") is is_local


@pytest.mark.parametrize(
    ("state", "is_dead"), [(ContainerState(is_running=True), False), (ContainerState(), True)]
)
async def test_docker_says_whether_a_remote_container_has_ended(
    state: ContainerState, *, is_dead: bool
) -> None:
    docker = FakeDocker(None, last_state=state, is_local=False)
    assert await reaper(docker).is_dead("frozen") is is_dead
