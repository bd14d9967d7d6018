"""A fake Docker with images only, an image folder, and programs run inside real images."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import docker

from fumehood.docker.api import Docker, open_docker
from fumehood.image_store.store import BASE, GUEST, IMAGE, PACKAGES, PACKAGES_FROM, RECIPE
from fumehood.sandbox.images.catalog import Image

RUN_DEADLINE_S = 120


class DockerWith(Docker):
    """Docker in which each name means the same image, because its name can move to another one."""

    def __init__(self, image: Image, environment: Mapping[str, str] = os.environ) -> None:
        super().__init__(environment)
        self._image = image

    async def find_image(self, name: str) -> Image:
        await self.info()  # as any request, it may fail
        return self._image


class ListedImages:
    """Lists images by label as Docker does."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = list(rows)

    def images(self, *, filters: dict[str, Any]) -> list[dict[str, Any]]:
        asked = filters["label"]
        wanted = [pair.split("=", 1) for pair in ([asked] if isinstance(asked, str) else asked)]
        return [row for row in self.rows if all(_has(row["Labels"] or {}, *w) for w in wanted)]


def _has(labels: dict[str, str], key: str, value: str | None = None) -> bool:
    return key in labels and (value is None or labels[key] == value)


def image_row(
    identifier: str, *, recipe: str, guest: str, created: int = 1_700_000_000, **more: str
) -> dict[str, Any]:
    """An image as Docker lists it."""
    labels = {
        IMAGE: "python", RECIPE: recipe, GUEST: guest, BASE: "",
        PACKAGES: "114", PACKAGES_FROM: str(created),
    }  # fmt: skip
    labels |= {f"fumehood.{key.replace('_', '-')}": value for key, value in more.items()}
    return {
        "Id": identifier, "Size": 117_000_000, "Created": created, "Labels": labels,
        "RepoTags": ["fumehood/python:latest"],
    }  # fmt: skip


def write_image_folder(home: Path, name: str = "python", **files: str) -> Path:
    """A folder of images with one in it; `files` by name without its suffix."""
    folder = home / "sandbox_images" / name
    folder.mkdir(parents=True)
    contents = {
        "packages": "python3\n", "requirements": "# none\n",
        "image": 'release = "bookworm"\ndescription = "x"\n', "finish": "true\n",
    } | files  # fmt: skip
    suffixes = {"packages": ".txt", "requirements": ".lock", "image": ".toml"}
    for stem, text in contents.items():
        (folder / f"{stem}{suffixes.get(stem, '')}").write_text(text, encoding="utf-8")
    return folder.parent


def run_inside(
    image: str, *command: str, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit status and output of a program in a container without network or writable root, with
    an empty /tmp.
    """
    with closing(open_docker(timeout_s=RUN_DEADLINE_S)) as client:
        host = client.create_host_config(
            network_mode="none", cap_drop=["ALL"], read_only=True, mem_limit="512m",
            pids_limit=64, security_opt=["no-new-privileges"],
            tmpfs={"/tmp": "rw,mode=1777"},
        )  # fmt: skip
        made = client.create_container(
            image, command=list(command), host_config=host, user="10001:10001",
            environment=environment or {},
            name=f"fumehood-test-{time.time_ns()}",
        )["Id"]  # fmt: skip
        try:
            client.start(made)
            status = client.wait(made, timeout=RUN_DEADLINE_S)["StatusCode"]
            return status, client.logs(made).decode()
        finally:
            client.remove_container(made, force=True)


def write_whole(client: docker.APIClient, image: str, target: Path) -> None:
    """Every file of an image as one tar file."""
    container = client.create_container(image, command=["true"])["Id"]
    try:
        with target.open("wb") as file:
            file.writelines(client.export(container, chunk_size=1 << 20))
    finally:
        client.remove_container(container, force=True)
