"""The bait of `doctor --attack`: tampering with it is detected, and it cleans up after itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import psutil
import pytest

from fumehood.attack.bait import LOOPBACK, VARIABLE, Bait
from fumehood.attack.run import Watch, is_sealed


@pytest.fixture
def bait() -> Iterator[Bait]:
    with Bait() as bait:
        yield bait


def test_knock_on_any_bait_listener_is_reported_exactly_once(bait: Bait) -> None:
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


def test_connection_without_the_secret_knock_is_not_reported(bait: Bait) -> None:
    with socket.create_connection((LOOPBACK, bait.port), timeout=5) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert bait.losses("") == []


def test_secret_word_never_enters_attack_code_and_is_detected_in_answers(bait: Bait) -> None:
    facts = "@FILE@ @DIRECTORY@ @PORT@ @ADDRESSES@ @ABSTRACT@ @KNOCK@ @PID@ @MARK@"
    filled = bait.fill(facts)
    assert bait.word not in filled
    assert "@" not in filled
    assert bait.losses(f"found {bait.file.read_text()}") != []
    assert bait.word in os.environ[VARIABLE]


def test_changed_file_and_killed_process_are_reported_and_restored(bait: Bait) -> None:
    bait.file.write_text("x")
    assert bait.losses("") == ["the bait's directory was changed"]
    (bait.directory / "left").mkdir()
    assert bait.losses("") == ["the bait's directory was changed"]
    bait.process.kill()
    bait.process.wait()
    assert bait.losses("") == ["the bait's process was ended"]
    assert bait.losses("") == []
    assert bait.file.read_text() == bait.word


def test_closed_bait_leaves_no_directory_variable_process_or_listener() -> None:
    with Bait() as bait:
        process = psutil.Process(bait.process.pid)
    assert not bait.directory.exists()
    assert VARIABLE not in os.environ
    assert not process.is_running()
    with socket.socket() as caller:
        assert caller.connect_ex((LOOPBACK, bait.port)) != 0


def test_process_without_seccomp_filter_is_not_seen_as_sealed(bait: Bait) -> None:
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
