"""Languages and sessions in real containers, through the daemon's socket."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client, Refused
from support.http import SocketClient
from support.pages import run_snippets
from support.wheels import write_wheel
from support.workshop import Session, workshop

pytestmark = [pytest.mark.needs("docker")]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    index = tmp_path_factory.mktemp("index")
    write_wheel(index, "humanize", "4.9", files={"humanize.py": "naturalsize = '{:.1e} B'.format"})
    with workshop("python", "shell", "node", index=index) as running:
        yield running


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    made = Session(daemon, image="python", memory_mb=128)
    yield made
    made.end()


def call(
    http: SocketClient, tool: str, options: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    answer = http.call(tool, arguments, **(options or {}))
    return answer.body["error"] or answer.body["data"]


@pytest.mark.row("S7", "E7")
def test_shell_command_returns_streams_status_and_files(http: SocketClient) -> None:
    data = call(
        http, "run_shell",
        command="sort -u - | tee out.txt; echo warn >&2; jq -r .a in.json", stdin="b\na\nb\n",
        files=[{"path": "in.json", "content": '{"a": "found"}'}],
    )  # fmt: skip
    assert data == {
        "stdout": "a\nb\nfound\n", "stderr": "warn\n", "exit_code": 0, "ended_by": "ok",
        "files": [{"filename": "out.txt", "content_type": "text/plain", "size": 4,
                   "content_base64": base64.b64encode(b"a\nb\n").decode()}],
    }  # fmt: skip


@pytest.mark.row("S7")
def test_failed_command_reports_exit_status_stdout_and_stderr(http: SocketClient) -> None:
    error = call(http, "run_shell", command="echo out; ls nothing; exit 7")
    assert error["code"] == "EXECUTION_ERROR"
    assert (error["details"]["exit_code"], error["details"]["stdout"]) == (7, "out\n")
    assert "nothing" in error["details"]["stderr"]


@pytest.mark.row("S7")
@pytest.mark.parametrize("command", ["read x < /dev/tty", "stty raw", "vi a 2>&1 >&2 || stty -a"])
def test_command_requiring_a_terminal_fails_with_explanation(
    http: SocketClient, command: str
) -> None:
    error = call(http, "run_shell", command=command)
    assert error["code"] == "EXECUTION_ERROR"
    assert "no terminal is available" in error["message"]


@pytest.mark.row("S7", "S2")
def test_timeout_of_blocked_command_reports_waiting_not_computing(http: SocketClient) -> None:
    error = call(http, "run_shell", {"timeout_seconds": 1.5}, command="mkfifo p; cat p")
    assert (error["code"], error["details"]["ended_by"]) == ("TIMEOUT", "wall_time")
    assert "waiting, not computing" in error["message"]


@pytest.mark.row("S7")
def test_javascript_returns_value_stdout_and_files(http: SocketClient) -> None:
    data = call(
        http, "run_javascript",
        code="require('fs').writeFileSync('a.txt', 'x');\nconsole.log('out');\n({a: [1, null]})",
    )  # fmt: skip
    assert (data["value"], data["stdout"], data["exit_code"]) == ({"a": [1, None]}, "out\n", 0)
    assert [file["filename"] for file in data["files"]] == ["a.txt"]


@pytest.mark.row("S7", "E1")
def test_javascript_exception_has_the_same_fields_as_python(http: SocketClient) -> None:
    error = call(http, "run_javascript", code="const a = 1;\nnull.x;")
    assert error["code"] == "EXECUTION_ERROR"
    exception = error["details"]["exception"]
    assert exception.keys() == {"type", "message", "line", "traceback"}
    assert (exception["type"], exception["line"]) == ("TypeError", 2)
    assert "TypeError" in error["message"]


@pytest.mark.row("S6")
def test_session_keeps_variables_and_files_between_calls(session: Session) -> None:
    first = session.python("x = 41\nheld = b'x' * 20_000_000\nopen('a.txt', 'w').write('written')")
    assert first["session"]["state"] == "kept"
    # Of its own: what every child begins with is not counted.
    assert 15_000_000 < first["session"]["variables_bytes"] < 30_000_000
    assert session.python("x + 1")["value"] == 42
    shell = session.shell("cat a.txt; echo more >> a.txt")
    assert shell["stdout"] == "written"
    assert shell["session"] == {"id": session.id, "state": None, "variables_bytes": None}
    assert session.python("open('a.txt').read()")["value"] == "writtenmore\n"
    shown = session.http.get(f"/v1/sessions/{session.id}").body["data"]["session"]
    assert (shown["calls"], shown["state"]) == (4, "active")


@pytest.mark.row("S6")
def test_timed_out_session_call_rolls_back_variables_but_not_files(session: Session) -> None:
    session.python("x = 'before'")
    answer = session.http.call(
        "run_python", {"code": "x = 'after'\nopen('left', 'w').write('1')\nwhile True: pass"},
        session_id=session.id, timeout_seconds=1.5,
    )  # fmt: skip
    assert answer.code == "TIMEOUT"
    assert answer.body["error"]["details"]["session"]["state"] == "rolled_back"
    assert any("files are not rolled back" in w for w in answer.body["metadata"]["warnings"])
    assert session.python("import os\n[x, os.path.exists('left')]")["value"] == ["before", True]


@pytest.mark.row("S6")
def test_file_tools_read_list_and_write_files_shared_with_programs(session: Session) -> None:
    session.shell("mkdir d; printf 'eins\\nzwei\\n' > d/a.txt; head -c 300 /dev/urandom > b.bin")
    read = session.call("read_file", path="d/a.txt", offset=5).body["data"]
    assert (read["content"], read["size"], read["has_more"]) == ("zwei\n", 10, False)
    raw = session.call("read_file", path="b.bin").body["data"]
    assert len(base64.b64decode(raw["content_base64"])) == 300
    assert session.call("read_file", path="b.bin", encoding="text").code == "INVALID_PARAMS"
    assert session.call("read_file", path="c").code == "RESOURCE_NOT_FOUND"
    listed = session.call("list_files", recursive=True).body["data"]
    assert [entry["path"] for entry in listed["items"]] == ["b.bin", "d", "d/a.txt"]
    assert listed["pagination"] == {"has_more": False, "next_cursor": None, "total_count": 3}
    assert session.call("write_file", path="e/f.py", content="print(6 * 7)").status == 200
    assert session.call("write_file", path="e/f.py", content="").code == "INVALID_PARAMS"
    assert session.shell("python3 e/f.py")["stdout"] == "42\n"


@pytest.mark.row("S6", "T2")
def test_delete_tool_needs_approval_but_owner_deletes_directly(session: Session) -> None:
    session.shell("touch a b c")
    refused = session.call("delete_files", paths=["a"])
    assert refused.code == "REQUIRES_HUMAN_APPROVAL"
    assert session.files("DELETE", "/b").status == 200
    session.shell("rm c")
    assert session.shell("ls")["stdout"] == "a\n"


@pytest.mark.row("S6")
def test_uploaded_file_is_owned_and_writable_by_session_programs(session: Session) -> None:
    content = os.urandom(2_500_000)
    assert session.files("PUT", "/d/in.bin", content).status == 200
    assert session.python(
        "import os\nopen('d/in.bin', 'ab').write(b'!')\n"
        "[os.stat('d/in.bin').st_uid == os.getuid(), os.path.getsize('d/in.bin')]"
    )["value"] == [True, 2_500_001]
    assert session.files("GET", "/d/in.bin").body == content + b"!"
    assert session.shell("rm -r d; ls -A | wc -l")["stdout"] == "0\n"


@pytest.mark.row("S6")
def test_session_without_the_language_refuses_the_call(session: Session) -> None:
    answer = session.call("run_javascript", code="1")
    assert (answer.code, answer.body["error"]["fields"]) == (
        "INVALID_PARAMS", ["options.session_id"],
    )  # fmt: skip


@pytest.mark.row("S6")
def test_ended_session_refuses_calls_and_file_access(daemon: Daemon) -> None:
    session = Session(daemon, image="python", memory_mb=128)
    session.shell("touch a")
    session.http.request("DELETE", f"/v1/sessions/{session.id}")
    for answer in (session.call("run_shell", command="ls"), session.files("GET", "/a")):
        assert answer.code == "RESOURCE_NOT_FOUND"
        assert "ended" in answer.body["error"]["message"]
    session.http.close()


@pytest.mark.row("S6", "S11")
def test_directory_goes_into_a_session_and_back(daemon: Daemon, tmp_path: Path) -> None:
    session = Session(daemon, image="python", memory_mb=512)
    source, target = tmp_path / "project", tmp_path / "back"
    (source / "a/deep").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a/deep/ünicode name").write_text("x")
    (source / "large").write_bytes(os.urandom(700_000))
    for number in range(1200):
        (source / f"a/{number}").write_text(str(number))
    script = source / "script"
    script.write_text("#!/bin/sh\necho ran > made-inside\n")
    script.chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")

    with Client(session.daemon.socket) as client:
        put = client.put_directory(session.id, source, "p")
        assert (put.path, put.files) == ("p", 1203)
        session.shell(
            "cd p && sh ./script && stat -c %A script | grep x && ln -s /etc/passwd inside && rm a/7"
        )
        client.get_directory(session.id, "p", target)
        with pytest.raises(FileExistsError):
            client.get_directory(session.id, "p", target / "large")
        with pytest.raises(FileExistsError):
            client.get_directory(session.id, "p", target)
        with pytest.raises(Refused, match="not a directory"):
            client.get_directory(session.id, "p/large", tmp_path / "no")
        with pytest.raises(Refused, match="There is no such"):
            client.get_directory(session.id, "nothing", tmp_path / "no")

    def content(root: Path) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
            for path in root.rglob("*")
            if not path.is_symlink()
        }

    assert content(target) == {
        **{path: data for path, data in content(source).items() if path != "a/7"},
        "made-inside": b"ran\n",
    }
    assert (target / "script").stat().st_mode & 0o111 != 0
    assert [one for one in os.listdir(tmp_path) if one.startswith(".")] == []
    session.end()


@pytest.mark.row("S6", "D1")
@pytest.mark.parametrize(
    "page",
    [
        "keep-a-session", "files-in-and-out", "let-an-agent-work-on-your-project",
        "run-a-dev-server",
    ],
)  # fmt: skip
def test_session_how_to_snippets_run_unchanged(daemon: Daemon, tmp_path: Path, page: str) -> None:
    ran = list(run_snippets(f"docs/howto/{page}.md", daemon.environment, tmp_path, timeout_s=120))
    printed = "".join(snippet.stdout + snippet.stderr for snippet in ran)
    words = {
        "keep-a-session": (
            "[1, 2, 3]",
            "written by the shell",
            "'state': 'kept'",
            "b'HELLO'",
            "1.2e+07 B",
            "1 AB",
        ),
        "files-in-and-out": (
            "name\nAnn\nBob\n",
            "FROM A PIPE",
            "one\ntwo\n",
            "three\n",
            "name,age\nAnn,31",
        ),
        "let-an-agent-work-on-your-project": (
            "tests pass",
            "-    return max(prices)\n+    return sum(prices)",
            "+++ b/state.txt",
        ),
        "run-a-dev-server": ("running", "hello from the session", "GET / HTTP/1.1", "ended"),
    }[page]
    assert [word for word in words if word not in printed] == []
    assert len(ran) >= 3
