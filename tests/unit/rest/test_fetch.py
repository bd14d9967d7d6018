"""`fetch_url`: the addresses that it takes, and what it makes of an answer."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import ArgumentsRefused
from fumehood.core.json_types import JsonObject
from fumehood.outgoing.upstreams import UpstreamAnswer
from fumehood.rest.fetch import fetch_request, file_name, page_data, readable_text

pytestmark = [pytest.mark.row("T5", "E7")]

URL = "https://example.org/docs/page.bin?x=1"


def read(body: bytes, kind: str | None = None, *, raw: bool = False, start: int = 0) -> JsonObject:
    headers = {} if kind is None else {"content-type": kind}
    return page_data(UpstreamAnswer(200, headers, body, URL), raw=raw, start=start)


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        (b'{"a": [1]}', "application/json", {"json": {"a": [1]}}),
        (b"[1, 2]", "application/ld+json; charset=utf-8", {"json": [1, 2]}),
        (b"{not json", "application/json", {"text": "{not json", "characters": 9}),
        (b"[" * 60 + b"]" * 60, "application/json", {"text": "[" * 60 + "]" * 60, "characters": 120}),
        ("é".encode(), "text/plain", {"text": "é", "characters": 1}),
        (b"caf\xe9", "text/plain; charset=ISO-8859-1", {"text": "café", "characters": 4}),
        (b"caf\xe9 \x93", "text/html", {"text": "café “", "characters": 6}),
        (b"\x82\xa0", 'text/html; charset="Shift_JIS"', {"text": "あ", "characters": 1}),
        (b"plain", None, {"text": "plain", "characters": 5}),
        (b"", "text/html", {"text": "", "characters": 0}),
        (b"+AGE-", "text/plain; charset=utf-7", {"text": "+AGE-", "characters": 5}),
    ],
)  # fmt: skip
def test_response_becomes_json_or_text_by_its_content_type(
    body: bytes, kind: str | None, expected: JsonObject
) -> None:
    found = read(body, kind)
    assert found == {"url": URL, "status": 200, "content_type": kind, **expected}


def test_long_json_response_is_returned_as_text() -> None:
    body = b"[" + b"1," * 6000 + b"1]"
    assert read(body, "application/json")["text"] == body.decode()
    assert read(b"[" + b"1," * 4000 + b"1]", "application/json")["json"] == [1] * 4001  # twin


@pytest.mark.parametrize(
    ("body", "kind", "shown"),
    [
        (b"\x89PNG\xff", "image/png", "image/png"),
        (b"\xff\xfe", None, "application/octet-stream"),
        (b"text\0", "application/x; a=b", "application/x"),
    ],
)
def test_binary_response_becomes_a_file(body: bytes, kind: str | None, shown: str) -> None:
    (file,) = read(body, kind)["files"]
    assert base64.b64decode(file.pop("content_base64")) == body
    assert file == {"filename": "page.bin", "content_type": shown, "size": len(body)}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/b.png", "b.png"), ("/", "download"), ("", "download"), ("/..", "download"),
        ("/..%2f..%2fetc%2fpasswd", "passwd"), ("/.ssh", "ssh"), ("/a%00b%0a.txt", "a_b_.txt"),
        ("/%5c..%5cx", "x"), ("/" + "a" * 300, "a" * 100),
    ],
)  # fmt: skip
def test_name_of_a_fetched_file_contains_no_path(path: str, name: str) -> None:
    assert file_name(f"https://example.org{path}?q=/x") == name


def test_html_is_converted_to_text_unless_raw_is_requested() -> None:
    page = (
        "<!doctype html><html><head><title>A &amp; B</title><style>p {}</style></head><body>"
        "<!-- hidden --><h1>Head</h1><p>Hi <b>you</b>&nbsp;there<br>next<script>alert('<p>')"
        "</script><ul><li title='a>b'>one<li>two</ul>1 < 2<p class='x>open</body>"
    )
    body = page.encode()
    text = "A & B\nHead\nHi you there\nnext\none\ntwo\n1 < 2open"
    assert read(body, "text/html; charset=utf-8")["text"] == text
    assert read(body, "text/html", raw=True)["text"] == page
    assert read(b'{"a": 1}', "application/json", raw=True)["text"] == '{"a": 1}'


def test_text_is_returned_from_the_requested_offset() -> None:
    found = read(b"0123456789", "text/plain", start=4)
    assert (found["text"], found["characters"]) == ("456789", 10)
    assert read(b"0123456789", "text/plain", start=99)["text"] == ""


@given(st.lists(st.sampled_from(["<", ">", "</", "<!--", "-->", "<script>", "</script>", "'", '"',
                                 "<p ", "a", " ", "&#", "&lt;", "\n", "<b>"])))  # fmt: skip
def test_text_of_a_hostile_page_has_no_tags_and_no_script(parts: list[str]) -> None:
    text = readable_text("".join(parts).replace("&lt;", "&amp;"))
    assert "<script>" not in text
    assert "<b>" not in text


@pytest.mark.parametrize("part", ["<script", "<a '", "&#", "<!--", "</"])
def test_any_page_of_one_megabyte_is_converted(part: str) -> None:
    page = part * ((1 << 20) // len(part))
    assert len(readable_text(page)) <= len(page)
    assert readable_text("&#" + "9" * 100_000) == "&#" + "9" * 100_000


ADDRESSES: dict[str, tuple[Any, str]] = {
    "file": ("file:///etc/passwd", "must be an absolute URL"),
    "gopher": ("gopher://127.0.0.1:6379/_INFO", "must be an absolute URL"),
    "ftp": ("ftp://example.org/", "must be an absolute URL"),
    "data": ("data:text/plain,x", "must be an absolute URL"),
    "javascript": ("javascript:alert(1)", "must be an absolute URL"),
    "relative": ("//example.org/", "must be an absolute URL"),
    "user": ("https://me@example.org/", "user name or password"),
    "user and password": ("https://me:pw@example.org/", "user name or password"),
    "host in the user": ("https://example.org:443@127.0.0.1/", "user name or password"),
    "line ends": ("https://example.org/\r\nhost: evil", "what a URL cannot"),
    "backslash": ("https://example.org\\@127.0.0.1/", "what a URL cannot"),
    "space": ("https://example.org/a b", "what a URL cannot"),
    "secret": ("https://example.org/?k=${secret:key}", "what a URL cannot"),
    "full-width": ("https://１２７.0.0.1/", "what a URL cannot"),
    "encoded host": ("https://127%2e0.0.1/", "no valid host"),
    "port 0": ("https://example.org:0/", "no valid host or port"),
    "zone": ("https://[fe80::1%25eth0]/", "no valid host|not a URL"),
    "too long": ("https://example.org/" + "a" * 2048, "longer than"),
    "fragment alone": ("#a", "what a URL cannot"),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_url_that_is_not_plain_http_is_refused(case: str) -> None:
    url, words = ADDRESSES[case]
    with pytest.raises(ArgumentsRefused) as caught:
        fetch_request({"url": url})
    assert caught.value.fields == ("url",)
    assert any(word in caught.value.message for word in words.split("|"))


def test_fetch_request_carries_no_call_context_and_no_fragment() -> None:
    request = fetch_request({"url": "https://example.org/a?b=%20#part"})
    assert (request.method, request.url) == ("GET", "https://example.org/a?b=%20")
    assert {name for name, _ in request.headers} == {"accept", "user-agent"}
    assert (request.secret_headers, request.body) == ((), None)
    assert "traceparent" not in json.dumps(request.headers)
