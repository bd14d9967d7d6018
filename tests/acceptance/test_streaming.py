"""S8: program output is streamed while the program runs, and the program can be cancelled."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import Daemon, running_daemon
from fumehood import Client
from fumehood.docker.api import open_docker
from fumehood.sandbox.images.catalog import Image
from fumehood.streams.events import OutputEvent, ProgressEvent, ResultEvent
from support.containers import containers_of
from support.packages import install
from support.pages import read, run_snippets
from support.streaming import call_id_of, streaming
from support.wait import wait_until

pytestmark = [pytest.mark.needs("docker"), pytest.mark.row("S8", "P8", "D2")]

OUTPUT_KB = 64 * 1024


@pytest.fixture(scope="module")
def daemon(python_image: Image) -> Iterator[Daemon]:
    """A separate daemon whose programs may print more than the default."""
    with running_daemon(container__output_kb=str(OUTPUT_KB)) as running:
        yield running


def follow(daemon: Daemon, code: str, **options: Any) -> Any:
    return streaming(daemon.socket, "run_python", {"code": code}, **options)


def sleeps_inside(daemon: Daemon) -> bool:
    """Whether `sleep` runs in one of this daemon's containers, according to Docker."""
    commands: list[str] = []
    with contextlib.closing(open_docker(timeout_s=30)) as docker:
        for one in containers_of(f"fumehood.pid={daemon.process.pid}"):
            commands += [process[-1] for process in docker.top(one["Id"])["Processes"]]
    return "sleep 60" in commands


def test_output_is_streamed_while_program_runs_and_cancel_kills_it(daemon: Daemon) -> None:
    """The program would run for a minute, so any output received arrived before its end."""
    with follow(daemon, "print('warm')") as stream:
        assert stream.data()[-1][0] == "tool_result"
    code = (
        "import subprocess, sys, time\n"
        "print('one', flush=True)\nprint('two', file=sys.stderr, flush=True)\n"
        "subprocess.Popen(['sleep', '60'])\ntime.sleep(60)"
    )
    with follow(daemon, code) as stream:
        events = stream.events()
        call_id = call_id_of(next(events))
        seen = {json.loads(next(events).data)["text"] for _ in range(2)}
        assert seen == {"one\n", "two\n"}
        wait_until(lambda: sleeps_inside(daemon))
        with Client(daemon.socket) as client:
            client.cancel(call_id)
        last = next(events)
    envelope = json.loads(last.data)
    assert (last.kind, envelope["error"]["code"]) == ("tool_error", "CANCELLED")
    assert envelope["error"]["details"]["stdout"] == "one\n"
    assert envelope["error"]["details"]["stderr"] == "two\n"
    assert envelope["metadata"]["sandbox"]["ended_by"] == "cancelled"
    wait_until(lambda: not sleeps_inside(daemon))
    with follow(daemon, "print('after')") as stream:  # and the wall is as good as before
        assert stream.data()[-1][1]["data"]["stdout"] == "after\n"


def test_utf8_character_printed_bytewise_is_never_split(daemon: Daemon) -> None:
    text = "ä€🙂\n" * 30
    code = (
        f"import os, time\nfor byte in {text!r}.encode():\n    os.write(1, bytes([byte]))\n"
        "    time.sleep(0.002)"
    )
    with follow(daemon, code) as stream:
        data = stream.data()
    told = [fields for kind, fields in data if kind == "tool_output"]
    assert "".join(fields["text"] for fields in told) == text
    assert len(told) > 1
    expected = 0
    for fields in told:
        assert fields["offset"] == expected
        expected += len(fields["text"].encode())
    assert data[-1][1]["data"]["stdout"] == text


@pytest.mark.row("D1")
def test_how_to_stream_output_snippets_run_unchanged(daemon: Daemon, tmp_path: Path) -> None:
    page = "docs/howto/stream-output.md"
    ran = [snippet.stdout for snippet in run_snippets(page, daemon.environment, tmp_path)]
    followed, python, curl, cancelled, resumed = ran
    assert followed == "line 0\nline 1\nline 2\n"
    assert python.startswith("stdout 0 '0\\n'")
    assert python.endswith("CANCELLED '0\\n1\\n'\n")
    assert 'event: tool_output\ndata: {"stream":"stdout","offset":0,"text":"42\\n"' in curl
    assert "event: tool_result" in curl
    assert cancelled.endswith("that one does not run\n")
    kinds = re.findall("^event: (.*)$", resumed, re.MULTILINE)
    assert kinds == [
        "tool_output", "tool_result", "resync", "tool_progress", "tool_output", "tool_result"
    ]  # fmt: skip
    (shown,) = re.findall(r"^```text\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)
    assert (
        shown.splitlines()[1:] == resumed.replace("\n\n", "\n").split("id: \n")[1].splitlines()[:2]
    )


def test_streams_of_concurrent_programs_do_not_mix(daemon: Daemon) -> None:
    with (
        follow(daemon, "print('a' * 200_000)") as one,
        follow(daemon, "print('b' * 200_000)") as other,
    ):
        answers = one.data(), other.data()
    for letter, events in zip("ab", answers, strict=True):
        text = "".join(fields.get("text", "") for _, fields in events)
        assert text == letter * 200_000 + "\n"


@pytest.mark.row("E6")
def test_long_output_is_not_held_in_memory_and_downloadable_in_full(daemon: Daemon) -> None:
    size = 40 << 20
    code = f"line = 'ä' * 511 + '\\n'\nfor _ in range({size} // 1023):\n    print(line, end='')"
    process = psutil.Process(daemon.process.pid)
    with follow(daemon, "print(1)") as stream:
        stream.data()
    before = process.memory_info().rss
    largest = length = 0
    with Client(daemon.socket) as client:
        for number, event in enumerate(client.stream("run_python", {"code": code})):
            if isinstance(event, OutputEvent):
                assert event.offset == length
                length += len(event.text.encode())
            if number % 50 == 0:
                largest = max(largest, process.memory_info().rss)
            last = event
        assert isinstance(last, ResultEvent), last
        data = last.envelope.data
        whole = client.blob(data["resource_url"])
    line = ("ä" * 511 + "\n").encode()
    assert whole == line * (size // 1023)
    assert length == len(whole)
    assert len(data["stdout"]) < 11_000
    (field,) = data["truncation_info"]["fields"]
    assert (field["field"], field["original_length"]) == ("stdout", 512 * (size // 1023))
    assert last.envelope.metadata.resources.output_bytes == len(whole)
    # A run whose output were held would need it several times over.
    assert largest - before < size / 2


@pytest.mark.needs("landlock")
def test_progress_of_jailed_and_host_functions_is_streamed(
    start_daemon: Any, tmp_path: Path
) -> None:
    installed = install(tmp_path / "packages", "work", WORK)
    own = start_daemon(variables=installed, host_tools="on_the_host")
    with Client(own.socket) as client:
        for tool in ("in_the_jail", "on_the_host"):
            *events, last = client.stream(tool)
            assert isinstance(last, ResultEvent), last
            told = [(e.progress, e.message) for e in events if isinstance(e, ProgressEvent)]
            assert told == [(0, "started"), *((n * 25, f"step {n}") for n in range(4))]
            assert isinstance(last, ResultEvent)
            assert last.envelope.data == {"value": 4}


WORK = '''
from fumehood import progress, tool

def work() -> int:
    for number in range(4):
        progress(number * 25, f"step {number}")
    return 4

@tool
def in_the_jail() -> int:
    """Work and say how far it is."""
    return work()

@tool(sandboxed=False)
def on_the_host() -> int:
    """Work and say how far it is, in a worker process."""
    return work()

tools = [in_the_jail, on_the_host]
'''
