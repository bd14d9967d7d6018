"""What a principal may do: call at all, speak for an agent, use a tool of that agent."""

from __future__ import annotations

import pytest

from fumehood.core.errors import PermissionDenied, ResourceNotFound, ToolDisabled, Unauthorized
from fumehood.core.identity import Principal, Scope
from fumehood.identity.model import Agent, Binding
from fumehood.identity.principals import require_agent, require_binding, require_caller

SPEAKER = Principal("uid:1", frozenset({Scope.CALL}), frozenset({"a"}))
AGENT = Agent(id="a", principals=("uid:1",))


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


@pytest.mark.row("R3")
def test_a_principal_speaks_for_its_agent() -> None:
    require_agent(SPEAKER, "a", AGENT)


@pytest.mark.row("R3", "D4")
def test_unknown_disabled_and_somebody_elses_agents_are_refused_in_the_same_words() -> None:
    stranger = Principal("uid:2", frozenset({Scope.CALL}), frozenset({"b"}))
    words = set()
    for principal, agent in (
        (SPEAKER, None),
        (stranger, None),
        (stranger, AGENT),
        (SPEAKER, AGENT.model_copy(update={"is_enabled": False})),
        (stranger, AGENT.model_copy(update={"is_enabled": False})),
        (Principal("uid:2"), AGENT),
        (None, AGENT),
    ):
        with pytest.raises(ResourceNotFound) as caught:
            require_agent(principal, "a", agent)
        words.add((caught.value.message, caught.value.fields, caught.value.may_retry))
    assert len(words) == 1


@pytest.mark.row("R3")
def test_a_tool_that_is_not_bound_is_denied_and_one_that_is_switched_off_disabled() -> None:
    with pytest.raises(PermissionDenied, match="has no tool 'act'"):
        require_binding("a", "act", None)
    with pytest.raises(ToolDisabled, match="disabled for the agent"):
        require_binding("a", "act", Binding(tool="act@1.0.0", is_enabled=False))
    binding = Binding(tool="act")
    assert require_binding("a", "act", binding) is binding
