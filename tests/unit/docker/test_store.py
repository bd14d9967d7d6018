"""The tags of layers in Docker, and what counts as a layer there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from fumehood.docker.store import LAYERS, DockerStore
from fumehood.image_store.faults import ImageBuildError
from fumehood.image_store.find import find_layer, layer_key
from fumehood.image_store.store import GUEST, IMAGE, LAYER_BASE, LAYER_KEY, RECIPE, ROOT
from support.docker_images import ListedImages

LOCK = "tool==1.0"
KEY = layer_key("sha256:base", LOCK)


class Builder(ListedImages):
    """Makes one image, and keeps what it was asked for."""

    def __init__(self, *rows: dict[str, Any], status: int = 0) -> None:
        super().__init__(*rows)
        self.status = status
        self.tags: list[str] = []
        self.changes: list[str] = []
        self.containers_left = 0

    def create_host_config(self, **how: Any) -> dict[str, Any]:
        return how

    def create_container(self, image: str, **how: Any) -> dict[str, Any]:
        self.containers_left += 1
        return {"Id": "container"}

    def remove_container(self, container: str, *, force: bool) -> None:
        self.containers_left -= 1

    def put_archive(self, container: str, path: str, data: Any) -> None:
        pass

    def start(self, container: str) -> None:
        pass

    def wait(self, container: str, *, timeout: float) -> dict[str, int]:
        return {"StatusCode": self.status}

    def logs(self, container: str, *, tail: int) -> bytes:
        return b"No space left on device\n"

    def commit(
        self, container: str, *, repository: str, tag: str, changes: list[str]
    ) -> dict[str, str]:
        self.tags.append(f"{repository}:{tag}")
        self.changes = changes
        return {"Id": "sha256:new"}

    def tag(self, image: str, repository: str, tag: str) -> None:
        self.tags.append(f"{repository}:{tag}")

    def import_image(self, *, src: Any, repository: str, tag: str, changes: list[str]) -> str:
        self.tags.append(f"{repository}:{tag}")
        self.changes = changes
        return "{}"

    def inspect_image(self, name: str) -> dict[str, str]:
        return {"Id": f"sha256:{name}"}


def add(client: Builder, labels: dict[str, str]) -> str:
    return DockerStore(client).add(
        "sha256:below", io.BytesIO(), ["true"], labels=labels, run_s=1, failed="It failed"
    )


@pytest.mark.parametrize(
    ("labels", "tags"),
    [
        (
            {IMAGE: "python", RECIPE: "r" * 64, ROOT: "", GUEST: "g" * 64},
            ["fumehood/python:latest", f"fumehood/python:{'g' * 12}-{'r' * 12}"],
        ),
        (
            {IMAGE: "base-python", RECIPE: "r" * 64, ROOT: ""},
            [f"fumehood/base-python:{'r' * 12}"],
        ),
        ({LAYER_BASE: "sha256:base", LAYER_KEY: KEY}, [f"{LAYERS}:{KEY}"]),
    ],
    ids=["image", "base", "packages"],
)
def test_layer_has_the_tags_of_earlier_versions(labels: dict[str, str], tags: list[str]) -> None:
    client = Builder()
    assert add(client, labels) == "sha256:new"
    assert client.tags == tags
    assert client.containers_left == 0
    (line,) = [line for line in client.changes if line.startswith("LABEL")]
    assert (f'"{LAYER_BASE}"="sha256:base"' in line) == (LAYER_BASE in labels)
    assert LAYER_KEY not in line  # its tag says it


def test_root_has_the_tag_of_earlier_versions(tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(b"")
    client = Builder()
    made = DockerStore(client).import_root(tmp_path / "root.tar", {IMAGE: "root", ROOT: "d" * 64})
    assert client.tags == [f"fumehood/root:{'d' * 12}"]
    assert made == f"sha256:{client.tags[0]}"


def test_failed_step_leaves_neither_image_nor_container() -> None:
    client = Builder(status=1)
    with pytest.raises(ImageBuildError, match="It failed: There is no disk space left"):
        add(client, {IMAGE: "base-python", RECIPE: "r" * 64})
    assert (client.tags, client.containers_left) == ([], 0)


def layer_row(identifier: str, *tags: str) -> dict[str, Any]:
    return {
        "Id": identifier, "Size": 1, "Created": 1_700_000_000, "RepoTags": [*tags],
        "Labels": {IMAGE: "python", LAYER_BASE: "sha256:base"},
    }  # fmt: skip


def test_layer_of_packages_is_found_by_its_tag() -> None:
    class Tagged(ListedImages):
        def images(self, *, filters: dict[str, Any]) -> list[dict[str, Any]]:
            wanted = filters.get("reference")
            if wanted is None:
                return super().images(filters=filters)
            return [row for row in self.rows if wanted in row["RepoTags"]]

    store = DockerStore(
        Tagged(
            layer_row("sha256:layer", f"{LAYERS}:{KEY}"),
            layer_row("sha256:replaced"),
            layer_row("sha256:derived", "shop/derived:latest"),
        )
    )
    assert find_layer(store, "sha256:base", LOCK) == "sha256:layer"
    assert find_layer(store, "sha256:base", "other==1.0") is None
    keys = {layer.id: layer.labels.get(LAYER_KEY) for layer in store.layers(LAYER_BASE)}
    assert keys == {"sha256:layer": KEY, "sha256:replaced": None}
