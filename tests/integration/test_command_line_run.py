"""`fumehood run`: unchanged streams, exit status table, files saved below one directory."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon
from support.container import told
from support.scripted_daemon import running_scripted_daemon
from support.terminal import on_a_terminal

pytestmark = [pytest.mark.row("S7", "E7", "D1")]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Daemon]:
    with running_scripted_daemon() as daemon:
        yield daemon


class Runner:
    """Runs `fumehood run` in its own directory."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.daemon = daemon
        self.directory = directory

    def __call__(self, *options: str, stdin: bytes = b"", **script: Any) -> Any:
        if script:
            (self.directory / "program.py").write_text(told(**script))
        return subprocess.run(
            [str(FUMEHOOD), "run", *(["program.py"] if script else []), *options],
            env=self.daemon.environment, cwd=self.directory, input=stdin, capture_output=True,
            timeout=600,
        )  # fmt: skip


@pytest.fixture
def run(scripted: Daemon, tmp_path: Path) -> Runner:
    return Runner(scripted, tmp_path)


def test_program_output_is_passed_through_byte_for_byte(run: Runner) -> None:
    done = run(stdout="ä\x1b[31mred\r\n\0", stderr="warn\n", value=[1])
    assert done.returncode == 0
    assert done.stdout == "ä\x1b[31mred\r\n\0".encode()
    assert done.stderr == b"warn\nvalue: [1]\n"


def test_long_output_is_printed_whole(run: Runner) -> None:
    done = run(stdout="out" * 50_000, stderr="err" * 50_000)
    assert done.stdout == b"out" * 50_000
    assert done.stderr.startswith(b"err" * 50_000)


def test_control_characters_in_program_output_are_escaped_on_a_terminal(run: Runner) -> None:
    (run.directory / "program.py").write_text(told(stdout="\x1b]0;owned\x07\x1b[2J\u202eok\n"))
    status, shown = on_a_terminal(
        run.daemon.environment, "run", "program.py", cwd=run.directory, term="xterm"
    )
    assert status == 0
    assert "\\u{001b}]0;owned\\u{0007}\\u{001b}[2J\\u{202e}ok" in shown
    assert "\x1b]" not in shown
    assert "\u202e" not in shown


TRACEBACK = "Traceback (most recent call last):\n  line 1\nZeroDivisionError: division by zero"
FAILURE = {
    "kind": "exception", "message": "m",
    "exception": {"type": "ZeroDivisionError", "message": "division by zero", "line": 1,
                  "traceback": TRACEBACK},
}  # fmt: skip


@pytest.mark.row("S4")
@pytest.mark.parametrize("stderr", ["", TRACEBACK + "\n"])
def test_failed_program_prints_its_traceback_once_and_exits_1(run: Runner, stderr: str) -> None:
    done = run(ended_by="exception", failure=FAILURE, stdout="so far\n", stderr=stderr)
    assert done.returncode == 1
    assert done.stdout == b"so far\n"
    assert done.stderr.count(TRACEBACK.encode()) == 1
    assert done.stderr.endswith(
        b"EXECUTION_ERROR: The program failed: ZeroDivisionError: division by zero (line 1).\n"
    )


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ({"ended_by": "exit", "exit_code": 7}, 1, b"exited with status 7"),
        ({"ended_by": "wall_time"}, 1, b"TIMEOUT"),
        ({"ended_by": "memory"}, 1, b"MEMORY_LIMIT_EXCEEDED"),
        ({"ended_by": "sandbox_lost"}, 4, b"SANDBOX_UNAVAILABLE"),
        ({"limits_hit": ["disk"]}, 0, b"warning: limits_hit: disk"),
    ],
    ids=str,
)
def test_run_exit_status_follows_the_documented_table(
    run: Runner, script: dict[str, Any], code: int, words: bytes
) -> None:
    done = run(**script)
    assert done.returncode == code
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nothing.py"], b"cannot be read"),
        (["text.txt"], b"--language"),
        (["text.txt", "--language", "cobol"], b"--language takes python"),
        (["latin.py"], b"not UTF-8 at byte 2"),
        (["ok.py", "--timeout", "nan"], b"--timeout"),
        (["ok.py", "--force"], b"--save"),
        (["-", "--language", "python", "--stdin", "-"], b"not both"),
        (["ok.py", "--stdin", "nothing"], b"cannot be read"),
        (["ok.py", "--file", "nothing"], b"cannot be read"),
        (["ok.py", "--file", "../x=ok.py"], b"'..'"),
        ([], b"Missing argument"),
    ],
)
def test_wrong_usage_exits_2_with_its_reason(run: Runner, options: list[str], words: bytes) -> None:
    (run.directory / "text.txt").write_text("1")
    (run.directory / "ok.py").write_text(told(stdout=""))
    (run.directory / "latin.py").write_bytes(b"# \xe4")
    done = run(*options)
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr
    assert b"Traceback" not in done.stderr


def test_run_without_a_daemon_exits_4(run: Runner, home: Path) -> None:
    (run.directory / "a.py").write_text("1")
    done = run("a.py", "--socket", str(home / "none.sock"))
    assert done.returncode == 4
    assert b"fumehood serve" in done.stderr


def test_program_stdin_and_files_are_read_from_the_named_sources(run: Runner) -> None:
    (run.directory / "data").mkdir()
    (run.directory / "data" / "in.csv").write_text("1,2")
    (run.directory / "raw").write_bytes(b"\xff\0")
    (run.directory / "input").write_text("typed")
    script = told(echo=True, files={"in.csv": True, "as/other.csv": True, "new": "made"})
    done = run(
        "-", "--language", "python", "--stdin", "input", "--file", "data/in.csv",
        "--file", "as/other.csv=data/in.csv", "--file", "raw", "--json", stdin=script.encode(),
    )  # fmt: skip
    data = json.loads(done.stdout)["data"]
    sent = json.loads(data["stdout"])
    assert sent["stdin"] == "typed"
    assert sent["files"] == [
        {"path": "in.csv", "content": "1,2"},
        {"path": "as/other.csv", "content": "1,2"},
        {"path": "raw", "content_base64": "/wA="},
    ]
    # What the program left as it was sent does not come back.
    assert [entry["filename"] for entry in data["files"]] == ["new"]


def test_timeout_memory_and_agent_options_reach_the_engine(run: Runner) -> None:
    done = run("--timeout", "2", "--memory", "300", "--json", stdout="")
    limits = json.loads(done.stdout)["metadata"]["sandbox"]["limits"]
    assert limits == {"timeout_seconds": 2, "memory_mb": 256}
    refused = run("--agent", "nobody", stdout="")
    assert refused.returncode == 1
    assert b"RESOURCE_NOT_FOUND" in refused.stderr


def test_program_from_standard_input_defaults_to_python(run: Runner) -> None:
    done = run("-", stdin=told(stdout="out\n").encode())
    assert (done.returncode, done.stdout) == (0, b"out\n")


def test_multi_line_value_starts_on_its_own_line(run: Runner) -> None:
    done = run(result={"value": None, "has_value": True, "value_repr": "   a  b\n0  1  2"})
    assert done.stderr == b"value:\n   a  b\n0  1  2\n"


def test_files_not_saved_are_listed_with_the_save_option(run: Runner) -> None:
    done = run(files={"a.txt": "abc", "b": 2_000_000})
    assert done.stderr == b"files: a.txt (3 bytes), b (2000000 bytes). To save them: --save DIR\n"


def test_files_left_out_are_warned_about_and_fail_a_save(run: Runner) -> None:
    done = run(files={"a": "b"}, files_left_out=2)
    assert done.returncode == 0
    assert (
        b"warning: files_left_out: 2 files were not returned; the limits are 100 files"
        in done.stderr
    )
    done = run("--save", "out", files={"a": "b"}, files_left_out=1)
    assert done.returncode == 1
    assert b"1 file was not returned" in done.stderr
    assert (run.directory / "out" / "a").read_text() == "b"


def test_small_and_large_files_are_saved_below_the_directory(run: Runner) -> None:
    done = run("--save", "out/here", files={"a.txt": "abc", "deep/er/b": 2_000_000, "empty": ""})
    assert done.returncode == 0, done.stderr
    here = run.directory / "out" / "here"
    assert (here / "a.txt").read_text() == "abc"
    assert (here / "deep" / "er" / "b").stat().st_size == 2_000_000
    assert (here / "empty").read_bytes() == b""
    assert (here / "a.txt").stat().st_mode & 0o111 == 0


def test_existing_file_is_not_overwritten_without_force(run: Runner) -> None:
    (run.directory / "a.txt").write_text("mine")
    done = run("--save", ".", files={"a.txt": "theirs", "b.txt": "theirs"})
    assert done.returncode == 1
    assert b"a.txt was not saved: it already exists" in done.stderr
    assert (run.directory / "a.txt").read_text() == "mine"
    assert (run.directory / "b.txt").read_text() == "theirs"
    assert run("--save", ".", "--force", files={"a.txt": "theirs"}).returncode == 0
    assert (run.directory / "a.txt").read_text() == "theirs"


def test_session_new_creates_a_session_from_the_image_and_prints_its_id(run: Runner) -> None:
    done = run("--session", "new", "--image", "python", stdout="made\n")
    assert (done.returncode, done.stdout) == (0, b"made\n"), done.stderr
    session = re.findall(rb"sess_[0-9a-f]+", done.stderr)[0].decode()
    again = run("--session", session, "--json", stdout="again\n")
    assert again.returncode == 0
    (listed,) = [one for one in run_sessions(run, "list") if one["id"] == session]
    assert (listed["image"], listed["calls"]) == ("python", 2)
    run_sessions(run, "end", session)
    refused = run("--image", "python", stdout="")
    assert (refused.returncode, b"--session new" in refused.stderr) == (2, True)


def test_session_is_replayed_from_the_receipts_of_its_calls(run: Runner) -> None:
    """In a new one like it, which is ended then."""
    made = run("--session", "new", "--receipt", "1.json", files={"a.txt": "kept"})
    session = re.findall(rb"sess_[0-9a-f]+", made.stderr)[0].decode()
    assert run("--session", session, "--receipt", "2.json", stdout="two\n").returncode == 0
    for one in ("1.json", "2.json"):
        assert json.loads((run.directory / one).read_text())["session"]["id"] == session

    def replay(*files: str) -> Any:
        return subprocess.run(
            [str(FUMEHOOD), "replay", *files], env=run.daemon.environment, cwd=run.directory,
            capture_output=True, timeout=600,
        )  # fmt: skip

    done = replay("1.json", "2.json")
    assert (done.returncode, done.stdout.count(b"Nothing differs")) == (0, 2), done
    listed = run_sessions(run, "list")
    assert [one["id"] for one in listed if one["state"] == "active"] == [session]
    forged = json.loads((run.directory / "1.json").read_text())
    forged["session"] |= {"packages": 5, "image": ["x"]}
    (run.directory / "3.json").write_text(json.dumps(forged))
    refused = replay("3.json")
    assert (refused.returncode, b"INVALID_PARAMS" in refused.stderr) == (1, True), refused
    run_sessions(run, "end", session)


def run_sessions(run: Runner, *arguments: str) -> Any:
    done = subprocess.run(
        [str(FUMEHOOD), "sessions", *arguments, "--json"],
        env=run.daemon.environment, capture_output=True, timeout=600, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_replay_shows_what_differs_from_a_receipt(run: Runner) -> None:
    def replay(text: str, *options: str) -> Any:
        return subprocess.run(
            [str(FUMEHOOD), "replay", "-", *options], env=run.daemon.environment,
            input=text.encode(), capture_output=True, timeout=600,
        )  # fmt: skip

    assert run("--receipt", "r.json", stdout="one\ntwo\n", value=1).returncode == 0
    kept = run.directory / "r.json"
    receipt = kept.read_text()
    call_id = json.loads(receipt)["call_id"]
    done = replay(receipt)
    assert (done.returncode, done.stdout) == (0, f"Nothing differs from {call_id}.\n".encode())
    changed = json.loads(receipt)
    changed["fields"] |= {"stdout": "one\nzwei\n", "value": 2}
    done = replay(json.dumps(changed))
    assert done.returncode == 1
    assert done.stdout.decode().splitlines() == [
        f"What differs from {call_id}:", "  stdout:", "    @@ -1,2 +1,2 @@", "     one",
        "    -zwei", "    +two", "  value: 2 → 1",
    ]  # fmt: skip
    (shown,) = json.loads(replay(receipt, "--json").stdout)["replays"]
    assert shown["differences"] == []
    assert shown["receipt"]["fields"] == json.loads(receipt)["fields"]
    # An existing file stays, a call that does not run has no receipt, and a forged file is none.
    assert run("--receipt", "r.json", stdout="other").returncode == 2
    assert kept.read_text() == receipt
    assert b"There is no receipt" in run("--receipt", "q.json", "--memory", "1", value=1).stderr
    for forged in ("{}", receipt.replace("fumehood.receipt.1", "x"), "[]"):
        assert replay(forged).returncode == 2
    unknown = replay(receipt.replace('"run_python"', '"no_such_tool"'))
    assert (unknown.returncode, b"TOOL_NOT_FOUND" in unknown.stdout) == (1, True)
