"""Authorise: nothing configured grants nothing."""

from __future__ import annotations

import pytest

from fumehood.core.errors import PermissionDenied, Unauthorized
from fumehood.core.identity import Principal, Scope, TrustDomain
from fumehood.pipeline.authorize import authorize
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from support.definitions import OWNER, NoRules, function_definition, never, registered, request


def _validated(principal: Principal | None, **options: str) -> ValidatedCall:
    call = request(principal=principal, **options)
    return ValidatedCall(ResolvedCall(call, registered(function_definition()), ()), {}, ())


def test_unknown_caller_is_unauthorized() -> None:
    with pytest.raises(Unauthorized):
        authorize(_validated(None), NoRules(), never)


@pytest.mark.parametrize(
    "scopes", [frozenset(), frozenset({Scope.APPROVE}), frozenset({Scope.ADMIN, Scope.APPROVE})]
)
def test_known_caller_without_the_scope_call_is_denied(scopes: frozenset[Scope]) -> None:
    with pytest.raises(PermissionDenied):
        authorize(_validated(Principal("somebody", scopes)), NoRules(), never)


def test_caller_with_the_scope_call_is_permitted_as_itself() -> None:
    permitted = authorize(_validated(OWNER), NoRules(), never)
    assert permitted.principal is OWNER
    assert permitted.trust_domain == TrustDomain(OWNER.id)


@pytest.mark.row("S2")
def test_agent_and_session_make_a_trust_domain_of_their_own() -> None:
    permitted = authorize(_validated(OWNER, agent_id="a", session_id="s"), NoRules(), never)
    assert permitted.trust_domain == TrustDomain(OWNER.id, "a", "s")
