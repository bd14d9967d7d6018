"""What will change, in words: nothing is left out, and no name can pass for something of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fumehood.cli.marked_lines import MARK
from fumehood.cli.preview_view import preview_in_words, preview_lines

pytestmark = pytest.mark.row("A6")

HASH = "5" * 64


def preview(**fields: Any) -> dict[str, Any]:
    """As the engine makes them: lists of everything, and counts."""
    made: dict[str, Any] = {
        "added": [], "changed": [], "removed": [], "missing": [], "kept": [], "truncated": False,
    } | fields  # fmt: skip
    if "counts" not in fields:
        made["counts"] = {name: len(made[name]) for name in ("added", "changed", "removed")}
        made["counts"]["removed_bytes"] = sum(entry.get("size", 0) for entry in made["removed"])
    return made


def shown(columns: int = 100, **fields: Any) -> list[str]:
    return [line.text for line in preview_lines(preview(**fields), columns)]


GONE = {"path": "old.csv", "kind": "file", "mode": "0644", "size": 7, "links": 1, "sha256": HASH}


def test_deletion_of_a_file_is_two_lines() -> None:
    assert shown(removed=[GONE]) == ["  removes 1 file, 7 bytes", "  - file, 7 bytes: old.csv"]


def test_new_file_has_its_directories_and_its_diff_on_lines_of_its_own() -> None:
    added = [
        {"path": "a", "kind": "directory", "mode": "0755"},
        {"path": "a/b", "kind": "file", "mode": "0644", "size": 2, "sha256": HASH,
         "diff": "@@ -0,0 +1 @@\n+x\n"},
    ]  # fmt: skip
    assert shown(added=added) == [
        "  adds 1 directory, 1 file, 2 bytes",
        "  + directory: a",
        "  + file, 2 bytes: a/b",
        f"{MARK}@@ -0,0 +1 @@",
        f"{MARK}+x",
    ]


def test_change_says_what_becomes_of_size_and_mode() -> None:
    changed = {
        "path": "run.sh",
        "before": {"mode": "0755", "size": 1500, "sha256": HASH},
        "after": {"mode": "0644", "size": 20, "sha256": HASH},
        "other_names": 1, "diff": "@@ -1 +1 @@\n-old\u202e\n+new\n", "diff_truncated": True,
        "diff_coarse": True,
    }  # fmt: skip
    lines = list(preview_lines(preview(changed=[changed]), 100))
    assert [(line.text, line.kind) for line in lines] == [
        ("  changes 1 file", "head"),
        ("  ~ file, 1,500 → 20 bytes, mode 0755 → 0644, also changed under 1 other name: run.sh",
         "plain"),
        (f"{MARK}@@ -1 +1 @@", "theirs"),
        (f"{MARK}-old\\u{{202e}}", "removed"),
        (f"{MARK}+new", "added"),
        ("      Too large to compare line by line: removed and added as a whole.", "warning"),
        ("      There is more of this diff than is shown.", "warning"),
    ]  # fmt: skip


def test_what_an_approver_must_not_overlook_stands_with_its_file() -> None:
    removed = [
        {"path": "l", "kind": "link", "mode": "0777", "target": "/etc\x1b"},
        {"path": "p", "kind": "other", "mode": "0644", "special": "pipe"},
        {**GONE, "links": 3},
        {"path": "u", "kind": "file", "mode": "0000", "size": 1, "links": 1, "unread": True},
        {"path": "n\\xff", "path_base64": "bv8=", "kind": "directory", "mode": "0755"},
    ]
    assert shown(removed=removed) == [
        "  removes 1 link, 1 pipe, 2 files, 1 directory, 8 bytes",
        "  - link: l",
        "      leads to: /etc\\u{001b}",
        "  - pipe: p",
        "  - file, 7 bytes, stays under 2 other names: old.csv",
        "  - file, 1 byte, cannot be read: u",
        "  - directory, its name is no UTF-8: n\\xff",
    ]


def test_deletion_that_is_not_listed_whole_is_counted_whole() -> None:
    counts = {"added": 0, "changed": 0, "removed": 3000, "removed_bytes": 12345}
    lines = shown(removed=[GONE], counts=counts, truncated=True)
    assert lines[0] == "  removes 3,000 entries, 12,345 bytes"
    assert lines[-1] == "There is more than could be listed."


def test_missing_and_kept_are_said_only_where_there_are_some() -> None:
    lines = shown(
        missing=["b\x1b"], kept=[{"path": "k", "why": "no right"}], would_fail="Not all of it."
    )
    assert lines == [
        "The call would fail: Not all of it.",
        "  changes nothing",
        "  ? is not there: b\\u{001b}",
        "  ! stays, no right: k",
    ]
    assert "missing" not in "\n".join(shown(removed=[GONE]))


@pytest.mark.parametrize("path", ["file, 0 bytes: x", "x\n  - file: y", "a\x1b[2K", "x" * 300])
def test_no_name_passes_for_a_line_or_a_size_of_ours(path: str) -> None:
    lines = shown(removed=[{**GONE, "path": path}])
    assert lines[1].startswith("  - file, 7 bytes: ")
    assert all(line.startswith(MARK) for line in lines[2:])
    assert all(line.isprintable() for line in lines)


def test_form_that_is_not_known_is_shown_whole() -> None:
    text = "\n".join(shown(added=7, statements=["drop\x1b"], counts={"rows": 3}))
    for part in ('"added": 7', '"drop\\u{001b}"', '"rows": 3'):
        assert part in text
    text = "\n".join(shown(removed=[{**GONE, "owner": "root\x1b"}]))
    assert '      besides: {"owner": "root\\u{001b}"}' in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "changes nothing"),
        ({"removed": [GONE, GONE]}, "removes 2 files, 14 bytes"),
        ({"removed": [{"path": "d", "kind": "directory"}]}, "removes 1 directory"),
        ({"added": [{**GONE, "size": 0}], "removed": [GONE]},
         "adds 1 file, 0 bytes; removes 1 file, 7 bytes"),
    ],
)  # fmt: skip
def test_amount_is_said_in_words(fields: Any, words: str) -> None:
    assert preview_in_words(preview(**fields)) == words


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.dictionaries(
    st.sampled_from(["path", "kind", "size", "before", "after", "diff", "target", "links", "x"]),
    JSON,
)
PREVIEW = st.dictionaries(
    st.sampled_from(
        ["added", "changed", "removed", "missing", "kept", "counts", "would_fail", "x"]
    ),
    JSON | st.lists(ENTRY, max_size=3),
)


@given(PREVIEW, st.integers(40, 200))
def test_whatever_it_holds_lines_fit_and_are_printable(found: Any, columns: int) -> None:
    for line in preview_lines(found, columns):
        assert line.text.isprintable()
        assert cell_len(line.text) <= columns
