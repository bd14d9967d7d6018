"""The inbox of `approvals watch`: what keys decide, and what the screen shows."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fumehood.approvals.model import Approval, ApprovalState, DecisionRecord, RememberedRule
from fumehood.cli import approvals as command
from fumehood.cli.approval_inbox import Inbox, Look, editable, how_it_ended
from fumehood.client.api_request import DaemonUnavailable
from support.approvals import NOW, approval, rule

pytestmark = pytest.mark.row("A6")


@dataclass
class Desk:
    """Takes every decision, and writes it down."""

    decided: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    is_away: bool = False

    def _take(self, what: str, approval_id: str, given: dict[str, Any]) -> Approval:
        if self.is_away:
            raise DaemonUnavailable("No engine answers.")
        self.decided.append((what, approval_id, given))
        state = ApprovalState.APPROVED if what == "approve" else ApprovalState.DENIED
        return ended(approval_id, state, version=given["version"] + 1)

    def approve(self, approval_id: str, **given: Any) -> Approval:
        return self._take("approve", approval_id, given)

    def deny(self, approval_id: str, **given: Any) -> Approval:
        return self._take("deny", approval_id, given)

    def preview_edit(self, approval_id: str, arguments: Any) -> Approval:
        return approval(id=approval_id, arguments=arguments, action_digest="e" * 64)

    def preview_remember(self, approval_id: str, wish: Any) -> RememberedRule:
        return rule(approval_id=approval_id)


def ended(
    approval_id: str, state: ApprovalState, by: str = "approver:bob", **more: Any
) -> Approval:
    said: Any = "deny" if state is ApprovalState.DENIED else "approve"
    decision = DecisionRecord(
        at=NOW, approver=by, channel="control", decision=said, action_digest="0" * 64, reason="so"
    )
    return approval(
        **{"id": approval_id, "state": state, "decisions": (decision,), "version": 2} | more
    )


def inbox(desk: Desk, *approvals: Approval, edit: Any = None) -> Inbox:
    made = Inbox(cast("Any", desk), edit)
    made.take(Look(approvals))
    return made


def screen(one: Inbox, columns: int = 80, rows: int = 24) -> str:
    return "\n".join(line.text for line in one.lines(columns, rows, NOW))


ONE, TWO, THREE = (approval(n, created_at=NOW + timedelta(seconds=n)) for n in (1, 2, 3))


def test_selection_stays_with_its_call_when_others_come_and_go() -> None:
    desk = Desk()
    made = inbox(desk, TWO)
    made.take(Look([ONE, TWO, THREE]))
    assert made.has_news
    made.take(Look([TWO, THREE], [ended(ONE.id, ApprovalState.DENIED)]))
    made.press("a")
    made.press("y")
    assert [(what, which) for what, which, _ in desk.decided] == [("approve", TWO.id)]


def test_call_that_another_decided_is_not_replaced_under_the_key() -> None:
    """The control is the test above: a call that waits is approved by the same keys."""
    desk = Desk()
    made = inbox(desk, ONE, TWO)
    made.take(Look([TWO], [ended(ONE.id, ApprovalState.DENIED)]))
    assert f"── {ONE.id}" in screen(made)
    made.press(["a"])
    made.press(["y"])
    assert desk.decided == []
    assert "was denied by approver:bob: so" in screen(made)
    made.press(["j"])
    assert ONE.id not in screen(made)
    assert f"── {TWO.id}" in screen(made)


@pytest.mark.parametrize("key", ["a", "d", "e", "r"])
def test_question_about_a_call_that_changed_is_taken_back(key: str) -> None:
    desk = Desk()
    made = inbox(desk, ONE)
    made.press([key])
    made.take(Look([approval(1, created_at=ONE.created_at, version=2)]))
    assert "It has changed meanwhile." in screen(made)
    made.press(["y", "enter"])
    assert desk.decided == []


def test_decision_carries_the_version_that_was_shown() -> None:
    desk = Desk()
    seven = approval(1, version=7)
    for batches in ([["a"], ["y"]], [["d", *"no", "enter"]]):
        made = inbox(desk, seven)
        for keys in batches:
            made.press(keys)
    assert [given for _, _, given in desk.decided] == [
        {"version": 7}, {"version": 7, "reason": "no"},
    ]  # fmt: skip


def test_look_that_was_older_than_the_own_decision_brings_nothing_back() -> None:
    made = inbox(Desk(), ONE, TWO)
    made.press(["a"])
    made.press(["y"])
    made.take(Look([ONE, TWO]))
    assert "1 call waits" in screen(made)
    assert ONE.id not in screen(made).splitlines()[2]


def test_approved_call_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start is no new version, and the call is on no list of what waits then."""
    became = ["pending", "approved", "started", "started", "done", "done"]
    looks: list[Look] = []
    is_over = threading.Event()

    class Approvals:
        def next_change(self, after: int) -> int:
            return after + 1

        def list(self, **query: Any) -> Any:
            items = [ONE] if became[len(looks)] == "pending" else []
            return SimpleNamespace(items=items, next_cursor=None, has_more=False)

        def show(self, approval_id: str) -> Approval:
            return ended(approval_id, ApprovalState(became[len(looks)]))

    def tell(look: Look | Exception) -> None:
        assert isinstance(look, Look)
        looks.append(look)
        if len(looks) == len(became):
            is_over.set()

    monkeypatch.setattr(command, "PAUSE_S", 0)
    command._look_again(cast("Any", SimpleNamespace(approvals=Approvals())), tell, is_over)
    told = [[one.state.value for one in look.decided] for look in looks]
    assert told == [[], ["approved"], ["started"], [], ["done"], []]

    made = inbox(Desk(), TWO)
    for look in looks:
        made.take(replace(look, pending=[*look.pending, TWO]))
    assert "was approved by approver:bob (done)" in screen(made)


def test_title_does_not_count_the_row_of_a_call_that_was_decided() -> None:
    made = inbox(Desk(), ONE, TWO)
    made.take(Look([TWO], [ended(ONE.id, ApprovalState.STARTED)]))
    assert screen(made).startswith("1 call waits for approval, 1 no longer\n")
    made.press("j")
    assert screen(made).startswith("1 call waits for approval\n")


def test_edited_call_is_bound_to_what_was_shown_of_it() -> None:
    desk = Desk()
    made = inbox(desk, ONE, edit=lambda text: '{"paths": ["b"]}')
    made.press(["e"])
    assert "AS EDITED" in screen(made)
    assert '"b"' in screen(made)
    made.press(["y"])
    assert desk.decided == [
        ("approve", ONE.id,
         {"version": 1, "arguments": {"paths": ["b"]}, "action_digest": "e" * 64}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "These arguments cannot be read"), ('{"a": 1, "a": 2}', "These arguments cannot be read"),
        ("[]", "JSON object"), ("[" * 100_000, "These arguments cannot be read"),
        (json.dumps(ONE.arguments), "as they were"),
    ],
    ids=lambda text: text[:10],
)  # fmt: skip
def test_edit_that_is_none_is_said_and_kept(text: str, says: str) -> None:
    given: list[str] = []

    def edit(before: str) -> str:
        given.append(before)
        return text

    desk = Desk()
    made = inbox(desk, ONE, edit=edit)
    made.press(["e"])
    assert says in screen(made)
    made.press(["y"])
    made.press(["e"])
    assert given[1] == text
    assert desk.decided == []


def test_editor_that_failed_decides_nothing() -> None:
    def edit(before: str) -> str:
        raise ValueError("vi ended with 1.")

    desk = Desk()
    made = inbox(desk, ONE, edit=edit)
    made.press(["e"])
    assert "Nothing was decided. vi ended with 1." in screen(made)


def test_engine_that_is_away_is_said_and_what_was_shown_stays() -> None:
    desk = Desk()
    made = inbox(desk, ONE)
    made.take(Look(fault="Gone."))
    assert "No answer from the engine; trying again. Gone." in screen(made)
    assert ONE.id in screen(made)
    desk.is_away = True
    made.press(["a"])
    made.press(["y"])
    assert "No engine answers." in screen(made)
    assert ONE.id in screen(made)
    made.take(Look([ONE]))
    assert "No answer" not in screen(made)


HARMLESS = [
    *"aedrjkbgq xn01/~\t", "up", "down", "page up", "page down", "escape", "backspace", "erase",
    "\x1b[99~", "é", "\u202e",
]  # fmt: skip


@given(st.lists(st.lists(st.sampled_from(HARMLESS), max_size=4), max_size=40))
def test_without_a_yes_and_without_enter_no_keys_decide_anything(batches: list[list[str]]) -> None:
    desk = Desk()
    made = inbox(desk, ONE, approval(2, session_id="sess_1"), edit=lambda text: '{"paths": []}')
    for keys in batches:
        made.press(keys)
        made.lines(80, 24, NOW)
    assert desk.decided == []


@given(
    st.lists(st.text(max_size=200), min_size=0, max_size=4), st.integers(10, 100),
    st.integers(5, 40), st.lists(st.sampled_from([*HARMLESS, "y", "enter"]), max_size=20),
)  # fmt: skip
def test_screen_is_filled_exactly_with_text_that_can_be_seen(
    texts: list[str], columns: int, rows: int, keys: list[str]
) -> None:
    calls = [
        approval(number, tool=f"t{number}", arguments={"text": text}, reason=text or None)
        for number, text in enumerate(texts)
    ]
    made = inbox(Desk(), *calls)
    for key in ("", *keys):
        made.press([key] if key else [])
        lines = made.lines(columns, rows, NOW)
        assert len(lines) == rows
        assert all(char.isprintable() for line in lines for char in line.text)


def test_details_can_be_read_to_their_end() -> None:
    made = inbox(Desk(), approval(arguments={"text": "\n".join(f"line {n}." for n in range(99))}))
    seen = set()
    for _ in range(20):
        lines = made.lines(80, 24, NOW)
        assert all(cell_len(line.text) <= 80 for line in lines[3:])
        seen |= {line.text for line in lines}
        made.press([" "])
    assert {f"  │ line {number}." for number in range(99)} <= seen
    made.press(["b"] * 20)
    assert "arguments" in screen(made)


def test_thousand_calls_are_listed_around_the_chosen_one() -> None:
    made = inbox(Desk(), *(approval(n, tool=f"tool-{n}") for n in range(1000)))
    made.press(["down"] * 500)
    lines = screen(made).splitlines()
    assert "1000 calls wait" in lines[0]
    assert any(line.startswith(">") and "tool-500 " in line for line in lines[1:9])
    assert len(lines) == 24


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (ApprovalState.DENIED, "was denied by approver:bob: so"),
        (ApprovalState.APPROVED, "was approved by approver:bob"),
        (ApprovalState.FAILED, "was approved by approver:bob (failed)"),
    ],
)
def test_end_says_who(state: ApprovalState, says: str) -> None:
    assert how_it_ended(ended("apr_1", state)).endswith(says)
    assert how_it_ended(approval(state=ApprovalState.EXPIRED)).endswith(": expired")
    lost = approval(state=ApprovalState.EXPIRED, changed=("session",))
    assert "its session ended" in how_it_ended(lost)


@given(st.dictionaries(st.text(), st.text() | st.integers(), max_size=3))
def test_editor_gets_ascii_that_means_the_same(arguments: dict[str, Any]) -> None:
    text = editable(arguments)
    assert text.isascii()
    assert json.loads(text) == arguments


@pytest.mark.parametrize(
    "text",
    ["# vim: set x:", "vi:x", "ex: x", "/* Vim<900: x */", "-*- mode: x -*-", "Local Variables:"],
)
def test_editor_gets_no_settings_of_its_own(text: str) -> None:
    shown = editable({"a": f" {text}", " ex": 1})
    assert text not in shown
    assert json.loads(shown) == {"a": f" {text}", " ex": 1}
