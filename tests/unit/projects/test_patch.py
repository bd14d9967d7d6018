"""The diffs of a project are bounded as a whole, whatever its session has written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fumehood.projects import changes, service
from fumehood.projects.changes import Baseline, Changes, patch_of, shown
from fumehood.projects.tree import Entry, ProjectDirectory
from fumehood.projects.writing import Change

OLD = "".join(f"{number % 3}\n" for number in range(100)).encode()
NEW = "".join(f"{number % 2}\n" for number in range(100)).encode()


def entry(content: bytes) -> Entry:
    return Entry(len(content), False, hashlib.sha256(content).hexdigest())


CHANGES = [Change(f"{number}.txt", entry(OLD), entry(NEW)) for number in range(20)]


def test_diffs_of_many_files_take_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = ({one.path: content for one in CHANGES} for content in (OLD, NEW))
    whole, is_cut = patch_of(CHANGES, old, new)
    assert not is_cut
    monkeypatch.setattr(changes, "MAX_ALL_STEPS", 1_000_000)

    told = shown(CHANGES, old, new, "/project")["changed"]
    coarse, is_cut = patch_of(CHANGES, old, new)

    marks = [one.get("diff_coarse", False) for one in told]
    assert marks == sorted(marks)
    assert {True, False} == set(marks)
    assert not is_cut
    assert len(coarse) > len(whole)


def test_old_contents_of_many_files_take_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in CHANGES:
        (tmp_path / one.path).write_bytes(OLD)
    monkeypatch.setattr(service, "SHOWN_BYTES", 5 * len(OLD))
    with ProjectDirectory(tmp_path) as project:
        found = Changes(CHANGES, frozenset(), frozenset(), {}, {}, [])
        judged = service._judge(project, found, Baseline({}, {}, False))
    assert len(judged.changes) == len(CHANGES)
    assert not judged.conflicts
    assert len(judged.old) == 5
