"""The control socket: approvals, everybody's calls, and who may use its operations."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.call_options import CallBody
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal, Scope
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.http.endpoint import Needs, Operation
from fumehood.http.peer import Face
from fumehood.identity.approvers import all_approvers, make_first_approver
from fumehood.policy.loader import parse_policy
from fumehood.policy.model import Policy
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall, ManualClock
from fumehood.webhook.channel import HEADER, Callbacks, sign
from fumehood.webhook.in_engine import Webhook
from support.approvals import NOW, FakeDesk, approval
from support.faces import FacesClient
from support.http import Answer

pytestmark = [pytest.mark.anyio, pytest.mark.row("A4", "A6", "D6")]

SECRET = b"s" * 32
ROOT = Principal("init", frozenset({Scope.ADMIN}))
ONE = approval()
DECISION = f"/v1/approvals/{ONE.id}/decision"
YES = {"decision": "approve"}


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
    clock: ManualClock
    admin: str
    approver: str
    caller: str
    deciding: str

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """As the approver on the control socket, unless told otherwise."""
        return await self.client.ask(method, path, body, **{"credential": self.approver, **more})

    async def call(self, expression: str, **options: Any) -> Envelope:
        body = CallBody.model_validate(
            {"arguments": {"expression": expression}, "options": options}
        )
        return await self.engine.run("calculator", body, self.engine.principal_of_uid(1))


async def built(
    home: Path, container: FakeWall | None = None, **config: Any
) -> AsyncIterator[House]:
    clock = ManualClock(NOW)
    engine = Engine(
        config=Config(home=home, **config), interpreter=FakeWall(), container=container, clock=clock
    )
    admin = make_first_approver(engine.database, "owner", NOW)
    engine.approvers._approvers = engine.database.read_now(all_approvers)
    async with engine:
        _, approver = await engine.approvers.add("alice", {Scope.APPROVE}, by=ROOT, now=NOW)

        async def token(name: str, *scopes: Scope) -> str:
            _, text = await engine.tokens.new(
                name, principal_id=f"token:{name}", scopes=scopes, agents=(), expires_at=None,
                by=ROOT, now=NOW,
            )  # fmt: skip
            return text

        yield House(
            engine, FacesClient(engine), clock, admin, approver,
            await token("caller", Scope.CALL), await token("robot", Scope.APPROVE),
        )  # fmt: skip


@pytest.fixture
async def house(home: Path) -> AsyncIterator[House]:
    policy = home / "policy.toml"
    policy.write_text(POLICY, encoding="utf-8")
    policy.chmod(0o600)
    async for made in built(home, policy_file=policy):
        yield made


@dataclass
class Desk:
    """An engine whose desk for approvals only remembers."""

    house: House
    desk: FakeDesk

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        return await self.house.ask(method, path, body, **more)

    async def decide(self, body: Any = YES, **more: Any) -> Answer:
        return await self.ask("POST", DECISION, body, **{"headers": [("if-match", '"1"')], **more})

    async def call_back(self, body: Any, *signatures: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = signatures or (sign(SECRET, raw, self.house.clock.now()),)
        headers = [(HEADER, one) for one in given]
        path = "/v1/approvals/callback"
        return await self.house.client.ask("POST", path, raw, headers=headers)


async def made_desk(home: Path, **config: Any) -> AsyncIterator[Desk]:
    async for house in built(home, **config):
        desk = FakeDesk()
        desk.put(ONE)
        house.engine.approvals = desk  # type: ignore[attr-defined]
        house.engine.part(Webhook).channel = SimpleNamespace(
            callbacks=Callbacks(SECRET, window_s=300)
        )  # type: ignore[assignment]
        yield Desk(house, desk)


@pytest.fixture
async def here(home: Path) -> AsyncIterator[Desk]:
    async for made in made_desk(home):
        yield made


@pytest.fixture
async def service(home: Path) -> AsyncIterator[Desk]:
    async for made in made_desk(home, mode="service"):
        yield made


# -- Approvals: who may see, who may decide, and on what -----------------------------------


async def test_approver_sees_full_approvals_with_version_as_etag(here: Desk) -> None:
    listed = await here.ask("GET", "/v1/approvals?state=pending")
    assert [item["id"] for item in listed.body["data"]["items"]] == [ONE.id]
    shown = await here.ask("GET", f"/v1/approvals/{ONE.id}")
    assert shown.body["data"]["approval"]["binding"] == {"secret": "binding"}
    assert shown.headers["etag"] == '"1"'


async def test_decision_records_approver_digest_and_channel(here: Desk) -> None:
    answer = await here.decide({"decision": "deny", "reason": "not today"})
    assert answer.code is None
    assert answer.body["data"]["approval"]["state"] == "denied"
    assert answer.headers["etag"] == '"2"'
    (given,) = here.desk.decided
    assert given["decision"].reason == "not today"
    assert (given["by"], given["channel"], given["version"]) == ("approver:alice", "control", 1)
    assert given["peer"] is None  # in single-user mode it would be the engine's own user


@pytest.mark.row("A4")
async def test_token_with_the_scope_decides_as_its_own_principal(here: Desk) -> None:
    assert (await here.decide(credential=here.house.deciding)).code is None
    assert here.desk.decided[0]["by"] == "token:robot"


@pytest.mark.row("A4")
async def test_service_mode_decision_carries_the_callers_identity_of_the_approver(
    service: Desk,
) -> None:
    assert (await service.decide(uid=4321)).code is None
    assert service.desk.decided[0]["peer"] == "uid:4321"


async def test_decision_without_a_version_is_refused(here: Desk) -> None:
    for headers in (
        [], [("if-match", "1")], [("if-match", 'W/"1"')], [("if-match", '"one"')],
        [("if-match", '"' + "1" * 16 + '"')], [("if-match", '"1"'), ("if-match", "*")],
    ):  # fmt: skip
        answer = await here.decide(headers=headers)
        refused = (answer.code, answer.body["error"]["fields"])
        assert refused == ("INVALID_PARAMS", ["If-Match"]), headers
    assert here.desk.decided == []


async def test_decision_with_if_match_star_applies_to_any_version(here: Desk) -> None:
    assert (await here.decide(headers=[("if-match", "*")])).code is None
    assert here.desk.decided[0]["version"] is None


async def test_malformed_decision_is_refused(here: Desk) -> None:
    for body in (
        {}, {"decision": "maybe"}, {"decision": "deny", "arguments": {}}, {"decision": "approve", "x": 1},
        {"decision": "approve", "remember": {"scope": "until"}}, [], {"decision": "deny", "reason": "x" * 1001},
    ):  # fmt: skip
        assert (await here.decide(body)).code == "INVALID_PARAMS", body
    assert here.desk.decided == []


async def test_caller_sees_its_own_approvals_without_approver_names(here: Desk) -> None:
    here.desk.put(approval(2, principal_id="token:caller", approvers=("alice",)))
    mine = {"face": Face.ENGINE, "credential": here.house.caller}
    listed = (await here.ask("GET", "/v1/approvals", **mine)).body["data"]["items"]
    assert [item["id"] for item in listed] == [approval(2).id]
    shown = (await here.ask("GET", f"/v1/approvals/{approval(2).id}", **mine)).body["data"]
    for item in (listed[0], shown["approval"]):
        assert item["binding"] is None
        assert item["approvers"] == []
    others = await here.ask("GET", f"/v1/approvals/{ONE.id}", **mine)
    assert others.code == "RESOURCE_NOT_FOUND"
    assert (await here.ask("POST", f"/v1/approvals/{ONE.id}/cancel", **mine)).code == others.code


CALLBACK = {"approval_id": ONE.id, "version": 1, "decision": YES}


async def test_signed_callback_decides_as_the_webhook(here: Desk) -> None:
    assert (await here.call_back(CALLBACK)).code is None
    (given,) = here.desk.decided
    assert (given["by"], given["channel"], given["version"]) == ("webhook", "webhook", 1)


def _other_secret(raw: bytes) -> list[str]:
    return [sign(b"t" * 32, raw, NOW)]


FORGERIES: dict[str, Callable[[bytes], list[str]]] = {
    "none": lambda raw: [],
    "another secret": _other_secret,
    "another body": lambda raw: [sign(SECRET, raw + b" ", NOW)],
    "an old one": lambda raw: [sign(SECRET, raw, NOW - timedelta(seconds=301))],
    "of the future": lambda raw: [sign(SECRET, raw, NOW + timedelta(seconds=301))],
    "a newer time on an older one": lambda raw: [
        sign(SECRET, raw, NOW - timedelta(seconds=9)).replace(
            f"t={int(NOW.timestamp()) - 9}", f"t={int(NOW.timestamp())}"
        )
    ],
    "two": lambda raw: [sign(SECRET, raw, NOW), *_other_secret(raw)],
    "two in one": lambda raw: [sign(SECRET, raw, NOW) + "," + _other_secret(raw)[0]],
    "two with a good last": lambda raw: [*_other_secret(raw), sign(SECRET, raw, NOW)],
    "upper case": lambda raw: [sign(SECRET, raw, NOW).upper()],
    "no version": lambda raw: [sign(SECRET, raw, NOW).replace("v1=", "v0=")],
    "empty": lambda raw: [""],
    "foreign digits": lambda raw: [sign(SECRET, raw, NOW).replace("t=", "t=٠")],
}  # fmt: skip


async def test_callback_with_a_bad_signature_decides_nothing(here: Desk) -> None:
    raw = json.dumps(CALLBACK).encode()
    for name, forge in FORGERIES.items():
        headers: Any = [(HEADER, value.encode()) for value in forge(raw)]
        answer = await here.house.client.ask("POST", "/v1/approvals/callback", raw, headers=headers)
        assert (answer.status, answer.code) == (401, "UNAUTHORIZED"), name
    assert here.desk.decided == []


async def test_replayed_callback_decides_nothing_more(here: Desk) -> None:
    """Also where the first was refused for another reason: a signature holds once."""
    raw = json.dumps({**CALLBACK, "version": 7}).encode()
    signature = sign(SECRET, raw, NOW)
    assert (await here.call_back(raw, signature)).code == "IDEMPOTENCY_CONFLICT"
    assert (await here.call_back(raw, signature)).code == "UNAUTHORIZED"
    assert len(here.desk.decided) == 1


async def test_signed_callback_without_a_decision_is_refused(here: Desk) -> None:
    for body in (
        {"approval_id": ONE.id, "decision": YES},  # without a version
        {**CALLBACK, "more": 1},
        b"[" * 100,
        b'{"approval_id": "a", "approval_id": "b"}',
        # our own message, sent back
        {"event": "approval.created", "approval": {"id": ONE.id}, "delivery": 1, "sent_at": "x"},
    ):
        assert (await here.call_back(body)).code == "INVALID_PARAMS", body
    assert here.desk.decided == []


async def test_callback_is_refused_if_callbacks_are_disabled(here: Desk) -> None:
    here.house.engine.part(Webhook).channel = SimpleNamespace(callbacks=None)  # type: ignore[assignment]
    assert (await here.call_back(CALLBACK)).code == "PERMISSION_DENIED"
    here.house.engine.part(Webhook).channel = None
    assert (await here.call_back(CALLBACK)).code == "PERMISSION_DENIED"
    assert here.desk.decided == []


# -- Everybody's calls, their figures and the rules ----------------------------------------


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
    assert (shown["children"], shown["approval"], shown["answer"]) == ([], None, "needs_admin")


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


# -- Processes of everybody's sessions -----------------------------------------------------

PROCESS = {"exit_code": None, "signal": None, "lost": False, "started_at": 1.5}


@dataclass
class Beside:
    """A session of a caller, in which processes run."""

    house: House
    session: str
    place: FakePlace
    asked: list[Any]

    async def ask(self, method: str, path: str = "", **more: Any) -> Answer:
        """As the administrator on the control socket, unless told otherwise."""
        given = {"credential": self.house.admin, **more}
        return await self.house.ask(method, f"/v1/sessions/{self.session}{path}", **given)

    async def owned(self, method: str, path: str = "") -> Answer:
        """As the owner on the callers' socket."""
        return await self.ask(method, path, face=Face.ENGINE, credential=self.house.caller)

    async def changes(self) -> list[tuple[str, str]]:
        found = await self.house.ask("GET", "/v1/changes", credential=self.house.admin)
        items = found.body["data"]["items"]
        return [(one["action"], one["details"].get("process", "")) for one in items]

    def answer(self, request: Any) -> Any:
        """Answer as a guest: `web` runs and has printed 100,000 bytes, `old` has ended."""
        self.asked.append(request)
        if request["do"] == "read":
            after = min(request["after"], 100_000)
            text = "x" * min(100_000 - after, 65_536)
            piece = {"text": text, "offset": after + len(text), "skipped": 0, "ended": False}
            return {"output": piece}
        web, old = ({**PROCESS, "name": "web", "state": "running"},
                    {**PROCESS, "name": "old", "state": "ended", "exit_code": 3})  # fmt: skip
        return {"processes": [web, old]} if request["do"] == "list" else {"process": web}


@pytest.fixture
async def beside(home: Path) -> AsyncIterator[Beside]:
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async for house in built(home, container=wall):
        caller = {"face": Face.ENGINE, "credential": house.caller}
        made = await house.ask("POST", "/v1/sessions", {}, **caller)
        here = Beside(house, made.body["data"]["session"]["id"], wall.held[0], [])
        here.place.on_processes = here.answer
        yield here


async def test_approver_lists_processes_and_administrator_reads_the_end_of_output(
    beside: Beside,
) -> None:
    approver = beside.house.approver
    listed = (await beside.ask("GET", "/processes", credential=approver)).body["data"]["items"]
    assert [(one["name"], one["state"]) for one in listed] == [("web", "running"), ("old", "ended")]
    refused = await beside.ask("GET", "/processes/web/output", credential=approver)
    assert refused.code == "PERMISSION_DENIED"
    read = (await beside.ask("GET", "/processes/web/output")).body["data"]
    assert (len(read["text"]), read["offset"], read["skipped"]) == (65_536, 100_000, 34_464)


async def test_stopping_a_process_needs_admin_and_is_recorded(beside: Beside) -> None:
    refused = await beside.ask("DELETE", "/processes/web", credential=beside.house.approver)
    assert refused.code == "PERMISSION_DENIED"
    assert (await beside.ask("DELETE", "/processes/nobody")).code == "RESOURCE_NOT_FOUND"
    ended = await beside.ask("DELETE", "/processes/old")
    assert ended.body["data"]["process"]["exit_code"] == 3
    assert [one for one in beside.asked if one["do"] == "stop"] == []
    assert ("process.stop", "old") not in await beside.changes()
    assert (await beside.ask("DELETE", "/processes/web?grace_s=2")).code is None
    assert beside.asked[-1] == {"do": "stop", "name": "web", "grace_s": 2}
    assert (await beside.changes())[0] == ("process.stop", "web")


async def test_looking_at_processes_neither_thaws_nor_keeps_a_session(beside: Beside) -> None:
    before = (await beside.owned("GET")).body["data"]["session"]["last_used_at"]
    beside.house.clock.advance(60)
    await beside.ask("GET", "/processes")
    await beside.ask("GET", "/processes/web/output")
    assert (await beside.owned("GET")).body["data"]["session"]["last_used_at"] == before
    assert (await beside.owned("POST", "/pause")).code is None
    assert (await beside.ask("GET", "/processes")).code == "SANDBOX_UNAVAILABLE"
    assert beside.place.is_paused
    # Twin: it is thawed for its owner, whose look is a use.
    assert (await beside.owned("GET", "/processes")).code is None
    assert not beside.place.is_paused
    assert (await beside.owned("GET")).body["data"]["session"]["last_used_at"] > before


async def test_processes_of_an_ended_or_unknown_session_are_not_found(beside: Beside) -> None:
    await beside.owned("DELETE")
    assert (await beside.ask("GET", "/processes")).code == "RESOURCE_NOT_FOUND"
    beside.session = "sess_" + "0" * 32
    assert (await beside.ask("GET", "/processes")).code == "RESOURCE_NOT_FOUND"
    assert (await beside.ask("DELETE", "/processes/web")).code == "RESOURCE_NOT_FOUND"


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
        assert others.wait(timeout=600)
        return parse_policy(*given)

    async def call() -> None:
        await house.call("1 + 1")
        others.set()

    monkeypatch.setattr("fumehood.overview.service.parse_policy", slow)
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
