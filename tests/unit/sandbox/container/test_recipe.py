"""What decides an image, and what does not."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from fumehood.sandbox.container import recipe as recipes
from fumehood.sandbox.container.recipe import (
    GUEST_HOME,
    UnknownImage,
    WrongRecipe,
    guest_archive,
    guest_digest,
    guest_files,
    read_recipe,
)
from support.docker_images import write_image_folder

DIGEST = "sha256:" + "a" * 64


def test_recipe_of_this_package_is_read_as_it_stands() -> None:
    recipe = read_recipe("python")
    assert recipe.release == "bookworm"
    assert {"python3", "tzdata"} <= set(recipe.packages)
    assert not any(package.startswith(("#", "python3-pip", "gcc")) for package in recipe.packages)
    assert recipe.file("finish").startswith(b"#!/bin/sh")


@pytest.mark.parametrize(
    ("stem", "text"),
    [
        ("packages", "python3\ntzdata\n"),
        ("requirements", "# other words\n"),
        ("image", 'release = "trixie"\ndescription = "x"\n'),
        ("finish", "false\n"),
    ],
)
def test_every_file_of_the_folder_decides_the_digest(tmp_path: Path, stem: str, text: str) -> None:
    before = read_recipe("python", folder=write_image_folder(tmp_path / "a"))
    same = read_recipe("python", folder=write_image_folder(tmp_path / "b"))
    other = read_recipe("python", folder=write_image_folder(tmp_path / "c", **{stem: text}))
    assert before.digest == same.digest
    assert before.digest != other.digest


def test_a_named_base_decides_the_digest(tmp_path: Path) -> None:
    folder = write_image_folder(tmp_path)
    own = read_recipe("python", folder=folder)
    named = read_recipe("python", base=f"debian@{DIGEST}", folder=folder)
    assert own.digest != named.digest


@pytest.mark.parametrize(
    "base",
    ["debian", "debian:bookworm", "debian@sha256:abc", f"{DIGEST}", f"-x@{DIGEST}", f"a b@{DIGEST}",
     f"debian@{DIGEST}\n"],
)  # fmt: skip
def test_a_base_without_a_digest_is_refused(base: str) -> None:
    with pytest.raises(WrongRecipe):
        read_recipe("python", base=base)


@pytest.mark.parametrize("name", ["nosuch", "", "..", "../python", "python/", "Python", "."])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownImage, match="Known: python"):
        read_recipe(name)


def test_index_packages_are_refused_and_not_left_out(tmp_path: Path) -> None:
    folder = write_image_folder(tmp_path, requirements="numpy==2.0 --hash=sha256:00\n")
    with pytest.raises(WrongRecipe, match="not enforced"):
        read_recipe("python", folder=folder)


@pytest.mark.parametrize("package", ["--allow-x", "a,b", "a b", "A", "x;rm", "$(x)"])
def test_a_line_that_is_no_package_is_refused(tmp_path: Path, package: str) -> None:
    """They become part of a command line."""
    folder = write_image_folder(tmp_path, packages=f"python3\n{package}\n")
    with pytest.raises(WrongRecipe, match="not the name"):
        read_recipe("python", folder=folder)


def test_guest_is_all_of_its_files_and_nothing_of_the_host() -> None:
    paths = [path for path, _ in guest_files()]
    assert paths == sorted(paths)
    outside = {path for path in paths if not path.startswith("guest/")}
    assert outside == {
        "__init__.py", "wire/__init__.py", "wire/framing.py", "wire/strict_json.py",
    }  # fmt: skip
    assert "guest/__main__.py" in paths
    assert not any("__pycache__" in path for path in paths)


def test_guest_digest_follows_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = guest_digest()
    files = guest_files()
    for changed in (
        (*files[:-1], (files[-1][0], files[-1][1] + b"\n")),
        (*files[:-1], (files[-1][0] + "x", files[-1][1])),
        files[:-1],
    ):
        monkeypatch.setattr(recipes, "guest_files", lambda changed=changed: changed)
        assert guest_digest.__wrapped__() != before
    monkeypatch.setattr(recipes, "guest_files", lambda: files)
    assert guest_digest.__wrapped__() == before


def test_guest_in_the_archive_is_roots_and_nobody_elses_to_write() -> None:
    with tarfile.open(fileobj=io.BytesIO(guest_archive())) as archive:
        members = archive.getmembers()
        start = archive.extractfile(f"{GUEST_HOME}/guest/__main__.py")
        assert start is not None
        assert start.read() == dict(guest_files())["guest/__main__.py"]
    assert {(m.uid, m.gid) for m in members} == {(0, 0)}
    assert {m.mode for m in members if m.isfile()} == {0o644}
    assert {m.mode for m in members if m.isdir()} == {0o755}
    folders = {m.name for m in members if m.isdir()}
    assert {str(Path(m.name).parent) for m in members if m.isfile()} <= folders
