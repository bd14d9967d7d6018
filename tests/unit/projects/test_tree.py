"""A directory of the host is read as untrusted: a repository comes from anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fumehood.core.errors import InvalidParams
from fumehood.projects.tree import ProjectDirectory


def test_rules_that_are_directories_leave_no_descriptor_open(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}/.gitignore").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with ProjectDirectory(tmp_path) as project:
        found, rules = project.look(everything=False)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(found) == 10
    assert rules == {}


def test_rules_too_large_to_read_let_nothing_in(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("secret\n" + "#" * (1 << 20))
    (tmp_path / "secret").write_text("left out\n")
    with ProjectDirectory(tmp_path) as project:
        with pytest.raises(InvalidParams, match="too many rules"):
            project.look(everything=False)
        assert len(project.look(everything=True)[0]) == 2
