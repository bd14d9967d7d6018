"""Diffs: what they say is true, and what they cost is bounded."""

from __future__ import annotations

import re
import shutil
import subprocess
from difflib import Match
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fumehood.executors import effect_diff
from fumehood.executors.effect_diff import MAX_DIFF_BYTES, text_of, unified

TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "d\u2028d\n", "x"]), max_size=30)


def applied(before: str, diff: str) -> str:
    """The text that a unified diff makes of another, checked line by line."""
    old = before.split("\n")
    old = [f"{line}\n" for line in old[:-1]] + ([old[-1]] if old[-1] else [])
    new: list[str] = []
    at = 0
    lines = re.findall(r"[^\n]*\n", diff)
    for number, marked in enumerate(lines):
        if marked.startswith("@@"):
            found = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n", marked)
            assert found is not None, marked
            begins = int(found[1]) - (found[2] != "0")
            new += old[at:begins]
            at = begins
            assert len(new) == int(found[3]) - (found[4] != "0")
            continue
        if marked.startswith("\\"):
            continue
        line = marked[1:]
        if number + 1 < len(lines) and lines[number + 1].startswith("\\"):
            line = line.removesuffix("\n")
        if marked[0] in " -":
            assert old[at] == line
            at += 1
        if marked[0] in " +":
            new.append(line)
    return "".join(new + old[at:])


@given(TEXTS.map("".join), TEXTS.map("".join))
@example("", "")
@example("", "a")
@example("a", "")
@example("a", "a\n")
@example("a\nb", "a\nb\nc")
def test_a_diff_makes_one_text_of_the_other(before: str, after: str) -> None:
    diff = unified(before, after)
    assert not diff.is_truncated
    assert applied(before, diff.text) == after
    assert (diff.text == "") is (before == after)


@given(TEXTS.map("".join), TEXTS.map("".join))
def test_texts_that_are_not_compared_line_by_line_give_a_true_diff_too(
    before: str, after: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effect_diff, "MAX_STEPS", 3)
        diff = unified(before, after)
    assert applied(before, diff.text) == after
    if diff.is_coarse:
        marks = re.sub(r"@@.*\n", "", diff.text).splitlines()
        changed = "".join(line[0] for line in marks if line[0] in "+-")
        assert re.fullmatch(r"-+\++", changed), "more than one part is shown as changed"


def test_whoever_applies_it_gets_what_will_be(tmp_path: Path) -> None:
    before = "".join(f"line {n}\n" for n in range(60))
    after = before.replace("line 7\n", "seven\n").replace("line 40\n", "") + "end"
    diff = unified(before, after).text
    assert _applied(before, diff) == after
    if shutil.which("patch") is not None:  # a reader that is not ours, where there is one
        (tmp_path / "f").write_text(before)
        command = ["patch", "--silent", "f"]
        subprocess.run(command, input=diff.encode(), cwd=tmp_path, check=True, timeout=60)
        assert (tmp_path / "f").read_text() == after


def _applied(before: str, diff: str) -> str:
    """The text that a unified diff makes of another, every line of which must be there."""
    old, new, at, mark = before.splitlines(keepends=True), [], 0, " "
    for line in diff.splitlines(keepends=True):
        if line.startswith("@@"):
            start, _, count = line.split(" ")[1][1:].partition(",")
            first = int(start) - (count != "0")
            new, at = new + old[at:first], first
        elif line.startswith("\\"):
            if mark != "-":
                new[-1] = new[-1].removesuffix("\n")
        elif line.startswith("+"):
            new.append(line[1:])
        else:
            assert old[at] == line[1:]
            new += [old[at]] if line.startswith(" ") else []
            at += 1
        mark = line[0]
    return "".join(new + old[at:])


def test_a_change_is_shown_with_three_lines_around_it() -> None:
    before = "".join(f"{n}\n" for n in range(20))
    assert unified(before, before.replace("10\n", "ten\n")).text == (
        "@@ -8,7 +8,7 @@\n 7\n 8\n 9\n-10\n+ten\n 11\n 12\n 13\n"
    )


def test_lines_of_a_file_never_look_like_a_head() -> None:
    hostile = "@@ -1 +1 @@\n--- a\n+++ b\n\\ No newline at end of file\n"
    heads = [line for line in unified("", hostile).text.splitlines() if not line.startswith("+")]
    assert heads == ["@@ -0,0 +1,4 @@"]


def test_a_long_diff_ends_at_its_bound_and_says_so() -> None:
    for after in ("é" * 100_000, "line\n" * 100_000):
        diff = unified("", after)
        assert diff.is_truncated
        assert MAX_DIFF_BYTES - 8 <= len(diff.text.encode()) <= MAX_DIFF_BYTES


class Slow(NamedTuple):
    """Two texts that are slow to compare for their size."""

    id: str
    before: list[str]
    after: list[str]


SLOW = [
    Slow("alternating", ["a", "b"] * 1900, ["b", "c", "a"] * 1300),
    Slow("one-line-again-and-again", ["a"] * 1000, [x for n in range(99) for x in ("a", str(n))]),
    Slow("one-line-and-thousands", ["a"] * 200_000, ["b", *["a"] * 199, "b"]),
    Slow(
        "rare-enough-to-be-compared",
        [x for n in range(1000) for x in (f"{n % 50}", f"a{n}")],
        [x for n in range(1000) for x in (f"{n % 50}", f"b{n}")],
    ),
    Slow("thousands-of-others", [f"a{n}" for n in range(9000)], [f"b{n}" for n in range(9000)]),
]  # fmt: skip


@pytest.mark.parametrize("slow", SLOW, ids=[slow.id for slow in SLOW])
def test_texts_made_to_be_slow_are_not_compared_line_by_line(slow: Slow) -> None:
    """Estimated, not timed: the estimate is proven below."""
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (slow.before, slow.after))
    assert unified(before, after).is_coarse


@given(TEXTS, TEXTS)
@example([f"{n % 9}\n" for n in range(300)], [f"{n % 7}\n" for n in range(300)])
@example(["a\n", "b\n"] * 150, ["a\n"] * 250)
def test_estimate_is_never_below_the_lines_looked_at(before: list[str], after: list[str]) -> None:
    looked_at = 0

    class Counted(effect_diff._Middle):
        def find_longest_match(
            self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
        ) -> Match:
            nonlocal looked_at
            looked_at += sum(1 + len(self.b2j.get(line, ())) for line in before[alo:ahi])
            return super().find_longest_match(alo, ahi, blo, bhi)

    matcher = Counted(None, before, after)
    matcher.get_matching_blocks()
    found = len(before) + sum(len(matcher.b2j.get(line, ())) for line in before)
    assert looked_at <= 2 * found + matcher.most_steps


def test_a_small_change_in_a_long_text_is_compared_line_by_line() -> None:
    before = "".join(f"line {n}\n" for n in range(20_000))
    after = before.replace("line 9000\n", "").replace("line 9900\n", "other\n")
    diff = unified(before, after)
    assert not diff.is_coarse
    assert [line for line in diff.text.splitlines() if line[0] in "+-"] == [
        "-line 9000", "-line 9900", "+other",
    ]  # fmt: skip


def test_bytes_that_nobody_reads_are_no_text() -> None:
    assert text_of(b"a\0b") is None
    assert text_of(b"\xff") is None
    assert text_of("é\r\n".encode()) == "é\r\n"
