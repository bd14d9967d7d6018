"""The container wall over a fake Docker: availability, recovery, guests and held containers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits
from fumehood.docker.api import (
    DockerConflict,
    DockerError,
    DockerNotPermitted,
    DockerNotRunning,
    DockerTimeout,
)
from fumehood.sandbox.container import disks, supply, wall
from fumehood.sandbox.container.disks import Disks
from fumehood.sandbox.container.pool import Kind
from fumehood.sandbox.container.runtime import ContainerState
from fumehood.sandbox.container.supply import Making
from fumehood.sandbox.container.wall import ContainerWall, HeldContainer, SessionDisk
from fumehood.sandbox.settings import ContainerSettings, EngineIdentity, LanguageImages
from fumehood.sandbox.wall import ImageMissing, RunEnding
from support.fake_docker import FakeDocker, FakeGuest, honest
from support.scripted_guest import READY
from support.wait import DEADLINE_S

pytestmark = pytest.mark.anyio

LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=512, output_bytes=1000)
DOMAIN = TrustDomain("uid:1")


def not_built(image: str) -> ImageMissing:
    return ImageMissing.of(image, "is not built", f"Build it: fumehood images build {image}")


@dataclass(frozen=True)
class Found:
    """The parts of an image that the wall uses."""

    id: str
    languages: tuple[str, ...] = ("python", "shell")
    guest_mb: int = 32


OPTIONS = ("eager", "making")
ONE_IMAGE = LanguageImages(python="python", shell="python", javascript="python")
TWO_IMAGES = LanguageImages(python="python", shell="shell", javascript="python")


class Bench:
    def __init__(self, docker: FakeDocker, **settings: Any) -> None:
        self.docker = docker
        docker.find_image = self._find_image  # type: ignore[method-assign]
        self.events: list[tuple[str, JsonObject]] = []
        self.image = "sha256:1"
        self.missing: set[str] = set()
        """Names of images that are not there."""
        options = {key: settings.pop(key) for key in OPTIONS if key in settings}
        self.wall = ContainerWall(
            ContainerSettings(**{"pool_min": 0, "pool_max": 2, **settings}),
            docker,  # type: ignore[arg-type]
            EngineIdentity("e" * 32, "o" * 32),
            **options,
            on_event=lambda event, values: self.events.append((event, values)),
        )

    async def _find_image(self, name: str) -> Found:
        if name in self.missing:
            raise not_built(name)
        if not self.image:
            raise not_built("python")
        return Found(self.image)

    async def run(
        self, domain: TrustDomain = DOMAIN, *, fresh: bool = False, image: str | None = None
    ) -> RunEnding:
        with anyio.fail_after(DEADLINE_S):
            lease = self.wall.lease(domain, fresh=fresh, memory_mb=512, image=image)
            async with lease as place:
                return await place.run("python", {"code": "4"}, LIMITS)

    async def until(self, condition: Any) -> None:
        with anyio.fail_after(DEADLINE_S):
            while not condition():
                await anyio.sleep(0.001)

    def told(self, event: str) -> list[JsonObject]:
        return [values for name, values in self.events if name == event]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "FIRST_LOOK_DELAY_S", 0.0)
    monkeypatch.setattr(wall, "LOOK_WHILE_AWAY_S", 0.001)
    monkeypatch.setattr(supply, "LEAST_BETWEEN_LOOKS_S", 0.0)
    monkeypatch.setattr(supply, "REMEMBERED_S", 0.0)


def only_calls_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the wall's periodic check, so that only calls check Docker."""
    monkeypatch.setattr(wall, "FIRST_LOOK_DELAY_S", 3600.0)


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    docker_settings, keeps_sessions = settings.pop("docker", {}), settings.pop("keeps", False)
    async with anyio.create_task_group() as group:
        docker = FakeDocker(group, **docker_settings)
        made = Bench(docker, **settings)
        made.wall.keeps_sessions = keeps_sessions
        async with made.wall:
            yield made
        kept = set(made.wall._held) if keeps_sessions else set()
        left = {one.name for one in docker.containers.values()}
        assert left == kept or docker.failing is not None
        group.cancel_scope.cancel()


async def test_wall_runs_a_program_and_removes_its_containers_on_exit() -> None:
    async with bench() as made:
        ending = await made.run()
        assert (ending.ended_by, ending.isolation) == (EndedBy.OK, "call")
        assert (await made.run(fresh=True)).isolation == "container_per_call"
        assert made.wall.status.is_ready
        assert made.wall.status.seen == made.wall.status.enforced == frozenset(Limit)
    assert sorted(made.docker.removed) == ["fumehood-eeeeeeee-1", "fumehood-eeeeeeee-2"]


async def test_lazy_wall_sends_nothing_to_docker_before_the_first_call() -> None:
    async with bench(eager=False) as made:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert made.docker.asked == []
        assert made.wall.status.enforced == made.wall.status.required
        assert made.wall.status.seen == frozenset()
        assert not made.wall.status.is_ready
        assert (await made.run()).ended_by is EndedBy.OK


@pytest.mark.parametrize("failure", [DockerNotPermitted, DockerNotRunning, DockerTimeout])
async def test_wall_without_docker_logs_the_reason_once_and_recovers(
    failure: type[DockerError],
) -> None:
    async with bench(docker={"failing": failure("/var/run/secret.sock")}) as made:
        with pytest.raises(SandboxUnavailable) as refused:
            await made.run()
        assert failure.message in refused.value.message
        assert "secret" not in refused.value.message
        assert refused.value.may_retry is failure.heals
        assert refused.value.retry_after_ms == (1000 if failure.heals else None)
        asked = len(made.docker.asked)
        await made.until(lambda: len(made.docker.asked) > asked + 3)
        assert len(made.told("container.unavailable")) == 1
        assert made.wall.status.enforced == frozenset()
        assert failure.message in made.wall.status.remedy
        made.docker.failing = None
        await made.until(lambda: made.wall.status.is_ready)
        assert (await made.run()).ended_by is EndedBy.OK


async def test_missing_image_refuses_calls_until_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_calls_look(monkeypatch)
    async with bench(images=ONE_IMAGE) as made:
        made.image = ""
        for _ in range(2):
            with pytest.raises(ImageMissing) as refused:
                await made.run()
            assert refused.value.message == (
                "The image python is not built. Build it: fumehood images build python"
            )
            assert not refused.value.may_retry
        assert made.wall.status.enforced == made.wall.status.required
        assert (made.wall.status.faults, made.wall.status.is_ready) == ((), False)
        assert made.wall.status.missing_images == (
            "The image python is not built. Build it: fumehood images build python",
        )
        assert made.told("container.unavailable") == []
        made.image = "sha256:2"
        assert (await made.run()).ended_by is EndedBy.OK
        assert made.docker.bodies[0]["Image"] == "sha256:2"
        assert made.wall.status.is_ready
        assert made.told("container.available") == [{"images": {"python": "sha256:2"}}]


async def test_first_call_after_docker_returns_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    only_calls_look(monkeypatch)
    async with bench(docker={"failing": DockerNotRunning("away")}) as made:
        with pytest.raises(SandboxUnavailable, match="Containers are unavailable; nothing ran"):
            await made.run()
        made.docker.failing = None
        held = await hold(made, [])
        assert held.lost is None


async def test_docker_timeout_is_cached_so_later_calls_fail_without_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_calls_look(monkeypatch)
    monkeypatch.setattr(supply, "LOOK_DEADLINE_S", 0.02)
    monkeypatch.setattr(supply, "REMEMBERED_S", 3600.0)
    async with bench() as made:
        made.docker.silence = anyio.Event()
        for _ in range(3):
            with pytest.raises(SandboxUnavailable, match="does not answer in time") as refused:
                await made.run()
            assert (refused.value.may_retry, refused.value.retry_after_ms) == (True, 1000)
        assert made.docker.asked == ["info"]


async def test_hundreds_of_concurrent_calls_share_one_docker_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_calls_look(monkeypatch)
    endings: list[EndedBy] = []
    async with bench(pool_max=8, docker={"failing": DockerNotRunning("away")}) as made:
        with pytest.raises(SandboxUnavailable):
            await made.run()
        made.docker.failing, made.docker.silence = None, anyio.Event()
        looks = made.docker.asked.count("info")

        async def call(number: int) -> None:
            endings.append((await made.run(TrustDomain(f"uid:{number % 4}"))).ended_by)

        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(call, number)
            await made.until(lambda: "info" in made.docker.asked[looks:])
            made.docker.silence.set()
        assert endings == [EndedBy.OK] * 200
        assert made.docker.asked.count("info") == looks + 1


async def test_docker_warning_about_a_limit_prevents_the_start() -> None:
    async with bench(docker={"warnings": ("No swap limit support",)}) as made:
        with pytest.raises(SandboxUnavailable, match="lack a required limit"):
            await made.run()
        assert "start" not in made.docker.asked


@pytest.mark.parametrize("least_warm", [0, 1])
async def test_container_lacking_a_limit_is_refused_and_the_wall_reports_the_limit(
    least_warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wall, "LOOK_AGAIN_S", 0.01)

    async def lacking(guest: FakeGuest) -> None:
        held = {limit.value: limit is not Limit.NETWORK for limit in Limit}
        await guest.says({**READY, "enforces": held})
        assert (await guest.hears())["op"] != "run"

    async with bench(docker={"behave": lacking}, pool_min=least_warm) as made:
        with pytest.raises(SandboxUnavailable, match=r"lack a required limit: network\."):
            await made.run()
        await made.until(lambda: made.wall.status.enforced == frozenset(Limit) - {Limit.NETWORK})
        assert not made.wall.status.is_ready

        made.docker.behave = honest
        await made.until(lambda: made.wall.status.is_ready)  # though no call is admitted meanwhile
        assert made.wall.status.enforced == frozenset(Limit)


@pytest.mark.parametrize("how", ["falls silent", "ends", "speaks nonsense"])
async def test_guest_failing_to_start_is_unavailable_and_its_containers_are_removed(
    how: str,
) -> None:
    async def bad(guest: FakeGuest) -> None:
        if how == "speaks nonsense":
            await guest.says({"op": "hello"})
        if how != "ends":
            await guest.hears()

    async with bench(docker={"behave": bad}, making=Making(start_deadline_s=0.02)) as made:
        with pytest.raises(SandboxUnavailable, match="No container could be started"):
            await made.run()
        await made.until(lambda: len(made.docker.removed) == 1)
        assert made.docker.containers == {}
        made.docker.behave = honest
        assert (await made.run()).ended_by is EndedBy.OK


async def test_docker_error_text_stays_in_the_log_and_the_next_call_retries() -> None:
    failing = DockerError("mounting /var/lib/docker/overlay2/secret: no space left")
    async with bench(docker={"failing_to_start": failing}) as made:
        with pytest.raises(SandboxUnavailable) as refused:
            await made.run()
        assert "secret" not in refused.value.message
        assert "secret" in str(made.told("container.failed")[0]["why"])
        made.docker.failing_to_start = None
        assert (await made.run()).ended_by is EndedBy.OK


@pytest.mark.parametrize(
    ("state", "ended_by"),
    [
        (ContainerState(exit_code=137, out_of_memory=True), EndedBy.MEMORY),
        (ContainerState(exit_code=137), EndedBy.SANDBOX_LOST),
        (ContainerState(exit_code=1, out_of_memory=True), EndedBy.SANDBOX_LOST),
        (ContainerState(), EndedBy.SANDBOX_LOST),
    ],
)
async def test_container_lost_in_a_run_ends_as_memory_only_if_docker_reports_oom(
    state: ContainerState, ended_by: EndedBy
) -> None:
    async def dies(guest: FakeGuest) -> None:
        await guest.says(READY)
        await guest.hears()
        await guest.says({"op": "output", "id": 1, "stream": "stdout", "text": "so far"})

    async with bench(docker={"behave": dies, "last_state": state}) as made:
        ending = await made.run()
        assert (ending.ended_by, ending.stdout) == (ended_by, "so far")


async def test_oom_reported_late_by_docker_is_waited_for() -> None:
    async def dies(guest: FakeGuest) -> None:
        await guest.says(READY)
        await guest.hears()

    late = ContainerState(exit_code=137)
    async with bench(docker={"behave": dies, "last_state": late}) as made:
        ending: list[EndedBy] = []

        async def call() -> None:
            ending.append((await made.run()).ended_by)

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await made.until(lambda: "state" in made.docker.asked)
            made.docker.last_state = replace(late, out_of_memory=True)
        assert ending == [EndedBy.MEMORY]


async def test_invalid_guest_frame_ends_as_sandbox_lost_even_if_docker_reports_oom() -> None:
    async def lies(guest: FakeGuest) -> None:
        await guest.says(READY)
        await guest.hears()
        await guest.says({"op": "won"})
        await guest.hears()

    state = ContainerState(exit_code=137, out_of_memory=True)
    async with bench(docker={"behave": lies, "last_state": state}) as made:
        assert (await made.run()).ended_by is EndedBy.SANDBOX_LOST


async def test_stopping_wall_ends_a_running_call_as_sandbox_lost() -> None:
    async def never(guest: FakeGuest) -> None:
        await guest.says(READY)
        while True:
            await guest.hears()

    endings: list[object] = []

    async def call(made: Bench) -> None:
        endings.append((await made.run()).ended_by)

    async with anyio.create_task_group() as calls, bench(docker={"behave": never}) as made:
        calls.start_soon(call, made)
        await made.until(lambda: made.wall.counts["busy"] == 1)
    assert endings == [EndedBy.SANDBOX_LOST]


async def test_missing_image_disables_only_its_languages_until_it_is_built() -> None:
    async with bench(images=TWO_IMAGES) as made:
        made.missing.add("shell")
        await made.run()
        with pytest.raises(SandboxUnavailable, match="fumehood images build shell") as caught:
            await made.run(image="shell")
        assert not caught.value.may_retry
        assert made.wall.status.is_ready
        missing = ("The image shell is not built. Build it: fumehood images build shell",)
        assert made.wall.status.missing_images == missing
        assert made.told("container.images_missing") == [{"missing": list(missing)}]
        assert made.wall.status.faults == ()
        assert (await made.run()).ended_by is EndedBy.OK
        made.missing.clear()
        assert (await made.run(image="shell")).ended_by is EndedBy.OK
        assert made.wall.status.missing_images == ()
        names = [body["Labels"]["fumehood.image"] for body in made.docker.bodies]
        assert names == ["python", "shell"]


async def test_language_without_an_image_is_refused_by_name() -> None:
    async with bench(images=ONE_IMAGE) as made:
        await made.run()
        with pytest.raises(SandboxUnavailable, match="no image for ruby"):
            made.wall.image_for("ruby")
        with pytest.raises(SandboxUnavailable, match=r"image python has no javascript"):
            made.wall.image_for("javascript")


async def hold(made: Bench, lost: list[str], image: str = "python") -> HeldContainer:
    with anyio.fail_after(DEADLINE_S):
        return await made.wall.hold(
            TrustDomain("uid:1", None, "s"),
            image=image,
            memory_mb=512,
            on_lost=lambda: lost.append("lost"),
        )


async def test_stopping_wall_that_keeps_sessions_leaves_their_containers() -> None:
    lost: list[str] = []
    async with bench(keeps=True) as made:
        held = await hold(made, lost)
        await made.run()
    assert lost == []
    assert [held.name] == [one.name for one in made.docker.containers.values()]


async def test_stopping_wall_ends_held_containers() -> None:
    lost: list[str] = []
    async with bench() as made:
        held = await hold(made, lost)
    assert lost == ["lost"]
    assert held.lost is not None
    assert held.name in made.docker.removed


async def test_session_image_is_looked_up_on_demand() -> None:
    async with bench() as made:
        made.missing.add("mine")
        await made.run()
        with pytest.raises(SandboxUnavailable, match="images build mine"):
            await hold(made, [], "mine")
        assert made.wall.status.missing_images == ()
        made.missing.clear()
        await hold(made, [], "mine")
        assert made.docker.bodies[-1]["Labels"]["fumehood.image"] == "mine"


async def test_rebuilt_image_retires_idle_containers_but_not_held_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wall, "LOOK_AGAIN_S", 0.001)
    async with bench() as made:
        lost: list[str] = []
        await made.run()
        held = await hold(made, lost)
        made.image = "sha256:2"
        await made.until(lambda: made.told("container.destroyed"))
        (gone,) = made.told("container.destroyed")
        assert (gone["name"], gone["why"]) == (
            "fumehood-eeeeeeee-1", "its image is not the newest",
        )  # fmt: skip
        await made.run()
        assert [body["Image"] for body in made.docker.bodies] == [
            "sha256:1", "sha256:1", "sha256:2",
        ]  # fmt: skip
        assert (held.lost, lost) == (None, [])


async def test_program_that_cannot_be_removed_is_given_up_and_reaped_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supply, "REMOVE_S", 0.01)
    async with bench() as made:
        await made.run()

        async def fail(name: str) -> None:
            raise DockerTimeout("busy")

        made.docker.failing_to_start = DockerTimeout("busy")
        with monkeypatch.context() as patched, anyio.fail_after(DEADLINE_S):
            patched.setattr(made.docker, "remove", fail)
            with pytest.raises(SandboxUnavailable):
                await made.wall.open_program(("server",), {}, image="python", memory_mb=512)
        assert len(made.docker.containers) == 2
        await made.wall._supply.sweep()
        assert len(made.docker.containers) == 1


async def accept(*arguments: object) -> None:
    """Do nothing, well."""


async def test_disk_of_session_that_ends_just_before_a_stop_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker still removes the container, which uses the disk until then."""
    (tmp_path / "fumehood-sess_1").touch()
    conflicts = iter([DockerConflict("volume is in use")] * 3)

    async def detach_disk(name: str) -> None:
        for conflict in conflicts:
            raise conflict

    async def run(program: str, *arguments: str, **options: Any) -> str:
        return ""

    monkeypatch.setattr(disks, "_run", run)
    monkeypatch.setattr(wall, "RESTART_PAUSE_S", 0.0)
    async with bench(keeps=True) as made:
        held = await hold(made, [])
        made.docker.detach_disk = detach_disk  # type: ignore[attr-defined]
        made.wall.disks = Disks(tmp_path, made.docker)  # type: ignore[arg-type]
        held.disk = SessionDisk("fumehood-sess_1", 16, Kind("python", 512), 0)
        held.end("its owner ended it")
    assert not (tmp_path / "fumehood-sess_1").exists()


async def test_copy_and_restore_do_not_wait_for_docker_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session's container that Docker cannot remove at present still uses its disk."""
    monkeypatch.setattr(wall, "RESTART_S", 0.01)
    async with bench() as made:
        held = await hold(made, [])
        held.disk = SessionDisk("fumehood-sess_1", 16, Kind("python", 512), 0)
        monkeypatch.setattr(made.wall.disks, "prepare", accept)
        made.docker.failing = DockerNotRunning("dead")
        with pytest.raises(SandboxUnavailable, match="could not be removed in time") as refused:
            await held.restore("snap_1")
        assert refused.value.may_retry
        with pytest.raises(SandboxUnavailable, match="could not be removed in time"):
            async with held.copy_disk("snap_2"):
                pass
