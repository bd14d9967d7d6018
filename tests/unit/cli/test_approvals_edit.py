"""`fumehood approvals approve --edit`: what is asked about is what would be done."""

from __future__ import annotations

import io
from typing import Any

import pytest
import typer

from fumehood.approvals.model import Approval, NewDecision
from fumehood.cli import approvals
from fumehood.core.errors import InvalidParams
from support.approvals import approval

pytestmark = pytest.mark.row("A3")

EDIT = NewDecision(decision="approve", arguments={"text": "better"})


class _Control:
    """A client whose engine coerces, adds a default and computes what will change."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.approvals = self
        self._refusal = refusal

    def preview_edit(self, approval_id: str, arguments: dict[str, Any]) -> Approval:
        if self._refusal is not None:
            raise self._refusal
        return approval(
            arguments={**arguments, "times": 7},
            preview={"added": ["new.txt"]},
            action_digest="sha256:edited",
            approvers=("carol",),
        )


def _asked(monkeypatch: pytest.MonkeyPatch, word: str, **control: Any) -> NewDecision:
    monkeypatch.setattr("sys.stdin", io.StringIO(word + "\n"))
    client: Any = _Control(**control)
    return approvals._ask(client, [approval()], EDIT)


def test_edited_call_is_shown_and_approved_as_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = _asked(monkeypatch, "yes")
    assert decision == EDIT.model_copy(update={"action_digest": "sha256:edited"})
    shown = capsys.readouterr().err.partition("AS EDITED")[2]
    for part in ("better", "times: 7", "what will change", "new.txt", "carol"):
        assert part in shown


def test_impossible_wishes_are_refused_before_asking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidParams):
        _asked(monkeypatch, "yes", refusal=InvalidParams("No.", fields=["arguments.text"]))
    assert "Type yes" not in capsys.readouterr().err


def test_confirmation_other_than_yes_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.Exit):
        _asked(monkeypatch, "y")
