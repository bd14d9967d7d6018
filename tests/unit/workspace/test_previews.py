"""Previews of changes to files, and their diffs."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from difflib import Match, SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.errors import (
    EndedBy,
    EngineError,
    InternalError,
)
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors import effects
from fumehood.executors.effects import Effect, unified
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks
from fumehood.workspace.executors import run_workspace
from fumehood.workspace.previews import effect_of
from support.fake_files import FakeFiles

pytestmark = pytest.mark.anyio

LIMITS = Limits(10, 10, 256, 1 << 20)
DOMAIN = TrustDomain("ann", None, "sess_1")
CURSORS = Cursors(b"k" * 32)


def tool(executor: str) -> ToolDefinition:
    return ToolDefinition(name="t", description="d", type="BUILTIN", executor=executor)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> FakeFiles:
    return FakeFiles(tmp_path, room=1 << 30)


async def effect(action: str, lease: Any, **arguments: Any) -> Effect:
    found = await effect_of(tool(f"workspace:{action}"), arguments, LIMITS, lease)
    assert found is not None
    return found


async def shown(action: str, lease: Any, **arguments: Any) -> Any:
    found = (await effect(action, lease, **arguments)).shown
    assert strict_json.loads(strict_json.dumps(found)) == found
    return found


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.row("A2")
async def test_preview_of_a_new_file_includes_its_new_directories(
    files: FakeFiles,
) -> None:
    (files.root / "a").mkdir()
    found = await shown("write", files, path="a/b/c/f", content="one\ntwo")
    assert found == {
        "added": [
            {"path": "a/b", "kind": "directory", "mode": "0755"},
            {"path": "a/b/c", "kind": "directory", "mode": "0755"},
            {
                "path": "a/b/c/f", "kind": "file", "mode": "0644", "size": 7,
                "sha256": sha256(b"one\ntwo"),
                "diff": "@@ -0,0 +1,2 @@\n+one\n+two\n\\ No newline at end of file\n",
            },
        ],
        "changed": [],
        "removed": [],
        "missing": [],
        "kept": [],
        "counts": {"added": 3, "changed": 0, "removed": 0, "removed_bytes": 0},
        "truncated": False,
    }  # fmt: skip
    assert os.listdir(files.root / "a") == []


@pytest.mark.row("A2")
async def test_preview_of_binary_or_long_content_has_sizes_and_hashes(files: FakeFiles) -> None:
    (files.root / "f").write_bytes(b"\xff")
    encoded = base64.b64encode(b"a\0").decode()
    for content in ({"content": "text"}, {"content_base64": encoded}):
        (changed,) = (await shown("write", files, path="f", mode="replace", **content))["changed"]
        assert changed["binary"] is True
        assert "diff" not in changed
    long = "x" * (MAX_READ_BYTES + 1)
    (changed,) = (await shown("write", files, path="f", mode="replace", content=long))["changed"]
    assert (changed["too_large"], "diff" in changed) == (True, False)
    (added,) = (await shown("write", files, path="new", content=long))["added"]
    assert (added["too_large"], added["sha256"]) == (True, sha256(long.encode()))
    (added,) = (await shown("write", files, path="new", content="line\n" * 9000))["added"]
    assert added["diff_truncated"] is True
    assert len(added["diff"].encode()) <= 16 * 1024


@pytest.mark.row("A2")
@pytest.mark.parametrize(
    ("mode", "path", "words"),
    [
        ("create", "f", "already exists"),
        ("replace", "d", "Not a regular file"),
        ("append", "l", "symbolic link"),
        ("create", "l/new", "symbolic link"),
        ("create", "f/new", "no such file or directory"),
    ],
)
async def test_preview_of_a_failing_write_reports_the_failure(
    files: FakeFiles, mode: str, path: str, words: str
) -> None:
    (files.root / "f").write_text("")
    (files.root / "d").mkdir()
    (files.root / "l").symlink_to("/etc")
    found = await shown("write", files, path=path, content="x", mode=mode)
    assert words in found["would_fail"]
    assert (found["added"], found["changed"]) == ([], [])


@pytest.mark.row("A2")
async def test_preview_of_a_deletion_lists_removed_missing_and_kept_paths(
    files: FakeFiles,
) -> None:
    (files.root / "d/e").mkdir(parents=True)
    (files.root / "d/e/f").write_text("text")
    (files.root / "d/l").symlink_to("/etc/passwd")
    (files.root / "full").mkdir()
    (files.root / "full/x").write_text("")
    found = await shown("delete", files, paths=["d", "no", "d"], recursive=True)
    assert [(one["path"], one["kind"]) for one in found["removed"]] == [
        ("d", "directory"), ("d/e", "directory"), ("d/e/f", "file"), ("d/l", "link"),
    ]  # fmt: skip
    assert found["removed"][2]["sha256"] == sha256(b"text")
    assert found["removed"][3]["target"] == "/etc/passwd"
    assert found["missing"] == ["no"]
    assert found["counts"]["removed"] == 4
    assert found["counts"]["removed_bytes"] == 4
    assert "would_fail" not in found
    found = await shown("delete", files, paths=["full", "d/l"])
    assert [one["path"] for one in found["removed"]] == ["d/l"]
    assert found["kept"][0]["path"] == "full"
    assert "not empty" in found["kept"][0]["why"]
    assert "would_fail" in found


@pytest.mark.row("A2")
async def test_preview_hash_identifies_the_affected_files(files: FakeFiles) -> None:
    for name in "ab":
        (files.root / name).write_text("same")
    first = await effect("delete", files, paths=["a"])
    assert await effect("delete", files, paths=["a"]) == first
    for other in (
        await effect("delete", files, paths=["b"]),
        await effect("delete", files, paths=["a", "b"]),
        await effect("write", files, path="a", content="x", mode="replace"),
    ):
        assert other.effect != first.effect
    assert (await effect("delete", files, paths=["b"])).base != first.base
    contents = [
        (await effect("write", files, path="new", content=content)).effect for content in ("1", "2")
    ]
    assert len(set(contents)) == 2


@pytest.mark.row("A2")
async def test_only_file_changing_tools_have_a_preview(files: FakeFiles) -> None:
    for executor in ("workspace:read", "workspace:list", "code:python"):
        assert await effect_of(tool(executor), {"path": "f"}, LIMITS, files) is None
    with pytest.raises(InternalError):
        await run_workspace(
            tool("workspace:read"), {"path": "f"}, LIMITS, files, DOMAIN, CURSORS, expected="0" * 64
        )
    assert files.requests == []


CONTENTS = st.one_of(st.text(max_size=40).filter(lambda text: "\0" not in text), st.just("a\nb\n"))


@pytest.mark.row("A2")
async def test_preview_in_the_how_to_matches_a_real_one(files: FakeFiles) -> None:
    page = Path(__file__).parents[3] / "docs/howto/see-what-will-change.md"
    call, preview = map(
        json.loads, re.findall(r"^```json\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    )
    (files.root / "prices.csv").write_text("apple,3\nplum,4\n")
    found = await shown("write", files, **call["arguments"])
    for one in (found["changed"][0]["before"], found["changed"][0]["after"]):
        one["sha256"] = f"{one['sha256'][:12]}…"
    assert preview == found


# -- a guest that lies ---------------------------------------------------------------------


class Lies:
    """The program's own answers, changed on the way. `lie` gets the request and the answer."""

    queue_ms = 0.0

    def __init__(self, files: FakeFiles, lie: Callable[[JsonObject, Any], Any]) -> None:
        self._files = files
        self._lie = lie

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        answer = copy.deepcopy(self._files.answer(arguments))
        return RunEnding(EndedBy.OK, "session", result=self._lie(arguments, answer) or answer)


@dataclass(frozen=True)
class Lie:
    """One thing that a guest says which is not so."""

    name: str
    tell: Callable[[Any], Any]

    def __str__(self) -> str:
        return self.name


def entry(answer: Any, path: str) -> Any:
    return next(one for one in answer["entries"] if one["path"] == path)


LIES = [
    Lie("no-hash", lambda answer: answer.update(base="")),
    Lie("a-field-more", lambda answer: entry(answer, "d/f").update(note="trust me")),
    Lie("a-mode-that-is-none", lambda answer: entry(answer, "d/f").update(mode=1 << 20)),
    Lie("no-outcome", lambda answer: answer["faults"].clear()),
    Lie("an-outcome-more", lambda answer: answer["faults"].append(None)),
    Lie("an-unknown-fault", lambda answer: answer.update(faults=["sorry"])),
    Lie("too-many-entries", lambda answer: answer.update(entries=answer["entries"] * 600)),
    Lie("no-survey", lambda answer: {"result": "fine"}),
    Lie("a-text", lambda answer: answer.update(entries="none")),
]


@pytest.mark.row("A2")
@pytest.mark.parametrize("lie", LIES, ids=str)
async def test_malformed_preview_of_a_guest_is_rejected(files: FakeFiles, lie: Lie) -> None:
    (files.root / "d").mkdir()
    (files.root / "d/f").write_text("text")

    def tell(request: JsonObject, answer: Any) -> Any:
        other = lie.tell(answer)
        return other if isinstance(other, dict) else None

    with pytest.raises(EngineError) as caught:
        await effect("delete", Lies(files, tell), paths=["d"], recursive=True)
    assert caught.value.code == "SANDBOX_UNAVAILABLE"
    assert caught.value.may_retry is False
    truth = Lies(files, lambda request, answer: None)
    assert await effect("delete", truth, paths=["d"], recursive=True)  # the twin


@pytest.mark.row("A2")
@pytest.mark.parametrize(
    "lie",
    [
        Lie("another-content", lambda answer: answer.update(content_base64="eHh4")),
        Lie("less-of-it", lambda answer: answer.update(content_base64="b24=", size=2)),
        Lie("another-end", lambda answer: answer["appended"].update(sha256="0" * 64)),
        Lie("another-length", lambda answer: answer["appended"].update(size=99)),
        Lie("no-end", lambda answer: answer.update(appended=None)),
    ],
    ids=str,
)
async def test_preview_with_false_file_content_is_rejected(files: FakeFiles, lie: Lie) -> None:
    (files.root / "f").write_text("one")

    def tell(request: JsonObject, answer: Any) -> None:
        is_of_reading = request["do"] == "read"
        if is_of_reading is (lie.name in ("another-content", "less-of-it")):
            lie.tell(answer)

    arguments = {"path": "f", "content": "two", "mode": "append"}
    with pytest.raises(EngineError) as caught:
        await effect("write", Lies(files, tell), **arguments)
    assert caught.value.code == "SANDBOX_UNAVAILABLE"
    assert await effect("write", files, **arguments)  # the twin


# -- Diffs ---------------------------------------------------------------------------------

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
def test_applying_a_diff_gives_the_new_text(before: str, after: str) -> None:
    diff = unified(before, after)
    assert not diff.is_truncated
    assert applied(before, diff.text) == after
    assert (diff.text == "") is (before == after)


@given(TEXTS.map("".join), TEXTS.map("".join), st.integers(0, 3000))
@example("a\nb\nc\nd\n", "x\nb\nc\ny\n", 1500)
def test_coarse_diff_is_correct(before: str, after: str, max_steps: int) -> None:
    diff = unified(before, after, max_steps=max_steps)
    assert applied(before, diff.text) == after
    assert diff.steps <= max_steps


def test_few_changes_far_from_each_other_are_shown_exactly() -> None:
    """All between them was shown as removed, up to the limit, and nothing as added."""
    before = [f"line {n}" for n in range(5000)]
    after = ["first", *before[1:2500], "more", *before[2500:4999], "last"]
    diff = unified(*("".join(f"{line}\n" for line in lines) for lines in (before, after)))
    assert (diff.is_coarse, diff.is_truncated) == (False, False)
    assert [line for line in diff.text.splitlines() if line[0] in "+-"] == [
        "-line 0", "+first", "+more", "-line 4999", "+last",
    ]  # fmt: skip
    assert diff.text.count("@@ -") == 3


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
def test_adversarial_texts_get_a_coarse_diff(slow: Slow) -> None:
    """Estimated, not timed: the estimate is proven below."""
    before, after = ("".join(f"{line}\n" for line in lines) for lines in (slow.before, slow.after))
    assert unified(before, after).is_coarse


@given(TEXTS, TEXTS)
@example([f"{n % 9}\n" for n in range(300)], [f"{n % 7}\n" for n in range(300)])
@example(["a\n", "b\n"] * 150, ["a\n"] * 250)
def test_diff_cost_estimate_is_an_upper_bound(before: list[str], after: list[str]) -> None:
    looked_at = 0

    class Counted(SequenceMatcher[str]):
        def find_longest_match(
            self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
        ) -> Match:
            nonlocal looked_at
            looked_at += sum(1 + len(self.b2j.get(line, ())) for line in before[alo:ahi])
            return super().find_longest_match(alo, ahi, blo, bhi)

    matcher = Counted(None, before, after)
    matcher.get_matching_blocks()
    found = len(before) + sum(len(matcher.b2j.get(line, ())) for line in before)
    assert looked_at <= 2 * found + effects.most_steps(matcher)


def test_small_change_in_a_long_text_gets_an_exact_diff() -> None:
    before = "".join(f"line {n}\n" for n in range(20_000))
    after = before.replace("line 9000\n", "").replace("line 9900\n", "other\n")
    diff = unified(before, after)
    assert not diff.is_coarse
    assert [line for line in diff.text.splitlines() if line[0] in "+-"] == [
        "-line 9000", "-line 9900", "+other",
    ]  # fmt: skip


def numbered(first: int, last: int, text: str = "line") -> list[str]:
    return [
        f"{text} {number} of a text that is too long to be shown" for number in range(first, last)
    ]


CUT = {
    "one-line-behind-many": (numbered(0, 5000), ["evil"], "-line 0 of", "+evil\n"),
    "many-lines-behind-one": (["good"], numbered(0, 5000), "-good\n", "+line 0 of"),
    "long-lines": (["a" * 100_000], ["b" * 100_000], "-aaaa", "+bbbb"),
    "hunk-behind-a-long-one": (
        [*numbered(0, 900), "good"], [*numbered(0, 10), "evil"], "-line 10 of", "+evil\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_attack_cut_diff_shows_removed_and_added_lines(name: str) -> None:
    """Twin: a diff that fits is whole, above."""
    before, after, removed, added = CUT[name]
    diff = unified(*("".join(f"{line}\n" for line in lines) for lines in (before, after)))
    assert diff.is_truncated
    assert len(diff.text.encode()) <= effects.MAX_DIFF_BYTES
    assert removed in diff.text
    assert added in diff.text
    shown = Counter(line[0] for line in re.sub(r"@@.*\n", "", diff.text).splitlines())
    left_out = dict(re.findall(r"\\ ([\d,]+) more (removed|added) line", diff.text)[::-1])
    told = {kind: int(count.replace(",", "")) for count, kind in left_out.items()}
    if name != "long-lines":
        assert shown["-"] + told.get("removed", 0) >= len(set(before) - set(after))
        assert shown["+"] + told.get("added", 0) >= len(set(after) - set(before))
    assert told
