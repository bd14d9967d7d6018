"""The housekeeper's walk, on ordinary directories: what it hands over, and that it empties all."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from fumehood.core.limits import (
    CONTAINER_FILES_OUT,
    CONTAINER_FILES_OUT_MB,
    CONTAINER_SIXTEENTHS,
    MB,
)
from fumehood.guest.container import workspace


def _kept(place: Path) -> tuple[dict[str, bytes], int]:
    """Keep house; the files that were told of, and how many were left out."""
    told: list[dict[str, Any]] = []
    left_out = workspace.keep_house(7, told.append, [str(place)])
    assert {frame["id"] for frame in told} <= {7}
    files: dict[str, bytes] = {}
    for frame in told:
        if frame["op"] == "file":
            files[frame["path"]] = b""
            newest = frame["path"]
        else:
            assert len(frame["data"]) <= 88 * 1024
            files[newest] += base64.b64decode(frame["data"])
    return files, left_out


@pytest.mark.row("S5")
def test_deep_and_unreadable_directories_are_removed(place: Path) -> None:
    here = os.open(place, os.O_RDONLY)
    for _ in range(400):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    Path(f"/proc/self/fd/{here}/deepest").write_text("x")
    os.close(here)
    (place / "closed").mkdir()
    (place / "closed" / "file").write_text("y")
    (place / "closed" / "file").chmod(0)
    (place / "closed").chmod(0)
    files, left_out = _kept(place)
    assert files == {"closed/file": b"y"}
    assert left_out == 1  # a directory deeper than the walk goes stands for what is in it
    assert os.listdir(place) == []


@pytest.mark.row("S5")
def test_names_used_by_the_cleaner_itself_are_removed(place: Path) -> None:
    for name in (".1", ".2", ".3"):
        (place / name / "inner" / ".1").mkdir(parents=True)
        (place / name / ".9").write_text("x")
    _kept(place)
    assert os.listdir(place) == []


@pytest.mark.row("E7")
def test_files_over_a_limit_are_counted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "MAX_FILES", 3)
    monkeypatch.setattr(workspace, "MAX_TOTAL_BYTES", 10)
    for name, size in {"0": 11, "1": 10, "2": 0, "3": 0, "4": 0, "5": 0}.items():
        (place / name).write_bytes(b"x" * size)
    files, left_out = _kept(place)
    assert (sorted(files), left_out) == (["1", "2", "3"], 3)


def test_workspace_bounds_match_those_of_the_host() -> None:
    assert workspace.MAX_FILES == CONTAINER_FILES_OUT
    assert workspace.MAX_TOTAL_BYTES == CONTAINER_FILES_OUT_MB * MB
    assert set(workspace.MOUNTS) == set(CONTAINER_SIXTEENTHS)


def test_mount_that_is_kept_counts_as_clean_and_is_not_emptied(tmp_path: Path) -> None:
    """As that of a session's disk, which has files of an earlier container."""
    kept, other = tmp_path / "kept", tmp_path / "other"
    for path in (kept, other):
        path.mkdir()
        (path / "file").write_text("x")
    mounts = workspace.Mounts(kept=[str(kept)])
    mounts._watched.close()
    mounts.paths, mounts.emptied = (str(kept), str(other)), (str(other),)
    mounts._count_inodes = False
    assert not mounts.are_clean()
    (other / "file").unlink()
    assert mounts.are_clean()
    told: list[Any] = []
    assert workspace.keep_house(1, told.append, mounts.emptied) == 0
    assert (told, (kept / "file").read_text()) == ([], "x")
