"""`fumehood images new`: a custom image from a requirements list, in one command."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from fumehood.docker.api import open_docker
from fumehood.docker.store import BUILDER, DEADLINE_S
from support.docker_images import run_inside
from support.wait import wait_until
from support.wheels import only_from, write_wheel

pytestmark = [
    pytest.mark.needs("docker"),
    pytest.mark.row("S10"),
    pytest.mark.usefixtures("python_image"),
]

MINE = f"own-image-of-test-{os.getpid()}"
"""Another run of the tests can use the same Docker."""


class Command:
    """Runs `fumehood images …` with pip restricted to one folder of packages."""

    def __init__(self, home: Path, tmp_path: Path) -> None:
        self.home = home
        self.packages = tmp_path / "packages"
        self.packages.mkdir()
        self.list = tmp_path / "requirements.txt"
        self.environment = {
            **CLEAN_ENVIRONMENT, **only_from(self.packages), "FUMEHOOD_HOME": str(home),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }  # fmt: skip

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(FUMEHOOD), "images", *arguments],
            env=self.environment, capture_output=True, timeout=600, encoding="utf-8",
        )  # fmt: skip

    def new(self, requirements: str, *more: str) -> subprocess.CompletedProcess[str]:
        self.list.write_text(requirements, encoding="utf-8")
        return self.run("new", MINE, "--requirements", str(self.list), "--from", "python", *more)

    def listed(self) -> list[dict[str, Any]]:
        return [image for image in json.loads(self.run("list").stdout) if image["name"] == MINE]


@pytest.fixture
def command(home: Path, tmp_path: Path) -> Iterator[Command]:
    made = Command(home, tmp_path)
    yield made
    done = made.run("remove", MINE)
    assert done.returncode == 2 or json.loads(done.stdout)["kept"] == []  # 2: there is none


def test_rebuild_uses_the_lock_and_only_a_successful_replacement_changes_the_image(
    command: Command,
) -> None:
    """Nor is an image removed that a container uses."""
    write_wheel(command.packages, "greeting", "1.0")
    assert command.new("greeting\n").returncode == 0
    write_wheel(command.packages, "greeting", "2.0")
    rebuilt = command.run("build", MINE)
    assert rebuilt.returncode == 0, rebuilt.stderr
    (listed,) = command.listed()
    program = "import greeting; print(greeting.VERSION)"
    assert run_inside(listed["digest"], "python3", "-c", program) == (0, "1.0\n")
    replaced = command.new("greeting\n", "--replace")
    assert replaced.returncode == 0, replaced.stderr
    (document,) = json.loads(f"[{replaced.stdout}]")
    assert run_inside(document["digest"], "python3", "-c", program) == (0, "2.0\n")
    assert command.new("nosuch\n", "--replace").returncode == 4
    assert "is up to date" in command.run("build", MINE).stderr
    assert [image["digest"] for image in command.listed() if image["up_to_date"]] == [
        document["digest"]
    ]

    def builders() -> set[str]:
        with closing(open_docker(timeout_s=DEADLINE_S)) as client:
            return {found["Id"] for found in client.containers(all=True, filters={"name": BUILDER})}

    left = builders()  # those of other tests end by themselves
    wait_until(lambda: not left & builders())
    with closing(open_docker(timeout_s=DEADLINE_S)) as client:
        user = client.create_container(document["digest"], command=["true"])["Id"]
        try:
            done = command.run("remove", MINE)
        finally:
            client.remove_container(user, force=True)
    assert (done.returncode, "containers use it" in done.stderr) == (1, True)
    assert (command.home / "images" / MINE).is_dir()
    assert document["digest"] in json.loads(done.stdout)["kept"]


def test_edited_recipe_is_out_of_date_until_rebuilt(command: Command) -> None:
    """A rebuild imports preloaded modules once, in a container without network or capabilities."""
    code = (
        "import os, socket\n"
        "names = sorted(os.listdir('/sys/class/net'))\n"
        "caps = [l for l in open('/proc/self/status') if l.startswith('CapEff')][0].split()[1]\n"
        "raise ImportError(f'{names} {int(caps, 16)}')\n"
    )
    write_wheel(command.packages, "greeting")
    write_wheel(command.packages, "curious", files={"curious.py": code})
    assert command.new("curious\ngreeting\n").returncode == 0
    settings = command.home / "images" / MINE / "image.toml"
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("preload = []", 'preload = ["greeting"]'), encoding="utf-8")
    assert [image["up_to_date"] for image in command.listed()] == [False]
    done = command.run("build", MINE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["up_to_date"]
    settings.write_text(text.replace("preload = []", 'preload = ["curious"]'), encoding="utf-8")
    done = command.run("build", MINE)
    assert done.returncode == 4
    assert "curious of `preload` in image.toml: ImportError: ['lo'] 0" in done.stderr


def test_invalid_images_new_input_is_refused_and_leaves_nothing(command: Command) -> None:
    write_wheel(command.packages, "greeting")
    for requirements, more, status, words in (
        ("nosuch\n", (), 4, "no package 'nosuch'"),
        ("greeting\n", ("--base", "debian"), 2, "REF@sha256:DIGEST"),
    ):
        done = command.new(requirements, *more)
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert command.listed() == []
    images = command.home / "images"
    assert not images.exists() or list(images.iterdir()) == []


def test_unwritable_wheel_cache_is_reported_without_traceback(
    command: Command, tmp_path: Path
) -> None:
    """A file is in place of the wheel cache directory."""
    write_wheel(command.packages, "greeting")
    (tmp_path / "cache").write_text("", encoding="utf-8")
    done = command.new("greeting\n")
    assert (done.returncode, "cannot be written" in done.stderr) == (4, True), done.stderr
    assert "Traceback" not in done.stderr
    assert list((command.home / "images").iterdir()) == []
