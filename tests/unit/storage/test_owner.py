"""The state directory's own name: stable, private, and never shared with a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fumehood.storage.directory import owner_id


def test_name_is_the_same_after_a_restart(tmp_path: Path) -> None:
    assert owner_id(tmp_path) == owner_id(tmp_path)
    assert len(owner_id(tmp_path)) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]
    assert (tmp_path / "owner").stat().st_mode & 0o777 == 0o600


def test_other_directories_and_copies_have_other_names(tmp_path: Path) -> None:
    first, second, copy = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    first.mkdir()
    second.mkdir()
    name = owner_id(first)
    shutil.copytree(first, copy)
    assert len({name, owner_id(second), owner_id(copy)}) == 3


def test_damaged_name_is_an_error_and_no_other_name(tmp_path: Path) -> None:
    (tmp_path / "owner").write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        owner_id(tmp_path)


def test_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"0" * 16)
    (tmp_path / "owner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"."):
        owner_id(tmp_path)


def test_draft_that_a_crash_left_behind_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "owner.new").write_bytes(b"half")
    assert len(owner_id(tmp_path)) == 32
