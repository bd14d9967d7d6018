"""Changes of a project on a terminal: a diff cannot be imitated, and notes promise nothing wrong."""

from __future__ import annotations

import re
import sys

import pytest

from fumehood.answers import ProjectDiff, ProjectFile
from fumehood.projects.show import notes, write_diff


def test_content_cannot_imitate_lines_of_the_diff(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    ends = "\r\x0b\x0c\x1c\x85\u2028\u2029"
    ended = "".join(f"{end} as it was" for end in ends)
    write_diff(f"@@ -0,0 +1 @@\n+one{ended}\n+two\tthree\n")
    shown = re.sub(r"\x1b\[[0-9]*m", "", capsys.readouterr().out).split("\n")
    assert [line[:4] for line in shown] == ["@@ -", "+one", "+two", ""]
    assert shown[2] == "+two    three"  # a terminal does not move a tab at its right edge
    assert not set(ends) & set("".join(shown))


def test_notes_of_a_diff_promise_to_apply_all_only_without_a_conflict() -> None:
    conflict = ProjectFile(path="a", change="modified", bytes=1, conflict="is not as it was copied")
    well = conflict.model_copy(update={"conflict": None})
    found = ProjectDiff(diff="", files=(conflict, well), truncated=True, unseen=())
    told = list(notes(found))
    assert told[0] == (
        "a: CONFLICT: the host's file is not as it was copied, so no diff of it is shown"
    )
    assert "applied" not in "".join(told)
    assert "All of it is applied." in "".join(notes(found.model_copy(update={"files": (well,)})))
