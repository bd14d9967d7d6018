"""A remembered rule allows calls like the approved one, except in what its approver left free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import text as sql

from fumehood.approvals.model import RememberedRule, RememberWish, StoredApproval, StoredRequest
from fumehood.approvals.preview import definition_digest
from fumehood.approvals.remembered import (
    RememberedRules,
    add_rule,
    all_rules,
    remembered_rule,
)
from fumehood.core.errors import InvalidParams
from fumehood.core.identity import Principal
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.model import Decision, Verdict
from fumehood.storage.database import Database, open_database
from support.approvals import approval
from support.definitions import OWNER, function_definition, registered, request

pytestmark = pytest.mark.row("A3", "B9")

NOW = datetime(2026, 1, 1, tzinfo=UTC)
UNTIL = NOW + timedelta(hours=1)
ALICE = "approver:alice"
TOOLS = {
    dangerous: registered(function_definition(sandboxed=False, dangerous=dangerous))
    for dangerous in (False, True)
}
OTHER = Principal("uid:4242", OWNER.scopes)


def _call(
    arguments: dict[str, Any], *, dangerous: bool = False, by: Principal = OWNER, **options: Any
) -> PermittedCall:
    resolved = ResolvedCall(request(principal=by, **options), TOOLS[dangerous], (), None)
    decision = Decision(Verdict.ASK, "r1", policy_version="v1")
    return PermittedCall(ValidatedCall(resolved, arguments, ()), by, decision)


def _rule(approved: PermittedCall, same: tuple[str, ...] | None, scope: str = "until") -> Any:
    """The rule remembered for an approved call, with `same` as the arguments that must be equal."""
    options = approved.request.options
    definition = definition_digest(approved.tool)
    stored = approval(
        tool=approved.tool.definition.name, dangerous=approved.tool.definition.dangerous,
        arguments=approved.arguments, principal_id=approved.principal.id,
        agent_id=options.agent_id, session_id=options.session_id, rule="r1",
        binding={"definition": definition},
    )  # fmt: skip
    kept = StoredRequest(approved.arguments, options.model_dump(mode="json"), None)
    until = {"until": UNTIL} if scope == "until" else {}
    wish = RememberWish(scope=scope, arguments=same, **until)  # type: ignore[arg-type]
    return remembered_rule(StoredApproval(stored, kept), wish, "rul_1", ALICE, NOW)


def _allows(database: Database, one: RememberedRule, call: PermittedCall) -> bool:
    database.write_now(lambda connection: connection.execute(sql("DELETE FROM remembered")))
    database.write_now(lambda connection: add_rule(connection, one))
    definition = definition_digest(call.tool, call.request.context)
    return RememberedRules(database).rule_for(call, definition, NOW, lambda _: True) is not None


@pytest.fixture(scope="module")
def shared_database() -> Iterator[Database]:
    opened = open_database(None)
    yield opened
    opened.close()


VALUES = st.sampled_from([
    0, 0.0, -0.0, 1, 1.0, True, False, None, "1", "", "\u00e9", "e\u0301", [], [1], [1.0], [True], {},
    {"a": 1}, {"a": True}, {"a": -0.0}, {"a": None},
])  # fmt: skip
ARGUMENTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"timeout_seconds": 5.0}, {"timeout_seconds": 600.0}, {"memory_limit_mb": 512},
    {"isolation": "session"}, {"session_id": "s1"}, {"session_id": "s2"}, {"agent_id": "a1"},
)  # fmt: skip


def _exact(value: Any) -> str:
    return repr(value)  # in which true is not 1


@given(
    approved=ARGUMENTS, repeated=ARGUMENTS, same=st.none() | st.sets(st.sampled_from("abc")),
    options=st.sampled_from(OPTIONS), other_options=st.sampled_from(OPTIONS),
    dangerous=st.booleans(), stranger=st.booleans(), scope=st.sampled_from(["session", "until"]),
)  # fmt: skip
@example(
    approved={"a": ["build"]}, repeated={"a": ["build"], "b": True}, same=None, options={},
    other_options={}, dangerous=True, stranger=False, scope="until",
)  # fmt: skip
@example(
    approved={"a": [0.0]}, repeated={"a": [-0.0]}, same=None, options={}, other_options={},
    dangerous=False, stranger=False, scope="until",
)  # fmt: skip
def test_remembered_rule_allows_difference_only_in_freed_arguments(
    shared_database: Database,
    approved: dict[str, Any],
    repeated: dict[str, Any],
    same: set[str] | None,
    options: dict[str, Any],
    other_options: dict[str, Any],
    dangerous: bool,
    stranger: bool,
    scope: str,
) -> None:
    call = _call(approved, dangerous=dangerous, **options)
    named = None if same is None else tuple(sorted(same & approved.keys()))
    frees = named is not None and len(named) < len(approved)
    if (dangerous and frees) or (scope == "session" and "session_id" not in options):
        with pytest.raises(InvalidParams):
            _rule(call, named, scope)
        return
    one = _rule(call, named, scope)
    assert _allows(shared_database, one, call)  # the twin
    other = _call(repeated, dangerous=dangerous, by=OTHER if stranger else OWNER, **other_options)
    if not _allows(shared_database, one, other):
        return
    assert not stranger
    held = approved.keys() | repeated.keys() if not one.any_others else set(named or ())
    assert [_exact(approved.get(n, "absent")) for n in held] == [
        _exact(repeated.get(n, "absent")) for n in held
    ]
    freed_options = {"session_id"} if scope == "until" else set()
    assert {k: v for k, v in options.items() if k not in freed_options} == {
        k: v for k, v in other_options.items() if k not in freed_options
    }


def test_stored_rule_of_an_earlier_version_allows_no_other_arguments(database: Database) -> None:
    call = _call({"paths": ["build"]})
    earlier = _rule(call, None).model_dump(mode="json", exclude={"any_others"})
    names = ", ".join(earlier)
    marks = ", ".join(f":{name}" for name in earlier)
    row = {**earlier, "arguments": '{"paths": ["build"]}'}
    database.write_now(
        lambda connection: connection.execute(
            sql(f"INSERT INTO remembered ({names}) VALUES ({marks})"), row
        )
    )
    (read,) = database.read_now(all_rules)
    assert not read.any_others
    assert _allows(database, read, call)
    assert not _allows(database, read, _call({"paths": ["build"], "recursive": True}))


def test_remembered_rule_of_no_session_allows_nothing_in_a_session_with_own_variables(
    shared_database: Database,
) -> None:
    """A variable such as PATH changes what the approved call does."""
    call = _call({"a": 1}, session_id="s1")
    with_path = replace(call, session_env={"PATH": "/workspace"})
    everywhere, here = _rule(call, None), _rule(call, None, "session")
    assert _allows(shared_database, everywhere, call)  # the twin
    assert not _allows(shared_database, everywhere, with_path)
    assert _allows(shared_database, here, with_path)
