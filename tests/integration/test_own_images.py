"""`fumehood images new`: an image of one's own, in one command, from one folder of packages."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import CLEAN_ENVIRONMENT, FUMEHOOD
from fumehood.sandbox.container.docker_api import open_docker
from fumehood.sandbox.images.build import DEADLINE_S
from fumehood.sandbox.images.builder import NAME as BUILDER
from fumehood.sandbox.images.catalog import Image
from support.docker_images import run_inside
from support.wheels import only_from, write_wheel

pytestmark = [
    pytest.mark.needs("docker"),
    pytest.mark.row("S10"),
    pytest.mark.usefixtures("python_image"),
]

MINE = "own-image-of-a-test"


class Command:
    """`fumehood images …` with pip that knows one folder, and a list of packages to give it."""

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
            env=self.environment, capture_output=True, timeout=200, encoding="utf-8",
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


def test_one_command_makes_an_image_that_has_the_packages(command: Command) -> None:
    write_wheel(command.packages, "greeting", "2.0", needs=["words>=1"])
    write_wheel(command.packages, "words")
    done = command.new("greeting\n")
    assert done.returncode == 0, done.stderr
    (document,) = json.loads(f"[{done.stdout}]")
    assert document["up_to_date"]
    (listed,) = command.listed()
    assert (listed["digest"], listed["languages"]) == (document["digest"], ["python", "shell"])
    program = "import greeting, words; print(greeting.VERSION, words.VERSION)"
    assert run_inside(document["digest"], "python3", "-c", program) == (0, "2.0 1.0\n")
    assert (command.home / "images" / MINE / "requirements.lock").is_file()
    again = command.run("build", MINE)
    assert "is up to date" in again.stderr


def test_lock_decides_and_not_what_the_index_has_by_now(command: Command) -> None:
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


def test_code_of_a_package_has_no_network_and_no_rights_while_the_image_is_built(
    command: Command,
) -> None:
    """A module that is preloaded is tried out during the build, in a container."""
    code = (
        "import os, socket\n"
        "names = sorted(os.listdir('/sys/class/net'))\n"
        "caps = [l for l in open('/proc/self/status') if l.startswith('CapEff')][0].split()[1]\n"
        "raise ImportError(f'{names} {int(caps, 16)}')\n"
    )
    write_wheel(command.packages, "curious", files={"curious.py": code})
    assert command.new("curious\n").returncode == 0
    settings = command.home / "images" / MINE / "image.toml"
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("preload = []", 'preload = ["curious"]'), encoding="utf-8")
    done = command.run("build", MINE)
    assert done.returncode == 4
    assert "curious of `preload` in image.toml: ImportError: ['lo'] 0" in done.stderr


def test_edited_recipe_is_said_to_be_out_of_date_until_it_is_built(command: Command) -> None:
    write_wheel(command.packages, "greeting")
    assert command.new("greeting\n").returncode == 0
    settings = command.home / "images" / MINE / "image.toml"
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("preload = []", 'preload = ["greeting"]'), encoding="utf-8")
    assert [image["up_to_date"] for image in command.listed()] == [False]
    done = command.run("build", MINE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["up_to_date"]


@pytest.mark.parametrize(
    ("requirements", "more", "status", "words"),
    [
        ("nosuch\n", (), 4, "no package 'nosuch'"),
        ("--index-url http://127.0.0.1\n", (), 2, "is an option"),
        ("greeting @ file:///tmp/x\n", (), 2, "is an address"),
        ("greeting\n", ("--from", "nosuch"), 2, "--from takes one of"),
        ("greeting\n", ("--package", "A B"), 2, "not the name of a Debian package"),
        ("greeting\n", ("--base", "debian"), 2, "REF@sha256:DIGEST"),
    ],
)
def test_bad_input_is_refused_in_words_and_leaves_nothing(
    command: Command, requirements: str, more: tuple[str, ...], status: int, words: str
) -> None:
    write_wheel(command.packages, "greeting")
    done = command.new(requirements, *more)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert command.listed() == []
    images = command.home / "images"
    assert not images.exists() or list(images.iterdir()) == []


def test_name_of_ours_is_refused(command: Command) -> None:
    done = command.run("new", "python", "--requirements", "/dev/null")
    assert (done.returncode, "is none of" in done.stderr) == (2, True)


def test_build_that_is_broken_off_leaves_nothing_that_looks_finished(command: Command) -> None:
    write_wheel(command.packages, "broken", files={"broken.py": "raise SystemExit(9)\n"})
    write_wheel(command.packages, "greeting")
    assert command.new("greeting\n").returncode == 0
    settings = command.home / "images" / MINE / "image.toml"
    before = [image["digest"] for image in command.listed()]
    assert command.new("nosuch\n", "--replace").returncode == 4
    assert command.run("build", MINE).returncode == 0
    assert [image["digest"] for image in command.listed() if image["up_to_date"]] == before
    assert settings.is_file()
    with closing(open_docker(timeout_s=DEADLINE_S)) as client:
        assert client.containers(all=True, filters={"name": BUILDER}) == []


def test_removed_image_is_gone_with_its_folder_and_ours_stays(
    command: Command, python_image: Image
) -> None:
    write_wheel(command.packages, "greeting")
    assert command.new("greeting\n").returncode == 0
    done = command.run("remove", MINE)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["removed"]) == 2
    assert command.listed() == []
    assert list((command.home / "images").iterdir()) == []
    names = [image["digest"] for image in json.loads(command.run("list").stdout)]
    assert python_image.id in names
    assert "no image" in command.run("build", MINE).stderr


def test_image_that_a_container_uses_stays(command: Command) -> None:
    write_wheel(command.packages, "greeting")
    document = json.loads(command.new("greeting\n").stdout)
    with closing(open_docker(timeout_s=DEADLINE_S)) as client:
        user = client.create_container(document["digest"], command=["true"])["Id"]
        try:
            done = command.run("remove", MINE)
        finally:
            client.remove_container(user, force=True)
    assert (done.returncode, "containers use it" in done.stderr) == (1, True)
    assert (command.home / "images" / MINE).is_dir()
    assert document["digest"] in json.loads(done.stdout)["kept"]
    assert [image["digest"] for image in command.listed()] == [document["digest"]]


def test_folder_that_others_may_write_is_not_built(command: Command) -> None:
    write_wheel(command.packages, "greeting")
    assert command.new("greeting\n").returncode == 0
    (command.home / "images" / MINE).chmod(0o777)
    done = command.run("build", MINE)
    assert (done.returncode, "can be written by others" in done.stderr) == (2, True)
    assert [image["up_to_date"] for image in command.listed()] == [False]


def test_disk_that_cannot_be_written_is_said_in_words(command: Command, tmp_path: Path) -> None:
    """A file stands where the folder of wheels has to be."""
    write_wheel(command.packages, "greeting")
    (tmp_path / "cache").write_text("", encoding="utf-8")
    done = command.new("greeting\n")
    assert (done.returncode, "cannot be written" in done.stderr) == (4, True), done.stderr
    assert "Traceback" not in done.stderr
    assert list((command.home / "images").iterdir()) == []
