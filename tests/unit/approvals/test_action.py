"""The action document that an approval covers: it holds what affects execution, and only that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fumehood.approvals.preview import Action, action_of, changed_fields, definition_digest
from fumehood.core.call import FunctionAddress
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.executors.effects import Effect
from fumehood.identity.model import Binding
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.plan import Plan, make_plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.model import Decision, Verdict
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.host import Host
from fumehood.sandbox.wall import Walls
from support.definitions import OWNER, function_definition, registered, request

pytestmark = pytest.mark.row("A2")

ASKS = Decision(Verdict.ASK, "r1", policy_version="v1")


def _permitted(
    arguments: dict[str, Any] | None = None,
    *,
    found: RegisteredTool | None = None,
    binding: Binding | None = None,
    principal: Principal = OWNER,
    decision: Decision = ASKS,
    **options: Any,
) -> PermittedCall:
    found = found or registered(function_definition(sandboxed=False))
    call = request(principal=principal, **options)
    resolved = ResolvedCall(call, found, (), binding)
    return PermittedCall(ValidatedCall(resolved, arguments or {"a": 1}, ()), principal, decision)


def _plan(permitted: PermittedCall) -> Plan:
    return make_plan(permitted, Walls(host=Host()))


def _action(effect: Effect | None = None, sends: JsonObject | None = None, **fields: Any) -> Action:
    permitted = _permitted(**fields)
    return action_of(permitted, _plan(permitted), None, effect, sends)


BASE = _action()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: _action(arguments={"a": 2}), "arguments"),
        (lambda: _action(arguments={"a": True}), "arguments"),
        (lambda: _action(arguments={"a": 1, "b": None}), "arguments"),
        (lambda: _action(agent_id="x"), "agent"),
        (lambda: _action(binding=Binding(tool="t", fixed={"a": 1})), "agent_binding"),
        (lambda: _action(principal=Principal("uid:2", frozenset({Scope.CALL}))), "principal"),
        (lambda: _action(timeout_seconds=1.0), "limits"),
        (lambda: _action(Effect({}, "base", "effect")), "workspace"),
        (lambda: _action(sends={"server": "files", "command": ["a"]}), "sends"),
    ],
)
def test_change_that_affects_execution_changes_the_action_digest(
    make: Callable[[], Action], field: str
) -> None:
    other = make()
    assert other.digest != BASE.digest
    assert changed_fields(BASE.document, other.document) == (field,)


def test_what_a_call_sends_its_secrets_and_its_hosts_are_part_of_the_action() -> None:
    sends: JsonObject = {"server": "files", "command": ["a"], "secrets": {"key": ["url"]}}
    first, other = _action(sends=sends), _action(sends={**sends, "command": ["b"]})
    assert first.document["secrets"] == ["key"]
    assert changed_fields(first.document, other.document) == ("sends",)
    assert _action(sends=dict(sends)).digest == first.digest
    reaching = _action(sends={**sends, "network": ["a.example"]}).document["network"]
    assert reaching == "by the gateway: a.example"
    permitted = _permitted()
    plan = replace(_plan(permitted), network=("b.example",))
    assert action_of(permitted, plan, None, None, None).document["network"] == (
        "by the gateway: b.example"
    )


def test_names_of_session_variables_are_part_of_the_action_and_values_are_not() -> None:
    permitted = replace(_permitted(), session_env={"PATH": "hidden", "A": "hidden"})
    other = action_of(permitted, _plan(permitted), None, None, None)
    assert other.digest != BASE.digest
    assert other.document["session_env"] == ["A", "PATH"]
    assert "hidden" not in str(other.document)


def test_changed_definition_price_or_version_changes_the_action_digest() -> None:
    for fields, named in (
        ({"description": "Another."}, ("definition",)),
        ({"cost_per_use": "0.5"}, ("cost_ceiling", "definition")),
        ({"version": "2.0.0"}, ("definition", "tool")),
    ):
        found = registered(function_definition(sandboxed=False, **fields))
        other = _action(found=found)
        assert changed_fields(BASE.document, other.document) == named


@pytest.mark.parametrize(
    "make",
    [
        lambda: _action(trace_id="another"),
        lambda: _action(wait_for_approval=True),
        lambda: _action(debug=True),
        lambda: _action(idempotency_key="k"),
        lambda: _action(decision=Decision(Verdict.ASK, "r2", "why", policy_version="v2")),
    ],
    ids=["trace", "waiting", "debug", "key", "policy-rule"],
)
def test_descriptive_option_does_not_change_the_action_digest(make: Callable[[], Action]) -> None:
    assert make().digest == BASE.digest


def test_definition_digest_covers_source_of_a_main_program() -> None:
    found = registered(function_definition(sandboxed=False))

    def digest(source: str) -> str:
        address = FunctionAddress("__main__", "act", "", "a pickle", source)
        return definition_digest(replace(found, address=address))

    assert digest("one") == digest("one") != digest("two")
