"""What is kept of a run, and which paths are taken from a stranger."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from fumehood.core.errors import EndedBy
from fumehood.core.limits import CONTAINER_FILES_OUT, MB
from fumehood.core.session import FileKind
from fumehood.protocol.container_frames import (
    ContainerData,
    ContainerEnding,
    ContainerFile,
    ContainerOutput,
)
from fumehood.protocol.framing import FrameError
from fumehood.sandbox.container.channel import ReceivedRun, is_plain_path
from fumehood.sandbox.wall import RunSinks
from support.scripted_guest import LIMITS, ended


class Sink:
    def __init__(self) -> None:
        self.files: list[tuple[str, int, bytes]] = []

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        self.files.append((path, size, b""))

    def write(self, data: bytes) -> None:
        path, size, content = self.files[-1]
        self.files[-1] = (path, size, content + data)


def run(sink: Any = None) -> ReceivedRun:
    port: Any = None  # it has no streams
    return ReceivedRun(1, LIMITS, RunSinks(files=sink), "call", port)


def output(text: str, stream: str = "stdout") -> ContainerOutput:
    return ContainerOutput.model_validate({"op": "output", "id": 1, "stream": stream, "text": text})


def file(path: str, size: int) -> ContainerFile:
    return ContainerFile(op="file", id=1, path=path, size=size)


def data(content: bytes) -> ContainerData:
    return ContainerData(op="data", id=1, data=base64.b64encode(content).decode())


def ending(**other: Any) -> ContainerEnding:
    return ContainerEnding.model_validate(ended(**other))


PLAIN = ["a", "a/b", "a b", "ä/ü", "a" * 255, "/".join(["d" * 200] * 20), "..a", "a..", "...", "\n"]


@pytest.mark.parametrize(
    "path",
    [
        *PLAIN, "", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", ".", "./a", "a/.",
        "a//b", "a/", "a\0b", "\udc80",
    ],
)  # fmt: skip
def test_path_that_escapes_the_workspace_is_refused_and_a_plain_one_accepted(path: str) -> None:
    assert is_plain_path(path) is (path in PLAIN)


def test_output_is_kept_up_to_the_limit_of_each_stream() -> None:
    received = run()
    for _ in range(3000):
        received.on_output(output("ab"))
    received.on_output(output("e" * 999, "stderr"))
    kept = received.on_ended(ending(stdout_bytes=6000))
    assert kept.stdout == "ab" * 500
    assert kept.stderr == "e" * 999
    assert kept.stdout_bytes == 6000


def test_failing_sink_is_not_used_again_and_the_run_continues() -> None:
    class Broken(Sink):
        def write(self, data: bytes) -> None:
            self.files.append(("asked", 0, data))
            raise RuntimeError

    sink = Broken()
    received = run(sink)
    received.on_file(file("a", 5))
    received.on_data(data(b"he"))
    received.on_data(data(b"llo"))
    received.on_file(file("b", 0))
    assert [path for path, _, _ in sink.files] == ["a", "asked"]
    assert received.on_ended(ending()).ended_by is EndedBy.OK


def test_more_files_than_a_workspace_holds_are_refused() -> None:
    received = run()
    for number in range(CONTAINER_FILES_OUT):
        received.on_file(file(f"f{number}", 0))
    with pytest.raises(FrameError):
        received.on_file(file("one-more", 0))


def test_declared_files_over_the_memory_limit_are_refused_at_once() -> None:
    received = run()
    received.on_file(file("a", 128 * MB))
    with pytest.raises(FrameError):
        received.on_file(file("b", 1))


@pytest.mark.parametrize("ended_by", [by.value for by in EndedBy if by is not EndedBy.OK])
def test_claimed_result_does_not_turn_a_failure_into_success(ended_by: str) -> None:
    received = run().on_ended(ending(ended_by=ended_by, claim={"result": {"value": 4}}))
    assert received.ended_by.value == ended_by
    assert received.result is None


@pytest.mark.parametrize(
    ("decided", "claimed", "named"),
    [
        ("exception", "memory", EndedBy.MEMORY),
        ("exception", "policy", EndedBy.POLICY),
        ("exception", "cancelled", EndedBy.EXCEPTION),
        ("exception", "output", EndedBy.EXCEPTION),
        ("wall_time", "memory", EndedBy.WALL_TIME),
    ],
)
def test_claimed_failure_kind_is_used_only_without_an_observed_one(
    decided: str, claimed: str, named: EndedBy
) -> None:
    error = {"kind": claimed, "message": "m"}
    received = run().on_ended(ending(ended_by=decided, claim={"error": error}))
    assert received.ended_by is named
    assert received.claimed_message == "m"


def test_interrupted_run_keeps_its_partial_output() -> None:
    received = run()
    received.on_output(output("größe"))
    kept = received.cut_off(EndedBy.WALL_TIME)
    assert (kept.ended_by, kept.stdout, kept.stdout_bytes) == (EndedBy.WALL_TIME, "größe", 7)
