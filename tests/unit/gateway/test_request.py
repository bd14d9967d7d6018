"""Requests of programs: what is read, and what is refused because it could be read in two ways."""

from __future__ import annotations

import pytest

from fumehood.core.hosts import network_matches, network_pattern
from fumehood.gateway.request import Place, Refusal, passed_on, read_request

INSIDE = Place("https", "api.example.org", 443)
HOST = (b"host", b"api.example.org")
LONG = b".".join([b"a" * 60] * 5)


@pytest.mark.parametrize(
    ("target", "host", "url"),
    [
        (b"http://api.example.org/a?b=c", b"api.example.org", "http://api.example.org/a?b=c"),
        (b"http://API.Example.org.:8080/", b"api.example.org:8080", "http://api.example.org:8080/"),
        (b"HTTP://api.example.org", b"api.example.org:80", "http://api.example.org/"),
        (b"http://api.example.org?b", b"API.EXAMPLE.ORG", "http://api.example.org/?b"),
        (b"http://[::1]:81/x", b"[::1]:81", "http://[::1]:81/x"),
        (
            b"http://xn--bcher-kva.example/",
            b"xn--bcher-kva.example",
            "http://xn--bcher-kva.example/",
        ),
    ],
)
def test_equal_absolute_targets_are_read_as_one_address(
    target: bytes, host: bytes, url: str
) -> None:
    assert read_request(b"GET", target, [(b"Host", host)], None).url == url


@pytest.mark.parametrize(
    ("method", "target", "headers", "inside", "status"),
    [
        (b"GET", b"/a", [HOST], None, 400),  # a relative target, to a proxy
        (b"GET", b"https://api.example.org/", [HOST], None, 400),  # TLS needs CONNECT
        (b"GET", b"ftp://api.example.org/", [HOST], None, 400),
        (b"GET", b"http://user:key@api.example.org/", [HOST], None, 400),
        (b"GET", b"http://%b.org/" % LONG, [(b"host", b"%b.org" % LONG)], None, 400),
        (b"GET", b"http://api.example.org\\@other.test/", [HOST], None, 400),
        (b"GET", b"http://127.1/", [(b"host", b"127.1")], None, 400),  # some clients: 127.0.0.1
        (b"GET", b"http://0x7f.1/", [(b"host", b"0x7f.1")], None, 400),
        (b"GET", b"http://api.example.org:99999/", [HOST], None, 400),
        (b"GET", b"http://api.example.org:0/", [HOST], None, 400),
        (b"GET", b"http://other.test/", [HOST], None, 400),  # the Host header names another
        (b"GET", b"/", [(b"host", b"other.test")], INSIDE, 400),
        (b"GET", b"/", [(b"host", b"api.example.org:8443")], INSIDE, 400),
        (b"GET", b"http://other.test/", [HOST], INSIDE, 400),
        (b"GET", b"/a\x7f\xff", [HOST], INSIDE, 400),
        (b"POST", b"/orders/../admin", [HOST], INSIDE, 400),
        (b"POST", b"/orders/%2e%2E/admin", [HOST], INSIDE, 400),
        (b"POST", b"/orders/..%2fadmin", [HOST], INSIDE, 400),
        (b"POST", b"/orders/..;x/admin", [HOST], INSIDE, 400),
        (b"POST", b"/orders\\..\\admin", [HOST], INSIDE, 400),
        (b"GET", b"http://x#:z/", [HOST], None, 400),
        (b"GET", b"/", [(b"host", b"x?:z")], INSIDE, 400),
        (b"POST", b"/", [HOST, (b"content-length", b"1"), (b"transfer-encoding", b"chunked")],
         INSIDE, 400),
        (b"TRACE", b"/", [HOST], INSIDE, 405),
        (b"PROPFIND", b"/", [HOST], INSIDE, 405),
        (b"GET", b"/", [HOST, (b"upgrade", b"h2c")], INSIDE, 501),
        (b"POST", b"/", [HOST, (b"upgrade", b"websocket")], INSIDE, 501),
    ],
)  # fmt: skip
def test_attack_request_that_could_be_read_in_two_ways_is_refused(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], inside: Place | None,
    status: int,
) -> None:  # fmt: skip
    with pytest.raises(Refusal) as refused:
        read_request(method, target, headers, inside)
    assert refused.value.status == status


def test_headers_of_the_connection_are_not_passed_on() -> None:
    sent = [
        HOST, (b"Connection", b"close, X-Mine"), (b"X-Mine", b"1"), (b"TE", b"trailers"),
        (b"Proxy-Authorization", b"Basic x"), (b"Accept", b"*/*"), (b"Content-Length", b"3"),
        (b"Transfer_Encoding", b"chunked"), (b"Content_Length", b"9"), (b"Proxy_Connection", b"x"),
    ]  # fmt: skip
    request = read_request(b"POST", b"/", sent, INSIDE)
    assert request.headers == ((b"accept", b"*/*"),)
    assert request.length == 3
    answered = [
        (b"Keep-Alive", b"5"),
        (b"Alt-Svc", b"h3"),
        (b"Connection", b"x"),
        (b"X", b"1"),
        (b"Y", b"2"),
    ]
    assert passed_on(answered) == [(b"y", b"2")]


@pytest.mark.parametrize(
    ("pattern", "host", "port", "is_allowed"),
    [
        ("api.example.org", "api.example.org", 443, True),
        ("API.example.org", "api.example.org", 8080, True),
        ("api.example.org:443", "api.example.org", 443, True),
        ("api.example.org:443", "api.example.org", 80, False),
        ("*.example.org", "api.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "api.example.org.evil.test", 443, False),
        ("example.org", "notexample.org", 443, False),
        ("[::1]", "[::1]", 443, True),
        ("[::1]:443", "[::1]", 80, False),
    ],
)
def test_pattern_allows_only_what_it_says(
    pattern: str, host: str, port: int, is_allowed: bool
) -> None:
    assert network_matches(host, port, [network_pattern(pattern)]) is is_allowed


@pytest.mark.parametrize(
    "pattern",
    ["*", "", "http://example.org", "ex*mple.org", "*.127.0.0.1", "a.org:0", "a.org:99999"],
)
def test_pattern_that_says_too_much_or_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        network_pattern(pattern)


@pytest.mark.parametrize(
    ("method", "headers", "is_read"),
    [
        (b"GET", [], True),
        (b"HEAD", [], True),
        (b"OPTIONS", [(b"content-length", b"0")], True),
        (b"GET", [(b"content-length", b"1")], False),
        (b"GET", [(b"transfer-encoding", b"chunked")], False),
        (b"GET", [(b"upgrade", b"websocket"), (b"connection", b"upgrade")], False),
        (b"GET", [(b"X-HTTP-Method-Override", b"DELETE")], False),
        (b"GET", [(b"X-Original-URL", b"/admin")], False),
        (b"GET", [(b"X_HTTP_Method_Override", b"DELETE")], False),
        (b"GET", [(b"x-HTTP_method.override", b"DELETE")], False),
        (b"GET", [(b"X_Rewrite_URL", b"/admin")], False),
        (b"GET", [(b"X_Note", b"DELETE")], True),
        (b"POST", [], False),
    ],
)
def test_attack_read_that_a_server_may_take_for_a_write_is_no_read(
    method: bytes, headers: list[tuple[bytes, bytes]], is_read: bool
) -> None:
    assert read_request(method, b"/", [HOST, *headers], INSIDE).is_read is is_read


def test_path_that_names_a_package_or_a_project_is_no_attack() -> None:
    for target in (b"/@scope%2fname", b"/projects/a%2Fb/..x", b"/a//b", b"/v1.0/.hidden"):
        assert read_request(b"GET", target, [HOST], INSIDE).target == target.decode()
