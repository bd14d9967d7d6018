"""The note of a build: engines read it while the build runs, and believe no old one."""

from __future__ import annotations

from typing import Any

import pytest
from docker.errors import DockerException

from fumehood.sandbox.images.builder import (
    BUILDING,
    UNTIL,
    building_noted,
    is_being_built,
    sweep_builders,
)


class Volumes:
    """As much of Docker as notes need."""

    def __init__(self, **labels: str) -> None:
        self.kept: dict[str, dict[str, str]] = {"left": labels} if labels else {}
        self.refuses = False

    def create_volume(self, name: str, labels: dict[str, str]) -> None:
        if self.refuses:
            raise DockerException("no volumes here")
        self.kept[name] = labels

    def remove_volume(self, name: str) -> None:
        if self.refuses:
            raise DockerException("no volumes here")
        del self.kept[name]

    def volumes(self, *, filters: dict[str, Any]) -> dict[str, Any]:
        (label,) = filters["label"]
        rows = [{"Name": n, "Labels": it} for n, it in self.kept.items() if label in it]
        return {"Volumes": rows or None}

    def containers(self, **options: Any) -> list[Any]:
        return []


def test_images_are_marked_as_being_built_during_the_build_only() -> None:
    docker: Any = Volumes()
    with building_noted(docker, ["node", "python-data"]):
        assert is_being_built(docker, "node")
        assert is_being_built(docker, "python-data")
        assert not is_being_built(docker, "python")
    assert not is_being_built(docker, "node")
    assert docker.kept == {}


def test_failed_build_removes_its_mark() -> None:
    docker: Any = Volumes()
    with pytest.raises(SystemExit), building_noted(docker, ["node"]):
        raise SystemExit(4)
    assert docker.kept == {}


@pytest.mark.parametrize("until", ["1", "", "soon", "-1", "²", "9" * 13])
def test_expired_build_mark_is_ignored_and_removed_by_the_next_build(
    until: str,
) -> None:
    docker: Any = Volumes(**{BUILDING: "node", UNTIL: until})
    assert not is_being_built(docker, "node")
    sweep_builders(docker)
    assert docker.kept == {}


def test_build_mark_of_a_running_build_is_kept() -> None:
    docker: Any = Volumes(**{BUILDING: "node", UNTIL: "9" * 12})
    sweep_builders(docker)
    assert is_being_built(docker, "node")


def test_build_continues_if_docker_cannot_store_its_mark() -> None:
    docker: Any = Volumes()
    docker.refuses = True
    reached = []
    with building_noted(docker, ["node"]):
        reached.append("the build")
    assert reached == ["the build"]
