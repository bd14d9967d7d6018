"""`fumehood images remove`: which image it means, and what it says of one that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from docker.errors import APIError
from typer.testing import CliRunner

from fumehood.cli import images as command
from fumehood.cli.main import app
from support.docker_images import ListedImages, image_row


class Docker(ListedImages):
    """Images, of which containers may use some."""

    users: tuple[str, ...] = ()

    def images(self, *, name: str = "", **how: Any) -> list[dict[str, Any]]:
        if "filters" in how:
            return super().images(filters=how["filters"])
        tags = [(row, str(row["RepoTags"][0])) for row in self.rows]
        return [row for row, tag in tags if not name or tag.startswith(f"{name}:")]

    def containers(self, *, filters: dict[str, str], **_: Any) -> list[dict[str, Any]]:
        return [{"Names": [f"/{user}"]} for user in self.users]

    def inspect_image(self, identifier: str) -> dict[str, Any]:
        return next(row for row in self.rows if row["Id"] == identifier)

    def remove_image(self, what: str) -> None:
        if self.users:
            raise APIError("conflict")
        self.rows = [row for row in self.rows if what not in (row["Id"], *row["RepoTags"])]


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Docker:
    """A Docker with the image `python` and an own one, whose folder is in the state directory."""
    mine = image_row("sha256:2", recipe="r", guest="g", image="mine")
    found = Docker(
        image_row("sha256:1", recipe="r", guest="g"), {**mine, "RepoTags": ["fumehood/mine:latest"]}
    )
    (tmp_path / "images" / "mine").mkdir(parents=True)
    monkeypatch.setenv("FUMEHOOD_HOME", str(tmp_path))
    monkeypatch.setattr(command, "open_engine", lambda: found)
    return found


def remove(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["images", "remove", *arguments])


def test_removed_image_is_gone_with_its_folder(docker: Docker, tmp_path: Path) -> None:
    assert remove("mine").exit_code == 0
    assert [row["Id"] for row in docker.rows] == ["sha256:1"]
    assert not (tmp_path / "images" / "mine").exists()


@pytest.mark.parametrize("name", ["pythn", "base-python", "../python"])
def test_misspelt_name_is_a_wrong_argument_and_removes_nothing(docker: Docker, name: str) -> None:
    done = remove(name)
    assert (done.exit_code, len(docker.rows)) == (2, 2)
    assert "There is no image" in done.output
    assert "Did you mean 'python'" in done.output


def test_image_in_use_stays_with_its_folder_and_its_users_are_named(
    docker: Docker, tmp_path: Path
) -> None:
    docker.users = ("fumehood-1",)
    done = remove("mine")
    assert (done.exit_code, len(docker.rows)) == (1, 2)
    assert "containers use it: fumehood-1. Stop their engine" in done.output
    assert (tmp_path / "images" / "mine").is_dir()


def test_known_image_that_is_not_built_is_gone_already(docker: Docker) -> None:
    docker.rows = []
    assert remove("python").exit_code == 0
