"""REST tools of an engine, against a scripted upstream service."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fumehood.core.errors import UpstreamTimeout
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.executors.outcome import Outcome
from fumehood.outgoing.upstreams import Upstreams
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.definitions import parse_definition
from fumehood.registry.secrets import RestSettings, SecretBindings, SecretSettings
from fumehood.rest.executor import ListCursors, run_request
from support.answers import details_of, error_of
from support.certificates import make_certificate
from upstream import Reply, Upstream, head_of, packed, redirect, running_upstream

pytestmark = pytest.mark.anyio

OUTPUT_BYTES = 1 << 20
LIMITS = Limits(20, 20, None, OUTPUT_BYTES)
SECRET = "s3cret-Value/1"
CURSORS = ListCursors(Cursors(b"k" * 32), "uid:1")


def document(upstream: Upstream, path: str = "/now", **fields: Any) -> JsonObject:
    """A REST tool of the service."""
    return {
        "name": "ask",
        "type": "REST",
        "description": "Ask the service.",
        "method": "GET",
        "endpoint": upstream.url + path,
        "parameters": {"properties": {"city": {"type": "string"}}},
        **fields,
    }


class Asker:
    """Runs REST tools without an engine."""

    def __init__(self, upstream: Upstream, upstreams: Upstreams) -> None:
        self.upstream = upstream
        self.upstreams = upstreams
        self.redactor = Redactor()

    async def ask(
        self, *replies: Reply, arguments: JsonObject | None = None, **fields: Any
    ) -> Outcome:
        if replies:
            self.upstream.script("/now", *replies)
        limits = fields.pop("limits", LIMITS)
        definition = parse_definition(document(self.upstream, **fields))
        traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        return await run_request(
            definition, arguments or {}, limits, self.upstreams, self.redactor, traceparent, CURSORS
        )


@asynccontextmanager
async def asking(upstream: Upstream, **secrets: SecretSettings) -> AsyncIterator[Asker]:
    """An Asker that may reach the service, with these secrets."""
    rest = RestSettings(allowed_hosts=("127.0.0.1", "localhost"))
    bindings = SecretBindings(secrets, rest, {"KEY": SECRET})
    upstreams = Upstreams(rest, bindings)
    yield Asker(upstream, upstreams)
    await upstreams.close()


@pytest.fixture
async def asker(upstream: Upstream) -> AsyncIterator[Asker]:
    key = SecretSettings(env="KEY", tools=("ask",), hosts=("127.0.0.1", "localhost"))
    async with asking(upstream, key=key) as asker:
        yield asker


def ended(outcome: Outcome) -> str:
    """The error code of an outcome that failed."""
    assert outcome.error is not None, outcome.data
    return outcome.error.code


# -- what is asked, and what comes back ----------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "data"),
    [
        (Reply(body=b'{"a": 1}'), {"a": 1}),
        (Reply(body=b"[1, 2]", content_type="application/problem+json"), {"value": [1, 2]}),
        (Reply(body="é".encode(), content_type="text/plain; charset=utf-8"),
         {"text": "é", "content_type": "text/plain; charset=utf-8"}),
        (Reply(body=b"x", content_type=None), {"text": "x", "content_type": None}),
        (Reply(body=b"\xff\x00", content_type="image/png"),
         {"content_base64": "/wA=", "content_type": "image/png"}),
        (Reply(204, b""), {"status": 204}),
        (Reply(200, b""), {"status": 200}),
        (packed(b'{"a": 2}'), {"a": 2}),
    ],
)  # fmt: skip
async def test_answer_is_decoded_by_its_content_type(asker: Asker, reply: Reply, data: Any) -> None:
    outcome = await asker.ask(reply)
    assert (outcome.error, outcome.data) == (None, data)
    assert outcome.network_ms > 0
    assert outcome.isolation == "none"


async def test_head_returns_the_status(asker: Asker) -> None:
    assert (await asker.ask(method="HEAD")).data == {"status": 200}


async def test_error_body_is_in_the_details_and_bounded(asker: Asker) -> None:
    small = await asker.ask(Reply(404, b'{"reason": "none"}'))
    assert error_of(small).details == {
        "status": 404, "content_type": "application/json", "body": {"reason": "none"},
    }  # fmt: skip
    large = await asker.ask(Reply(400, b"x" * 3_000_000, content_type="text/plain"))
    assert details_of(large)["body"] == "x" * 4096


@pytest.mark.row("E8")
@pytest.mark.parametrize("form", ["{}", '["{}"]'])
async def test_credential_in_an_error_body_is_redacted_before_truncation(
    asker: Asker, form: str
) -> None:
    key = "ghp_" + "a1B2" * 9
    body = form.format("words " * 677 + key + " words" * 100).encode()
    kind = "application/json" if form != "{}" else "text/plain"
    outcome = await asker.ask(Reply(status=400, body=body, content_type=kind))
    assert "ghp_" in body.decode()[:4096]
    assert key not in body.decode()[:4096]
    assert "ghp_" not in json.dumps(details_of(outcome))
    assert outcome.redacted == 1


async def test_sequential_requests_reuse_one_connection(asker: Asker) -> None:
    for _ in range(3):
        assert (await asker.ask()).error is None
    assert asker.upstream.connections == 1


@pytest.fixture
def certificate(home: Path) -> Path:
    return make_certificate(home / "certificate.pem")


@pytest.fixture
def secure(certificate: Path) -> Iterator[Upstream]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with running_upstream(context) as running:
        yield running


PLAIN = {"content_type": "text/plain"}
SECOND = b"HTTP/1.1 222 OK\r\ncontent-length: 6\r\n\r\nsecond"
FULL_READ = b"x" * (65536 - len(head_of(Reply(body=b"x" * 65000, **PLAIN))))
"""A body that, with its head, fills exactly one read of the HTTP library."""


@pytest.mark.parametrize("is_secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize(
    ("method", "body"),
    [("GET", b"first"), ("POST", b"first"), ("HEAD", b""), ("GET", FULL_READ)],
    ids=["GET", "POST", "HEAD", "full"],
)
async def test_surplus_response_is_never_used_for_a_later_call(
    asker: Asker, secure: Upstream, certificate: Path, is_secure: bool, method: str, body: bytes
) -> None:
    if is_secure:
        rest = RestSettings(allowed_hosts=("localhost",))
        tls = ssl.create_default_context(cafile=str(certificate))
        asker = Asker(secure, Upstreams(rest, tls=tls))
    endpoint = asker.upstream.url.replace("127.0.0.1", "localhost") + "/now"
    reply = Reply(body=body, then=SECOND, **PLAIN)
    answers = []
    for number in range(1, 4):
        answers.append((await asker.ask(reply, endpoint=endpoint, method=method)).data)
        # Later, it could not be told from the next answer.
        asker.upstream.wait_for(lambda number=number: asker.upstream.answered == number)
    first, *others = answers
    assert first == (
        {"text": body.decode(), "content_type": "text/plain"} if body else {"status": 200}
    )
    assert others == [first, first]
    assert asker.upstream.connections == 3
    sent = [request.body for request in asker.upstream.requests]
    assert sent == [b"{}" if method == "POST" else b""] * 3  # the body, too, is sent again
    await asker.upstreams.close()


async def test_response_pushed_on_an_idle_connection_is_never_used(asker: Asker) -> None:
    for number in range(3):
        assert (await asker.ask(Reply(body=b"1"))).data == {"value": 1}
        assert asker.upstream.connections == number + 1
        asker.upstream.push(SECOND)


# -- limits --------------------------------------------------------------------------------


async def test_shorter_call_timeout_overrides_the_definitions(asker: Asker) -> None:
    limits = Limits(0.2, 0.2, None, OUTPUT_BYTES)
    outcome = await asker.ask(Reply(held=True), timeout=60_000, limits=limits)
    assert isinstance(outcome.error, UpstreamTimeout)
    assert details_of(outcome)["limit"] == {"timeout_seconds": 0.2}


async def test_cancelled_request_closes_its_connection(asker: Asker) -> None:
    task = asyncio.ensure_future(asker.ask(Reply(held=True)))
    await asyncio.to_thread(asker.upstream.wait_for, lambda: asker.upstream.count("/now") == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(asker.upstream.wait_for, lambda: asker.upstream.closed == 1)
    assert (await asker.ask(Reply())).error is None


# -- redirects -----------------------------------------------------------------------------


async def test_redirect_is_followed_for_get_but_not_for_post(asker: Asker) -> None:
    asker.upstream.script("/then", Reply(body=b'{"there": true}'))
    assert (await asker.ask(redirect("/then"))).data == {"there": True}
    asker.upstream.script("/now", redirect("/then", 307))
    posted = await asker.ask(method="POST")
    assert ended(posted) == "EXECUTION_ERROR"
    assert asker.upstream.count("/then") == 1


@pytest.mark.parametrize(
    "location",
    [
        "ftp://127.0.0.1/",
        "http://u:p@127.0.0.1/",
        "http://a b/",
        "http://:0/",
        "http://[",
        "http://[::1",
        "http://a:b/",
        "/\xe9",
        "javascript:1",
    ],
)
async def test_redirect_to_an_invalid_url_is_refused(asker: Asker, location: str) -> None:
    assert ended(await asker.ask(redirect(location))) == "EXECUTION_ERROR"
    assert len(asker.upstream.requests) == 1


# -- secrets -------------------------------------------------------------------------------

WITH_SECRET = {
    "headers": {"authorization": "Bearer ${secret:key}", "x-plain": "plain"},
    "path": "/now?api_key=${secret:key}",
}


async def test_secret_once_sent_is_redacted_in_all_later_answers(asker: Asker) -> None:
    assert asker.redactor.text(SECRET) == (SECRET, 0)
    await asker.ask(**WITH_SECRET)
    assert asker.redactor.text(SECRET) == ("[redacted]", 1)


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(body=f"you sent {SECRET}".encode(), content_type="text/plain"),
        Reply(body=f'{{"{SECRET}": ["{SECRET}"]}}'.encode()),
        Reply(body=f'"{escaped(SECRET)}"'.encode()),
        Reply(400, f'{{"sent": "{escaped(SECRET)}"}}'.encode()),
        Reply(body=b"\xff" + SECRET.encode(), content_type="application/octet-stream"),
        Reply(content_type=f"text/{SECRET}", body=b"x"),
        Reply(500, SECRET.encode() * 10_000, content_type="text/plain"),
        Reply(401, SECRET.encode(), content_type=SECRET),
        Reply(body=f'{{"{SECRET}": 1, "{SECRET}": 1}}'.encode()),
        redirect(f"http://localhost:1/?{SECRET}"),
    ],
)
async def test_echoed_secret_is_redacted_in_every_encoding(asker: Asker, reply: Reply) -> None:
    outcome = await asker.ask(reply, **WITH_SECRET)
    error = outcome.error
    told = json.dumps([outcome.data, error and [error.message, error.details]])
    for form in (SECRET, "s3cret", escaped(SECRET)[:24], "czNjcmV0"):
        assert form not in told.replace("\\\\", "\\"), told
    assert outcome.redacted > 0 or reply.status == 302


async def test_secret_file_is_read_per_call_and_must_be_private(
    upstream: Upstream, home: Path
) -> None:
    file = home / "key"
    key = SecretSettings(file=file, tools=("ask",), hosts=("127.0.0.1",))
    async with asking(upstream, key=key) as asker:
        assert ended(await asker.ask(**WITH_SECRET)) == "EXECUTION_ERROR"
        file.write_text("value-one\n")
        file.chmod(0o640)
        assert ended(await asker.ask(**WITH_SECRET)) == "EXECUTION_ERROR"
        file.chmod(0o600)
        assert (await asker.ask(**WITH_SECRET)).error is None
        file.write_text("value-two\n")
        assert (await asker.ask(**WITH_SECRET)).error is None
    assert [r.headers["authorization"] for r in upstream.requests] == [
        "Bearer value-one", "Bearer value-two",
    ]  # fmt: skip
