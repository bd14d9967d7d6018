"""The folder of an image of the operator's own: whole, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood.image_store.faults import ImageBuildError
from fumehood.images import build
from fumehood.images.build import (
    ImageRequest,
    check_request,
    is_own_name,
    make_aside,
    publish,
)
from fumehood.sandbox.images.recipe import Lock, Pinned, WrongRecipe, read_recipe

LOCK = Lock((Pinned("tool", "1.0", ("a" * 64,)),))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the index is asked for; it answers with one package."""
    lists: list[str] = []

    def answer(requirements: str, *_: object) -> Lock:
        lists.append(requirements)
        return LOCK

    monkeypatch.setattr(build, "resolve", answer)
    return lists


def make(wish: ImageRequest, home: Path) -> Path:
    with make_aside(wish, home, home / "cache", lambda _: None) as folder:
        return publish(folder, wish.name)


def test_packages_and_preloads_of_the_parent_image_are_kept(
    asked: list[str], tmp_path: Path
) -> None:
    make(ImageRequest("mine", "Pandas<9\ntool\n"), tmp_path / "images")
    (text,) = asked
    assert {"numpy", "matplotlib", "Pandas<9", "tool"} <= set(text.splitlines())
    assert "pandas" not in text.splitlines()
    mine, below = read_recipe("mine", own=tmp_path / "images"), read_recipe("python-data")
    assert mine.settings.preload == below.settings.preload
    assert mine.settings.guest_mb == below.settings.guest_mb


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (ImageRequest("python", "tool"), "is none of host, node, python"),
        (ImageRequest("No", "tool"), "cannot be the name"),
        (ImageRequest("../x", "tool"), "cannot be the name"),
        (ImageRequest("mine", "tool", (), "nosuch"), "--from takes one of"),
        (ImageRequest("mine", "tool", (), "mine"), "--from takes one of"),
        (ImageRequest("mine", "tool", ("a b",)), "not the name of a Debian package"),
        (ImageRequest("mine", "tool", ("--x",)), "not the name of a Debian package"),
        (ImageRequest("mine", "-r x"), "is an option"),
    ],
)
def test_invalid_image_request_is_refused_before_anything_is_written(
    tmp_path: Path, wish: ImageRequest, words: str
) -> None:
    with pytest.raises(WrongRecipe, match=words):
        check_request(wish, tmp_path / "images")
    check_request(ImageRequest("mine", "tool"), tmp_path / "images")
    assert not (tmp_path / "images").exists()


def test_interrupted_image_request_leaves_the_old_directory(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "images"
    make(ImageRequest("mine", "tool", (), "python"), home)
    with pytest.raises(WrongRecipe, match="already: --replace"):
        check_request(ImageRequest("mine", "other", (), "python"), home)
    with (
        pytest.raises(KeyboardInterrupt),
        make_aside(ImageRequest("mine", "other", (), "python"), home, tmp_path, lambda _: None),
    ):
        raise KeyboardInterrupt
    assert [entry.name for entry in home.iterdir()] == ["mine"]
    assert (home / "mine/requirements.in").read_text() == "tool\n"

    def away(*_: object) -> Lock:
        raise ImageBuildError("The index is away.", "Wait.")

    monkeypatch.setattr(build, "resolve", away)
    with pytest.raises(ImageBuildError):
        make(ImageRequest("mine", "third", (), "python"), home)
    assert [entry.name for entry in home.iterdir()] == ["mine"]


def test_image_directory_is_not_writable_by_others_under_any_umask(
    asked: list[str], tmp_path: Path
) -> None:
    import os

    before = os.umask(0)
    try:
        folder = make(ImageRequest("mine", "tool", (), "python"), tmp_path / "images")
    finally:
        os.umask(before)
    entries = [folder.parent, folder, *folder.iterdir()]
    assert [str(e) for e in entries if e.stat().st_mode & 0o022] == []
    assert read_recipe("mine", own=tmp_path / "images")


@pytest.mark.parametrize(
    "name",
    [
        "python",
        "node",
        "common",
        "root",
        "packages",
        "base-x",
        "building-x",
        "",
        "A",
        "a_b",
        "../a",
        "a" * 32,
    ],
)
def test_reserved_or_invalid_name_is_refused_for_an_own_image(name: str) -> None:
    assert not is_own_name(name)
    assert is_own_name("a" * 31)
