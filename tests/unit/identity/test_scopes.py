"""The identity gate: nobody, and somebody without the scope, do not call."""

from __future__ import annotations

import pytest

from fumehood.core.errors import PermissionDenied, Unauthorized
from fumehood.core.identity import Principal, Scope
from fumehood.identity.principals import require_caller


@pytest.mark.row("D4")
def test_nobody_is_unauthorized() -> None:
    with pytest.raises(Unauthorized):
        require_caller(None)


@pytest.mark.row("D4", "A4")
@pytest.mark.parametrize("scopes", [set(), {Scope.APPROVE}, {Scope.ADMIN, Scope.APPROVE}])
def test_authority_does_not_call(scopes: set[Scope]) -> None:
    with pytest.raises(PermissionDenied):
        require_caller(Principal("approver:owner", frozenset(scopes)))


@pytest.mark.row("D4")
def test_the_scope_call_calls() -> None:
    caller = Principal("uid:1", frozenset({Scope.CALL}))
    assert require_caller(caller) is caller
