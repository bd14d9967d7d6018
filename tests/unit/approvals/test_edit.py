"""The warning to the caller of an edited call: argument names, never hidden ones or values."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from fumehood.approvals.model import (
    Approval,
    ApprovalState,
    StoredApproval,
    StoredRequest,
    own_view,
)
from fumehood.approvals.preview import edit_warning, edited

pytestmark = pytest.mark.row("A3")

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _stored(asked: dict[str, Any] | None, done: dict[str, Any], *hidden: str) -> StoredApproval:
    approval = Approval(
        id="apr_1", version=1, state=ApprovalState.STARTED, call_id="call_1", trace_id="t",
        tool="erase", tool_version="1.0.0", principal_id="uid:1", agent_id=None, session_id=None,
        arguments=done, asked_arguments=asked, preview=None, rule="r", reason=None, dangerous=True,
        approvers=(), quorum=1, decisions=(), policy_version="v", action_digest="d", binding=None,
        created_at=NOW, expires_at=NOW,
    )  # fmt: skip
    return StoredApproval(approval, StoredRequest({}, {}, None, hidden=hidden))


def _changed(asked: dict[str, Any], done: dict[str, Any], *hidden: str) -> str:
    said = edit_warning(_stored(asked, done, *hidden))
    return said.partition("this call ran")[2]


def test_edit_warning_names_changed_added_and_removed_arguments_without_values() -> None:
    asked = {"same": 1, "other": "secret", "gone": None}
    done = {"same": 1, "other": "s3cret", "new": None}
    assert _changed(asked, done) == ": changed /gone, /new, /other"


def test_edit_warning_distinguishes_true_from_one() -> None:
    assert _changed({"a": 1, "b": 1}, {"a": True, "b": 1.0}) == ": changed /a"


def test_edit_warning_uses_json_pointers() -> None:
    assert _changed({"a/b~c": 1}, {"a/b~c": 2}) == ": changed /a~1b~0c"


def test_hidden_arguments_are_in_neither_warning_nor_callers_view() -> None:
    stored = _stored({"a": 1, "fixed": 1}, {"a": 2, "fixed": 2}, "fixed")
    assert _changed({"a": 1, "fixed": 1}, {"a": 2, "fixed": 2}, "fixed") == ": changed /a"
    own = own_view(stored)
    assert (own.arguments, own.asked_arguments) == ({"a": 2}, {"a": 1})
    # The control: with nothing hidden both are there.
    bare = replace(stored.request, hidden=())
    assert own_view(replace(stored, request=bare)) == stored.approval


@pytest.mark.row("R3")
def test_arguments_fixed_before_an_edit_are_hidden_from_the_caller() -> None:
    asked, now = _stored(None, {"what": "a"}), _stored(None, {"what": "the draft"}, "what")
    own = own_view(edited(asked, now, is_asked=True))
    assert (own.arguments, own.asked_arguments) == ({}, {})
