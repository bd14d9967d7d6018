"""The bait of `doctor --attack`: what is done to it is seen, and nothing of it is left."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import psutil
import pytest

from fumehood.attack.bait import LOOPBACK, VARIABLE, Bait
from fumehood.attack.looks import Watch, below, is_sealed, named, status_of


@pytest.fixture
def bait() -> Iterator[Bait]:
    with Bait() as bait:
        yield bait


def test_untouched_bait_has_lost_nothing(bait: Bait) -> None:
    assert bait.losses("an answer with the knock is none: " + bait.knock) == []


def test_knock_at_any_listener_is_heard_and_told_once(bait: Bait) -> None:
    knock = bait.knock.encode()
    for address in [LOOPBACK, *bait.addresses]:
        with socket.create_connection((address, bait.port), timeout=5) as caller:
            caller.sendall(knock)
        assert bait.losses("") == [f"it reached the host's listener on {address}:{bait.port}"]
        assert bait.losses("") == []
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"\0{bait.abstract}")
        caller.sendall(knock)
    assert bait.losses("") == ["it reached the host's listener on an abstract socket"]


def test_stranger_who_does_not_know_the_knock_is_not_taken_for_an_attack(bait: Bait) -> None:
    with socket.create_connection((LOOPBACK, bait.port), timeout=5) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert bait.losses("") == []


def test_word_is_told_to_no_program_and_noticed_in_an_answer(bait: Bait) -> None:
    facts = "@FILE@ @DIRECTORY@ @PORT@ @ADDRESSES@ @ABSTRACT@ @KNOCK@ @PID@ @MARK@"
    filled = bait.fill(facts)
    assert bait.word not in filled
    assert "@" not in filled
    assert bait.losses(f"found {bait.file.read_text()}") != []
    assert bait.word in os.environ[VARIABLE]


def test_changed_file_and_ended_process_are_told_and_put_back(bait: Bait) -> None:
    bait.file.write_text("x")
    assert bait.losses("") == ["the bait's directory was changed"]
    (bait.directory / "left").mkdir()
    assert bait.losses("") == ["the bait's directory was changed"]
    bait.process.kill()
    bait.process.wait()
    assert bait.losses("") == ["the bait's process was ended"]
    assert bait.losses("") == []
    assert bait.file.read_text() == bait.word


def test_nothing_of_it_is_left() -> None:
    with Bait() as bait:
        process = psutil.Process(bait.process.pid)
    assert not bait.directory.exists()
    assert VARIABLE not in os.environ
    assert not process.is_running()
    with socket.socket() as caller:
        assert caller.connect_ex((LOOPBACK, bait.port)) != 0


def test_processes_are_seen_by_their_name_and_below_their_parent(bait: Bait) -> None:
    pid = bait.process.pid
    assert pid in below(os.getpid())
    assert named(status_of(pid)["Name"]).count(pid) == 1
    assert named("no-such-name") == []
    assert below(None) == []


def test_process_without_a_filter_is_not_taken_for_a_sealed_one(bait: Bait) -> None:
    looks = 0

    def find() -> list[int]:
        nonlocal looks
        looks += 1
        return [bait.process.pid]

    watch = Watch(find)
    with watch:
        while looks < 3:
            os.sched_yield()
    assert watch.most == 1
    assert [is_sealed(seal) for seal in watch.seals] == [False]
    # The twin: the same process with all that is asked for.
    seal = dict(watch.seals[0], Seccomp="2", NoNewPrivs="1")
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        seal[name] = "0" * 16
    assert is_sealed(seal)
