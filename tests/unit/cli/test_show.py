"""An envelope on a terminal: none of its words is obeyed, and its last line tells the truth."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fumehood.cli.options import age
from fumehood.cli.show import show_calls, show_envelope, show_json
from fumehood.core.call_log import CallRecord
from fumehood.core.envelope import Envelope, ErrorInfo
from support.answers import envelope_bytes

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
def test_no_text_of_an_envelope_is_obeyed_by_a_terminal(where: str, shown: Any) -> None:
    text = shown(TEXTS[where])
    assert SHOWN in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_harmless_text_is_shown_as_it_is(shown: Any) -> None:
    text = shown(envelope(error("INVALID_PARAMS", "[red]Grüße[/red] a\\u{202e}b")))
    assert "INVALID_PARAMS [red]Grüße[/red] a\\u{202e}b" in text


def test_message_cannot_look_like_the_last_line(shown: Any) -> None:
    lines = shown(envelope(error("EXECUTION_ERROR", "bad\ndelete_files · nothing ran"))).split("\n")
    assert [line for line in lines if line.startswith("delete_files")] == [lines[-2]]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_json_stays_json_and_a_terminal_obeys_none_of_it(
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
def test_last_line_says_what_is_known_of_a_call_without_a_sandbox(
    one: Envelope, says: str, shown: Any
) -> None:
    assert f" · {says} · " in shown(one)
    assert says == "nothing ran" or "nothing ran" not in shown(one)


def test_list_of_calls_fits_80_columns_without_breaking_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    record = CallRecord.model_construct(
        call_id=f"call_{'0' * 24}", timestamp="2026-01-01T00:00:00.000Z", agent_id=None,
        tool_name="run_python", tool_version="1.0.0", code="REQUIRES_HUMAN_APPROVAL",
        execution_time_ms=12.3,
    )  # fmt: skip
    show_calls([record], as_json=False)
    shown = capsys.readouterr()
    assert {record.call_id, record.tool_name, record.code} <= set(shown.out.split())
    assert "age" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    assert shown.err == "Hidden columns: version, ms, agent. See --json.\n"


@pytest.mark.parametrize(
    ("seconds", "says"), [(-5, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (86_400 * 9, "9d")]
)
def test_age_is_told_in_its_largest_unit(seconds: int, says: str) -> None:
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


def test_result_with_nothing_but_empty_fields_is_shown_as_it_is(shown: Any) -> None:
    assert shown(envelope(data={"items": [], "next": None})).startswith("items: []\nnext: null\n")


def test_json_of_an_envelope_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"stdout": "", "files": [], "content_base64": "AAE="}
    show_envelope(envelope(data=data), as_json=True)
    assert json.loads(capsys.readouterr().out)["data"] == data
