"""An approval and its preview in words: complete, and nothing can pass for something of ours."""

from __future__ import annotations

import io
import unicodedata
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fumehood.approvals.model import (
    Approval,
    ApprovalPage,
    ApprovalState,
    DecisionRecord,
    NewDecision,
)
from fumehood.cli import approvals
from fumehood.cli.approvals import (
    MARK,
    ago,
    approval_lines,
    preview_in_words,
    preview_lines,
    rule_lines,
)
from fumehood.core.errors import InvalidParams
from fumehood.core.escaping import visible
from support.approvals import NOW, approval, rule

pytestmark = pytest.mark.row("A6")

COLUMNS = 60


HASH = "5" * 64


def shown(one: Approval, columns: int = COLUMNS) -> list[str]:
    """The lines as a terminal gets them."""
    lines = [line.text for line in approval_lines(one, NOW, columns)]
    return "\n".join(lines).split("\n")


def arguments(**given: Any) -> list[str]:
    lines = shown(approval(arguments=given))
    return lines[lines.index("arguments") + 1 :]


def test_approval_shows_tool_caller_reason_approvers_and_expiry() -> None:
    one = approval(
        agent_id="clerk", session_id="sess_1", reason="it deletes", quorum=2,
        approvers=("alice", "bob"),
    )  # fmt: skip
    text = "\n".join(shown(one, 200))
    for fact in (
        one.id, "pending", "delete_files@1.0.0  (dangerous)", "uid:1000", "clerk", "sess_1",
        "default: dangerous tools wait for a human: it deletes", "2 approvals from alice, bob (0 so far)",
        "04:04:05 UTC (in 60 m)", one.call_id,
    ):  # fmt: skip
        assert fact in text


def test_directory_links_and_programs_of_a_project_are_named() -> None:
    link = {"kind": "link", "target": "b\u202e"}
    file = {"kind": "file", "mode": "0644", "size": 3, "sha256": HASH}
    lines = shown(
        approval(
            preview={
                "directory": "/home/a\nb",
                "added": [{"path": "go", **file, "mode": "0755"}, {"path": "note", **file}],
                "changed": [{"path": "l", "before": link, "after": file}],
            }
        ),
        200,
    )
    start = lines.index("what will change") + 1
    assert [line.strip() for line in lines[start : start + 5]] == [
        "in /home/a\\u{000a}b", "adds 2 files, 6 bytes; changes 1 file",
        "+ file, 3 bytes, can be executed: go", "+ file, 3 bytes: note",
        "~ file, 3 bytes, link → file, leads to b\\u{202e}: l",
    ]  # fmt: skip
    assert not any("also:" in line for line in lines)


def test_time_of_the_preview_is_shown_while_it_can_change() -> None:
    one = approval(preview={"removed": []}, previewed_at=NOW - timedelta(minutes=40))
    assert "previewed:   02:24:05 UTC (40 m ago)" in shown(one)
    done = one.model_copy(update={"state": ApprovalState.DONE})
    assert not any(line.startswith("previewed") for line in shown(done))


ENDED = approval(session_id="sess_1", state=ApprovalState.EXPIRED, changed=("session",))


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            approval(tool="external:Bash"),
            "Outside fumehood: no limits, no sandbox, network unknown.",
        ),
        (ENDED, "Its session ended"),
        (ENDED.model_copy(update={"changed": ("program",)}), "the program that wanted to send it"),
    ],
)
def test_approval_of_an_external_tool_or_an_ended_session_shows_a_warning(
    one: Approval, words: str
) -> None:
    lines = approval_lines(one, NOW, 200)
    assert [line.kind for line in lines if words in line.text] == ["warning"]
    assert not any(words in line for line in shown(approval(session_id="sess_1"), 200))


def test_argument_name_cannot_imitate_an_argument_with_a_value() -> None:
    lines = arguments(**{'path: "notes.txt"' + " " * COLUMNS: "everything", "x (9 characters)": 1})
    assert not any(line.startswith("  path:") for line in lines)
    assert lines[0].startswith('  "path: ')
    assert '  "x (9 characters)": 1' in lines
    assert arguments(**{"a-b.c_1": 1})[0] == "  a-b.c_1: 1"  # the twin


ATTACKS = {
    "moves the cursor": "\x1b[2J\x1b[1;1H",
    "sets the title": "\x1b]0;x\x07",
    "C1 sequence": "\x9b2J",
    "goes back": "safe\rdangerous",
    "rubs out": "rm\b\bls",
    "turns the reading": "a\u202etxt.exe",
    "isolates": "\u2066a\u2069",
    "marks": "\u200e\u200f\u061c",
    "zero width": "pass\u200bword\u200d\u2060\ufeff",
    "soft hyphen": "a\u00adb",
    "variation": "a\ufe0f\U000e0100",
    "tags": "a\U000e0041\U000e0042",
    "blank letters": "\u3164\u115f\uffa0\u2800",
    "other spaces": "a\u00a0b\u3000c\u2003d",
    "line separators": "a\u2028b\u2029c\x0b\x0c\x85d",
    "private": "\ue000\U000f0000",
    "unassigned": "\u0378",
    "joiner": "a\u034fb",
    "many accents": "a" + "\u0301" * 40,
    "accent on a space": " \u0336\u0336",
    "nul": "a\0b",
    "delete": "a\x7fb",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_control_and_invisible_characters_are_shown_escaped(attack: str) -> None:
    text = ATTACKS[attack]
    for value in (text, {"nested": [text]}, "lines\n" + text):
        lines = arguments(text=value, **{text: 1})
        for line in lines:
            assert line.isprintable(), line
        assert "\\u{" in "".join(lines)
        assert any("Escaped, because" in line for line in lines)
    assert visible(text) != text


HARMLESS = [
    "Grüße, Zoë",
    "naïve café",
    "数据",
    "हिन्दी",
    "שלום",
    "emoji 🎉",
    "a\\u{202e}b",
    "[red]x[/red]",
    unicodedata.normalize("NFD", "Việt Nam"),
]


@pytest.mark.parametrize("text", HARMLESS)
def test_other_scripts_and_markup_are_shown_unchanged(text: str) -> None:
    assert visible(text) == text
    assert not any("Escaped, because" in line for line in arguments(text="a\n" + text))


def test_every_argument_of_an_approval_is_shown_completely() -> None:
    long, code = "x" * 5000, "\n".join(f"line {number}" for number in range(500))
    lines = arguments(long=long, code=code, deep={"a": [{"b": "yy" * 250}]}, empty="", nothing=None)
    text = "".join(lines)
    assert text.count("x") == 5000
    assert all(f"{MARK}line {number}" in lines for number in range(500))
    assert text.count("y") == 500 + 1  # and that of "empty"
    assert '  empty: ""' in lines
    assert "  nothing: null" in lines


def test_folded_line_cannot_begin_like_one_of_ours() -> None:
    """Whatever is at a line's start is ours: a name, a mark, or the indent of a fact."""
    padded = "a" * (COLUMNS - 12) + "arguments" + " " * 300 + "decisions"
    one = approval(
        arguments={"text": padded, padded: padded, "code": f"a\n{padded}\narguments\n  text: 1"},
        reason=padded, agent_id="a" * 128,
    )  # fmt: skip
    lines = shown(one)
    ours = [line for line in lines if line and not line.startswith(" ")]
    heads = (
        "apr_",
        "tool:",
        "asked by:",
        "as agent:",
        "because:",
        "made:",
        "expires:",
        "version:",
        "call:",
    )
    assert [line for line in ours if not line.startswith(heads)] == ["arguments"]


def test_context_of_an_external_call_is_shown_without_a_promised_effect() -> None:
    preview = {"context": {"cwd": "/home/u\x1b"}}
    lines = shown(approval(preview=preview))
    assert lines[-5:-3] == ["context", '  cwd: "/home/u\\u{001b}"']
    assert "what will change" not in lines
    assert preview_in_words(preview) == ""


def test_decisions_before_an_edit_are_marked() -> None:
    word = DecisionRecord(
        at=NOW, approver="approver:alice", channel="control", decision="approve",
        action_digest="1" * 64, reason="fine\x1b", is_self_approval=True,
    )  # fmt: skip
    text = " ".join(shown(approval(state=ApprovalState.DONE, decisions=(word,)), 200))
    for part in ("approver:alice", "SELF-APPROVAL", "before an edit", "fine\\u{001b}"):
        assert part in text


def test_remembered_rule_shows_principal_arguments_and_duration() -> None:
    text = "\n".join(line.text for line in rule_lines(rule(uses_left=3), COLUMNS))
    for part in (
        "delete_files",
        "uid:1000",
        "sess_1",
        "3 more times",
        "if these arguments are equal",
        "a.txt",
    ):
        assert part in text


def test_rule_for_any_arguments_is_a_warning() -> None:
    found = rule_lines(rule(arguments={}, any_others=True), COLUMNS)
    assert found[-1].kind == "warning"
    assert rule_lines(rule(), COLUMNS)[-1].kind != "warning"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "now"), (5, "in 5 s"), (119, "in 119 s"), (120, "in 2 m"), (7200, "in 2 h"), (-9, "9 s ago"), (200_000, "in 2 d")],
)  # fmt: skip
def test_remaining_time_is_described_in_words(seconds: int, words: str) -> None:
    assert ago(NOW + timedelta(seconds=seconds), NOW) == words


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), JSON, max_size=3), st.integers(40, 200))
def test_lines_of_any_arguments_fit_and_are_printable(
    given_arguments: dict[str, Any], columns: int
) -> None:
    for line in shown(approval(arguments=given_arguments, rule="r"), columns):
        assert line.isprintable()
        assert cell_len(line) <= columns


def preview(**fields: Any) -> dict[str, Any]:
    """As the engine makes them: lists of everything, and counts."""
    made: dict[str, Any] = {
        "added": [], "changed": [], "removed": [], "missing": [], "kept": [], "truncated": False,
    } | fields  # fmt: skip
    if "counts" not in fields:
        made["counts"] = {name: len(made[name]) for name in ("added", "changed", "removed")}
        made["counts"]["removed_bytes"] = sum(entry.get("size", 0) for entry in made["removed"])
    return made


def previewed(columns: int = 100, **fields: Any) -> list[str]:
    return [line.text for line in preview_lines(preview(**fields), columns)]


GONE = {"path": "old.csv", "kind": "file", "mode": "0644", "size": 7, "links": 1, "sha256": HASH}


def test_preview_of_a_changed_file_shows_old_and_new_size_and_mode() -> None:
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


ODD = [
    {"path": "l", "kind": "link", "mode": "0777", "target": "/etc\x1b"},
    {"path": "p", "kind": "other", "mode": "0644", "special": "pipe"},
    {**GONE, "links": 3},
    {"path": "u", "kind": "file", "mode": "0000", "size": 1, "links": 1, "unread": True},
    {"path": "n\\xff", "path_base64": "bv8=", "kind": "directory", "mode": "0755"},
]
NEW = [
    {"path": "a", "kind": "directory", "mode": "0755"},
    {"path": "a/b", "kind": "file", "mode": "0644", "size": 2, "sha256": HASH,
     "diff": "@@ -0,0 +1 @@\n+x\n"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"removed": [GONE]}, ["  removes 1 file, 7 bytes", "  - file, 7 bytes: old.csv"]),
        (
            {"added": NEW},
            [
                "  adds 1 directory, 1 file, 2 bytes",
                "  + directory: a",
                "  + file, 2 bytes: a/b",
                f"{MARK}@@ -0,0 +1 @@",
                f"{MARK}+x",
            ],
        ),
        (
            {"removed": ODD},
            [
                "  removes 1 link, 1 pipe, 2 files, 1 directory, 8 bytes",
                "  - link: l",
                "      leads to: /etc\\u{001b}",
                "  - pipe: p",
                "  - file, 7 bytes, stays under 2 other names: old.csv",
                "  - file, 1 byte, cannot be read: u",
                "  - directory, its name is not UTF-8: n\\xff",
            ],
        ),
        (
            {
                "missing": ["b\x1b"],
                "kept": [{"path": "k", "why": "no right"}],
                "would_fail": "Not all.",
            },
            [
                "The call would fail: Not all.",
                "  changes nothing",
                "  ? missing: b\\u{001b}",
                "  ! kept, no right: k",
            ],
        ),
        (
            {
                "changed": [{"path": "m\x1b", "conflict": "is not as it was copied"}],
                "executed": [{"path": "m\x1b", "by": "make"}],
            },
            [
                "  changes 1 file; 1 executable by your tools",
                "  ! executable by your tools (make): m\\u{001b}",
                "  ~ in conflict: is not as it was copied: m\\u{001b}",
            ],
        ),
    ],
    ids=["removed", "added", "odd", "failing", "executed"],
)
def test_preview_shows_each_file_with_its_warnings(
    fields: dict[str, Any], lines: list[str]
) -> None:
    assert previewed(**fields) == lines


def test_tab_in_a_diff_is_shown_as_spaces_and_other_controls_stay_escaped() -> None:
    diff = "@@ -1 +1 @@\n-all:\ta\n+\t\techo\x0b\x1b[1m\n"
    lines = previewed(changed=[{"path": "Makefile", "diff": diff}])
    assert [line.removeprefix(MARK) for line in lines if line.startswith(MARK)] == [
        "@@ -1 +1 @@",
        "-all:   a",
        "+               echo\\u{000b}\\u{001b}[1m",
    ]


def test_preview_counts_all_files_of_a_partly_listed_deletion() -> None:
    counts = {"added": 0, "changed": 0, "removed": 3000, "removed_bytes": 12345}
    lines = previewed(removed=[GONE], counts=counts, truncated=True)
    assert lines[0] == "  removes 3,000 entries, 12,345 bytes"
    assert lines[-1] == "The list is incomplete."


@pytest.mark.parametrize("path", ["file, 0 bytes: x", "x\n  - file: y", "a\x1b[2K", "x" * 300])
def test_file_name_cannot_imitate_a_line_or_a_size(path: str) -> None:
    lines = previewed(removed=[{**GONE, "path": path}])
    assert lines[1].startswith("  - file, 7 bytes: ")
    assert all(line.startswith(MARK) for line in lines[2:])
    assert all(line.isprintable() for line in lines)


def test_preview_of_unknown_form_is_shown_whole() -> None:
    text = "\n".join(previewed(added=7, statements=["drop\x1b"], counts={"rows": 3}))
    for part in ('"added": 7', '"drop\\u{001b}"', '"rows": 3'):
        assert part in text
    text = "\n".join(previewed(removed=[{**GONE, "owner": "root\x1b"}]))
    assert '      also: {"owner": "root\\u{001b}"}' in text


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
def test_lines_of_any_preview_fit_and_are_printable(found: Any, columns: int) -> None:
    for line in preview_lines(found, columns):
        assert line.text.isprintable()
        assert cell_len(line.text) <= columns


# -- `fumehood approvals watch`: nothing that is open is left out --


class _Watched:
    """A client of an engine in which each change is made as the client waits for it."""

    def __init__(
        self, stored: dict[int, ApprovalState], *changes: dict[int, ApprovalState]
    ) -> None:
        self.approvals = self
        self._stored: dict[str, Approval] = {}
        self._changes = [*changes]
        self._change(stored)

    def _change(self, states: dict[int, ApprovalState]) -> None:
        for number, state in states.items():
            one = approval(number, state=state, created_at=NOW + timedelta(seconds=number))
            before = self._stored.get(one.id)
            version = 1 if before is None else before.version + 1
            self._stored[one.id] = one.model_copy(update={"version": version})

    def next_change(self, after: int) -> int:
        if after >= 0:
            if not self._changes:
                raise KeyboardInterrupt
            self._change(self._changes.pop(0))
        return after + 1

    def show(self, approval_id: str) -> Approval:
        return self._stored[approval_id]

    def list(
        self, state: str | None = None, *, limit: int, cursor: str | None = None
    ) -> ApprovalPage:
        stored = sorted(self._stored.values(), key=lambda one: one.id, reverse=True)
        rest = [
            one for one in stored
            if state in (None, one.state) and (cursor is None or one.id < cursor)
        ]  # fmt: skip
        has_more = len(rest) > limit
        return ApprovalPage(
            items=tuple(rest[:limit]), has_more=has_more, total_count=None,
            next_cursor=rest[limit - 1].id if has_more else None,
        )  # fmt: skip


def test_watch_begins_with_all_open_approvals_and_follows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(approvals, "PAGE", 2)
    pending, approved, started, done, denied = map(
        ApprovalState, ("pending", "approved", "started", "done", "denied")
    )
    open_ones = dict.fromkeys((1, 2, 3), pending) | {4: approved, 5: started}
    client: Any = _Watched(
        open_ones | dict.fromkeys(range(6, 10), done),
        {1: denied},
        {4: started, 5: done, 10: pending},
        {4: done, 6: denied},
    )
    followed = approvals._followed(client)
    assert [(int(one.id[4:], 16), one.state.value) for one in islice(followed, 10)] == [
        (1, "pending"), (2, "pending"), (3, "pending"), (4, "approved"), (5, "started"),
        (1, "denied"),
        (4, "started"), (5, "done"), (10, "pending"),
        (4, "done"),
    ]  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        next(followed)


# -- `fumehood approvals approve --edit`: what is asked about is what would be done --


EDIT = NewDecision(decision="approve", arguments={"text": "better"})


class _Control:
    """A client whose engine coerces, adds a default and computes what will change."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.approvals = self
        self._refusal = refusal

    def preview_edit(self, approval_id: str, arguments: dict[str, Any]) -> Approval:
        if self._refusal is not None:
            raise self._refusal
        return approval(
            arguments={**arguments, "times": 7},
            preview={"added": ["new.txt"]},
            action_digest="sha256:edited",
            approvers=("carol",),
        )


def _asked(monkeypatch: pytest.MonkeyPatch, word: str, **control: Any) -> NewDecision:
    monkeypatch.setattr("sys.stdin", io.StringIO(word + "\n"))
    client: Any = _Control(**control)
    return approvals._ask(client, [approval()], EDIT)


@pytest.mark.row("A3")
def test_edited_call_is_shown_and_approved_as_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = _asked(monkeypatch, "yes")
    assert decision == EDIT.model_copy(update={"action_digest": "sha256:edited"})
    shown = capsys.readouterr().err.partition("AS EDITED")[2]
    for part in ("better", "times: 7", "what will change", "new.txt", "carol"):
        assert part in shown


@pytest.mark.row("A3")
def test_impossible_wishes_are_refused_before_asking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidParams):
        _asked(monkeypatch, "yes", refusal=InvalidParams("No.", fields=["arguments.text"]))
    assert "Type yes" not in capsys.readouterr().err


@pytest.mark.row("A3")
def test_confirmation_other_than_yes_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.Exit):
        _asked(monkeypatch, "y")
