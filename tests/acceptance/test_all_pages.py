"""E5: all pages of a tool's list, from the command line and from Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import Daemon
from fumehood import Client
from fumehood.cli.main import app
from fumehood.sandbox.images.catalog import Image
from support.clients import LEAVES_SOCKETS

pytestmark = [pytest.mark.row("E5"), pytest.mark.needs("docker"), *LEAVES_SOCKETS]

FILES = 23


@pytest.fixture
def session(shared_daemon: Daemon, python_image: Image) -> Iterator[str]:
    """A session with files."""
    with Client(shared_daemon.socket) as client:
        code = f"for n in range({FILES}):\n    open(f'{{n:02}}.txt', 'w').close()"
        session_id = client.create_session().id
        client.call("run_python", {"code": code}, session_id=session_id).raise_for_error()
        yield session_id
        client.end_session(session_id)


NAMES = [f"{number:02}.txt" for number in range(FILES)]


def test_command_line_all_option_prints_one_item_per_line(
    shared_daemon: Daemon, session: str
) -> None:
    given = ["call", "list_files", "--all", "--session", session]
    done = CliRunner().invoke(app, [*given, "--socket", str(shared_daemon.socket)])
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["path"] for line in done.stdout.splitlines()] == NAMES


def test_client_fetch_all_returns_items_of_every_page(shared_daemon: Daemon, session: str) -> None:
    with Client(shared_daemon.socket) as client:
        items = client.fetch_all("list_files", {"limit": 4}, session_id=session)
    assert [item["path"] for item in items] == NAMES


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["calculator", '{"expression": "1"}', "--all"], 0, "does not answer in pages"),
        (["list_files", "--all"], 1, "INVALID_PARAMS"),
        (["list_files", "--all", "--stream"], 2, "--all goes without"),
    ],
)
def test_all_option_reports_tool_without_pages_and_bad_usage(
    shared_daemon: Daemon, given: list[str], code: int, words: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["call", *given, "--socket", str(shared_daemon.socket)])
    assert (done.exit_code, words in done.output) == (code, True), done.output
    assert ('"text": "1"' in done.stdout) is (given[0] == "calculator")  # it ran: here it is
