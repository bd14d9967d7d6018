"""The request of a REST tool, and what is taken out of its answer."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import anyio
import anyio.to_thread
import httpcore2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fumehood.core.errors import ArgumentsRefused, NetworkError, PermissionDenied
from fumehood.core.json_types import JsonObject
from fumehood.outgoing.addresses import CheckedBackend, is_public
from fumehood.outgoing.secret_values import SecretValues
from fumehood.outgoing.upstreams import UpstreamRequest, Upstreams, _unpacked, read_retry_after
from fumehood.redaction.redactor import Redactor
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.secrets import SecretBindings
from fumehood.rest.executor import fill_secrets, make_request
from support.definitions import rest_document

pytestmark = pytest.mark.row("T5")

ENDPOINT = "https://api.example/v1/cities/{city}/days-{day}?key=${secret:key}&v=1"
PARAMETERS = {
    "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
    "required": ["city", "day"],
    "additionalProperties": True,
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


DOCUMENT = rest_document(endpoint=ENDPOINT, parameters=PARAMETERS)
DEFINED = parse_definition(DOCUMENT)


def ask(arguments: JsonObject, **fields: Any) -> UpstreamRequest:
    definition = parse_definition({**DOCUMENT, **fields}) if fields else DEFINED
    return make_request(definition, arguments, "00-a-b-01")


HOSTILE = st.text() | st.sampled_from(
    ["..", ".", "../..", "..;", "%2e%2e", "%252e%252e/", "a/../b", "a\\..\\b", "//evil.example",
     "@evil.example", "?key=x", "#", "x\r\nhost: y", "\0", "..%2f", ".%2e;a=1/x", "{day}", "${secret:key}"]
)  # fmt: skip


def test_arguments_cannot_change_host_path_depth_or_fixed_query() -> None:
    endings = {"sent": 0, "refused": 0}

    @settings(max_examples=100)  # few of them can be sent
    @given(HOSTILE, HOSTILE, st.dictionaries(st.text(), JSON_VALUES, max_size=4))
    def check(city: str, day: str, others: JsonObject) -> None:
        try:
            url = ask({**others, "city": city, "day": day}).url
        except ArgumentsRefused:
            endings["refused"] += 1
            return
        endings["sent"] += 1
        parts = urlsplit(url.replace("${secret:key}", "SECRET"))
        assert (parts.scheme, parts.netloc, parts.fragment) == ("https", "api.example", "")
        empty, version, cities, sent_city, sent_day = parts.path.split("/")
        assert (empty, version, cities) == ("", "v1", "cities")
        assert unquote(sent_city) == city
        assert unquote(sent_day) == f"days-{day}"
        assert ".." not in unquote(unquote(sent_city)).split("/")
        query = parse_qsl(parts.query, keep_blank_values=True)
        assert query[:2] == [("key", "SECRET"), ("v", "1")]
        assert not {"key", "v", "city", "day"} & {name for name, _ in query[2:]}

    check()
    assert min(endings.values()) > 0


@pytest.mark.parametrize(
    "city",
    ["", ".", "..", "../x", "x/..", "..\\x", "%2e%2e", "%252e%252e", "..;a", "a\0", "a\n", None, [],
     {}, ["a"]],
)  # fmt: skip
def test_path_argument_with_a_path_separator_is_refused(city: Any) -> None:
    with pytest.raises(ArgumentsRefused) as caught:
        ask({"city": city, "day": "1"})
    assert caught.value.fields == ("city",)


@pytest.mark.parametrize("arguments", [{"city": "x"}, {"city": "c", "other": "x"}])
def test_over_long_url_is_not_sent(arguments: JsonObject) -> None:
    def of_length(count: int) -> JsonObject:
        return {"day": "1", **{name: value * count for name, value in arguments.items()}}

    with pytest.raises(ArgumentsRefused, match="too long"):
        ask(of_length(17_000))
    assert len(ask(of_length(8000)).url) > 8000
    assert ask(of_length(17_000), endpoint="https://api.example/v1", method="POST").body


QUERY = "https://api.example/v1?q={city}&n={day}&v=1"


@pytest.mark.parametrize(
    ("arguments", "query"),
    [
        ({"city": "a&v=2#é"}, "q=a%26v%3D2%23%C3%A9&v=1"),
        ({"city": ["a", "b"], "day": 0}, "q=a&q=b&n=0&v=1"),
        ({"city": None, "day": "", "more": "x"}, "n=&v=1&more=x"),
        ({"city": "{day}", "day": "${secret:key}"}, "q=%7Bday%7D&n=%24%7Bsecret%3Akey%7D&v=1"),
    ],
)
def test_argument_fills_its_placeholder_in_the_query(arguments: JsonObject, query: str) -> None:
    assert ask(arguments, endpoint=QUERY).url == f"https://api.example/v1?{query}"
    with pytest.raises(ArgumentsRefused):
        ask({**arguments, "v": "2"}, endpoint=QUERY)
    posted = ask(arguments, endpoint=QUERY, method="POST")
    assert posted.url == f"https://api.example/v1?{query.removesuffix('&more=x')}"
    assert posted.body == (b'{"more":"x"}' if "more" in arguments else b"{}")


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], [{"a": 1}]])
def test_query_argument_cannot_be_an_object_or_nested_list(value: Any) -> None:
    with pytest.raises(ArgumentsRefused):
        ask({"city": "a", "day": "1", "filter": value})
    assert ask({"city": "a", "day": "1", "filter": value}, method="POST").body is not None  # twin


PLACES: JsonObject = {
    "endpoint": "https://api.example/v1?mode={mode}&tag={tag}&v=1&key=${secret:key}",
    "headers": {"X-Trace": "{trace}", "X-Key": "${secret:key}", "X-Plain": "a {trace}"},
    "method": "POST",
    "parameters": {"properties": {name: {} for name in ("mode", "tag", "trace", "note")}},
}


def test_mapped_arguments_go_to_query_and_headers_and_not_to_the_body() -> None:
    sent = ask({"mode": "a&b", "tag": ["x", "y"], "trace": 7, "note": "n"}, **PLACES)
    assert sent.url == ("https://api.example/v1?mode=a%26b&tag=x&tag=y&v=1&key=${secret:key}")
    assert sent.body == b'{"note":"n"}'
    assert dict(sent.headers)["x-trace"] == "7"
    assert dict(sent.headers)["x-plain"] == "a {trace}"
    empty = ask({"tag": None, "trace": None}, **PLACES)
    assert empty.url == "https://api.example/v1?v=1&key=${secret:key}"
    assert "x-trace" not in dict(empty.headers)
    assert ask({"mode": "m", "note": "n"}, **{**PLACES, "method": "GET"}).url == (
        "https://api.example/v1?mode=m&v=1&key=${secret:key}&note=n"
    )


@example("a&b=c", "a: b")
@given(HOSTILE, HOSTILE)
def test_argument_cannot_inject_a_header_or_query_parameter(mode: str, trace: str) -> None:
    try:
        sent = ask({"mode": mode, "trace": trace}, **PLACES)
    except ArgumentsRefused:
        return
    assert trace.isascii()
    assert "\r" not in trace
    assert "\n" not in trace
    assert [name for name, _ in sent.headers] == [
        "x-trace", "x-plain", "accept", "user-agent", "traceparent", "content-type",
    ]  # fmt: skip
    assert dict(sent.headers)["x-trace"] == trace
    assert sent.secret_headers == (("x-key", "${secret:key}"),)
    query = parse_qsl(urlsplit(sent.url).query, keep_blank_values=True)
    assert query == [("mode", mode), ("v", "1"), ("key", "${secret:key}")]


@pytest.mark.parametrize("trace", ["a\r\nhost: evil", "a\nb", " a", "ü", "\0", "x" * 4097, {}, []])
def test_argument_invalid_in_a_header_is_refused(trace: Any) -> None:
    with pytest.raises(ArgumentsRefused) as caught:
        ask({"trace": trace}, **PLACES)
    assert caught.value.fields == ("trace",)


def test_secret_reference_in_a_header_argument_stays_literal() -> None:
    """Otherwise a caller would read a secret where a service echoes that header."""
    sent = fill_secrets(ask({"trace": "${secret:key}"}, **PLACES), {"key": "value-of-key"})
    assert dict(sent.headers)["x-trace"] == "${secret:key}"
    assert dict(sent.secret_headers) == {"x-key": "value-of-key"}


def test_header_placeholder_without_parameter_or_in_a_credential_header_is_refused() -> None:
    for headers, words in (
        ({"X-Trace": "{other}"}, "needs a parameter of that name"),
        ({"Authorization": "{trace}"}, "looks like a credential"),
        ({"X-Api-Token": "{trace}"}, "looks like a credential"),
        ({"Host": "{trace}"}, "belongs to the connection"),
        ({"Content-Type": "{trace}"}, "must be a type of JSON"),
    ):
        with pytest.raises(InvalidDefinition, match=words):
            ask({}, **{**PLACES, "headers": headers})


def test_definition_headers_override_the_defaults() -> None:
    sent = ask({"city": "a", "day": "1"}, headers={"Accept": "text/csv", "X-Key": "${secret:key}"})
    assert dict(sent.headers) == {
        "accept": "text/csv", "user-agent": "fumehood", "traceparent": "00-a-b-01",
    }  # fmt: skip
    assert sent.secret_headers == (("x-key", "${secret:key}"),)


# -- addresses -----------------------------------------------------------------------------

NOT_PUBLIC = [
    "0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "127.8.8.8", "169.254.169.254", "172.16.0.1",
    "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "100.100.100.200", "168.63.129.16", "::", "::1", "::ffff:127.0.0.1",
    "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1",
    "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::1", "3fff::1", "5f00::1", "fc00::1",
    "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001::200e"]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_non_public_address_is_recognized(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_is_recognized(address: str) -> None:
    assert is_public(ip_address(address))


class Names(CheckedBackend):
    """Resolves a name to other addresses each time."""

    def __init__(self, *answers: list[str], allowed: tuple[str, ...] = ()) -> None:
        super().__init__(allowed)
        self.answers = list(answers)

    async def resolve(self, host: str, port: int) -> list[Any]:
        return [ip_address(address) for address in self.answers.pop(0)]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that connections really go to."""
    hosts: list[str] = []

    async def connect_tcp(self: Any, host: str, *others: Any, **more: Any) -> Any:
        hosts.append(host)
        if host == "1.0.0.1":
            raise httpcore2.ConnectError
        return object()

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    return hosts


@pytest.mark.anyio
@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254", "fe80::1"])
async def test_one_non_public_address_refuses_the_host(connected: list[str], address: str) -> None:
    with pytest.raises(PermissionDenied) as caught:
        await Names(["1.1.1.1", address]).connect_tcp("mixed.example", 443)
    assert address not in caught.value.message
    assert connected == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("allowed", "host", "port", "passes"),
    [
        ("api.internal", "api.internal", 80, True),
        ("api.internal:8080", "api.internal", 8080, True),
        ("api.internal:8080", "api.internal", 8081, False),
        ("api.internal", "other.internal", 80, False),
        ("internal", "api.internal", 80, False),
        ("[::1]:80", "::1", 80, True),
    ],
)
async def test_allowed_host_matches_exactly(
    connected: list[str], allowed: str, host: str, port: int, passes: bool
) -> None:
    names = Names(["10.0.0.1"], allowed=(allowed,))
    if passes:
        await names.connect_tcp(host, port)
    else:
        with pytest.raises(PermissionDenied):
            await names.connect_tcp(host, port)
    assert connected == (["10.0.0.1"] if passes else [])


@pytest.mark.anyio
async def test_next_address_is_tried_if_one_does_not_answer(connected: list[str]) -> None:
    await Names(["1.0.0.1", "1.1.1.1"]).connect_tcp("two.example", 443)
    with pytest.raises(NetworkError):
        await Names(["1.0.0.1"]).connect_tcp("one.example", 443)
    assert connected == ["1.0.0.1", "1.1.1.1", "1.0.0.1"]


# -- answers -------------------------------------------------------------------------------

VALUE = 'a/b"c d+e'


@given(JSON_VALUES)
def test_redaction_leaves_other_values_unchanged(value: Any) -> None:
    assert SecretValues().value(value) == value
    assert SecretValues([VALUE * 3]).value(value) == value


@given(st.lists(st.sampled_from([VALUE, "x", VALUE[:5], "a%2Fb%22c%20d%2Be", 'a/b\\"c d+e'])))
def test_redacted_text_contains_no_encoding_of_the_secret(parts: list[str]) -> None:
    secret_values = SecretValues([VALUE])
    assert not secret_values.finds(secret_values.text("|".join(parts)))
    assert not secret_values.finds(secret_values.data("|".join(parts).encode()).decode())


def test_secret_is_redacted_in_keys_and_numbers() -> None:
    secret_values = SecretValues(["12345678"])
    assert secret_values.value({"12345678": [12345678, 1, True, 0.12345678]}) == {
        "[redacted]": ["[redacted]", 1, True, "[redacted]"]
    }


@pytest.mark.parametrize(
    ("value", "echo"),
    [
        ("s3cret-Value/1", r"s3cret-Value\/1"),
        ("s3cret-Value/1", "s3cret-Value%2f1"),
        ("two words & more", "two+words+%26+more"),
        ("two words & more", "two words &amp; more"),
        ("s3cret>>>Value???", "czNjcmV0Pj4-VmFsdWU_Pz8="),
        ("s3cret-Value/1", "czNjcmV0LVZhbHVlLzE"),
    ],
)
def test_secret_is_redacted_in_common_encodings(value: str, echo: str) -> None:
    assert SecretValues([value]).text(f"a {echo} b") == "a [redacted] b"


def test_redacted_keys_keep_their_values() -> None:
    found = SecretValues([VALUE]).value({VALUE: 1, f"{VALUE}{VALUE}": 2, "[redacted]": 3})
    assert sorted(found.values()) == [1, 2, 3]


NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "wait_ms"),
    [
        ("0", 0), ("120", 120_000), ("999999999999999999", 86_400_000), ("", None), ("-1", None),
        ("1.5", None), ("soon", None), ("²", None), ("Thu, 01 Jan 2026 00:00:30 GMT", 30_000),
        ("Thu, 01 Jan 2020 00:00:30 GMT", 0), ("Thu, 01 Jan 2099 00:00:30 GMT", 86_400_000),
        ("Thu, 99 Jan 2026 00:00:30 GMT", None), ("Thu, 01 Jan 2026 00:00:30", 30_000),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(value: str, wait_ms: int | None) -> None:
    assert read_retry_after(value, NOW) == wait_ms
    assert read_retry_after(value, NOW + timedelta(days=36_500)) in (wait_ms, 0)


@pytest.mark.anyio
async def test_data_after_a_compressed_body_is_not_read() -> None:
    read: list[bytes] = []

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (gzip.compress(b"whole"), *[b"more"] * 100):
            read.append(chunk)
            yield chunk

    with pytest.raises(zlib.error):
        assert [piece async for piece in _unpacked(chunks(), "gzip", 1 << 20)]
    assert len(read) == 2


@pytest.mark.anyio
async def test_hanging_secret_lookups_do_not_exhaust_the_thread_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, waiting = threading.Event(), threading.Semaphore(0)

    def hang(*_: Any) -> dict[str, str]:  # as a keyring that asks its user
        waiting.release()
        over.wait(20)
        return {"key": "value-of-key"}

    monkeypatch.setattr(SecretBindings, "values", hang)
    upstreams = Upstreams()
    try:
        async with anyio.create_task_group() as calls:
            for _ in range(100):
                calls.start_soon(upstreams.read_secrets, DEFINED, Redactor())
            assert await asyncio.to_thread(waiting.acquire, timeout=600)
            assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            over.set()
    finally:
        over.set()
