"""What is shown where there is little room."""

from __future__ import annotations

import pytest

from fumehood.cli.escaping import printable
from fumehood.cli.tables import Field, fitting, show_table

FIELDS = [Field("id", whole=True), Field("scopes", drop=1), Field("agents", drop=2), Field("valid")]
ROW = ["0123456789abcdef", "call, approve", "clerk", "True"]


@pytest.mark.parametrize(
    ("width", "kept"),
    [(80, [0, 1, 2, 3]), (51, [0, 1, 2, 3]), (50, [0, 1, 3]), (30, [0, 3]), (5, [0, 3])],
)
def test_least_important_columns_go_first_and_the_others_never(width: int, kept: list[int]) -> None:
    assert fitting(FIELDS, [ROW], width) == kept


def test_long_cells_are_folded_before_a_column_goes() -> None:
    fields = [Field("name"), Field("description", drop=1)]
    assert fitting(fields, [["clerk", "word " * 100]], 80) == [0, 1]


def test_no_rows_are_a_head_alone() -> None:
    assert fitting(FIELDS, [], 80) == [0, 1, 2, 3]


def test_nothing_is_cut_off_and_what_is_left_out_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "36")
    fields = [Field("name"), *FIELDS[1:]]
    show_table(fields, [["x" * 40, "call", "clerk", "True"]])
    shown = capsys.readouterr()
    assert shown.out.count("x") == 40
    assert max(map(len, shown.out.splitlines())) <= 36
    assert shown.err == "Hidden columns: scopes, agents. See --json.\n"


def test_what_somebody_wrote_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    show_table([Field("what")], [["\x1b[2J[red]word[/red]"]])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]word[/red]" in shown
    assert printable("a\x07b\nc") == "a\\u{0007}b\nc"


def test_words_are_kept_whole_where_a_column_less_makes_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fields = [
        Field("tool"), Field("runs as", drop=1), Field("from", drop=2), Field("description"),
    ]  # fmt: skip
    rows = [
        [
            "run_restricted_python@1.0.0",
            "restricted_python, dangerous",
            "builtin",
            "Runs a program",
        ],
        ["a", "workspace:write", "entry_point", "Writes one file of text into the directory"],
    ]
    show_table(fields, rows)
    shown = capsys.readouterr()
    words = {word for row in rows for cell in (row[0], row[1], row[3]) for word in cell.split()}
    assert words <= set(shown.out.split())
    assert max(map(len, shown.out.splitlines())) <= 80


def test_only_the_widest_words_are_folded_where_not_all_have_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    call = f"call_{'0' * 24}"
    fields = [Field("tool"), Field("code"), Field("call", whole=True)]
    show_table(fields, [["a_tool_with_quite_a_long_name", "MEMORY_LIMIT_EXCEEDED", call]])
    words = capsys.readouterr().out.split()
    assert {"MEMORY_LIMIT_EXCEEDED", call} <= set(words)
    assert "a_tool_with_quite_a_long_name" not in words
