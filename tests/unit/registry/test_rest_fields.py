"""Where REST and MCP tools go, and with what headers: every fault, and no credential."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import InvalidParams
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.rest_fields import METHODS, refers_to_secret, rest_faults
from support.definitions import expression_document, rest_document


def _faults(**fields: Any) -> list[str]:
    document = rest_document(**fields)
    return list(rest_faults({k: v for k, v in document.items() if v is not None}))


def test_sound_document_has_no_faults() -> None:
    assert _faults() == []
    assert parse_definition(rest_document()).executor == "http"


@pytest.mark.row("T5")
@pytest.mark.parametrize(
    "endpoint",
    [
        "https://example.org", "http://example.org:8080/a/b?q=%20x&max_tokens=5", "https://[::1]/",
        "https://127.0.0.1:1/", "https://a_b.example.org./~x;y=1", "https://xn--bcher-kva.example/",
        "https://example.org/authors?author=me",
    ],
)  # fmt: skip
def test_absolute_url_is_accepted(endpoint: str) -> None:
    assert _faults(endpoint=endpoint) == []


ENDPOINTS = {
    "none": (None, "says where it goes"),
    "relative": ("/v1/now", "must be an absolute URL"),
    "without a scheme": ("example.org/v1", "must be an absolute URL"),
    "without slashes": ("https:example.org", "must be an absolute URL"),
    "scheme in capitals": ("HTTPS://example.org", "must be an absolute URL"),
    "file": ("file:///etc/passwd", "must be an absolute URL"),
    "unix": ("unix:///run/x.sock", "must be an absolute URL"),
    "gopher": ("gopher://example.org/", "must be an absolute URL"),
    "user": ("https://me@example.org/", "user name or password"),
    "user and password": ("https://me:pw@example.org/", "user name or password"),
    "empty user": ("https://@example.org/", "user name or password"),
    "host and port in the user": ("https://example.org:443@evil.example/", "user name or password"),
    "no host": ("https:///v1", "no valid host"),
    "no host but a port": ("https://:443/v1", "no valid host"),
    "host with an empty label": ("https://a..b/", "no valid host"),
    "host with a dash before": ("https://-a.example/", "no valid host"),
    "label over 63": (f"https://{'a' * 64}.example/", "no valid host"),
    "host in percent": ("https://exa%6dple.org/", "no valid host"),
    "port over 65535": ("https://example.org:65536/", "not a URL"),
    "port of words": ("https://example.org:http/", "not a URL"),
    "port 0": ("https://example.org:0/", "no valid host or port"),
    "bracket left open": ("https://[::1/", "not a URL"),
    "address of letters": ("https://[v1.x]/", "valid host|not a URL"),
    "space": ("https://example.org/a b", "what a URL cannot"),
    "line end": ("https://example.org/\r\nx: y", "what a URL cannot"),
    "line end after": ("https://example.org/\n", "what a URL cannot"),
    "NUL": ("https://example.org/\0", "what a URL cannot"),
    "backslash": ("https://example.org\\@evil.example/", "what a URL cannot"),
    "fragment": ("https://example.org/#a", "what a URL cannot"),
    "braces": ("https://example.org/{city}", "what a URL cannot"),
    "broken escape": ("https://example.org/%zz", "what a URL cannot"),
    "letters beyond ASCII": ("https://bücher.example/", "what a URL cannot"),
    "full-width slash": ("https://example.org／evil", "what a URL cannot"),
    "empty": ("", "what a URL cannot"),
    "too long": ("https://example.org/" + "a" * 2048, "longer than"),
    "reference that is none": ("https://example.org/${SECRET}", "what a URL cannot"),
    "secret as host": ("https://${secret:HOST}/x", "cannot decide which host"),
    "secret as part of a host": ("https://a.${secret:HOST}.example/x", "cannot decide which host"),
    "key in the query": ("https://example.org/?api_key=abc123", "looks like a credential"),
    "token in the query": ("https://example.org/?a=1&access_token=abc", "looks like a credential"),
    "bearer in the query": ("https://example.org/?q=Bearer%20abc", "looks like a credential"),
}


@pytest.mark.row("T5")
@pytest.mark.parametrize("case", ENDPOINTS)
def test_endpoint_that_is_no_plain_url_is_refused(case: str) -> None:
    endpoint, words = ENDPOINTS[case]
    faults = _faults(endpoint=endpoint)
    assert len(faults) == 1, faults
    assert faults[0].startswith("endpoint: ")
    assert any(word in faults[0] for word in words.split("|"))


@pytest.mark.row("T5")
@pytest.mark.parametrize("method", METHODS)
def test_plain_methods_are_accepted(method: str) -> None:
    assert _faults(method=method) == []


@pytest.mark.row("T5")
@pytest.mark.parametrize("method", [None, "", "get", "CONNECT", "TRACE", "GET ", "GET / HTTP/1.1"])
def test_other_methods_are_refused_with_the_list(method: str | None) -> None:
    faults = _faults(method=method)
    assert faults == ["method: a REST tool says which: DELETE, GET, HEAD, PATCH, POST, PUT"]


@pytest.mark.row("T5")
@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Accept": "application/json", "X-Author": "me"}, {"x-empty": ""},
        {"user-agent": "fumehood/1 (a; b)"}, {"x-max-tokens": "100"}, {"Idempotency-Key": "a"},
    ],
)  # fmt: skip
def test_plain_headers_are_accepted(headers: dict[str, str]) -> None:
    assert _faults(headers=headers) == []


HEADERS: dict[str, tuple[dict[str, str], str]] = {
    "line end in a value": ({"x": "a\r\nhost: evil"}, "control characters"),
    "line end after a value": ({"x": "a\n"}, "control characters"),
    "NUL in a value": ({"x": "a\0"}, "control characters"),
    "letters beyond ASCII": ({"x": "ä"}, "beyond ASCII"),
    "space around a value": ({"x": " a"}, "space around it"),
    "a value too long": ({"x": "a" * 4097}, "4096"),
    "space in a name": ({"x y": "a"}, "not a header's name"),
    "colon in a name": ({"x:": "a"}, "not a header's name"),
    "line end in a name": ({"x\n": "a"}, "not a header's name"),
    "no name": ({"": "a"}, "not a header's name"),
    "the same twice": ({"Accept": "a", "accept": "b"}, "given twice"),
    "host": ({"Host": "evil.example"}, "belongs to the connection"),
    "length": ({"content-length": "3"}, "belongs to the connection"),
    "chunks": ({"Transfer-Encoding": "chunked"}, "belongs to the connection"),
    "too many": ({f"x-{i}": "a" for i in range(65)}, "more than 64"),
    "reference of another form": ({"x": "${env:HOME}"}, "no known form"),
    "reference left open": ({"x": "${secret:A"}, "no known form"),
    **{
        f"literal {name}": ({name: "abc"}, "looks like a credential")
        for name in (
            "Authorization", "proxy-authorization", "X-API-Key", "api_key", "apikey", "Cookie",
            "X-Auth-Token", "X-Access-Token", "PRIVATE-TOKEN", "Ocp-Apim-Subscription-Key",
            "x-client-secret", "X-Amz-Signature", "x-session-id", "x-password", "key",
        )
    },
    **{
        f"value {value}": ({"x-plain": value}, "looks like a credential")
        for value in ("Bearer abc", "basic abc", "sk-abcdef", "ghp_abc", "AKIAABC", "eyJhbGciOi")
    },
}  # fmt: skip


@pytest.mark.row("T5")
@pytest.mark.parametrize("case", HEADERS)
def test_header_that_cannot_be_sent_or_kept_is_refused(case: str) -> None:
    headers, words = HEADERS[case]
    faults = _faults(headers=headers)
    assert len(faults) == 1, faults
    assert faults[0].startswith("headers: ")
    assert words in faults[0]


@pytest.mark.row("T5", "E8")
def test_refusal_of_a_credential_names_the_cure_and_not_the_credential() -> None:
    headers = {"authorization": "Bearer hunter2hunter2"}
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition(rest_document(headers=headers, endpoint="https://a.example/?key=hunter2"))
    assert isinstance(caught.value, InvalidParams)
    assert "${secret:NAME}" in caught.value.message
    assert "hunter2" not in caught.value.message
    assert "hunter2" not in str(caught.value.details)


@pytest.mark.row("T5")
@pytest.mark.parametrize(
    "fields",
    [
        {"headers": {"authorization": "Bearer ${secret:KEY}"}},
        {"headers": {"accept": "a", "x-api-key": "${secret:KEY}"}},
        {"endpoint": "https://example.org/?api_key=${secret:KEY}"},
    ],
)
def test_reference_to_a_secret_is_known_and_not_enforced_yet(fields: dict[str, Any]) -> None:
    assert _faults(**fields) == []
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition(rest_document(**fields))
    (field,) = fields
    assert caught.value.faults == [f"{field}: not enforced by this version (secrets)"]


def test_text_without_a_reference_refers_to_nothing() -> None:
    assert not refers_to_secret("secret:KEY")
    assert not refers_to_secret({"a": "${SECRET}"})
    assert not refers_to_secret(None)


@pytest.mark.row("T5")
@pytest.mark.parametrize(
    ("field", "value"),
    [("endpoint", "https://example.org"), ("method", "GET"), ("headers", {}), ("timeout", 5)],
)
@pytest.mark.parametrize("kind", ["NATIVE", "BUILTIN"])
def test_rest_fields_do_not_fit_other_types(kind: str, field: str, value: Any) -> None:
    document = expression_document(type=kind, **{field: value})
    with pytest.raises(InvalidDefinition) as caught:
        parse_definition(document)
    assert caught.value.faults == [f"{field}: does not fit a tool of type {kind}"]


@pytest.mark.row("T5")
def test_mcp_tool_takes_an_endpoint_and_has_no_method() -> None:
    document = {**rest_document(type="MCP")}
    del document["method"]
    assert parse_definition(document).executor == "mcp"
    with pytest.raises(InvalidDefinition, match="method: does not fit a tool of type MCP"):
        parse_definition({**document, "method": "POST"})


@pytest.mark.row("S1", "R1")
@pytest.mark.parametrize("kind", ["REST", "MCP"])
def test_definition_cannot_lift_its_own_wall_or_promise_a_memory_limit(kind: str) -> None:
    faults = _faults(type=kind, method=None if kind == "MCP" else "GET", sandboxed=False)
    assert [fault.split(":")[0] for fault in faults] == ["sandboxed"]
    assert "operator" in faults[0]
    faults = _faults(type=kind, method=None if kind == "MCP" else "GET", memory_limit_mb=64)
    assert [fault.split(":")[0] for fault in faults] == ["memory_limit_mb"]


def test_timeout_of_more_than_a_day_is_refused() -> None:
    assert _faults(timeout=86_400_000) == []
    assert _faults(timeout=86_400_001) == ["timeout: over 86400000 milliseconds"]
