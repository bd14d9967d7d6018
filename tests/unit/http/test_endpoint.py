"""Endpoints: declared once, shared fairly, streamed."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import resource
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import BaseModel
from starlette.requests import Request

from fumehood import Config, Engine, tool
from fumehood.answers import Deleted
from fumehood.call_options import CallBody
from fumehood.core.errors import EngineError, Unauthorized
from fumehood.core.part import PartError
from fumehood.http import event_stream, peer, routes
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS, make_document, with_added
from fumehood.http.endpoint import Needs, Operation, endpoint
from fumehood.http.peer import MAX_CONNECTIONS, most_connections
from fumehood.streams import routes as stream
from fumehood.streams import sse
from fumehood.streams.routes import EventsResponse
from fumehood.testing import FakeWall

pytestmark = pytest.mark.anyio


class Query(BaseModel):
    """Needs its field."""

    since: str


SECURITY = {
    Needs.CALLER: [{}, {"bearer": []}],
    Needs.NOBODY: [],
    Needs.SIGNATURE: [{"signature": []}],
    Needs.APPROVER: [{"bearer": []}],
    Needs.ADMIN: [{"bearer": []}],
}


@cache
def documented() -> dict[str, Any]:
    """The entry of each operation in the document of its socket."""
    documents = [make_document("title", "1.2.3", made) for made in (OPERATIONS, CONTROL_OPERATIONS)]
    paths = [path for document in documents for path in document["paths"].values()]
    return {entry["operationId"]: entry for path in paths for entry in path.values()}


@pytest.mark.parametrize("operation", [*OPERATIONS, *CONTROL_OPERATIONS], ids=lambda one: one.id)
def test_required_authority_is_documented_with_its_error_codes(operation: Operation) -> None:
    entry = documented()[operation.id]
    assert entry["security"] == SECURITY[operation.needs]
    assert ({"401", "403"} <= set(entry["responses"])) is (operation.needs is not Needs.NOBODY)


def request(body: bytes = b"{}", query: bytes = b"") -> Request:
    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    headers = [(b"content-type", b"application/json")]
    state = {"take_body": lambda: body}
    scope = {"type": "http", "method": "POST", "headers": headers, "query_string": query}
    scope |= {"state": state, "path_params": {}}
    return Request(scope, receive)


class Body(BaseModel):
    """Needs its field."""

    field: int


async def authority_first(caller: Any, body: Body, query: Query) -> Deleted:
    """Check in this order."""
    return Deleted(deleted="")


async def body_first(body: Body, caller: Any) -> Deleted:
    """Check in this order."""
    return Deleted(deleted="")


async def no_caller(body: Body) -> Deleted:
    """Check the caller although it is not used."""
    return Deleted(deleted="")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("function", "body", "authorized", "refusal"),
    [
        (authority_first, b"{", False, "cannot be read"),
        (authority_first, b"{}", False, "who are you"),
        (authority_first, b"{}", True, "The body is wrong: field"),
        (authority_first, b'{"field": 1}', True, "The query is wrong: since"),
        (body_first, b"{}", False, "The body is wrong: field"),
        (body_first, b'{"field": 1}', False, "who are you"),
        (no_caller, b"{}", False, "who are you"),
    ],
)
async def test_request_checks_follow_the_parameter_order(
    function: Any, body: bytes, authorized: bool, refusal: str
) -> None:
    async def authorize(request: Request) -> str:
        if not authorized:
            raise Unauthorized("who are you")
        return "caller"

    operation = endpoint("POST", "/v1/x", Needs.ADMIN, authorize=authorize)(function)
    with pytest.raises(EngineError, match=refusal):
        await operation.respond(request(body))


def test_every_endpoint_of_the_routes_is_served() -> None:
    served = {(one.method, one.path) for one in (*OPERATIONS, *CONTROL_OPERATIONS)}
    modules = [
        importlib.import_module(f"{routes.__name__}.{module.name}")
        for module in pkgutil.iter_modules(routes.__path__)
    ]
    made = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Operation)
    ]
    assert len(made) >= 50
    assert [one.id for one in made if (one.method, one.path) not in served] == []


def test_socket_of_an_operation_follows_from_its_required_authority() -> None:
    assert {operation.needs for operation in OPERATIONS} == {Needs.CALLER, Needs.NOBODY}
    assert Needs.CALLER not in {operation.needs for operation in CONTROL_OPERATIONS}


# -- What one user holds is counted, given back, and takes nothing from another one --------


@pytest.mark.parametrize(
    ("files", "most"),
    [(100, 50), (1 << 16, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)],
)
def test_one_user_cannot_exhaust_open_files(
    monkeypatch: pytest.MonkeyPatch, files: int, most: int
) -> None:
    monkeypatch.setattr(peer.resource, "getrlimit", lambda _: (files, files))
    assert most_connections() == most


# -- Events to one client ------------------------------------------------------------------


@tool(sandboxed=False)
async def wait() -> None:
    """Wait to be ended."""
    await asyncio.Event().wait()


class Connection:
    """What the server offers: it takes what it is sent, or not."""

    def __init__(self, *, stuck_after: int = 1000) -> None:
        self.sent: list[dict[str, Any]] = []
        self.aborted = False
        self.left = anyio.Event()
        self._stuck_after = stuck_after

    @property
    def scope(self) -> dict[str, Any]:
        return {"type": "http", "state": {"abort": self._abort}}

    def _abort(self) -> None:
        self.aborted = True

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) >= self._stuck_after:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def respond(home: Path, connection: Connection, until: Any) -> None:
    """Follow a call that waits, until something holds; then the client leaves."""
    async with Engine([wait], config=Config(home=home), interpreter=FakeWall()) as engine:
        call = engine.open_stream("wait", CallBody(), engine.owner)
        assert await call.begun() is None
        response = EventsResponse(engine, call.reader(), "wait", None)
        with anyio.fail_after(120):
            async with anyio.create_task_group() as group:
                group.start_soon(response, connection.scope, connection.receive, connection.send)
                while not until():
                    await anyio.lowlevel.checkpoint()
                connection.left.set()


@pytest.mark.row("S8", "D2")
async def test_silent_stream_gets_keep_alive_comments(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.01)
    connection = Connection()
    await respond(home, connection, lambda: connection.body.count(event_stream.KEEP_ALIVE) >= 3)
    decoder = sse.Decoder()
    assert [frame.kind for frame in decoder.feed(connection.body)] == ["tool_progress"]
    assert connection.body.count(b"id:") == 1  # a comment moves no client's cursor


@pytest.mark.row("S8", "D2")
async def test_stream_of_a_stalled_client_is_closed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "WRITE_DEADLINE_S", 0.01)
    connection = Connection(stuck_after=1)
    await respond(home, connection, lambda: connection.aborted)


def operation_of(needs: Needs, path: str = "/v1/things", authorize: Any = None) -> Operation:
    @endpoint("GET", path, needs, authorize=authorize)
    async def things(query: Query) -> Deleted:
        """List things."""
        raise AssertionError(query)

    return things


def test_operation_of_a_part_takes_the_place_of_the_kernels() -> None:
    first, second = operation_of(Needs.CALLER), operation_of(Needs.ADMIN, "/v1/others")
    replacing, more = operation_of(Needs.CALLER), operation_of(Needs.NOBODY, "/v1/more")
    found = with_added([first, second], [replacing, more])
    assert [id(one) for one in found] == [id(one) for one in (replacing, second, more)]


@pytest.mark.parametrize("needs", [needs for needs in Needs if needs is not Needs.ADMIN])
def test_operation_of_a_part_cannot_need_less_than_the_kernels(needs: Needs) -> None:
    with pytest.raises(PartError, match="GET /v1/things of a part must need admin"):
        with_added([operation_of(Needs.ADMIN)], [operation_of(needs)])


def test_operation_of_a_part_cannot_check_the_caller_in_its_own_way() -> None:
    weaker = operation_of(Needs.CALLER, authorize=lambda request: None)
    with pytest.raises(PartError, match="must need caller"):
        with_added([operation_of(Needs.CALLER)], [weaker])


def test_two_parts_cannot_add_one_operation() -> None:
    twice = [operation_of(Needs.CALLER), operation_of(Needs.CALLER)]
    for kernel in ([], [operation_of(Needs.CALLER)]):
        with pytest.raises(PartError, match="Two parts add the operation GET /v1/things"):
            with_added(kernel, twice)
