"""Code in a container: arguments, languages and endings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.call_options import CallOptions
from fumehood.core.arguments import MAX_FILES
from fumehood.core.call import CallRequest
from fumehood.core.envelope import Envelope
from fumehood.core.errors import EndedBy
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MAX_BODY_BYTES, Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import CallHandle, ToolRun
from fumehood.executors.claims import NO_VALUE, FailureClaim, read_claim, read_value
from fumehood.executors.endings import PROGRAM, Subject, refused_by
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.plan import executor_of
from fumehood.protocol.strict_json import MAX_VALUE_DEPTH
from fumehood.redaction.redactor import Redactor
from fumehood.registry.arguments import argument_faults
from fumehood.registry.index import RegisteredTool, Source
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks
from fumehood.testing import CONTAINER_LIMITS, FakeWall
from support.answers import error_of

pytestmark = pytest.mark.anyio

EXCEPTION = {
    "type": "KeyError",
    "message": "'a'",
    "line": 3,
    "traceback": "Traceback …\nKeyError: 'a'",
}
FAILURE = {"kind": "exception", "message": "KeyError: 'a'", "exception": EXCEPTION}
IN_SESSION = Subject(in_session=True)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Place:
    """One engine for all endings: `ending` is how the next run ends."""

    engine: Engine
    wall: FakeWall
    ending: RunEnding


@pytest.fixture(scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    config = Config(home=tmp_path_factory.mktemp("home"))
    wall = FakeWall(answer=lambda run: made.ending, limits=CONTAINER_LIMITS)
    async with Engine(config=config, interpreter=FakeWall(), container=wall) as engine:
        made = Place(engine, wall, RunEnding(EndedBy.OK, "call"))
        yield made


async def call(
    place: Place, ending: RunEnding, arguments: JsonObject | None = None, **options: Any
) -> tuple[Envelope, FakeWall]:
    place.ending = ending
    place.wall.runs.clear()
    given = {"code": "1"} if arguments is None else arguments
    return await place.engine.call("run_python", given, **options), place.wall


async def failed(place: Place, ended_by: EndedBy, **fields: Any) -> Any:
    envelope, _ = await call(place, RunEnding(ended_by, "call", **fields))
    assert (envelope.success, envelope.data) == (False, {})
    return envelope.error


NETWORK, PACKAGES, SCIENCE = "Programs have no network: ", "images new", "image python-science has"
CRLF = "end with CR LF"


RESOLUTION = (
    "HTTPSConnectionPool(host='a.b', port=443): Max retries exceeded with url: / (Caused by "
    "NameResolutionError(\"Failed to resolve 'a.b' ([Errno -3] Temporary failure in name "
    'resolution)"))'
)


@pytest.mark.row("E1", "S3")
@pytest.mark.parametrize(
    ("type_", "message", "traceback", "hint"),
    [
        ("URLError", "<urlopen error [Errno -3] Temporary failure in name resolution>", "", NETWORK),
        ("ConnectionError", RESOLUTION, "", NETWORK),
        ("gaierror", "[Errno -2] Name or service not known", "", NETWORK),
        ("OSError", "[Errno 101] Network is unreachable", "", NETWORK),
        ("ConnectError", "All connection attempts failed",
         "OSError: [Errno 101] Network is unreachable\n\nThe above exception …", NETWORK),
        ("TypeError", "fetch failed", "", NETWORK),
        ("Error", "getaddrinfo ENOTFOUND a.b", "", NETWORK),
        ("Error", "getaddrinfo EAI_AGAIN a.b", "", NETWORK),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'pip'", "", PACKAGES),
        ("Error", "Cannot find module 'lodash'\nRequire stack:\n- /workspace/main.js", "", PACKAGES),
        ("Error", "Command failed: npm install x\n/bin/sh: 1: npm: not found\n", "", PACKAGES),
        ("ModuleNotFoundError", "No module named 'sklearn'", "", SCIENCE),
        ("ModuleNotFoundError", "No module named 'humanize'", "", PACKAGES),
        ("CalledProcessError", "Command 'pip install x' returned non-zero exit status 127.", "",
         PACKAGES),
        ("Error", "Cannot find module './lodash'", "", None),
        ("KeyError", "'pip'", "", None),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'data.csv'", "", None),
        ("ConnectionRefusedError", "[Errno 111] Connection refused", "", None),
    ],
    ids=lambda given: str(given)[:30],
)  # fmt: skip
async def test_exception_caused_by_missing_network_or_package_has_a_hint(
    place: Place, type_: str, message: str, traceback: str, hint: str | None
) -> None:
    thrown = {"type": type_, "message": message, "line": 1, "traceback": traceback}
    claimed = {"kind": "exception", "message": message, "exception": thrown}
    error = await failed(
        place, EndedBy.EXCEPTION, claimed_error=claimed, exit_code=1,
        stderr="/bin/sh: 1: pip: not found\n",
    )  # fmt: skip
    assert [one for one in (CRLF, NETWORK, PACKAGES, SCIENCE) if one in error.message] == (
        [] if hint is None else [hint]
    )


@pytest.mark.row("E1", "S3")
@pytest.mark.parametrize(
    ("stderr", "hint"),
    [
        ("bash: line 1: pip: command not found\n", PACKAGES),
        ("/usr/bin/python3: No module named pip\n", PACKAGES),
        ("bash: line 1: ffmpeg: command not found\n", PACKAGES),
        ("E: Could not open lock file /var/lib/dpkg/lock-frontend - open (13: …)\n", PACKAGES),
        ("bash: line 1: wget: command not found\n", NETWORK),
        ("bash: line 1: curl: command not found\n", NETWORK),
        ("curl: (6) Could not resolve host: a.b\n", NETWORK),
        (
            "curl: (7) Failed to connect to 192.0.2.1 port 80 after 0 ms: Couldn't connect\n",
            NETWORK,
        ),
        ("fatal: unable to access 'https://a.b/x/': Could not resolve host: a.b\n", NETWORK),
        ("npm ERR! code EAI_AGAIN\nnpm ERR! request to https://a.b/x failed\n", NETWORK),
        ("curl: (7) Failed to connect to localhost port 80 after 0 ms: …\n", None),
        ("config: key not found: x\nerror: not found\n", None),
        ("bash: line 1: $'ls\\r': command not found\n", CRLF),
        ("bash: line 2: $'\\r': command not found\n", CRLF),
        ("bash: -c: line 1: syntax error near unexpected token `$'do\\r''\n", CRLF),
        ("bash: cd: $'/tmp\\r': No such file or directory\n", CRLF),
        ("/usr/bin/env: ‘python3\\r’: No such file or directory\n", CRLF),
        ("bash: ./a: /bin/sh^M: bad interpreter: No such file or directory\n", CRLF),
        ("ls: cannot access 'a\\rb': Permission denied\n", None),
        ("", None),
    ],
    ids=lambda given: str(given)[:30],
)
async def test_failed_command_caused_by_missing_network_or_package_has_a_hint(
    place: Place, stderr: str, hint: str | None
) -> None:
    error = await failed(place, EndedBy.EXIT, exit_code=1, stderr=stderr)
    assert [one for one in (CRLF, NETWORK, PACKAGES, SCIENCE) if one in error.message] == (
        [] if hint is None else [hint]
    )


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
        ({**FAILURE, "exception": {**EXCEPTION, "message": "x " * 50_000}}, "… (line 3)."),
        ({**FAILURE, "exception": {**EXCEPTION, "message": "x" * 100_000}}, ": … (line 3)."),
    ],
    ids=lambda given: str(given)[:40],
)
async def test_claimed_message_is_sanitized_to_one_bounded_line(
    place: Place, claimed: Any, words: str
) -> None:
    error = await failed(place, EndedBy.EXCEPTION, claimed_error=claimed)
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
async def test_exceeded_limit_reports_its_value_the_peak_and_a_remedy(
    place: Place, ended_by: EndedBy, measured: Any, code: str, limit: Any, words: str
) -> None:
    error = await failed(place, ended_by, **measured)
    assert error.code == code
    assert words in error.message
    said = dict(error.details["limit"])
    assert said.pop("hint") in error.message
    assert said == limit
    assert error.details["ended_by"] == ended_by.value
    assert error.details["stdout"] == measured.get("stdout", "")
    assert error.details["exception"] is None


@pytest.mark.row("S4")
async def test_limits_that_refused_an_operation_are_named_with_a_remedy(place: Place) -> None:
    names = ("processes", "open_files", "disk", "file_size", "network", "unheard_of")
    ending = RunEnding(EndedBy.OK, "call", exit_code=0, limits_hit=names, files_left_out=3)
    envelope, _ = await call(place, ending, memory_limit_mb=128)
    assert envelope.data["limits_hit"] == list(names)
    assert envelope.data["files_left_out"] == 3
    warnings = envelope.metadata.warnings
    assert len(warnings) == len(names) + 1
    assert "more than 64 processes" in warnings[0]
    assert "more than 256 open files" in warnings[1]
    assert "directory holds 32 MB, /tmp 24 MB and /dev/shm 8 MB" in warnings[2]
    assert "a file of more than 32 MB" in warnings[3]
    assert "3 files were not returned; the limits are 100 files and 64 MB in total" in warnings[-1]
    error = await failed(place, EndedBy.EXIT, exit_code=1, limits_hit=("disk",))
    assert error.details["limits_hit"] == ["disk"]


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("limits", "subject", "advice"),
    [
        (Limits(1, 1, 128, 1), PROGRAM, "allow more memory (memory_limit_mb)"),
        (Limits(1, 1, 128, 1), IN_SESSION, "start a session with more memory"),
        (Limits(1, 1, 128, 1, disk_mb=32), IN_SESSION, "start a session with a larger disk"),
    ],
)
def test_refused_file_has_the_remedy_that_gives_its_directory_room(
    limits: Limits, subject: Subject, advice: str
) -> None:
    for warning in refused_by(["disk", "file_size"], limits, subject):
        assert "32 MB" in warning
        assert advice in warning


@pytest.mark.row("S4", "S7")
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("exception", "EXECUTION_ERROR"),
        ("invalid", "INVALID_PARAMS"),
        ("ok", "EXECUTION_ERROR"),
        ("wall_time", "EXECUTION_ERROR"),
        ("cancelled", "EXECUTION_ERROR"),
    ],
)
async def test_claimed_kind_names_a_failure_but_never_undoes_one(
    place: Place, kind: str, code: str
) -> None:
    claimed = {**FAILURE, "kind": kind}
    assert (await failed(place, EndedBy.EXCEPTION, claimed_error=claimed)).code == code
    # What the outside decided is not the program's to change.
    for decided in (EndedBy.WALL_TIME, EndedBy.OUTPUT, EndedBy.EXIT, EndedBy.SIGNAL):
        error = await failed(place, decided, claimed_error=claimed, exit_code=1)
        assert error.details["ended_by"] == decided.value
        assert error.code != "INVALID_PARAMS"


# -- Arguments of code ---------------------------------------------------------------------


def _faults(**arguments: Any) -> dict[str, str]:
    return dict(argument_faults("code:python", {"code": "1", **arguments}))


def _file(path: str, content: str = "x") -> dict[str, str]:
    return {"path": path, "content": content}


@pytest.mark.row("S3", "P2")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"stdin": None},
        {"stdin": ""},
        {"stdin": "a\0b"},
        {"files": []},
        {"files": [_file("a"), _file("b/c"), _file("b/d"), _file("A")]},
        {"files": [{"path": "a", "content_base64": ""}, {"path": "b", "content_base64": "AP8="}]},
        {"files": [_file(str(number)) for number in range(MAX_FILES)]},
        {"code": "#" * (5 << 20)},
        {"code": "print('ä')"},
    ],
    ids=lambda given: str(given)[:40],
)
def test_valid_program_arguments_have_no_fault(arguments: dict[str, Any]) -> None:
    assert _faults(**arguments) == {}


@pytest.mark.row("S3", "P2")
@pytest.mark.parametrize(
    ("arguments", "where", "words"),
    [
        ({"code": ""}, "code", "at least 1 character"),
        ({"code": " \n\t"}, "code", "empty"),
        ({"code": "a\0"}, "code", "NUL"),
        ({"code": "'\ud800'"}, "code", "unicode"),
        ({"code": 1}, "code", "string"),
        ({"argv": ["a\0"]}, "argv.0", "NUL"),
        ({"argv": ["a" * 103_000]}, "argv.0", "bytes"),
        ({"argv": ["a" * 100_000] * 14}, "argv", "together"),
        ({"env": [{"name": "A=B", "value": ""}]}, "env.0.name", ""),
        ({"env": [{"name": "A", "value": "\0"}]}, "env.0.value", "NUL"),
        ({"working_directory": "../a"}, "working_directory", "'..'"),
        ({"working_directory": "/etc"}, "working_directory", "absolute"),
        ({"stdin_base64": "!"}, "stdin_base64", "base64"),
        ({"stdin": "a", "stdin_base64": "YQ=="}, "stdin", ""),
        ({"code": "#" * ((5 << 20) + 1)}, "code", ""),
        ({"code": None}, "code", "string"),
        ({"stdin": 1}, "stdin", "string"),
        ({"stdin": "\udfff"}, "stdin", "surrogate"),
        ({"files": {}}, "files", "list"),
        ({"files": ["a"]}, "files.0", "dictionary"),
        ({"files": [{"path": 1, "content": ""}]}, "files.0.path", "string"),
        ({"files": [_file("/a")]}, "files.0.path", "absolute"),
        ({"files": [_file("ok"), _file("../a")]}, "files.1.path", "'..'"),
        ({"files": [_file("a"), _file("a")]}, "files.1.path", "twice"),
        ({"files": [{"path": "a"}]}, "files.0", "either"),
        ({"files": [{"path": "a", "content": "", "content_base64": ""}]}, "files.0", "either"),
        ({"files": [{**_file("a"), "mode": 7}]}, "files.0.mode", "not permitted"),
        ({"files": [_file("a", "\ud800")]}, "files.0.content", "surrogate"),
        ({"files": [{"path": "a", "content": 1}]}, "files.0.content", "string"),
        ({"files": [{"path": "a", "content_base64": 1}]}, "files.0.content_base64", "string"),
        ({"files": [{"path": "a", "content_base64": "a"}]}, "files.0.content_base64", "base64"),
        ({"files": [{"path": "a", "content_base64": "a\nb="}]}, "files.0.content_base64", "base64"),
        ({"files": [{"path": "a", "content_base64": "ää=="}]}, "files.0.content_base64", "base64"),
        ({"files": [_file(str(n)) for n in range(MAX_FILES + 1)]}, "files", "at most"),
        ({"stdin": "x" * MAX_BODY_BYTES}, "files", "together"),
        ({"stdin": "ä" * (MAX_BODY_BYTES // 2)}, "files", "together"),
    ],
    ids=lambda given: ascii(given)[:40],
)
def test_every_argument_fault_is_named_with_its_path(
    arguments: dict[str, Any], where: str, words: str
) -> None:
    assert words in _faults(**arguments)[where]


def test_all_argument_faults_are_reported_at_once() -> None:
    found = _faults(code="", stdin=1, files=[_file("/a"), {"path": "b"}])
    assert found.keys() == {"code", "stdin", "files.0.path", "files.1"}


def test_argument_fault_shows_only_the_beginning_of_a_long_path() -> None:
    (said,) = _faults(files=[_file("/" + "a" * 5000)]).values()
    assert len(said) < 200


def test_shell_command_is_a_text_or_an_argument_list() -> None:
    def faults(**arguments: Any) -> dict[str, str]:
        return dict(argument_faults("code:shell", arguments))

    assert faults(command="ls") == faults(argv=["ls", "-l", ""]) == {}
    assert faults() == {"command": "or argv is needed, one of the two"}
    assert faults(command="ls", argv=["ls"]).keys() == {"command"}
    for argv in ([], [""]):
        assert faults(argv=argv) == {"argv": "names no program"}


# -- Claims of a program -------------------------------------------------------------------

VALUE = {"value": [1, {"a": None}], "has_value": True, "value_repr": "[1, {'a': None}]"}


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.row("S7", "E1")
@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**53) + 1, 2**53 - 1, 1.5, "ä\0", [], {}, VALUE["value"], _nested(MAX_VALUE_DEPTH)],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_value_that_json_represents_exactly_is_passed_on(value: Any) -> None:
    assert read_value({**VALUE, "value": value}).value == value


@pytest.mark.row("S7", "E1")
@pytest.mark.parametrize(
    "value",
    [2**53, [-(2**53)], {"a": [10**30]}, float("nan"), [float("inf")], "\ud800", {"\ud800": 1},
     _nested(MAX_VALUE_DEPTH + 1), {1}, b"x"],
    ids=lambda value: ascii(value)[:20],
)  # fmt: skip
def test_value_that_json_cannot_represent_is_null_with_its_repr(value: Any) -> None:
    claim = read_value({**VALUE, "value": value})
    assert (claim.value, claim.value_repr) == (None, VALUE["value_repr"])


@pytest.mark.row("S7")
@pytest.mark.parametrize(
    "result",
    [None, {}, [], "x", {"value": 1}, {**VALUE, "more": 1}, {**VALUE, "has_value": 1},
     {**VALUE, "value_repr": 4}, {"result": VALUE}, {**VALUE, "has_value": False}],
    ids=str,
)  # fmt: skip
def test_malformed_claimed_value_is_ignored(result: Any) -> None:
    assert read_value(result) == NO_VALUE


def test_well_formed_claimed_failure_is_used() -> None:
    claim = read_claim(FailureClaim, FAILURE)
    assert claim.model_dump() == {**FAILURE, "errno": None}
    assert read_claim(FailureClaim, {"kind": "memory", "message": "m", "errno": 28}) is not None


@pytest.mark.row("S7", "E1")
@pytest.mark.parametrize(
    "claimed",
    [
        None, {}, [], "x", {**FAILURE, "more": 1}, {**FAILURE, "kind": "ok"},
        {**FAILURE, "kind": "wall_time"}, {**FAILURE, "message": None}, {**FAILURE, "message": 1},
        {"kind": "exception"}, {**FAILURE, "errno": "28"}, {**FAILURE, "errno": True},
        *({**FAILURE, "exception": {**EXCEPTION, **wrong}} for wrong in (
            {"line": "3"}, {"line": -1}, {"line": 2**40}, {"line": True}, {"type": ""},
            {"type": "x" * 501}, {"traceback": None}, {"traceback": ["x"]}, {"more": 1},
            {"message": 1},
        )),
    ],
    ids=lambda claimed: str(claimed)[:60],
)  # fmt: skip
def test_malformed_claimed_failure_is_ignored(claimed: Any) -> None:
    assert read_claim(FailureClaim, claimed) is None


# -- Code in other languages than Python, and in sessions ----------------------------------

LIMITS = Limits(30, 30, 256, 1 << 20)


class Says:
    """A lease that gives one answer, and keeps what it was asked."""

    queue_ms = 0.0

    def __init__(self, ended_by: EndedBy, **fields: Any) -> None:
        self.ending = RunEnding(ended_by, "session", **fields)
        self.asked: list[tuple[str, JsonObject]] = []

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks = NO_SINKS
    ) -> RunEnding:
        self.asked.append((program, {k: v for k, v in arguments.items() if k != "env"}))
        return self.ending


async def run(
    language: str, lease: Says, arguments: JsonObject, session_id: str | None = None
) -> Outcome:
    tool = ToolDefinition(name="t", description="d", type="BUILTIN", executor=f"code:{language}")  # type: ignore[arg-type]
    unused: Any = None  # no file comes back
    request = CallRequest("t", arguments, CallOptions(), None, "call_1", "trace_1")
    return await executor_of(tool).run(
        ToolRun(
            RegisteredTool(tool, Source.BUILTIN, unused, None), arguments, LIMITS, lease,
            TrustDomain("ann", None, session_id), CallHandle(), unused, unused, Redactor(),
            request,
        )
    )  # fmt: skip


async def shell(ended_by: EndedBy, *, session_id: str | None = None, **fields: Any) -> Any:
    outcome = await run("shell", Says(ended_by, **fields), {"command": "x"}, session_id)
    return outcome.error


@pytest.mark.row("S7")
@pytest.mark.parametrize(
    "stderr",
    [
        "bash: line 1: /dev/tty: No such device or address",
        "the input device is not a TTY",
        "stty: 'standard input': Inappropriate ioctl for device",
        "TERM environment variable not set.",
        "Vim: Warning: Output is not to a terminal\nError: not a terminal",
    ],
)
async def test_command_that_needs_a_terminal_fails_with_a_hint(stderr: str) -> None:
    error = await shell(EndedBy.EXIT, exit_code=1, stderr=stderr)
    assert "no terminal is available" in error.message


@pytest.mark.row("S7")
async def test_timeout_of_an_idle_command_says_that_it_was_waiting() -> None:
    waited = await shell(EndedBy.WALL_TIME, cpu_ms=40.0)
    assert waited.code == "TIMEOUT"
    assert "waiting, not computing" in waited.message
    assert "no terminal is available" in waited.details["limit"]["hint"]
    for cpu_ms in (29_000.0, None):  # it computed, or nobody knows
        busy = await shell(EndedBy.WALL_TIME, cpu_ms=cpu_ms)
        assert "terminal" not in busy.message


@pytest.mark.row("S7")
@pytest.mark.row("S6")
@pytest.mark.parametrize(
    ("state", "words"),
    [("kept", None), ("rolled_back", "variables restored"), ("reset", "are lost"), (None, None)],
)
async def test_state_of_session_variables_is_reported_after_a_call(
    state: Any, words: str | None
) -> None:
    lease = Says(EndedBy.OK, state=state, variables_bytes=7)
    outcome = await run("python", lease, {"code": "1"}, "sess_1")
    assert outcome.data["session"] == {"id": "sess_1", "state": state, "variables_bytes": 7}
    said = [warning for warning in outcome.warnings if warning.startswith("session:")]
    assert len(said) == (words is not None)
    assert all(words in warning and "files are not rolled back" in warning for warning in said)  # type: ignore[operator]


@pytest.mark.row("S7")
@pytest.mark.row("S6")
async def test_lost_session_container_error_says_that_files_and_variables_are_gone() -> None:
    error = await shell(EndedBy.SANDBOX_LOST, session_id="sess_1")
    assert (error.code, error.may_retry) == ("SANDBOX_UNAVAILABLE", False)
    assert "with its files and variables" in error.message
    assert "files and variables" not in (await shell(EndedBy.SANDBOX_LOST)).message


@pytest.mark.row("S7")
@pytest.mark.row("S6")
async def test_memory_error_in_a_session_suggests_a_larger_session() -> None:
    error = await shell(EndedBy.MEMORY, session_id="sess_1")
    assert "start a session with more" in error.message
    assert "memory_limit_mb" not in error.message
    assert "memory_limit_mb" in (await shell(EndedBy.MEMORY)).message


@pytest.mark.row("S7")
@pytest.mark.row("S4", "S6")
async def test_memory_error_names_the_size_of_session_variables() -> None:
    async def python(held_mb: int) -> str:
        ending = Says(EndedBy.MEMORY, state="rolled_back", variables_bytes=held_mb << 20)
        outcome = await run("python", ending, {"code": "x"}, "sess_1")
        return error_of(outcome).message

    assert "variables alone take 200 MB" in await python(200)
    assert "variables" not in await python(50)
