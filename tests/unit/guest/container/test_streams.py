"""The guest's ends of streams: programs are hostile, and one kind never reads another's frames."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fumehood.code_mode.stream import CALLS
from fumehood.gateway.service import network_kind
from fumehood.guest.container.run import Run
from fumehood.guest.container.streams import Place
from fumehood.guest.core.limits import Limits
from fumehood.guest.streams import calls, feed
from fumehood.images.archive import guest_archive
from fumehood.projects.service import FEED, FEED_BYTES
from fumehood.protocol.connections import DATA, ONLY, TAKEN, Segment
from fumehood.protocol.framing import HEADER, MAX_CALLS
from fumehood.protocol.streams import StreamFrame, pieces_of
from fumehood.sandbox.images.recipe import GUEST_HOME
from fumehood.sandbox.ports import PORTS


class Supervisor:
    """Keeps what the ends do."""

    def __init__(self) -> None:
        self.sent: list[StreamFrame] = []
        self.stopped: list[str] = []
        host: Any = SimpleNamespace(send_frame=self.sent.append)
        selector: Any = None  # these ends watch nothing
        self.place = Place(host, selector, self.write, lambda run, why: self.stopped.append(why))

    def write(self, run: Run, data: bytes) -> None:
        run.request += data


def run_of(*kinds: str) -> Run:
    limits = Limits(1, 1, 1 << 20, 1000)
    return Run(7, "python", limits, bytearray(), streams=dict.fromkeys(kinds, ""))


LOADED = """
import json, sys
sys.path.append(sys.argv[1])
from fumehood.guest import given, streams
from fumehood.guest.container import supervisor
from fumehood.guest.core.modules import modules_of
ends = {kind: module.End.__name__ for kind, module in modules_of(streams).items()}
makers = {name: module.Maker.__name__ for name, module in modules_of(given).items()}
protocol = [name for name in sys.modules if name.startswith("fumehood.prot")]
print(json.dumps([ends, makers, protocol]))
"""


def test_guest_in_an_image_knows_exactly_the_kinds_that_the_host_opens(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(guest_archive())) as archive:
        archive.extractall(tmp_path, filter="data")
    home = str(tmp_path / Path(GUEST_HOME).parent)
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", LOADED, home],
        env={}, capture_output=True, check=True, timeout=600,
    )  # fmt: skip
    ends, makers, protocol = json.loads(loaded.stdout)
    host = [CALLS, FEED, network_kind(""), PORTS.kind]
    assert ends == {kind.name: "End" for kind in host}
    assert makers == {module: "Maker" for kind in host for module in kind.modules}
    assert "fumehood.protocol.messages" not in protocol


# -- calls -----------------------------------------------------------------------------------


def call(**fields: Any) -> dict[str, Any]:
    return {"call": {"number": 1, "tool": "t", "arguments": {"a": 1}} | fields}


def calls_of(made: Supervisor, run: Run) -> calls.End:
    end = calls.End("calls", made.place)
    end.begin(run, "")
    return end


def test_call_is_sent_and_its_answer_is_passed_to_the_program() -> None:
    made, run = Supervisor(), run_of("calls")
    end = calls_of(made, run)
    assert end.on_message(run, call(more=1))
    (frame,) = made.sent
    assert frame[:2] == ("calls", 7)
    assert json.loads(frame.body) == call()["call"]
    answer = b"x" * 100_000
    for piece in pieces_of(answer):
        end.on_frame(run, StreamFrame("calls", 7, piece))
    assert bytes(run.request) == HEADER.pack(len(answer)) + answer
    assert not end.on_message(run, {"result": {}})  # which is the program's claim
    assert made.stopped == []


@pytest.mark.parametrize(
    "message",
    [
        {"call": 5}, {"call": []}, call(number=-1), call(number="1"), call(number=True),
        call(number=1 << 31), call(tool=5), call(tool="x" * 257), call(arguments=[]),
    ],
)  # fmt: skip
def test_attack_invalid_call_ends_the_program(message: dict[str, Any]) -> None:
    made, run = Supervisor(), run_of("calls")
    assert calls_of(made, run).on_message(run, message)
    assert (made.stopped, made.sent) == (["policy"], [])


def test_attack_program_that_calls_without_end_or_sends_garbage_is_ended() -> None:
    made, run = Supervisor(), run_of("calls")
    end = calls_of(made, run)
    for _ in range(MAX_CALLS + calls.REFUSALS):
        end.on_message(run, call())
    assert made.stopped == []
    end.on_message(run, call())
    end.on_garbage(run)
    assert made.stopped == ["policy", "policy"]
    assert len(made.sent) == MAX_CALLS + calls.REFUSALS


def test_attack_program_that_reads_no_answers_is_ended() -> None:
    made, run = Supervisor(), run_of("calls")
    end = calls_of(made, run)
    run.request += bytes(calls.MAX_UNREAD_BYTES - 4)
    (piece,) = pieces_of(b"full")
    end.on_frame(run, StreamFrame("calls", 7, piece))
    assert made.stopped == []
    end.on_frame(run, StreamFrame("calls", 7, piece))
    assert made.stopped == ["policy"]


def test_program_that_has_ended_neither_calls_nor_gets_an_answer() -> None:
    made, run = Supervisor(), run_of("calls")
    end = calls_of(made, run)
    (piece,) = pieces_of(b"late")
    end.on_frame(None, StreamFrame("calls", 7, piece))
    end.on_frame(run, StreamFrame("calls", 6, piece))
    run.killed_for = "cancelled"
    assert end.on_message(run, call(number=-1))
    end.on_frame(run, StreamFrame("calls", 7, piece))
    end.on_garbage(run)
    assert (made.sent, made.stopped, run.request) == ([], [], b"")


# -- the feed --------------------------------------------------------------------------------


def test_feed_lets_the_host_send_as_fast_as_the_program_reads() -> None:
    made, run = Supervisor(), run_of("feed")
    readable, writable = os.pipe()
    run.child = SimpleNamespace(request_fd=writable)  # type: ignore[assignment]
    end = feed.End("feed", made.place)
    end.begin(run, FEED.told)

    def credit() -> int:
        segments = [Segment.parse(frame.body) for frame in made.sent]
        assert {one[:2] for one in segments} <= {(TAKEN, ONLY)}
        made.sent.clear()
        return sum(one.taken_bytes for one in segments)

    assert credit() == FEED_BYTES
    piece = StreamFrame("feed", 7, Segment(DATA, ONLY, b"x" * 60_000).encode())
    for _ in range(5):
        end.on_frame(run, piece)
    end.on_written(run)
    assert (len(run.request), credit()) == (300_000, 0)
    del run.request[:200_000]  # less than a quarter of the window
    end.on_written(run)
    assert credit() == 0
    del run.request[:]
    end.on_written(run)
    assert credit() == 300_000
    for one, other in ((run, 6), (None, 7)):
        end.on_frame(one, StreamFrame("feed", other, piece.body))
    assert run.request == b""
    os.close(readable)
    os.close(writable)
