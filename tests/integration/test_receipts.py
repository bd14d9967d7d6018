"""Receipts of programs in containers, and their replay, in which nothing is sent."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fumehood import Config, Engine, Envelope
from fumehood.gateway.authority import Authority
from fumehood.gateway.settings import GatewaySettings
from fumehood.receipts.receipt import Receipt, differences
from fumehood.registry.secrets import SecretSettings
from fumehood.sandbox.settings import ContainerSettings, LanguageImages
from support.gateway import FETCH, gateway_part, names_here
from upstream import Reply, Upstream, running_upstream

pytestmark = [
    pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.usefixtures("python_image")
]  # fmt: skip

HOST = "api.example.test"
SECRET = "s3cret-of-the-api/1"
ON_PYTHON = ContainerSettings(pool_min=0, images=LanguageImages(python="python"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def names() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, names_here(HOST):
        patch.setenv("API_KEY", SECRET)
        yield


@pytest.fixture(scope="module")
def their_authority() -> Authority:
    return Authority(None)


@pytest.fixture(scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, their_authority: Authority
) -> AsyncIterator[Engine]:
    """One whose programs may reach the host."""
    config = Config(
        home=tmp_path_factory.mktemp("home"),
        gateway=GatewaySettings(hosts=(HOST,), allowed_hosts=(HOST,), writes="allow"),
        secrets={"api": SecretSettings(env="API_KEY", hosts=(HOST,), inside="API_KEY")},
        container=ON_PYTHON,
    )
    engine = Engine(config=config)
    gateway_part(engine).tls = ssl.create_default_context(cadata=their_authority.certificate)
    async with engine:
        yield engine


@pytest.fixture(scope="module")
async def offline(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """One that gives programs no network."""
    home = tmp_path_factory.mktemp("offline")
    async with Engine(config=Config(home=home, container=ON_PYTHON)) as engine:
        yield engine


@pytest.fixture
def upstream(their_authority: Authority) -> Iterator[Upstream]:
    with running_upstream(their_authority.context_for(HOST)) as running:
        yield running


def url(server: Upstream, path: str = "/") -> str:
    return f"https://{HOST}:{server.port}{path}"


async def run(engine: Engine, code: str, **options: Any) -> Envelope:
    return await engine.call("run_python", {"code": FETCH + code}, network=[HOST], **options)


async def receipt_of(engine: Engine, answer: Envelope) -> Receipt:
    assert answer.metadata.receipt is not None, answer
    assert answer.metadata.receipt.url is not None
    return Receipt.model_validate_json(await engine.blob(answer.metadata.receipt.url))


async def replayed(engine: Engine, receipt: Receipt, **arguments: Any) -> tuple[Envelope, Receipt]:
    answer = await engine.call(
        receipt.tool, receipt.arguments | arguments,
        **receipt.options, receipt=True, replay=receipt.network.model_dump(),
    )  # fmt: skip
    return answer, await receipt_of(engine, answer)


async def test_replay_answers_from_the_receipt_and_sends_nothing(
    engine: Engine, offline: Engine, upstream: Upstream
) -> None:
    """Reads, writes, a redirect, a refusal, what is packed and what is empty; also where no
    network, no host and no secret is configured."""
    upstream.script("/moved", Reply(302, headers={"location": "/now"}))
    code = f"""
out = [fetch({url(upstream, "/now?city=Bern")!r}, Authorization=os.environ.get("API_KEY", "")),
       fetch({url(upstream, "/moved")!r}), fetch({url(upstream, "/orders")!r}, b"two"),
       fetch("https://other.test/")[0]]
open("out.txt", "w").write(repr(out))
print(out)
"""
    answer = await run(engine, code, receipt=True)
    receipt = await receipt_of(engine, answer)
    assert answer.success, answer.error
    sent = len(upstream.requests)
    assert [one.status for one in receipt.network.exchanges][:2] == [200, 302]
    assert (receipt.network.left_out, receipt.network.exchanges[-1].status) == (0, 403)
    assert receipt.place is not None
    assert receipt.place["image_digest"].startswith("sha256:")
    for where in (engine, offline):
        again, second = await replayed(where, receipt)
        assert again.success, again.error
        assert differences(receipt, second) == []
        assert again.data["stdout"] == answer.data["stdout"]
        assert again.metadata.sandbox is not None
        assert again.metadata.sandbox.network is not None
        assert again.metadata.sandbox.network.replayed == len(receipt.network.exchanges)
    assert len(upstream.requests) == sent


async def test_attack_replayed_program_sends_something_else(
    engine: Engine, upstream: Upstream
) -> None:
    """Twin: the same requests, above."""
    answer = await run(engine, f"print(fetch({url(upstream)!r}, b'one'))", receipt=True)
    receipt = await receipt_of(engine, answer)
    (sent,) = upstream.requests
    other = f"""
print(fetch({url(upstream)!r}, b"other")[0], fetch({url(upstream, "/more")!r})[0])
print(fetch({url(upstream)!r}, b"one")[0], fetch({url(upstream)!r}, b"one")[0])
"""
    again, second = await replayed(engine, receipt, code=FETCH + other)
    assert again.data["stdout"] == "502 502\n200 502\n"
    assert upstream.requests == [sent]
    found = differences(receipt, second)
    assert f"new: GET {url(upstream, '/more')} (answered 502)" in found
    assert f"new: POST {url(upstream)} (answered 502), 2 times" in found
    assert any("no answer to it" in warning for warning in again.metadata.warnings)


async def test_calls_of_a_session_are_replayed_one_after_the_other(
    engine: Engine, offline: Engine, upstream: Upstream
) -> None:
    upstream.script("/", Reply(body=b"first"), Reply(body=b"second"))
    ask = f"x = fetch({url(upstream)!r})[1]; open('kept', 'a').write(x)"
    session = await engine.sessions.create(engine.owner)
    receipts = []
    for code in (ask, ask, "print(x, open('kept').read())"):
        answer = await run(engine, code, session_id=session.id, receipt=True)
        receipts.append(await receipt_of(engine, answer))
    assert answer.data["stdout"] == "second firstsecond\n"
    await engine.sessions.end(engine.owner, session.id)
    session = await offline.sessions.create(offline.owner)
    for receipt in receipts:
        options = {**receipt.options, "session_id": session.id}
        again, second = await replayed(offline, receipt.model_copy(update={"options": options}))
        assert differences(receipt, second) == []
    assert again.data["stdout"] == answer.data["stdout"]
    await offline.sessions.end(offline.owner, session.id)
    assert len(upstream.requests) == 2


async def test_receipt_has_no_secret(engine: Engine, upstream: Upstream) -> None:
    """Not that of a request, and not one that a server sends unasked, later."""
    upstream.script("/echo", Reply(200, json.dumps({"key": SECRET}).encode()))
    code = f"""
fetch({url(upstream)!r}, Authorization="Bearer " + os.environ["API_KEY"])
print(fetch({url(upstream, "/echo")!r}))
"""
    answer = await run(engine, code, receipt=True)
    assert upstream.requests[0].headers["authorization"] == f"Bearer {SECRET}"
    assert answer.metadata.receipt is not None
    assert answer.metadata.receipt.url is not None
    raw = await engine.blob(answer.metadata.receipt.url)
    receipt = Receipt.model_validate_json(raw)
    bodies = [base64.b64decode(one.body_base64) for one in receipt.network.exchanges]
    assert b"[redacted]" in bodies[1]
    assert not any(SECRET.encode() in one for one in (raw, *bodies))


@pytest.mark.parametrize(
    "long",
    [
        Reply(200, b"x" * (5 << 20)),
        Reply(200, b"x" * ((4 << 20) - 500), headers={f"x-{n}": "" for n in range(20)}),
    ],
    ids=["body", "headers"],
)
async def test_receipt_says_what_it_could_not_keep(
    engine: Engine, upstream: Upstream, long: Reply
) -> None:
    upstream.script("/long", long)
    code = f"print(len(fetch({url(upstream, '/long')!r})[1]), fetch({url(upstream)!r})[0])"
    receipt = await receipt_of(engine, await run(engine, code, receipt=True))
    assert (len(receipt.network.exchanges), receipt.network.left_out) == (0, 2)
    again, _ = await replayed(engine, receipt)
    assert "lacks 2 that could not be recorded" in again.metadata.warnings[0]


async def test_failed_program_has_a_receipt(engine: Engine) -> None:
    answer = await run(engine, "open('a.bin', 'wb').write(b'1'); 1 / 0", receipt=True)
    receipt = await receipt_of(engine, answer)
    assert (receipt.ended_by, receipt.error) == ("exception", "EXECUTION_ERROR")
    (file,) = receipt.fields["files"]
    assert (file["filename"], file["size"]) == ("a.bin", 1)
    again, second = await replayed(engine, receipt)
    assert not again.success
    assert differences(receipt, second) == []
    _, other = await replayed(engine, receipt, code="open('a.bin', 'wb').write(b'2'); 1 / 1")
    said = "\n".join(differences(receipt, other))
    assert "ended_by: exception → ok" in said
    assert "files: a.bin" in said


async def test_what_depends_on_more_has_no_receipt(engine: Engine) -> None:
    session = await engine.sessions.create(engine.owner)
    for option, value in (("receipt", True), ("replay", {"exchanges": []})):
        for tool, arguments, more in (
            ("run_python", {"code": "0"}, {"session_id": session.id, "preview": True}),
            ("run_python", {"code": "0", "tools": ["calculator"]}, {}),
            ("calculator", {"expression": "1"}, {}),
        ):
            options: dict[str, Any] = {option: value, **more}
            answer = await engine.call(tool, arguments, **options)
            assert answer.error is not None
            assert answer.error.code == "INVALID_PARAMS"
            assert answer.error.fields == (f"options.{option}",)
    await engine.sessions.end(engine.owner, session.id)


async def test_forged_exchange_is_refused(engine: Engine) -> None:
    """What is valid and no HTTP only breaks the program's own connection, see below."""
    exchange = {
        "method": "GET", "url": f"http://{HOST}/", "body_sha256": None, "status": 200,
        "headers": [["a", "b\r\nc: d"]], "body_base64": "",
    }  # fmt: skip
    for changed in (
        {"body_base64": "no base64!"}, {"status": 101}, {"headers": [["a"]]}, {"body_sha256": "1"},
    ):  # fmt: skip
        answer = await run(engine, "0", replay={"exchanges": [exchange | changed]})
        assert answer.error is not None, changed
        assert answer.error.code == "INVALID_PARAMS"
    broken = f"""
try: fetch("http://{HOST}/")
except OSError as error: print(type(error).__name__)
"""
    answer = await run(engine, broken, replay={"exchanges": [exchange]})
    assert answer.data["stdout"] == "RemoteDisconnected\n"
    assert (await run(engine, "1")).success
