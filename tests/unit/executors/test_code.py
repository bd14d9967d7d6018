"""Code in a container: what its ending becomes, and what a hostile one cannot make of it."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.wall import RunEnding
from fumehood.testing import CONTAINER_LIMITS, FakeWall

pytestmark = pytest.mark.anyio

EXCEPTION = {
    "type": "KeyError",
    "message": "'a'",
    "line": 3,
    "traceback": "Traceback …\nKeyError: 'a'",
}
FAILURE = {"kind": "exception", "message": "KeyError: 'a'", "exception": EXCEPTION}
FIELDS = {
    "stdout": "", "stderr": "", "exit_code": None, "value": None, "value_repr": None,
    "files": [], "images": [],
}  # fmt: skip


async def call(
    home: Any, ending: RunEnding, arguments: JsonObject | None = None, **options: Any
) -> tuple[Envelope, FakeWall]:
    wall = FakeWall(answer=lambda run: ending, limits=CONTAINER_LIMITS)
    async with Engine(config=Config(home=home), interpreter=FakeWall(), container=wall) as engine:
        return await engine.call(
            "run_python", {"code": "1"} if arguments is None else arguments, **options
        ), wall


async def failed(home: Any, ended_by: EndedBy, **fields: Any) -> Any:
    envelope, _ = await call(home, RunEnding(ended_by, "call", **fields))
    assert (envelope.success, envelope.data) == (False, {})
    return envelope.error


@pytest.mark.row("S1", "S7", "E1")
async def test_success_holds_what_was_measured_and_what_was_claimed(home: Any) -> None:
    ending = RunEnding(
        EndedBy.OK, "call", exit_code=0, stdout="out\n", stderr="err\n", stdout_bytes=4, stderr_bytes=4,
        cpu_ms=12.5, peak_memory_bytes=20 << 20,
        result={"value": [1], "has_value": True, "value_repr": "[1]"},
    )  # fmt: skip
    envelope, wall = await call(
        home, ending, {"code": "x", "stdin": "in", "files": [{"path": "a", "content": "b"}]}
    )
    assert envelope.data == {
        **FIELDS, "stdout": "out\n", "stderr": "err\n", "exit_code": 0, "value": [1],
        "value_repr": "[1]", "ended_by": "ok",
    }  # fmt: skip
    (run,) = wall.runs
    assert (run.program, run.fresh) == ("python", False)
    assert run.arguments == {"code": "x", "stdin": "in", "files": [{"path": "a", "content": "b"}]}
    metadata = envelope.metadata
    assert metadata.sandbox is not None
    assert (metadata.sandbox.placement, metadata.sandbox.limits.memory_mb) == ("container", 512)
    assert (metadata.resources.cpu_ms, metadata.resources.peak_memory_mb) == (12.5, 20)
    assert metadata.resources.output_bytes == 8
    assert metadata.warnings == ()


@pytest.mark.row("S5")
async def test_container_of_its_own_is_asked_for_by_name(home: Any) -> None:
    _, wall = await call(home, RunEnding(EndedBy.OK, "call"), isolation="container_per_call")
    assert wall.runs[0].fresh is True


@pytest.mark.row("S7", "S4")
async def test_success_stays_one_where_the_claim_has_no_form(home: Any) -> None:
    """The outside decided; a program that ends its process early claims nothing at all."""
    for result in (
        None,
        {},
        {"value": 1},
        {"value": "forged", "has_value": True, "ended_by": "ok"},
    ):
        envelope, _ = await call(home, RunEnding(EndedBy.OK, "call", exit_code=0, result=result))
        assert envelope.data == {**FIELDS, "exit_code": 0, "ended_by": "ok"}


@pytest.mark.row("E1", "S4")
async def test_exception_brings_its_own_traceback_and_what_was_printed(home: Any) -> None:
    error = await failed(
        home, EndedBy.EXCEPTION, exit_code=1, stdout="so far\n", stderr="Traceback",
        claimed_error=FAILURE,
    )  # fmt: skip
    assert (error.code, error.retryable) == ("EXECUTION_ERROR", False)
    assert error.message == "The program failed: KeyError: 'a' (line 3)."
    assert error.details == {
        **FIELDS, "stdout": "so far\n", "stderr": "Traceback", "exit_code": 1,
        "ended_by": "exception", "exception": EXCEPTION,
    }  # fmt: skip


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    ("claimed", "words"),
    [
        ({**FAILURE, "exception": None}, "KeyError: 'a'."),
        (None, "it gave no reason."),
        ({**FAILURE, "more": 1}, "it gave no reason."),
        ({**FAILURE, "exception": {**EXCEPTION, "message": "", "line": None}}, "failed: KeyError."),
        (
            {**FAILURE, "exception": {**EXCEPTION, "message": "KeyError: 'a'"}},
            "failed: KeyError: 'a' (line 3).",
        ),
        (
            {**FAILURE, "exception": {**EXCEPTION, "type": "E", "message": "a.b.E: x\n y"}},
            "failed: a.b.E: x y (line 3).",
        ),
        (
            {
                **FAILURE,
                "exception": {
                    **EXCEPTION,
                    "type": "SyntaxError",
                    "message": '  File "<code>", line 3\n    a =\nSyntaxError: no',
                },
            },
            "failed: SyntaxError: no (line 3).",
        ),
        (
            {
                **FAILURE,
                "exception": {
                    **EXCEPTION,
                    "type": "SyntaxError",
                    "message": "no (<code>, line 3)",
                },
            },
            "failed: SyntaxError: no (<code>, line 3).",
        ),
        ({**FAILURE, "exception": {**EXCEPTION, "message": "x" * 100_000}}, "xxx (line 3)."),
    ],
    ids=lambda given: str(given)[:40],
)
async def test_message_is_fit_for_a_model_whatever_was_claimed(
    home: Any, claimed: Any, words: str
) -> None:
    error = await failed(home, EndedBy.EXCEPTION, claimed_error=claimed)
    assert error.message.startswith("The program failed: ")
    assert error.message.endswith(words)
    assert "\n" not in error.message
    assert len(error.message) < 600


@pytest.mark.row("E1", "S4")
@pytest.mark.parametrize(
    ("ended_by", "measured", "code", "limit", "words"),
    [
        (EndedBy.WALL_TIME, {"cpu_ms": 1500.0}, "TIMEOUT",
         {"timeout_seconds": 30, "cpu_seconds": 1.5}, "stopped after 30 s"),
        (EndedBy.CPU_TIME, {"cpu_ms": 30_100.0}, "TIMEOUT",
         {"cpu_seconds": 30, "peak_cpu_seconds": 30.1}, "30 s of CPU time"),
        (EndedBy.MEMORY, {"peak_memory_bytes": 512 << 20}, "MEMORY_LIMIT_EXCEEDED",
         {"memory_mb": 512, "peak_memory_mb": 512}, "more than its 512 MB"),
        (EndedBy.MEMORY, {}, "MEMORY_LIMIT_EXCEEDED", {"memory_mb": 512}, "more than its 512 MB"),
        (EndedBy.MEMORY, {"peak_memory_bytes": 640 << 20}, "MEMORY_LIMIT_EXCEEDED",
         {"memory_mb": 512}, "more than its 512 MB"),
        (EndedBy.OUTPUT, {"stdout_bytes": 2_000_000, "stdout": "kept"}, "OUTPUT_LIMIT_EXCEEDED",
         {"output_bytes": 1 << 20, "peak_output_bytes": 2_000_000}, "printed more than 1048576"),
    ],
)  # fmt: skip
async def test_limit_says_what_it_was_the_peak_and_what_to_try(
    home: Any, ended_by: EndedBy, measured: Any, code: str, limit: Any, words: str
) -> None:
    error = await failed(home, ended_by, **measured)
    assert error.code == code
    assert words in error.message
    said = dict(error.details["limit"])
    assert said.pop("hint") in error.message
    assert said == limit
    assert error.details["ended_by"] == ended_by.value
    assert error.details["stdout"] == measured.get("stdout", "")
    assert error.details["exception"] is None


@pytest.mark.row("S4")
async def test_limits_that_only_refused_are_named_each_with_what_to_try(home: Any) -> None:
    names = ("processes", "open_files", "disk", "file_size", "network", "unheard_of")
    ending = RunEnding(EndedBy.OK, "call", exit_code=0, limits_hit=names, files_left_out=3)
    envelope, _ = await call(home, ending, memory_limit_mb=128)
    assert envelope.data["limits_hit"] == list(names)
    assert envelope.data["files_left_out"] == 3
    warnings = envelope.metadata.warnings
    assert len(warnings) == len(names) + 1
    assert "more than 64 processes" in warnings[0]
    assert "more than 256 open files" in warnings[1]
    assert "directory holds 32 MB, /tmp 24 MB and /dev/shm 8 MB" in warnings[2]
    assert "a file of more than 32 MB" in warnings[3]
    assert "3 files were not returned; the limits are 100 files and 64 MB in total" in warnings[-1]
    error = await failed(home, EndedBy.EXIT, exit_code=1, limits_hit=("disk",))
    assert error.details["limits_hit"] == ["disk"]


@pytest.mark.row("E1", "S4")
async def test_exit_and_signal_are_told_apart_and_named(home: Any) -> None:
    error = await failed(home, EndedBy.EXIT, exit_code=3)
    assert (error.code, error.details["exit_code"]) == ("EXECUTION_ERROR", 3)
    assert "exited with status 3" in error.message
    error = await failed(home, EndedBy.SIGNAL, signal=11)
    assert (error.code, error.details["signal"]) == ("EXECUTION_ERROR", 11)
    assert "signal 11 (SIGSEGV)" in error.message
    assert "signal 99" in (await failed(home, EndedBy.SIGNAL, signal=99)).message
    assert "a signal" in (await failed(home, EndedBy.SIGNAL)).message


@pytest.mark.row("S4", "S7")
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("memory", "MEMORY_LIMIT_EXCEEDED"),
        ("policy", "SANDBOX_VIOLATION"),
        ("exception", "EXECUTION_ERROR"),
        ("invalid", "INVALID_PARAMS"),
        ("ok", "EXECUTION_ERROR"),
        ("wall_time", "EXECUTION_ERROR"),
        ("cancelled", "EXECUTION_ERROR"),
    ],
)
async def test_claim_names_a_failure_and_never_undoes_one(home: Any, kind: str, code: str) -> None:
    claimed = {**FAILURE, "kind": kind}
    assert (await failed(home, EndedBy.EXCEPTION, claimed_error=claimed)).code == code
    # What the outside decided is not the program's to change.
    for decided in (EndedBy.WALL_TIME, EndedBy.OUTPUT, EndedBy.EXIT, EndedBy.SIGNAL):
        error = await failed(home, decided, claimed_error=claimed, exit_code=1)
        assert error.details["ended_by"] == decided.value
        assert error.code != "INVALID_PARAMS"


@pytest.mark.row("E1", "S3")
async def test_file_that_did_not_fit_is_the_callers_to_mend(home: Any) -> None:
    claimed = {"kind": "invalid", "message": "the file a could not be written: No space"}
    error = await failed(home, EndedBy.EXCEPTION, claimed_error=claimed, exit_code=71)
    assert (error.code, error.fields) == ("INVALID_PARAMS", ("files",))
    assert error.message == (
        "The program was not started: the file a could not be written: No space."
    )


@pytest.mark.row("S4", "S7")
async def test_failure_holds_no_value_however_it_was_claimed(home: Any) -> None:
    result = {"value": 1, "has_value": True, "value_repr": "1"}
    error = await failed(home, EndedBy.EXIT, exit_code=1, result=result)
    assert (error.details["value"], error.details["value_repr"]) == (None, None)


@pytest.mark.row("S9", "E1")
async def test_lost_container_is_unavailable_and_keeps_what_came(home: Any) -> None:
    error = await failed(home, EndedBy.SANDBOX_LOST, stdout="so far")
    assert (error.code, error.retryable) == ("SANDBOX_UNAVAILABLE", False)
    assert error.details["stdout"] == "so far"


@pytest.mark.row("P8")
async def test_cancelled_run_is_cancelled(home: Any) -> None:
    assert (await failed(home, EndedBy.CANCELLED)).code == "CANCELLED"


@pytest.mark.row("S1", "P2")
@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({}, ["code"]),
        ({"code": ""}, ["code"]),
        ({"code": "\n"}, ["code"]),
        ({"code": "a\0b"}, ["code"]),
        ({"code": "1", "argv": []}, ["argv"]),
        ({"code": "1", "stdin": 1}, ["stdin"]),
        ({"code": "1", "files": [{"path": "/a", "content": ""}]}, ["files.0.path"]),
        ({"code": "1", "files": [{"path": "a"}]}, ["files.0"]),
        ({"code": "1", "files": [{"path": "a", "content": "", "mode": 1}]}, ["files.0.mode"]),
        ({"code": "#" * ((5 << 20) + 1)}, ["code"]),
        ({"code": "1", "files": [{"path": str(n), "content": ""} for n in range(101)]}, ["files"]),
    ],
    ids=lambda given: ascii(given)[:50],
)
async def test_bad_arguments_are_refused_before_a_place_is_taken(
    home: Any, arguments: JsonObject, fields: list[str]
) -> None:
    envelope, wall = await call(home, RunEnding(EndedBy.OK, "call"), arguments)
    assert envelope.error is not None
    assert envelope.error.code == "INVALID_PARAMS"
    assert list(envelope.error.fields or ()) == fields
    assert wall.runs == []


@pytest.mark.row("S1")
async def test_program_of_five_megabytes_is_run(home: Any) -> None:
    code = "#" * (5 << 20)
    envelope, wall = await call(home, RunEnding(EndedBy.OK, "call", exit_code=0), {"code": code})
    assert envelope.success
    assert len(wall.runs[0].arguments["code"]) == 5 << 20


@pytest.mark.row("S1", "P12")
async def test_dry_run_says_where_and_how_and_takes_nothing(home: Any) -> None:
    arguments = {"code": "#" * 100_000}
    envelope, wall = await call(home, RunEnding(EndedBy.OK, "call"), arguments, dry_run=True)
    assert envelope.data["would_run"] is True
    assert envelope.data["placement"]["kind"] == "container"
    assert "reset after each of them" in envelope.data["placement"]["why"]
    assert envelope.data["limits"]["memory_mb"] == 512
    assert len(envelope.data["arguments"]["code"]) < 11_000
    assert "truncated" not in envelope.data
    assert wall.runs == []


@pytest.mark.row("S1", "S9")
async def test_engine_without_sound_containers_says_so_and_uses_nothing_weaker(home: Any) -> None:
    interpreter, none = FakeWall(), FakeWall(limits=CONTAINER_LIMITS, enforced=frozenset())
    async with Engine(config=Config(home=home), interpreter=interpreter, container=none) as engine:
        envelope = await engine.call("run_python", {"code": "1"})
        rehearsed = await engine.call("run_python", {"code": "1"}, dry_run=True)
    assert envelope.error is not None
    assert envelope.error.code == "SANDBOX_UNAVAILABLE"
    assert rehearsed.data["refused_with"] == "SANDBOX_UNAVAILABLE"
    assert interpreter.runs == none.runs == []
