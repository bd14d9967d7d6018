"""`fumehood sessions`: session lifecycle and file transfer that overwrites nothing by default."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import FUMEHOOD, Daemon
from fumehood import Client
from support.container import told
from support.scripted_daemon import running_scripted_daemon
from support.terminal import on_a_terminal

pytestmark = [pytest.mark.row("S6", "D1")]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Daemon]:
    with running_scripted_daemon() as daemon:
        yield daemon


class Shell:
    """Runs `fumehood` in its own directory, with one session."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.daemon = daemon
        self.directory = directory
        with Client(daemon.socket) as client:
            self.session = client.create_session(memory_mb=128).id
        self.root = daemon.home / "workspaces" / self.session
        self.root.mkdir(parents=True)

    def __call__(self, *arguments: str, stdin: bytes = b"", command: str = "sessions") -> Any:
        return subprocess.run(
            [str(FUMEHOOD), command, *arguments],
            env=self.daemon.environment, cwd=self.directory, input=stdin, capture_output=True,
            timeout=600,
        )  # fmt: skip


@pytest.fixture
def shell(scripted: Daemon, tmp_path: Path) -> Iterator[Shell]:
    made = Shell(scripted, tmp_path)
    yield made
    with Client(scripted.socket) as client:
        client.end_session(made.session)


def test_session_is_made_listed_shown_and_ended(shell: Shell) -> None:
    session = shell("new", "--memory", "128").stdout.decode().strip()
    assert session.startswith("sess_")
    listed = json.loads(shell("list").stdout)
    assert session in [one["id"] for one in listed]
    shown = json.loads(shell("show", session).stdout)
    assert (shown["state"], shown["memory_mb"]) == ("active", 128)
    ended = shell("end", session)
    assert (ended.returncode, json.loads(ended.stdout)["state"]) == (0, "ended")
    after = shell("files", session)
    assert after.returncode == 1
    assert b"RESOURCE_NOT_FOUND" in after.stdout
    assert shell("show", "sess_0").returncode == 1
    assert shell("new", "--memory", "1").returncode == 1


def test_file_round_trips_through_a_session_unchanged(shell: Shell) -> None:
    content = os.urandom(1_500_000)
    (shell.directory / "in.bin").write_bytes(content)
    put = shell("put", shell.session, "in.bin", "d/a.bin")
    assert put.returncode == 0
    assert json.loads(put.stdout) == {"path": "d/a.bin", "size": 1_500_000}
    assert shell("get", shell.session, "d/a.bin").returncode == 0
    assert (shell.directory / "a.bin").read_bytes() == content
    assert shell("get", shell.session, "d/a.bin", "-").stdout == content
    (shell.directory / "out").mkdir()
    assert shell("get", shell.session, "d/a.bin", "out").returncode == 0
    assert (shell.directory / "out/a.bin").read_bytes() == content
    assert shell("get", shell.session, "d/a.bin", "new/b").returncode == 0
    assert (shell.directory / "new/b").read_bytes() == content


def test_put_from_standard_input_requires_a_target_name(shell: Shell) -> None:
    assert shell("put", shell.session, "-", stdin=b"\0piped").returncode == 2
    assert shell("put", shell.session, "-", "a", stdin=b"\0piped").returncode == 0
    assert (shell.root / "a").read_bytes() == b"\0piped"


def test_get_does_not_overwrite_an_existing_file_without_force(shell: Shell) -> None:
    (shell.root / "a").write_bytes(b"theirs")
    (shell.directory / "a").write_bytes(b"mine")
    refused = shell("get", shell.session, "a")
    assert refused.returncode == 1
    assert b"--force" in refused.stderr
    assert (shell.directory / "a").read_bytes() == b"mine"
    assert shell("get", shell.session, "a", "--force").returncode == 0
    assert (shell.directory / "a").read_bytes() == b"theirs"


def test_rm_of_directory_requires_recursive_and_put_create_refuses_existing_file(
    shell: Shell,
) -> None:
    (shell.root / "d").mkdir()
    (shell.root / "d/a").touch()
    assert shell("rm", shell.session, "d").returncode == 1
    assert shell("rm", shell.session, "d", "-r").returncode == 0
    assert os.listdir(shell.root) == []
    (shell.directory / "x").write_bytes(b"1")
    assert shell("put", shell.session, "x", "--create").returncode == 0
    assert shell("put", shell.session, "x", "--create").returncode == 1
    assert shell("put", shell.session, "x").returncode == 0


def test_file_list_includes_names_with_control_characters(shell: Shell) -> None:
    names = ["a\nb", "‮fdp.exe", "\x1b]0;owned\x07"]
    for name in names:
        (shell.root / name).touch()
    for number in range(130):
        (shell.root / f"{number:03}").touch()
    listed = json.loads(shell("files", shell.session).stdout)
    assert {entry["path"] for entry in listed} >= set(names)
    assert len(listed) == 133


def shown_to_a_person(shell: Shell, *arguments: str) -> str:
    environment = shell.daemon.environment
    status, shown = on_a_terminal(environment, "sessions", *arguments, cwd=shell.directory)
    assert status == 0
    return shown


def test_filenames_and_contents_are_escaped_on_a_terminal(shell: Shell) -> None:
    (shell.root / "\x1b]0;owned\x07\nforged").write_text("\x1b[2J\u202eok\n")
    (shell.root / "a").write_text("\x1b[2J\u202eok\n")
    shown = shown_to_a_person(shell, "files", shell.session)
    assert "\x1b]" not in shown
    assert not any(line.startswith("forged") for line in shown.splitlines())
    assert "a " in shown
    shown = shown_to_a_person(shell, "get", shell.session, "a", "-")
    assert shown.strip() == "\\u{001b}[2J\\u{202e}ok"


@pytest.mark.row("S7")
@pytest.mark.parametrize(
    ("name", "options", "tool"),
    [
        ("a.py", (), "run_python"),
        ("a.sh", (), "run_shell"),
        ("a.bash", (), "run_shell"),
        ("a.js", (), "run_javascript"),
        ("a", ("--language", "shell"), "run_shell"),
        ("a.py", ("--language", "javascript"), "run_javascript"),
    ],
)
def test_program_language_follows_file_extension_or_option(
    shell: Shell, name: str, options: tuple[str, ...], tool: str
) -> None:
    (shell.directory / name).write_text(told(stdout="out\n"))
    done = shell(name, "--json", *options, command="run")
    assert done.returncode == 0, done.stderr
    envelope = json.loads(done.stdout)
    assert envelope["metadata"]["tool_name"] == tool
    assert envelope["data"]["stdout"] == "out\n"


@pytest.mark.row("S7")
def test_unknown_language_is_a_usage_error(shell: Shell) -> None:
    (shell.directory / "a.rb").write_text("1")
    done = shell("a.rb", command="run")
    assert done.returncode == 2
    assert b"python, shell, javascript" in done.stderr
    assert shell("a.rb", "--language", "ruby", command="run").returncode == 2
    local = shell("calculator", "{}", "--local", "--session", "sess_1", command="call")
    assert local.returncode == 2
