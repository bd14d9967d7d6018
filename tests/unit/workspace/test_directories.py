"""Directories as archives: what a client sends of one, and what it makes of what it gets."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from fumehood.workspace.directories import new_directory, packed

pytestmark = pytest.mark.row("S6", "S11")


def made(target: Path, *members: tuple[str, bytes]) -> None:
    with new_directory(target) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc"
            archive.addfile(member, io.BytesIO())


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/../out"])
def test_archive_that_leads_out_of_the_directory_makes_nothing(tmp_path: Path, name: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(tarfile.TarError):
        made(place / "new", ("first", tarfile.REGTYPE), (name, tarfile.REGTYPE))
    assert (os.listdir(place), os.listdir(tmp_path)) == ([], ["place"])


def test_links_and_devices_of_an_archive_are_left_out(tmp_path: Path) -> None:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.BLKTYPE)
    made(tmp_path / "new", ("file", tarfile.REGTYPE), *((f"no{n}", k) for n, k in enumerate(kinds)))
    assert os.listdir(tmp_path / "new") == ["file"]


def test_directory_that_is_not_empty_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    made(target, ("file", tarfile.REGTYPE))
    with pytest.raises(FileExistsError):
        made(target, ("other", tarfile.REGTYPE))
    assert os.listdir(target) == ["file"]
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        made(tmp_path / "link", ("other", tarfile.REGTYPE))


def test_pipes_and_links_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/file").write_text("x")
    os.link(tmp_path / "d/file", tmp_path / "same")
    (tmp_path / "link").symlink_to("d")
    os.mkfifo(tmp_path / "pipe")
    with packed(tmp_path) as file, tarfile.open(fileobj=file) as archive:
        members = {one.name: (one.isfile(), one.size) for one in archive}
    assert members == {"d": (False, 0), "d/file": (True, 1), "same": (True, 1)}
