"""What an approver reads: all of it, and nothing that passes for something else."""

from __future__ import annotations

import unicodedata
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fumehood.approvals.model import Approval, ApprovalState, DecisionRecord
from fumehood.cli.approval_view import ago, approval_lines, one_line, rule_lines
from fumehood.cli.escaping import visible
from fumehood.cli.marked_lines import MARK
from support.approvals import NOW, approval, rule

pytestmark = pytest.mark.row("A6")

COLUMNS = 60


def shown(one: Approval, columns: int = COLUMNS) -> list[str]:
    """The lines as a terminal gets them."""
    lines = [line.text for line in approval_lines(one, NOW, columns)]
    return "\n".join(lines).split("\n")


def arguments(**given: Any) -> list[str]:
    lines = shown(approval(arguments=given))
    return lines[lines.index("arguments") + 1 :]


def test_facts_are_there() -> None:
    one = approval(
        agent_id="clerk", session_id="sess_1", reason="it deletes", quorum=2,
        approvers=("alice", "bob"),
    )  # fmt: skip
    text = "\n".join(shown(one, 200))
    for fact in (
        one.id, "pending", "delete_files@1.0.0  (dangerous)", "uid:1000", "clerk", "sess_1",
        "default: dangerous tools wait for a human: it deletes", "2 yes of alice, bob (0 so far)",
        "04:04:05 UTC (in 60 m)", one.call_id,
    ):  # fmt: skip
        assert fact in text


def test_session_that_has_ended_is_a_warning_and_one_that_lasts_is_none() -> None:
    one = approval(session_id="sess_1")
    over = approval_lines(one, NOW, 200, session_is_over=True)
    assert [line.kind for line in over if "Its session has ended" in line.text] == ["warning"]
    assert not any("has ended" in line.text for line in approval_lines(one, NOW, 200))


def test_no_name_of_an_argument_passes_for_an_argument_with_its_value() -> None:
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
def test_what_a_terminal_obeys_or_does_not_show_is_shown_escaped(attack: str) -> None:
    text = ATTACKS[attack]
    for value in (text, {"nested": [text]}, "lines\n" + text):
        lines = arguments(text=value, **{text: 1})
        for line in lines:
            assert line.isprintable(), line
        assert "\\u{" in "".join(lines)
        assert any("Shown escaped" in line for line in lines)
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
]


@pytest.mark.parametrize("text", HARMLESS)
def test_languages_and_markup_are_shown_as_they_are(text: str) -> None:
    assert visible(text) == text
    assert not any("Shown escaped" in line for line in arguments(text="a\n" + text))


def test_accents_that_letters_have_are_kept() -> None:
    assert visible(unicodedata.normalize("NFD", "Việt Nam")) == unicodedata.normalize(
        "NFD", "Việt Nam"
    )


def test_every_argument_is_shown_to_its_end() -> None:
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


def test_preview_of_a_form_that_is_not_known_is_shown_whole() -> None:
    text = "\n".join(shown(approval(preview={"statements": ["drop table x"], "rows": 7})))
    assert "drop table x" in text
    assert "7" in text


def test_decisions_say_what_was_decided_on() -> None:
    word = DecisionRecord(
        at=NOW, approver="approver:alice", channel="control", decision="approve",
        action_digest="1" * 64, reason="fine\x1b", is_self_approval=True,
    )  # fmt: skip
    text = " ".join(shown(approval(state=ApprovalState.DONE, decisions=(word,)), 200))
    for part in ("approver:alice", "SELF-APPROVAL", "before an edit", "fine\\u{001b}"):
        assert part in text


def test_rule_says_to_whom_on_what_and_how_long() -> None:
    text = "\n".join(line.text for line in rule_lines(rule(uses_left=3), COLUMNS))
    for part in (
        "delete_files",
        "uid:1000",
        "sess_1",
        "3 more times",
        "where these are equal",
        "a.txt",
    ):
        assert part in text


def test_rule_for_any_arguments_is_a_warning() -> None:
    found = rule_lines(rule(arguments={}), COLUMNS)
    assert found[-1].kind == "warning"
    assert rule_lines(rule(), COLUMNS)[-1].kind != "warning"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "in 5 s"), (119, "in 119 s"), (120, "in 2 m"), (7200, "in 2 h"), (-9, "9 s ago"), (200_000, "in 2 d")],
)  # fmt: skip
def test_time_that_is_left_is_said_in_words(seconds: int, words: str) -> None:
    assert ago(NOW + timedelta(seconds=seconds), NOW) == words


def test_table_cell_says_that_it_is_cut() -> None:
    assert one_line("ab\ncd", 10) == "ab\\u{000a}cd"[:9] + "…"
    assert one_line("abc", 10) == "abc"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), JSON, max_size=3), st.integers(40, 200))
def test_whatever_the_arguments_are_lines_fit_and_are_printable(
    given_arguments: dict[str, Any], columns: int
) -> None:
    for line in shown(approval(arguments=given_arguments, rule="r"), columns):
        assert line.isprintable()
        assert cell_len(line) <= columns
