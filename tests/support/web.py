"""A console without sockets, with a fake engine and a test client as the browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
from starlette.testclient import TestClient

from fumehood.answers import ApprovalChanges, Whoami
from fumehood.approvals.model import (
    Approval,
    ApprovalPage,
    ApprovalState,
    DecisionRecord,
    OneOfSeveral,
    RememberWish,
)
from fumehood.client.api_request import DaemonUnavailable, Refused
from fumehood.core.identity import Scope
from fumehood.protocol.messages import decode_envelope
from fumehood.web.app import Console
from fumehood.web.pages import PAGES
from fumehood.web.view import Page
from support.answers import envelope_bytes
from support.approvals import NOW, approval, rule

PORT = 8420
BASE = f"http://127.0.0.1:{PORT}"
ALICE, BOB = "fha_alice", "fha_bob"
SCHEMA = {
    "type": "object",
    "required": ["to"],
    "properties": {
        "to": {"type": "string", "description": "Whom to write to."},
        "text": {"type": "string"},
        "times": {"type": "integer"},
        "urgent": {"type": "boolean"},
        "folder": {"enum": ["sent", "drafts"]},
        "tags": {"type": "array"},
    },
}


def refusal(code: str, message: str, fields: Iterable[str] = ()) -> Refused:
    """The exception a client raises if the engine refuses."""
    envelope = decode_envelope(envelope_bytes({}, code=code, message=message))
    error = envelope.error.model_copy(update={"fields": tuple(fields) or None})
    return Refused(envelope.model_copy(update={"error": error}))


@dataclass
class FakeEngine:
    """A fake engine with approvals that every client of the console sees."""

    approvals: dict[str, Approval] = field(default_factory=dict)
    changes: int = 0
    is_away: bool = False
    revoked: set[str] = field(default_factory=set)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    edit_refused: Refused | None = None
    asked_for_changes: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    def put(self, *given: Approval) -> None:
        for one in given:
            self.approvals[one.id] = one
        self.tell()

    def tell(self) -> None:
        self.changes += 1
        changed, self.changed = self.changed, anyio.Event()
        changed.set()


class FakeControl:
    """A fake `AsyncControlClient` with the methods the console uses."""

    def __init__(self, engine: FakeEngine, credential: str) -> None:
        if not credential.isascii() or not credential:
            raise ValueError("This is not a credential.")
        self.engine = engine
        self.credential = credential
        self.is_closed = False
        self.approvals = self

    def _check(self) -> None:
        if self.engine.is_away:
            raise DaemonUnavailable("No engine answers.")
        if self.credential not in (ALICE, BOB) or self.credential in self.engine.revoked:
            raise refusal("UNAUTHORIZED", "This credential is unknown.")

    @property
    def who(self) -> str:
        return f"approver:{self.credential.removeprefix('fha_')}"

    async def close(self) -> None:
        self.is_closed = True

    async def whoami(self) -> Whoami:
        self._check()
        return Whoami(principal_id=self.who, scopes=(Scope.APPROVE,))

    async def list(
        self, *, state: ApprovalState | None = None, limit: int = 50, cursor: str | None = None
    ) -> ApprovalPage:
        self._check()
        found = [one for one in reversed(self.engine.approvals.values()) if one.state is state]
        if cursor is not None:
            order = list(reversed(self.engine.approvals))
            found = [one for one in found if order.index(one.id) > order.index(cursor)]
        page = tuple(found[:limit])
        has_more = len(found) > limit
        return ApprovalPage(
            items=page,
            has_more=has_more,
            next_cursor=page[-1].id if has_more else None,
            total_count=None,
        )

    async def show(self, approval_id: str) -> Approval:
        self._check()
        if approval_id not in self.engine.approvals:
            raise refusal("RESOURCE_NOT_FOUND", "There is no such approval. Do not retry.")
        return self.engine.approvals[approval_id]

    async def changes(self, after: int = -1, *, wait_s: float = 25) -> ApprovalChanges:
        self._check()
        self.engine.asked_for_changes += 1
        if after == self.engine.changes:
            with anyio.move_on_after(wait_s):
                await self.engine.changed.wait()
        self._check()
        waiting = [one for one in self.engine.approvals.values() if one.state == "pending"]
        return ApprovalChanges(changes=self.engine.changes, pending=len(waiting))

    async def decide_all(self, items: Iterable[OneOfSeveral]) -> tuple[Approval, ...]:
        self._check()
        items = tuple(items)
        for item in items:
            one = await self.show(item.approval_id)
            if one.state is not ApprovalState.PENDING or item.version != one.version:
                raise refusal("IDEMPOTENCY_CONFLICT", f"It is {one.state} already.")
        for item in items:
            self.engine.asked.append((self.who, item))
            one, given = self.engine.approvals[item.approval_id], item.decision
            record = DecisionRecord(
                at=NOW, approver=self.who, channel="control", decision=given.decision,
                action_digest=one.action_digest, reason=given.reason, edited=given.arguments is not None,
            )  # fmt: skip
            state = "approved" if given.decision == "approve" else "denied"
            values = {
                "state": ApprovalState(state), "version": one.version + 1,
                "decisions": (*one.decisions, record), "arguments": given.arguments or one.arguments,
            }  # fmt: skip
            self.engine.put(one.model_copy(update=values))
        return tuple(self.engine.approvals[item.approval_id] for item in items)

    async def preview_edit(self, approval_id: str, arguments: dict[str, Any]) -> Approval:
        if self.engine.edit_refused is not None:
            raise self.engine.edit_refused
        one = await self.show(approval_id)
        return one.model_copy(update={"arguments": arguments, "action_digest": "e" * 64})

    async def preview_remember(self, approval_id: str, wish: RememberWish) -> Any:
        one = await self.show(approval_id)
        arguments = {name: one.arguments[name] for name in wish.arguments or ()}
        return rule(
            any_others=len(arguments) < len(one.arguments),
            arguments=arguments,
            expires_at=wish.until,
            session_id=None,
            uses_left=wish.uses,
        )

    async def resolve(self, approval_id: str, outcome: str, *, note: str | None = None) -> Approval:
        self.engine.asked.append((self.who, (approval_id, outcome, note)))
        return await self.show(approval_id)


class FakeCaller:
    """A fake `AsyncClient`, from which the inbox reads schemas."""

    async def tool(self, reference: str) -> Any:
        if not reference.startswith("send_mail@"):
            raise refusal("TOOL_NOT_FOUND", "There is no such tool.")
        return SimpleNamespace(tool=SimpleNamespace(parameters=SCHEMA))

    async def close(self) -> None:
        pass


@dataclass
class Site:
    """A console, its fake engine and its browsers."""

    engine: FakeEngine
    console: Console
    clock: list[float]

    def browser(self, credential: str | None = ALICE) -> Browser:
        browser = Browser(self.console)
        if credential is not None:
            assert browser.log_in(credential).status_code == 303
        return browser


def make_site(*approvals: Approval, pages: tuple[Page, ...] = PAGES) -> Site:
    engine = FakeEngine()
    engine.put(*approvals)
    connect: Callable[[str], Any] = lambda credential: FakeControl(engine, credential)  # noqa: E731
    console = Console(connect, FakeCaller(), PORT, pages)  # type: ignore[arg-type]
    clock = [1000.0]
    console.logins._clock = lambda: clock[0]
    return Site(engine, console, clock)


class Browser:
    """A well-behaved browser: keeps cookies and sends the Origin of its forms."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.client = TestClient(console.app, base_url=BASE, follow_redirects=False)

    def log_in(self, credential: str) -> Any:
        return self.post("/login", {"credential": credential}, csrf=False)

    def get(self, path: str, **headers: str) -> Any:
        return self.client.get(path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def part(self, path: str) -> Any:
        return self.get(path, hx_request="true")

    def post(
        self, path: str, fields: Any = (), *, csrf: bool = True, origin: str | None = BASE,
        headers: dict[str, str] | None = None,
    ) -> Any:  # fmt: skip
        given = list(fields.items() if isinstance(fields, dict) else fields)
        if csrf:
            given.append(("csrf", self.csrf))
        sent = {} if origin is None else {"origin": origin}
        body = "&".join(f"{quoted(name)}={quoted(value)}" for name, value in given)
        sent["content-type"] = "application/x-www-form-urlencoded"
        return self.client.post(path, content=body, headers={**sent, **(headers or {})})

    @property
    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.get("/inbox").text)
        assert found
        return found[1]


def quoted(text: str) -> str:
    from urllib.parse import quote_plus

    return quote_plus(text)


def many(number: int) -> list[Approval]:
    return [approval(n, arguments={"paths": [f"file-{n}.txt"]}) for n in range(1, number + 1)]
