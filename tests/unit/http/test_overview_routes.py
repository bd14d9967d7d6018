"""The control socket: who may use its operations; everybody's calls, sessions and figures."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.core.call import CallBody
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal, Scope
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.http.endpoint import Needs, Operation
from fumehood.http.peer import Face
from fumehood.identity.approvers import make_first_approver
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import Policy
from fumehood.testing import FakeWall, ManualClock
from support.approvals import NOW
from support.faces import FacesClient
from support.http import Answer

pytestmark = [pytest.mark.anyio, pytest.mark.row("D6", "A4")]

POLICY = """
[[rules]]
id = "sums"
decision = "ask"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
prefix = "2"

[[rules]]
id = "no-tens"
decision = "deny"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
prefix = "10"
"""
RULE = """
[[rules]]
id = "big"
decision = "deny"
tools = ["calculator"]
[[rules.when]]
argument = "/expression"
prefix = "9"

[[rules]]
id = "for-one-agent"
decision = "ask"
agents = ["nobody"]
"""


@dataclass
class House:
    """An engine, and somebody with each kind of credential."""

    engine: Engine
    client: FacesClient
    admin: str
    approver: str
    caller: str

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """As the approver on the control socket, unless told otherwise."""
        return await self.client.ask(method, path, body, **{"credential": self.approver, **more})

    async def call(self, expression: str, **options: Any) -> Envelope:
        body = CallBody.model_validate(
            {"arguments": {"expression": expression}, "options": options}
        )
        return await self.engine.run("calculator", body, self.engine.principal_of_uid(1))


@pytest.fixture
async def house(home: Path) -> AsyncIterator[House]:
    policy = home / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    policy.chmod(0o600)
    from fumehood.storage.database import FILE_NAME, open_database

    database = open_database(home / FILE_NAME)
    shown: list[str] = []
    make_first_approver(database, "owner", NOW, shown.append)
    config = Config(home=home, policy_file=policy)
    async with Engine(
        config=config, interpreter=FakeWall(), clock=ManualClock(NOW), database=database
    ) as engine:
        root = Principal("init", frozenset({Scope.ADMIN}))
        _, approver = await engine.approvers.add("alice", {Scope.APPROVE}, by=root, now=NOW)
        _, caller = await engine.tokens.new(
            "caller", principal_id="token:c", scopes=(Scope.CALL,), agents=(), expires_at=None,
            by=root, now=NOW,
        )  # fmt: skip
        yield House(engine, FacesClient(engine), shown[0], approver, caller)
    database.close()


def is_on_both(operation: Operation) -> bool:
    """Whether the callers' socket has an operation at this address."""
    same = [one for one in OPERATIONS if one.method == operation.method]
    return any(one.address.fullmatch(operation.path) for one in same)


GUARDED = [one for one in CONTROL_OPERATIONS if one.needs is Needs.ADMIN and is_on_both(one)]
"""Operations whose address callers have as well, for their own. `tests/adversarial` tries others."""
REFUSED = ("UNAUTHORIZED", "PERMISSION_DENIED")


async def asked(house: House, operation: Operation, credential: str | None) -> str | None:
    """The code of an operation's answer, with an `x` for each parameter."""
    path = re.sub(r"{\w+}", "x", operation.path)
    return (await house.ask(operation.method, path, credential=credential)).code


@pytest.mark.parametrize("operation", GUARDED, ids=lambda operation: operation.id)
async def test_control_operation_at_an_address_of_callers_needs_the_admin_scope(
    house: House, operation: Operation
) -> None:
    invented = f"fha_{'0' * 16}_{'a' * 43}"
    for credential in (None, invented):
        assert await asked(house, operation, credential) == "UNAUTHORIZED"
    for credential in (house.caller, house.approver):
        assert await asked(house, operation, credential) == "PERMISSION_DENIED"
    assert await asked(house, operation, house.admin) not in REFUSED  # the twin


async def test_caller_socket_shows_only_own_calls(house: House) -> None:
    await house.call("1 + 1")
    own = await house.ask("GET", "/v1/calls", face=Face.ENGINE, credential=None)
    assert own.body["data"]["items"] == []


async def test_call_details_have_stages_audit_row_and_children(house: House) -> None:
    call_id = (await house.call("1 + 1")).metadata.call_id
    shown = (await house.ask("GET", f"/v1/calls/{call_id}")).body["data"]
    assert list(shown["stages_ms"])[:3] == ["resolve", "validate", "authorize"]
    page = await house.ask("GET", f"/v1/audit?after={shown['audit_seq'] - 1}&limit=1",
                           credential=house.admin)  # fmt: skip
    assert f'"call_id":"{call_id}"' in page.body["data"]["items"][0]["body"]
    assert (shown["children"], shown["approval"], shown["answer"]) == ([], None, "not_kept")


async def test_stored_answer_of_a_keyed_call_is_shown_only_to_administrators(house: House) -> None:
    call_id = (await house.call("1 + 1", idempotency_key="k")).metadata.call_id
    path = f"/v1/calls/{call_id}"
    seen = (await house.ask("GET", path)).body["data"]
    assert (seen["answer"], seen["envelope"]) == ("needs_admin", None)
    blob = await house.ask("GET", f"{path}/blobs/blob_0?expires=1&signature=0")
    assert blob.code == "PERMISSION_DENIED"
    seen = (await house.ask("GET", path, credential=house.admin)).body["data"]
    assert seen["answer"] == "shown"
    assert seen["envelope"]["metadata"]["call_id"] == call_id


async def test_arguments_of_a_call_without_approval_are_not_stored(house: House) -> None:
    call_id = (await house.call("1 + 1")).metadata.call_id
    assert (await house.ask("POST", f"/v1/calls/{call_id}/dry-run")).code == "RESOURCE_NOT_FOUND"


async def test_policy_rules_count_their_decided_calls(house: House) -> None:
    await house.call("2 + 2")
    await house.call("10 + 2")
    await house.call("10 + 2", dry_run=True)
    rules = (await house.ask("GET", "/v1/policy")).body["data"]["rules"]
    assert {one["id"]: one["decided"] for one in rules} == {"sums": 1, "no-tens": 1}


async def test_slow_rule_trial_does_not_block_other_requests(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred kilobytes of rules took nine seconds, in which nobody else was answered."""
    others = threading.Event()

    def slow(*given: Any) -> Policy:
        assert others.wait(timeout=30)
        return parse_policy(*given)

    async def call() -> None:
        await house.call("1 + 1")
        others.set()

    monkeypatch.setattr("fumehood.engine_overview.parse_policy", slow)
    async with anyio.create_task_group() as group:
        group.start_soon(call)
        tried = await house.ask("POST", "/v1/policy/try", {"rules": RULE})
    assert len(tried.body["data"]["items"]) == 2


async def test_rule_trial_is_evaluated_on_past_calls(house: House) -> None:
    await house.call("1 + 1")
    await house.call("1 / 0")
    await house.engine.run("gone", CallBody(), house.engine.principal_of_uid(1))
    tried = (await house.ask("POST", "/v1/policy/try", {"rules": RULE})).body["data"]
    assert (tried["calls"], tried["skipped"]) == (3, 1)
    first, second = tried["items"]
    assert (first["id"], first["calls"], first["unknown"]) == ("big", 2, ["argument /expression"])
    assert first["groups"][0]["tool"] == "calculator"
    assert (second["id"], second["calls"], second["unknown"]) == ("for-one-agent", 0, [])
    faulty = await house.ask("POST", "/v1/policy/try", {"rules": "[[rules]]\nid = 7"})
    assert faulty.code == "INVALID_PARAMS"
    # The rules in force are the same as before.
    assert len((await house.ask("GET", "/v1/policy")).body["data"]["rules"]) == 2
