"""The `path` boundary: hostile file names saved by `fumehood run --save`."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fumehood.client.files import SaveFailed, Saving
from support.attacks import Harm

pytestmark = [pytest.mark.row("E7")]

Prepare = Callable[[Path, Path], None]


@dataclass(frozen=True)
class PathAttack:
    """A file name, and a step that prepares the target directory."""

    name: str
    harm: Harm
    filename: str
    prepare: Prepare = lambda here, outside: None


def _link_to_file(here: Path, outside: Path) -> None:
    (here / "a").symlink_to(outside / "canary")


def _link_to_new_file(here: Path, outside: Path) -> None:
    (here / "a").symlink_to(outside / "new")


def _link_to_directory(here: Path, outside: Path) -> None:
    (here / "d").symlink_to(outside, target_is_directory=True)


def _deep_link(here: Path, outside: Path) -> None:
    (here / "d").mkdir()
    (here / "d" / "e").symlink_to(outside, target_is_directory=True)


def _fifo(here: Path, outside: Path) -> None:
    os.mkfifo(here / "a")


def _file_as_directory(here: Path, outside: Path) -> None:
    (here / "a").write_text("mine")


ATTACKS = [
    PathAttack("parent", Harm.ESCAPE, "../outside/new"),
    PathAttack("parent-in-the-middle", Harm.ESCAPE, "a/../../outside/new"),
    PathAttack("absolute", Harm.ESCAPE, "{outside}/new"),
    PathAttack("link-to-a-file", Harm.ESCAPE, "a", _link_to_file),
    PathAttack("dangling-link", Harm.ESCAPE, "a", _link_to_new_file),
    PathAttack("link-to-a-directory", Harm.ESCAPE, "d/new", _link_to_directory),
    PathAttack("link-further-down", Harm.ESCAPE, "d/e/new", _deep_link),
    PathAttack("fifo-that-nobody-reads", Harm.HOST_DOS, "a", _fifo),
    PathAttack("directory-over-a-file", Harm.INTEGRITY, "a/b", _file_as_directory),
    PathAttack("terminal-escape", Harm.INTEGRITY, "\x1b]0;owned\x07"),
    PathAttack("line-break", Harm.INTEGRITY, "a\nb"),
    PathAttack("empty", Harm.INTEGRITY, ""),
    PathAttack("the-directory-itself", Harm.INTEGRITY, "."),
    PathAttack("name-too-long", Harm.INTEGRITY, "n" * 256),
]
HARMLESS_WHERE_REPLACED = {"link-to-a-file", "dangling-link", "fifo-that-nobody-reads"}
"""Attacks that are harmless with --force: the link itself is replaced, not its target."""


def _no_download(url: str, write: Any) -> None:
    raise AssertionError("nothing is to be downloaded")


def _entry(filename: str) -> dict[str, Any]:
    return {"filename": filename, "content_base64": base64.b64encode(b"theirs").decode()}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_hostile_file_name_cannot_write_outside_the_directory(
    attack: PathAttack, force: bool, tmp_path: Path
) -> None:
    here, outside = tmp_path / "here", tmp_path / "outside"
    here.mkdir()
    outside.mkdir()
    (outside / "canary").write_text("mine")
    attack.prepare(here, outside)
    replaced = force and attack.name in HARMLESS_WHERE_REPLACED
    with Saving(here, force=force) as saving:
        entry = _entry(attack.filename.format(outside=outside))
        if replaced:
            saving.save(entry, _no_download)
            assert not (here / "a").is_symlink()
            assert (here / "a").read_text() == "theirs"
        else:
            with pytest.raises(SaveFailed):
                saving.save(entry, _no_download)
        # Twin: the nearest harmless name.
        saving.save(_entry("new/twin"), _no_download)
    assert (here / "new" / "twin").read_text() == "theirs"
    assert (outside / "canary").read_text() == "mine"
    assert os.listdir(outside) == ["canary"]
    assert sorted(os.listdir(tmp_path)) == ["here", "outside"]
    assert not [name for name in os.listdir(here) if name.startswith(".fumehood")]


def test_control_naive_write_follows_the_symlink(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "here").mkdir()
    _link_to_directory(tmp_path / "here", tmp_path / "outside")
    (tmp_path / "here" / "d" / "new").write_text("theirs")
    assert (tmp_path / "outside" / "new").read_text() == "theirs"


@pytest.mark.parametrize("force", [False, True])
def test_failed_download_leaves_no_file(tmp_path: Path, force: bool) -> None:
    def broken(url: str, write: Any) -> None:
        write(b"half")
        raise ValueError("gone")

    with Saving(tmp_path, force=force) as saving, pytest.raises(ValueError, match="gone"):
        saving.save({"filename": "a", "url": "/v1/blobs/x"}, broken)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "entry",
    [{"filename": "a"}, {"filename": "a", "content_base64": "!"}, {"filename": "a", "not_kept": "the disk is full"}],
    ids=str,
)  # fmt: skip
def test_file_entry_without_valid_content_is_not_created(
    tmp_path: Path, entry: dict[str, Any]
) -> None:
    with Saving(tmp_path, force=False) as saving, pytest.raises(SaveFailed):
        saving.save(entry, _no_download)
    assert os.listdir(tmp_path) == []
