"""An approval is bound to its image and runtime: if either changes, it expires."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import docker.errors
import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import ApprovalState
from fumehood.sandbox.container.docker_api import open_docker
from fumehood.sandbox.images.catalog import IMAGE, RECIPE
from fumehood.sandbox.images.recipe import read_recipe
from fumehood.storage.database import Database, open_database
from support.answers import code_of, error_of
from support.asking import add_approvers, approve
from support.docker_images import write_image_folder
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


@pytest.mark.parametrize(
    ("changed", "ends"),
    [
        pytest.param({}, ApprovalState.DONE, id="unchanged"),
        pytest.param({"images": {"python": "python-data"}}, ApprovalState.EXPIRED, id="image"),
        pytest.param(
            {"runtime": "runsc"}, ApprovalState.EXPIRED, id="runtime",
            marks=pytest.mark.needs("runsc"),
        ),
    ],
)  # fmt: skip
async def test_approval_expires_if_image_or_runtime_changed_since_the_request(
    home: Path, changed: dict[str, Any], ends: ApprovalState
) -> None:
    """The program's definition, arguments and limits stay what they were."""
    database = open_database(home / "state.db")
    try:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            asked = await engine.call("run_python", {"code": "print(6 * 7)"})
            approval_id = error_of(asked).approval_id or ""
            shown = (await engine.approvals.show(approval_id)).binding
            assert shown is not None
            assert shown["place"]["image"] == "python"
            assert shown["place"]["image_digest"].startswith("sha256:")
        async with _engine(home, database, **changed) as engine:
            one = await approve(engine, approval_id)
            answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    finally:
        database.close()
    assert one.state is ends
    assert answer is not None
    if ends is ApprovalState.DONE:
        assert answer.data["stdout"] == "42\n"
        return
    assert code_of(answer) == "APPROVAL_EXPIRED"
    assert answer.error.details == {"changed": ["place"]}


@pytest.mark.parametrize(
    ("newer", "ends"), [(False, ApprovalState.DONE), (True, ApprovalState.EXPIRED)]
)
async def test_approval_expires_if_the_index_has_other_versions_since_the_request(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool, ends: ApprovalState
) -> None:
    for name, value in only_from(tmp_path).items():
        monkeypatch.setenv(name, value)
    write_wheel(tmp_path, "tool")
    code = {"code": "import tool; print(tool.VERSION)"}
    database = open_database(home / "state.db")
    try:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            asked = await engine.call("run_python", code, packages=["tool"])
            approval_id = error_of(asked).approval_id or ""
            shown = (await engine.approvals.show(approval_id)).binding
            assert shown is not None
            assert shown["place"]["packages"] == ["tool==1.0"]
        if newer:
            write_wheel(tmp_path, "tool", "2.0")
        async with _engine(home, database) as engine:
            one = await approve(engine, approval_id)
            answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    finally:
        database.close()
    assert one.state is ends
    assert answer is not None
    if ends is ApprovalState.DONE:
        assert answer.data["stdout"] == "1.0\n"
    else:
        assert answer.error is not None
        assert answer.error.details == {"changed": ["place"]}


class Twin:
    """An image of the operator, equal to `python`, that can be built again as another one."""

    def __init__(self, folder: Path) -> None:
        self._recipe = read_recipe("twin", own=folder).digest
        self.built: list[str] = []

    def build(self) -> str:
        """Return the id of the new image."""
        with closing(open_docker(timeout_s=60)) as client:
            made = client.create_container("fumehood/python:latest")["Id"]
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
def twin(home: Path) -> Iterator[Twin]:
    folder = write_image_folder(home, "twin").rename(home / "images")
    (folder / "twin" / "requirements.in").touch()
    twin = Twin(folder)
    yield twin
    twin.remove()


@pytest.mark.needs("disks")
@pytest.mark.parametrize(
    ("is_stopped", "ends"), [(False, ApprovalState.DONE), (True, ApprovalState.EXPIRED)]
)
async def test_approval_in_a_session_is_bound_to_the_image_of_its_container(
    home: Path, twin: Twin, is_stopped: bool, ends: ApprovalState
) -> None:
    """The image is built again after the question. A container goes on with the old one."""
    first = twin.build()
    database = open_database(home / "state.db")
    try:
        async with _engine(home, database) as engine:
            await add_approvers(engine)
            session = await engine.sessions.create(engine.owner, image="twin", disk_mb=16)
        twin.build()
        async with _engine(home, database) as engine:
            asked = await engine.call("run_python", {"code": "6 * 7"}, session_id=session.id)
            approval_id = error_of(asked).approval_id or ""
            shown = (await engine.approvals.show(approval_id)).binding
            assert shown is not None
            assert shown["place"]["image_digest"] == first
            if is_stopped:
                await engine.sessions.stop(engine.owner, session.id)
            one = await approve(engine, approval_id)
            answer = await engine.approvals.answer_of(one.call_id, engine.owner)
            await engine.sessions.end(engine.owner, session.id)
    finally:
        database.close()
    assert one.state is ends
    assert answer is not None
    if ends is ApprovalState.EXPIRED:
        assert error_of(answer).details == {"changed": ["place"]}
