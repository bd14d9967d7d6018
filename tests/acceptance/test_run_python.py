"""`run_python` in real containers, through the daemon's socket and from the command line."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon, running_daemon
from fumehood.core.workspace_path import MAX_PATH_BYTES
from fumehood.sandbox.images.catalog import Image
from support.http import Answer, SocketClient
from support.pages import run_snippets

pytestmark = pytest.mark.needs("docker")


@pytest.fixture(scope="module")
def daemon(python_image: Image) -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def run(
    http: SocketClient, code: str, files: Any = None, stdin: Any = None, **options: Any
) -> Answer:
    arguments = {"code": code, "files": files, "stdin": stdin}
    given = {name: value for name, value in arguments.items() if value is not None}
    return http.call("run_python", given, **options)


def data(http: SocketClient, code: str, **given: Any) -> Any:
    answer = run(http, code, **given)
    assert answer.status == 200, answer.body["error"]
    return answer.body["data"]


def error(http: SocketClient, code: str, **given: Any) -> Any:
    answer = run(http, code, **given)
    assert answer.body["data"] == {}
    return answer.body["error"]


@pytest.mark.row("S1", "S3", "S7", "E1")
def test_container_program_returns_streams_status_value_and_files(http: SocketClient) -> None:
    code = (
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
        "open('made.txt', 'w').write('content')\n[1, {'a': None}]"
    )
    answer = run(http, code)
    assert answer.body["data"] == {
        "stdout": "out\n", "stderr": "err\n", "exit_code": 0, "value": [1, {"a": None}],
        "value_repr": "[1, {'a': None}]", "images": [], "ended_by": "ok",
        "files": [{"filename": "made.txt", "content_type": "text/plain", "size": 7,
                   "content_base64": base64.b64encode(b"content").decode()}],
    }  # fmt: skip
    metadata = answer.body["metadata"]
    assert metadata["sandbox"]["placement"] == "container"
    assert metadata["resources"]["cpu_ms"] > 0


@pytest.mark.row("S3")
def test_container_program_runs_unprivileged_without_network(http: SocketClient) -> None:
    code = (
        "import os, socket\n"
        "def tried(action):\n"
        "    try:\n        action()\n    except OSError as refusal:\n        return type(refusal).__name__\n"
        "    return 'done'\n"
        "status = dict(l.split(':\\t', 1) for l in open('/proc/self/status') if ':\\t' in l)\n"
        "{'uid': os.getuid(), 'groups': os.getgroups(), 'caps': int(status['CapEff'], 16),\n"
        " 'new_privs': int(status['NoNewPrivs']), 'cwd': os.getcwd(),\n"
        " 'root': tried(lambda: open('/canary', 'w')), 'home': os.environ['HOME'],\n"
        " 'network': tried(lambda: socket.create_connection(('192.0.2.1', 80), 1))}"
    )
    value = data(http, code)["value"]
    assert value.pop("network") != "done"
    assert value.pop("root") != "done"
    assert value == {
        "uid": 10001, "groups": [], "caps": 0, "new_privs": 1, "cwd": "/workspace",
        "home": "/workspace",
    }  # fmt: skip


@pytest.mark.row("S7", "E7")
def test_input_files_and_stdin_are_passed_and_only_changed_files_returned(
    http: SocketClient,
) -> None:
    files = [
        {"path": "data/in.csv", "content": "1,2\nä"},
        {"path": "raw", "content_base64": base64.b64encode(b"\0\xff").decode()},
        {"path": "changed", "content": "before"},
    ]
    code = (
        "import sys\nopen('changed', 'w').write('after!')\n"
        "[sys.stdin.read(), open('data/in.csv').read(), list(open('raw', 'rb').read())]"
    )
    found = data(http, code, files=files, stdin="typed\0")
    assert found["value"] == ["typed\0", "1,2\nä", [0, 255]]
    (entry,) = found["files"]
    assert (entry["filename"], base64.b64decode(entry["content_base64"])) == ("changed", b"after!")


@pytest.mark.row("E7", "D4")
def test_large_file_and_long_output_are_downloadable_in_full(http: SocketClient) -> None:
    code = "open('big', 'wb').write(b'x' * 3_000_000)\nprint('y' * 500_000)"
    found = data(http, code)
    (entry,) = found["files"]
    assert http.get(entry["url"]).body == b"x" * 3_000_000
    assert len(found["stdout"]) < 11_000
    assert http.get(found["resource_url"]).body == b"y" * 500_000 + b"\n"


@pytest.mark.row("S7", "E6")
def test_long_value_is_downloadable_in_full(http: SocketClient) -> None:
    found = data(http, "list(range(5000))")
    assert found["value"] is None
    assert http.get(found["resource_url"]).body == list(range(5000))


@pytest.mark.row("S4", "E1")
def test_exception_reports_only_the_programs_own_traceback(http: SocketClient) -> None:
    said = error(http, "print('so far')\ndef half(x):\n    return 1 / x\nhalf(0)")
    assert said["code"] == "EXECUTION_ERROR"
    assert said["message"] == "The program failed: ZeroDivisionError: division by zero (line 3)."
    details = said["details"]
    assert details["stdout"] == "so far\n"
    assert (details["exit_code"], details["exception"]["line"]) == (1, 3)
    assert "/opt/" not in details["exception"]["traceback"] + details["stderr"]
    assert "line 4, in <module>" in details["exception"]["traceback"]


@pytest.mark.row("S4", "E1")
@pytest.mark.parametrize(
    ("code", "expected", "ended_by"),
    [
        ("1 / 0", "EXECUTION_ERROR", "exception"),
        ("import sys\nsys.exit(3)", "EXECUTION_ERROR", "exit"),
        ("import os\nos._exit(4)", "EXECUTION_ERROR", "exit"),
        ("import os\nos.kill(os.getpid(), 11)", "EXECUTION_ERROR", "signal"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MEMORY_LIMIT_EXCEEDED", "memory"),
        ("while True: print('x' * 1000)", "OUTPUT_LIMIT_EXCEEDED", "output"),
    ],
)
def test_each_failed_ending_has_its_error_code_and_next_call_succeeds(
    http: SocketClient, code: str, expected: str, ended_by: str
) -> None:
    said = error(http, "print('kept')\n" + code)
    assert (said["code"], said["retryable"]) == (expected, False)
    assert said["details"]["ended_by"] == ended_by
    assert said["details"]["stdout"].startswith("kept\n")
    assert data(http, "1 + 1")["value"] == 2


@pytest.mark.row("S4", "P8", "P11")
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\ntime.sleep(600)",
    ],
)
def test_timeout_kills_program_and_all_its_processes(http: SocketClient, code: str) -> None:
    said = error(http, "print('kept', flush=True)\n" + code, timeout_seconds=1)
    assert said["code"] == "TIMEOUT"
    assert said["details"]["limit"]["timeout_seconds"] == 1
    assert said["details"]["limit"]["hint"] in said["message"]
    assert said["details"]["stdout"] == "kept\n"
    processes = "import os\nlen([name for name in os.listdir('/proc') if name.isdigit() and os.stat('/proc/' + name).st_uid == 10001])"
    assert data(http, processes)["value"] == 1


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("open_files", "files = [open('/dev/null') for _ in range(1000)]"),
        ("disk", "for n in range(1000): open(str(n), 'wb').write(b'x' * (1 << 20))"),
        (
            "processes",
            "import subprocess\n[subprocess.Popen(['sleep', '600']) for _ in range(200)]",
        ),
    ],
)
def test_resource_limit_that_was_hit_is_named(http: SocketClient, limit: str, code: str) -> None:
    answer = run(http, code, memory_limit_mb=128)
    body = answer.body["error"]["details"] if answer.body["error"] else answer.body["data"]
    assert limit in body["limits_hit"], answer.body
    assert any(
        said.startswith(f"limits_hit: {limit}:") for said in answer.body["metadata"]["warnings"]
    )


@pytest.mark.row("S5")
@pytest.mark.parametrize("isolation", [None, "container_per_call"])
def test_no_state_leaks_from_one_call_to_the_next(
    http: SocketClient, isolation: str | None
) -> None:
    options = {} if isolation is None else {"isolation": isolation}
    leave = (
        "import os, sys\nopen('left', 'w').write('x')\nopen('/tmp/left', 'w').write('x')\n"
        "open('/dev/shm/left', 'w').write('x')\nos.environ['LEFT'] = 'x'\nsys.left = 1"
    )
    data(http, leave, **options)
    look = (
        "import os, sys\n[os.listdir('.'), os.listdir('/tmp'), os.listdir('/dev/shm'),"
        " 'LEFT' in os.environ, hasattr(sys, 'left')]"
    )
    assert data(http, look, **options)["value"] == [[], [], [], False, False]


@pytest.mark.row("S7", "E1")
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("{1}", "{1}"),
        ("b'x'", "b'x'"),
        ("float('nan')", "nan"),
        ("a = []\na.append(a)\na", "[[...]]"),
        ("2**60", "1152921504606846976"),
    ],
)
def test_value_not_representable_in_json_is_returned_as_repr_only(
    http: SocketClient, code: str, shown: str
) -> None:
    found = data(http, code)
    assert (found["value"], found["value_repr"]) == (None, shown)


@pytest.mark.row("S3", "P2")
def test_five_megabyte_program_runs_and_empty_or_nul_code_is_refused(http: SocketClient) -> None:
    assert data(http, "#" * (5 * 1024 * 1024 - 5) + "\n1+1")["value"] == 2
    assert error(http, "")["code"] == "INVALID_PARAMS"
    assert error(http, "print('a\0')")["code"] == "INVALID_PARAMS"


@pytest.mark.row("S3", "P2")
def test_file_path_of_maximum_length_works_and_longer_is_refused(http: SocketClient) -> None:
    path = "/".join(["d" * 203] * 20 + ["f" * 4])
    assert len(path) == MAX_PATH_BYTES
    code = f"open({path!r}, 'a').write('!')\nlen(open({path!r}).read())"
    found = data(http, code, files=[{"path": path, "content": "x" * 1000}])
    assert found["value"] == 1001
    assert found["files"][0]["filename"] == path
    longer = [{"path": path + "f", "content": ""}]
    assert run(http, "1", files=longer).body["error"]["fields"] == ["files.0.path"]


@pytest.mark.row("S3", "E1")
def test_undecodable_output_byte_is_replaced(http: SocketClient) -> None:
    found = data(http, "import sys\nsys.stdout.buffer.write(b'a\\xffb\\x1b[0m\\0')\nNone")
    assert found["stdout"] == "a\ufffdb\x1b[0m\0"


@pytest.mark.row("S3", "E7")
def test_symlink_fifo_and_undecodable_name_are_left_out_of_files(http: SocketClient) -> None:
    code = (
        "import os\nos.symlink('/etc/passwd', 'link')\nos.mkfifo('fifo')\n"
        "os.makedirs('d/e')\nopen('d/e/f', 'w').write('deep')\nos.chmod('d', 0)\n"
        "open('a\\nb', 'w').write('odd')\nopen(b'\\xff', 'w').write('no text')"
    )
    found = data(http, code)
    assert [entry["filename"] for entry in found["files"]] == ["a\nb", "d/e/f"]
    assert found["files_left_out"] == 3


@pytest.mark.row("S7", "D1", "E7")
def test_run_command_runs_script_and_saves_its_files(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys\nprint(open('in.txt').read(), sys.stdin.read())\n"
        "open('out.bin', 'wb').write(bytes(2_000_000))\n6 * 7"
    )
    (tmp_path / "in.txt").write_text("file")
    (tmp_path / "input").write_text("typed")
    done = subprocess.run(
        [str(FUMEHOOD), "run", "script.py", "--file", "in.txt", "--stdin", "input", "--save", "out"],
        cwd=tmp_path, env=daemon.environment, capture_output=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, b"file typed\n", b"value: 42\n")
    assert os.listdir(tmp_path / "out") == ["out.bin"]
    assert (tmp_path / "out" / "out.bin").read_bytes() == bytes(2_000_000)


@pytest.mark.row("D1", "S7")
def test_how_to_run_python_snippets_run_unchanged(daemon: Daemon, tmp_path: Path) -> None:
    snippets = run_snippets("docs/howto/run-python.md", daemon.environment, tmp_path)
    ran = [snippet.stdout for snippet in snippets]
    assert ran[0] == "5 rows\n" + "".join(f"{n},{n * n}\r\n" for n in range(5))
    assert ran[1:] == ["42\n", "3 lines\n", "5\n\nout.bin 2000000\n"]


@pytest.mark.row("D1", "B5")
def test_how_to_replay_a_call_snippets_run_unchanged(daemon: Daemon, tmp_path: Path) -> None:
    ran = [
        snippet.stdout
        for snippet in run_snippets("docs/howto/replay-a-call.md", daemon.environment, tmp_path)
    ]
    assert "Nothing differs from call_" in ran[1]
    assert ran[2].count("Nothing differs from call_") == 2
    assert ran[3] == "True\n"
