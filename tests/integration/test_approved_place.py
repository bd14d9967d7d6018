"""An approval is bound to its image and runtime: if either changes, it expires."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import docker.errors
import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import ApprovalState
from fumehood.docker.api import open_docker
from fumehood.image_store.store import IMAGE, RECIPE
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.images.recipe import read_recipe
from fumehood.storage.database import Database, open_database
from support.answers import code_of, error_of
from support.asking import add_approvers, approve
from support.docker_images import write_image_folder
from support.wait import DEADLINE_S
from support.wheels import only_from, write_wheel

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("A2", "S10")]

ASKS = '[[rules]]\nid = "look-first"\ndecision = "ask"\ntools = ["run_python"]\n'


def _engine(home: Path, database: Database, **container: Any) -> Engine:
    policy = home / "policy.toml"
    policy.write_text(ASKS)
    place: Any = {"pool_min": 0, "memory_mb": 128, "images": {"python": "python"}, **container}
    packages: Any = {"allow": ["*"]}
    config = Config(home=home, policy_file=policy, container=place, packages=packages)
    return Engine(config=config, database=database)


async def _ask(engine: Engine, code: str, **options: Any) -> str:
    """The approval id of a program that waits for approval."""
    asked = await engine.call("run_python", {"code": code}, **options)
    return error_of(asked).approval_id or ""


async def _place_of(engine: Engine, approval_id: str) -> Any:
    """The place that an approval is bound to."""
    binding = (await engine.approvals.show(approval_id)).binding
    return binding["place"]


async def _ending_of(engine: Engine, approval_id: str) -> tuple[ApprovalState, Any]:
    """Approve: how the approval ends, with the program's output or with what has changed."""
    one = await approve(engine, approval_id)
    answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    assert answer is not None
    if answer.success:
        return one.state, answer.data["stdout"]
    assert code_of(answer) == "APPROVAL_EXPIRED"
    return one.state, error_of(answer).details


CHANGED = (ApprovalState.EXPIRED, {"changed": ["place"]})


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"images": {"python": "python-data"}}, id="image"),
        pytest.param({"runtime": "runsc"}, id="runtime", marks=pytest.mark.needs("runsc")),
    ],
)
async def test_approval_expires_if_image_or_runtime_changed_since_the_request(
    home: Path, changed: dict[str, Any]
) -> None:
    """The program's definition, arguments and limits stay what they were.

    The next test has the twin, whose place does not change.
    """
    with closing(open_database(home / "state.db")) as database:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            approval_id = await _ask(engine, "print(6 * 7)")
            place = await _place_of(engine, approval_id)
            assert place["image"] == "python"
            assert place["image_digest"].startswith("sha256:")
        async with _engine(home, database, **changed) as engine:
            assert await _ending_of(engine, approval_id) == CHANGED


async def test_approval_expires_if_the_index_has_other_versions_since_the_request(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in only_from(tmp_path).items():
        monkeypatch.setenv(name, value)
    write_wheel(tmp_path, "tool")
    code = "import tool; print(tool.VERSION)"
    with closing(open_database(home / "state.db")) as database:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            before = await _ask(engine, code, packages=["tool"])
            after = await _ask(engine, f"{code}  # once more", packages=["tool"])
            assert (await _place_of(engine, after))["packages"] == ["tool==1.0"]
        async with _engine(home, database) as engine:
            assert await _ending_of(engine, before) == (ApprovalState.DONE, "1.0\n")  # twin
        write_wheel(tmp_path, "tool", "2.0")
        async with _engine(home, database) as engine:
            assert await _ending_of(engine, after) == CHANGED


class Twin:
    """An image of the operator, equal to `python`, that can be built again as another one."""

    def __init__(self, folder: Path, image: Image) -> None:
        self._image = image
        self._recipe = read_recipe("twin", own=folder).digest
        self.built: list[str] = []

    def build(self) -> str:
        """Return the id of the new image."""
        with closing(open_docker(timeout_s=60)) as client:
            made = client.create_container(self._image.id)["Id"]
            labels = {IMAGE: "twin", RECIPE: self._recipe, "fumehood.build": str(len(self.built))}
            changes = [f"LABEL {name}={value}" for name, value in labels.items()]
            image = str(client.commit(made, "fumehood/twin", "latest", changes=changes)["Id"])
            client.remove_container(made)
        self.built.append(image)
        return image

    def remove(self) -> None:
        with closing(open_docker(timeout_s=60)) as client:
            for image in self.built:
                with suppress(docker.errors.NotFound):
                    client.remove_image(image, force=True)


@pytest.fixture
def twin(home: Path, python_image: Image) -> Iterator[Twin]:
    folder = write_image_folder(home, "twin").rename(home / "images")
    (folder / "twin" / "requirements.in").touch()
    twin = Twin(folder, python_image)
    yield twin
    twin.remove()


@pytest.mark.needs("disks")
async def test_approval_in_a_session_is_bound_to_the_image_of_its_container(
    home: Path, twin: Twin
) -> None:
    """The image is built again after the question. A container goes on with the old one."""
    first = twin.build()
    with closing(open_database(home / "state.db")) as database:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            session = await engine.sessions.create(engine.owner, image="twin", disk_mb=16)
        twin.build()
        async with _engine(home, database) as engine:
            running, stopped = [
                await _ask(engine, f"print({number})", session_id=session.id) for number in (1, 2)
            ]
            assert (await _place_of(engine, stopped))["image_digest"] == first
            assert await _ending_of(engine, running) == (ApprovalState.DONE, "1\n")
            await engine.sessions.stop(engine.owner, session.id)
            assert await _ending_of(engine, stopped) == CHANGED
            await engine.sessions.end(engine.owner, session.id)
            with anyio.fail_after(DEADLINE_S):
                while list((home / "disks").iterdir()):
                    await anyio.sleep(0.02)
