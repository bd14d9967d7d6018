"""Approve: what is dangerous needs a human, whom this version cannot ask."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.call.approve import approve
from fumehood.call.authorise import PermittedCall
from fumehood.call.claim import ClaimedCall, claim
from fumehood.call.resolve import ResolvedCall
from fumehood.call.validate import ValidatedCall
from fumehood.model.errors import RequiresHumanApproval
from support.definitions import OWNER, function_definition, registered, request


def _claimed(**fields: Any) -> ClaimedCall:
    tool = registered(function_definition(**fields))
    permitted = PermittedCall(ValidatedCall(ResolvedCall(request(), tool, ()), {}, ()), OWNER)
    with claim(permitted) as claimed:
        return claimed


@pytest.mark.row("A1")
def test_dangerous_call_is_refused_and_tells_the_model_not_to_retry() -> None:
    with pytest.raises(RequiresHumanApproval, match="Do not retry") as caught:
        approve(_claimed(dangerous=True))
    assert type(caught.value).human_review is True
    assert caught.value.may_retry is False


@pytest.mark.row("A1")
def test_dangerous_call_is_refused_even_where_the_tool_only_reads() -> None:
    with pytest.raises(RequiresHumanApproval):
        approve(_claimed(dangerous=True, read_only=True))


@pytest.mark.row("A1")
def test_harmless_call_passes_with_the_rule_that_let_it() -> None:
    claimed = _claimed()
    approved = approve(claimed)
    assert approved.claimed is claimed
    assert approved.rule == "default: harmless tools are allowed"
