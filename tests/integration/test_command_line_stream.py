"""`--stream` and `calls cancel`: live output and cancellation of a running call."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon
from support.container import told
from support.scripted_daemon import running_scripted_daemon
from support.streaming import call_id_of, streaming
from support.terminal import on_a_terminal
from support.wait import wait_until

pytestmark = pytest.mark.row("S8", "P8", "D1")

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_scripted_daemon(streams_kept_minutes="0") as running:
        yield running


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Write a scripted program and return its path."""

    def write(*tells: Any, **script: Any) -> str:
        path = tmp_path / "program.py"
        path.write_text(told(tells=tells, **script))
        return str(path)

    return write


def fumehood(daemon: Daemon, *words: str) -> Any:
    return subprocess.run(
        [str(FUMEHOOD), *words], env=daemon.environment, capture_output=True, timeout=TIMEOUT_S
    )


RED = "ä\x1b[31mred\r\n\0"


def test_streamed_output_is_passed_through_unchanged(daemon: Daemon, program: Any) -> None:
    path = program(["stdout", RED], ["progress", 50, "half"], ["stderr", "warn\n"], value=[1])
    done = fumehood(daemon, "run", "--stream", path)
    assert (done.returncode, done.stdout) == (0, RED.encode())
    assert done.stderr == b"warn\nvalue: [1]\n"


def test_streamed_run_with_json_prints_one_document_on_stdout(daemon: Daemon, program: Any) -> None:
    path = program(["stdout", "out\n"], ["stderr", "err\n"], value=4)
    arguments = json.dumps({"code": Path(path).read_text()})
    for words in (("run", "--json", path), ("call", "run_python", arguments)):
        done = fumehood(daemon, words[0], "--stream", *words[1:])
        envelope = json.loads(done.stdout)
        assert (envelope["data"]["value"], envelope["data"]["stdout"]) == (4, "out\n")
        assert (done.returncode, done.stderr) == (0, b"out\nerr\n")


def test_streamed_output_and_progress_are_escaped_on_a_terminal(
    daemon: Daemon, program: Any
) -> None:
    path = program(
        ["stdout", "a\x1b[2J\n"],
        ["progress", 50, "\x1b[2Jhalf\r[red]"],
        ["stderr", "\x1b]0;title\x07\n"],
    )
    status, seen = on_a_terminal(
        daemon.environment, "run", "--stream", path, term="xterm", columns=100
    )
    assert status == 0
    assert "a\\u{001b}[2J" in seen
    assert "\\u{001b}]0;title\\u{0007}" in seen
    assert "\\u{001b}[2Jhalf" in seen  # in the bar
    assert "[red]" in seen
    assert "50%" in seen
    assert "\x1b[2J" not in seen
    assert "\x1b]0;" not in seen


def test_progress_message_is_not_interpreted_as_rich_markup(daemon: Daemon, program: Any) -> None:
    """A backslash before a bracket undoes rich's escape; a lone closing tag makes rich raise."""
    path = program(
        ["progress", 50, "\\[link=http://evil.example]here"], ["progress", 60, "\\[/red]end"]
    )
    status, seen = on_a_terminal(
        daemon.environment, "run", "--stream", path, term="xterm", columns=100
    )
    assert "Traceback" not in seen
    assert status == 0
    assert "\x1b]8;" not in seen
    assert "\\[link=http://evil.example]here" in seen
    assert "\\[/red]end" in seen


def test_progress_bar_does_not_erase_an_unfinished_line(daemon: Daemon, program: Any) -> None:
    path = program(["stdout", "question? "], ["progress", 50, "half"], ["stdout", "yes\n"])
    _, seen = on_a_terminal(daemon.environment, "run", "--stream", path, term="xterm", columns=100)
    assert "question? yes\r\n" in seen


def test_failed_streamed_call_has_its_exit_status_and_message(daemon: Daemon, program: Any) -> None:
    done = fumehood(
        daemon, "run", "--stream", program(["stdout", "x"], ended_by="exit", exit_code=3)
    )
    assert (done.returncode, done.stdout) == (1, b"x")
    assert b"EXECUTION_ERROR" in done.stderr
    refused = fumehood(daemon, "call", "--stream", "nothing")
    assert json.loads(refused.stdout)["error"]["code"] == "TOOL_NOT_FOUND"
    assert fumehood(daemon, "call", "--stream", "--local", "calculator").returncode == 2


def test_interrupting_a_stream_cancels_the_call_and_prints_its_answer(
    daemon: Daemon, program: Any
) -> None:
    process = subprocess.Popen(
        [str(FUMEHOOD), "run", "--stream", program(["stdout", "so far\n"], waits=True)],
        env=daemon.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == b"so far\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (1, b"")
    assert b"Cancelling the call" in err
    assert b"CANCELLED" in err


def test_calls_cancel_ends_a_running_call_by_its_id(daemon: Daemon, program: Any) -> None:
    code = Path(program(waits=True)).read_text()
    with streaming(daemon.socket, "run_python", {"code": code}) as stream:
        events = stream.events()
        call_id = call_id_of(next(events))
        done = fumehood(daemon, "calls", "cancel", call_id)
        assert (done.returncode, json.loads(done.stdout)["cancelled"]) == (0, True)
        assert next(events).kind == "tool_error"
    over = fumehood(daemon, "calls", "cancel", call_id)
    assert json.loads(over.stdout)["error"]["code"] == "RESOURCE_NOT_FOUND"
    assert over.returncode != 0
    wait_until(lambda: not list((daemon.home / "spool").iterdir()))
