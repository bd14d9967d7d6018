"""`approvals watch` on a real terminal: what is shown, decided, resized, and given back."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Daemon
from fumehood import Client, ControlClient
from support.approving import approving_daemon, ran
from support.clients import LEAVES_SOCKETS
from support.terminal import Watcher
from support.wait import wait_until

pytestmark = [pytest.mark.row("A6"), *LEAVES_SOCKETS]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    with approving_daemon(home) as running:
        yield running
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def caller(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client
        for one in client.approvals.list(state="pending").items:
            client.approvals.cancel(one.id)


@pytest.fixture
def control(daemon: Daemon) -> Iterator[ControlClient]:
    with ControlClient(daemon.control, credential=daemon.credential) as client:
        yield client


def asked(caller: Client, text: str, **options: Any) -> str:
    """A call that waits; the id of its approval."""
    error = caller.call("note", {"text": text}, **options).error
    assert error is not None
    assert error.approval_id is not None, error
    return error.approval_id


def watching(
    daemon: Daemon, *, size: tuple[int, int] = (80, 24), credential: str = "", **variables: str
) -> Watcher:
    """Somebody who has typed the credential, and sees the screen."""
    watcher = Watcher({**daemon.environment, **variables}, "approvals", "watch", size=size)
    watcher.until(lambda: "Credential: " in watcher.seen)
    watcher.types((credential or daemon.credential) + "\n")
    watcher.until(lambda: "for approval" in " ".join(watcher.screen))
    return watcher


def times(daemon: Daemon, text: str) -> int:
    return sum(line.startswith(repr(text) + " ") for line in ran(daemon))


def test_person_approves_with_two_keys_what_came_while_the_screen_was_open(
    daemon: Daemon, caller: Client
) -> None:
    watcher = watching(daemon)
    watcher.reads("0 calls wait")
    approval_id = asked(caller, "watched")
    watcher.reads("1 call waits", "note", '"watched"', approval_id, "a approve")
    watcher.until(lambda: "\x07" in watcher.seen)
    watcher.types("a")
    watcher.reads(f"Approve note {approval_id}?", "y/n")
    assert times(daemon, "watched") == 0
    watcher.types("y")
    watcher.reads("0 calls wait", "was approved by approver:owner (done)")
    assert times(daemon, "watched") == 1
    watcher.types("q")
    assert watcher.has_ended() == 0
    assert daemon.credential not in watcher.seen


def test_question_is_answered_by_yes_only_and_not_by_what_was_typed_ahead(
    daemon: Daemon, caller: Client
) -> None:
    """The control is the test above: the same two keys, one after the other, approve."""
    approval_id = asked(caller, "ahead")
    watcher = watching(daemon)
    watcher.reads(approval_id)
    watcher.types("ay")
    watcher.reads("y/n")
    watcher.types("n")
    watcher.reads("Nothing was decided.", "1 call waits")
    watcher.types("q")
    assert watcher.has_ended() == 0
    assert times(daemon, "ahead") == 0


@pytest.mark.row("A3")
def test_denial_tells_its_reason_and_escape_takes_it_back(daemon: Daemon, caller: Client) -> None:
    approval_id = asked(caller, "refused")
    watcher = watching(daemon)
    watcher.reads(approval_id)
    watcher.types("dno")
    watcher.reads("Reason", "no▏")
    watcher.types("\x1b")
    watcher.reads("Nothing was decided.", "1 call waits")
    watcher.types("dwrong\x15not todax\x7fy\n")
    watcher.reads("0 calls wait", "was denied by approver:owner: not today")
    watcher.types("q")
    assert watcher.has_ended() == 0
    denied = caller.approvals.show(approval_id)
    assert (denied.state, times(daemon, "refused")) == ("denied", 0)


def an_editor(directory: Path, text: str) -> dict[str, str]:
    """An environment whose editor replaces the file by this, and keeps what it was."""
    editor = directory / "an editor"
    editor.write_text(f"#!/bin/sh\ncp \"$2\" '{directory}/before'\nprintf %s '{text}' > \"$2\"\n")
    editor.chmod(0o700)
    return {"EDITOR": f"'{editor}' --wait"}


@pytest.mark.row("A3")
def test_call_runs_as_it_was_edited_in_the_persons_editor(
    daemon: Daemon, caller: Client, tmp_path: Path
) -> None:
    approval_id = asked(caller, "before \x1b]0;x\x07 vim: set x:")
    variables = an_editor(tmp_path, '{"text": "after", "times": 3}')
    watcher = watching(daemon, **variables)
    watcher.reads(approval_id)
    watcher.types("e")
    watcher.reads("AS EDITED", '"after"', "times: 3", "Approve AS EDITED note", "y/n")
    before = (tmp_path / "before").read_text()
    assert before.isascii()
    assert "\x1b" not in before
    assert "vim:" not in before
    assert json.loads(before) == {"text": "before \x1b]0;x\x07 vim: set x:", "times": 1}
    watcher.types("y")
    watcher.reads("was approved by approver:owner")
    wait_until(lambda: times(daemon, "after") == 1)
    watcher.types("q")
    assert watcher.has_ended() == 0


@pytest.mark.row("A3")
def test_edit_that_is_refused_can_be_corrected_and_without_an_editor_it_is_a_line(
    daemon: Daemon, caller: Client
) -> None:
    approval_id = asked(caller, "line")
    watcher = watching(daemon)
    watcher.reads(approval_id)
    watcher.types("e")
    watcher.reads('JSON: {"text": "line", "times": 1}▏')
    watcher.types('\x15{"text": 5, "more": 1}\n')
    watcher.reads("INVALID_PARAMS")
    watcher.types("e")
    watcher.reads('"more": 1}▏')
    watcher.types("\x15{\n")
    watcher.reads("These arguments cannot be read")
    watcher.types('e\x15{"text": "line-2"}\n')
    watcher.reads("AS EDITED", '"line-2"', "y/n")
    watcher.types("y")
    watcher.reads("0 calls wait")
    wait_until(lambda: times(daemon, "line-2") == 1)
    watcher.types("q")
    assert watcher.has_ended() == 0


@pytest.mark.row("A3")
def test_remembered_rule_is_shown_before_the_yes(
    daemon: Daemon, caller: Client, control: ControlClient
) -> None:
    approval_id = asked(caller, "again")
    watcher = watching(daemon)
    watcher.reads(approval_id)
    watcher.types("r")
    watcher.reads("h 1 hour, d 1 day")
    watcher.types("h")
    watcher.reads("note, any number of times", 'text: "again"', "remember this rule: note", "y/n")
    assert not [rule for rule in control.approvals.remembered() if rule.removed_at is None]
    watcher.types("y")
    watcher.reads("0 calls wait")
    # Until the first call has ended, an equal one is that call.
    wait_until(lambda: caller.call("note", {"text": "again"}).success)
    (rule,) = (rule for rule in control.approvals.remembered() if rule.removed_at is None)
    control.approvals.forget(rule.id)
    watcher.types("q")
    assert watcher.has_ended() == 0


def test_of_two_watchers_one_decides_and_the_other_reads_who(
    daemon: Daemon, caller: Client, control: ControlClient
) -> None:
    bob = control.approvers.add("bob").secret
    ids = [asked(caller, f"two-{number}") for number in range(2)]
    one, other = watching(daemon), watching(daemon, credential=bob)
    one.reads(*ids[:1], "2 calls wait", "two-1")
    other.reads(*ids[:1], "2 calls wait", "two-1")
    other.types("a")
    other.reads(f"Approve note {ids[0]}?")
    one.types("dmine\n")
    one.reads("1 call waits", "denied by approver:owner")
    # The question is gone with what it was about, and the call stays on the screen.
    screen = other.reads(f"note {ids[0]} was denied by approver:owner: mine", "1 call waits")
    assert any(row.startswith("> denied") for row in screen)
    assert not any("y/n" in row for row in screen)
    other.types("ya")
    other.reads("was denied by approver:owner: mine", "1 call waits")
    other.types("j")
    other.reads(f"── {ids[1]}")
    other.types("a")
    other.reads(f"Approve note {ids[1]}?")
    other.types("y")
    one.reads("0 calls wait", f"{ids[1]} was approved by approver:bob")
    wait_until(lambda: times(daemon, "two-1") == 1)
    assert times(daemon, "two-0") == 0
    for watcher in (one, other):
        watcher.types("q")
        assert watcher.has_ended() == 0
    control.approvers.remove("bob")


NASTY = "a\x1b[2J\x1b]0;owned\x07\u202egnp.exe\u200b\n\n1 call waits\x9b31m" + "x" * 300


def test_hostile_arguments_cannot_write_to_the_terminal(daemon: Daemon, caller: Client) -> None:
    harmless = watching(daemon)
    asked(caller, "harmless")
    harmless.reads('"harmless"')
    harmless.types("q")
    assert harmless.has_ended() == 0
    (one,) = caller.approvals.list(state="pending").items
    caller.approvals.cancel(one.id)
    approval_id = asked(caller, NASTY)
    watcher = watching(daemon)
    watcher.reads(approval_id, "\\u{001b}[2J", "\\u{202e}gnp.exe", "│ 1 call waits\\u{009b}31m")
    watcher.types("a")
    watcher.reads("y/n")
    watcher.types("n" + " " * 9)
    watcher.reads("RIGHT-TO-LEFT OVERRIDE")
    watcher.types("q")
    assert watcher.has_ended() == 0
    for forbidden in ("\x1b[2J", "\x1b]", "\u202e", "\u200b", "\x9b"):
        assert forbidden not in watcher.seen.partition("Credential: ")[2]
    # Nothing but what a harmless call is drawn with, too.
    used = {re_key(watcher.seen), re_key(harmless.seen)}
    assert len(used) == 1, used


def re_key(seen: str) -> frozenset[str]:
    """The kinds of control sequences."""
    import re

    return frozenset(re.findall(r"\x1b\[[?0-9;]*[A-Za-ln-z]|\x1b[^\[]", seen))


def test_screen_follows_the_size_of_the_terminal(daemon: Daemon, caller: Client) -> None:
    approval_id = asked(caller, "sized " + "word " * 60)
    watcher = watching(daemon)
    assert len(watcher.reads(approval_id, "a approve")) == 24
    for columns, rows in ((32, 10), (200, 50), (20, 5), (80, 24)):
        watcher.resizes(columns, rows)
        watcher.until(lambda rows=rows: len(watcher.screen) == rows)
        screen = watcher.reads("j")
        assert max(map(len, screen)) <= columns
        assert "1 call waits" in screen[0] or columns < 24
    watcher.types("a")
    watcher.reads("y/n")
    watcher.types("nq")
    assert watcher.has_ended() == 0


@pytest.mark.parametrize(
    ("end", "status"),
    [("ctrl-c", 0), ("quit", 0), ("ctrl-z and quit", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=str,
)  # fmt: skip
def test_terminal_is_given_back_however_it_ends(
    daemon: Daemon, end: str | signal.Signals, status: int
) -> None:
    watcher = watching(daemon)
    watcher.reads("0 calls wait")
    if isinstance(end, signal.Signals):
        watcher.process.send_signal(end)
    else:
        watcher.types({"ctrl-c": "\x03", "quit": "q", "ctrl-z and quit": "\x1a\x1cq"}[end])
    assert watcher.has_ended() == status


def test_terminal_is_given_back_when_the_credential_is_none(daemon: Daemon) -> None:
    watcher = Watcher(daemon.environment, "approvals", "watch")
    watcher.until(lambda: "Credential: " in watcher.seen)
    watcher.types("fha_wrong\n")
    assert watcher.has_ended() == 1
    assert "UNAUTHORIZED" in watcher.seen


def test_watcher_outlives_its_daemon(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    with approving_daemon(home) as before:
        with Client(before.socket) as caller:
            approval_id = asked(caller, "outlived")
        watcher = watching(before)
        watcher.reads(approval_id)
        before.process.send_signal(signal.SIGKILL)
        before.process.wait(timeout=30)
        watcher.reads("No answer from the engine", approval_id)
        watcher.types("a")
        watcher.reads("y/n")
        watcher.types("y")
        watcher.reads("No engine answers")
    with approving_daemon(home, credential=before.credential) as after:
        watcher.until(lambda: "No answer" not in " ".join(watcher.screen))
        watcher.reads("1 call waits", approval_id)
        watcher.types("a")
        watcher.reads("y/n")
        watcher.types("y")
        watcher.reads("0 calls wait")
        wait_until(lambda: times(after, "outlived") == 1)
        watcher.types("q")
        assert watcher.has_ended() == 0
    shutil.rmtree(home, ignore_errors=True)


def test_two_of_two_have_to_say_yes(tmp_path: Path) -> None:
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[[rules]]\nid = "both"\ntools = ["note"]\ndecision = "ask"\nquorum = 2\n'
        'approvers = ["owner", "bob"]\n'
    )
    with approving_daemon(home, policy_file=str(policy)) as daemon:
        with ControlClient(daemon.control, credential=daemon.credential) as control:
            bob = control.approvers.add("bob").secret
        one, other = watching(daemon), watching(daemon, credential=bob)
        with Client(daemon.socket) as caller:
            asked(caller, "both")
        for number, watcher in enumerate((one, other)):
            watcher.reads("1 call waits", f"{number}/2")
            watcher.types("a")
            watcher.reads("y/n")
            assert times(daemon, "both") == 0
            watcher.types("y")
            if number == 0:
                watcher.reads("Counted: 1 of 2 approvals.", "1/2")
        one.reads("was approved by approver:bob, approver:owner")
        wait_until(lambda: times(daemon, "both") == 1)
        for watcher in (one, other):
            watcher.types("q")
            assert watcher.has_ended() == 0
    shutil.rmtree(home, ignore_errors=True)
