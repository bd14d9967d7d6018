"""A diff on a terminal shows what a session has written, and nothing that it only imitates."""

from __future__ import annotations

import re
import sys

import pytest

from fumehood.cli.show import write_diff


def test_content_cannot_imitate_lines_of_the_diff(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    ends = "\r\x0b\x0c\x1c\x85\u2028\u2029"
    write_diff("@@ -0,0 +1 @@\n+one" + "".join(f"{end} as it was" for end in ends) + "\n+two\n")
    shown = re.sub(r"\x1b\[[0-9]*m", "", capsys.readouterr().out).split("\n")
    assert [line[:4] for line in shown] == ["@@ -", "+one", "+two", ""]
    assert not set(ends) & set("".join(shown))
