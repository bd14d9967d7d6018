"""Approvals over both sockets: who may see, who may decide, and on what."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.approvals.channels.webhook import HEADER, Callbacks, sign
from fumehood.core.identity import Principal, Scope
from fumehood.http.peer import Face
from fumehood.identity.approvers import all_approvers, make_first_approver
from fumehood.testing import FakeWall, ManualClock
from support.approvals import NOW, FakeDesk, approval
from support.faces import FacesClient
from support.http import Answer

pytestmark = [pytest.mark.anyio, pytest.mark.row("A6")]

SECRET = b"s" * 32
ROOT = Principal("init", frozenset({Scope.ADMIN}))
ONE = approval()
DECISION = f"/v1/approvals/{ONE.id}/decision"
YES = {"decision": "approve"}


@dataclass
class Desk:
    """An engine with a desk that remembers, and somebody with each kind of credential."""

    engine: Engine
    desk: FakeDesk
    client: FacesClient
    clock: ManualClock
    approver: str
    caller: str
    deciding: str

    async def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """As the approver on the control socket, unless told otherwise."""
        return await self.client.ask(method, path, body, **{"credential": self.approver, **more})

    async def decide(self, body: Any = YES, **more: Any) -> Answer:
        return await self.ask("POST", DECISION, body, **{"headers": [("if-match", '"1"')], **more})

    async def call_back(self, body: Any, *signatures: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = signatures or (sign(SECRET, raw, self.clock.now()),)
        headers = [(HEADER, one) for one in given]
        path = "/v1/approvals/callback"
        return await self.client.ask("POST", path, raw, headers=headers)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        return [given for what, given in self.desk.asked if what == "decide"]


async def make_desk(home: Path, **config: Any) -> AsyncIterator[Desk]:
    clock = ManualClock(NOW)
    engine = Engine(config=Config(home=home, **config), interpreter=FakeWall(), clock=clock)
    make_first_approver(engine.database, "owner", NOW)
    engine.approvers._approvers = engine.database.read_now(all_approvers)
    async with engine:
        desk = FakeDesk()
        desk.put(ONE)
        engine.approvals = desk  # type: ignore[attr-defined]
        engine.webhook = SimpleNamespace(callbacks=Callbacks(SECRET, window_s=300))  # type: ignore[attr-defined]
        _, approver = await engine.approvers.add("alice", {Scope.APPROVE}, by=ROOT, now=NOW)

        async def token(name: str, *scopes: Scope) -> str:
            _, text = await engine.tokens.new(
                name, principal_id=f"token:{name}", scopes=scopes, agents=(), expires_at=None,
                by=ROOT, now=NOW,
            )  # fmt: skip
            return text

        yield Desk(
            engine, desk, FacesClient(engine), clock, approver,
            await token("caller", Scope.CALL), await token("robot", Scope.APPROVE),
        )  # fmt: skip


@pytest.fixture
async def here(home: Path) -> AsyncIterator[Desk]:
    async for made in make_desk(home):
        yield made


@pytest.fixture
async def service(home: Path) -> AsyncIterator[Desk]:
    async for made in make_desk(home, mode="service"):
        yield made


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
    (given,) = here.decisions
    assert given["decision"].reason == "not today"
    assert (given["by"], given["channel"], given["version"]) == ("approver:alice", "control", 1)
    assert given["peer"] is None  # in single-user mode it would be the engine's own user


@pytest.mark.row("A4")
async def test_token_with_the_scope_decides_as_its_own_principal(here: Desk) -> None:
    assert (await here.decide(credential=here.deciding)).code is None
    assert here.decisions[0]["by"] == "token:robot"


@pytest.mark.row("A4")
async def test_service_mode_decision_carries_the_callers_identity_of_the_approver(
    service: Desk,
) -> None:
    assert (await service.decide(uid=4321)).code is None
    assert service.decisions[0]["peer"] == "uid:4321"


async def test_decision_without_a_version_is_refused(here: Desk) -> None:
    for headers in (
        [], [("if-match", "1")], [("if-match", 'W/"1"')], [("if-match", '"one"')],
        [("if-match", '"' + "1" * 16 + '"')], [("if-match", '"1"'), ("if-match", "*")],
    ):  # fmt: skip
        answer = await here.decide(headers=headers)
        refused = (answer.code, answer.body["error"]["fields"])
        assert refused == ("INVALID_PARAMS", ["If-Match"]), headers
    assert here.decisions == []


async def test_decision_with_if_match_star_applies_to_any_version(here: Desk) -> None:
    assert (await here.decide(headers=[("if-match", "*")])).code is None
    assert here.decisions[0]["version"] is None


async def test_malformed_decision_is_refused(here: Desk) -> None:
    for body in (
        {}, {"decision": "maybe"}, {"decision": "deny", "arguments": {}}, {"decision": "approve", "x": 1},
        {"decision": "approve", "remember": {"scope": "until"}}, [], {"decision": "deny", "reason": "x" * 1001},
    ):  # fmt: skip
        assert (await here.decide(body)).code == "INVALID_PARAMS", body
    assert here.decisions == []


@pytest.mark.row("A3")
async def test_several_approvals_are_decided_with_one_request(here: Desk) -> None:
    two = here.desk.put(approval(2))
    items = [
        {"approval_id": one.id, "version": 1, "decision": {"decision": "deny"}}
        for one in (ONE, two)
    ]
    answer = await here.ask("POST", "/v1/approvals/decisions", {"items": items})
    assert [item["state"] for item in answer.body["data"]["items"]] == ["denied", "denied"]


async def test_poll_times_out_with_the_same_number(here: Desk) -> None:
    answer = await here.ask("GET", f"/v1/approvals/changes?after={here.desk.changes}&wait=0")
    assert answer.body["data"]["changes"] == here.desk.changes
    assert (await here.ask("GET", "/v1/approvals/changes?wait=26")).code == "INVALID_PARAMS"


async def test_caller_sees_its_own_approvals_without_approver_names(here: Desk) -> None:
    here.desk.put(approval(2, principal_id="token:caller", approvers=("alice",)))
    mine = {"face": Face.ENGINE, "credential": here.caller}
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
    (given,) = here.decisions
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
        answer = await here.client.ask("POST", "/v1/approvals/callback", raw, headers=headers)
        assert (answer.status, answer.code) == (401, "UNAUTHORIZED"), name
    assert here.decisions == []


async def test_replayed_callback_decides_nothing_more(here: Desk) -> None:
    """Also where the first was refused for another reason: a signature holds once."""
    raw = json.dumps({**CALLBACK, "version": 7}).encode()
    signature = sign(SECRET, raw, NOW)
    assert (await here.call_back(raw, signature)).code == "IDEMPOTENCY_CONFLICT"
    assert (await here.call_back(raw, signature)).code == "UNAUTHORIZED"
    assert len(here.decisions) == 1


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
    assert here.decisions == []


async def test_callback_is_refused_if_callbacks_are_disabled(here: Desk) -> None:
    here.engine.webhook = SimpleNamespace(callbacks=None)  # type: ignore[attr-defined]
    assert (await here.call_back(CALLBACK)).code == "PERMISSION_DENIED"
    here.engine.webhook = None  # type: ignore[attr-defined]
    assert (await here.call_back(CALLBACK)).code == "PERMISSION_DENIED"
    assert here.decisions == []
