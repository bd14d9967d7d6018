"""The fields of REST and MCP tools: where they go and with what headers, checked in full.

Host side, asked by `definitions`. Invariant: no credential stands in a definition. Nothing
here is ever resolved, opened or sent; what a fault quotes is a name, never a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fumehood.core.json_types import JsonObject

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
FIELDS = ("endpoint", "headers", "method", "timeout")
FIELDS_OF: Mapping[str, frozenset[str]] = {
    "REST": frozenset(FIELDS),
    "MCP": frozenset({"endpoint", "headers", "timeout"}),  # MCP itself says which method
}
MAX_URL = 2048
MAX_HEADERS = 64
MAX_HEADER_VALUE = 4096
MAX_TIMEOUT_MS = 86_400_000
"""A day, as for `timeout_seconds`."""

# *Source*: RFC 3986, section 2: the characters that a URL may hold.
_URL_TEXT = re.compile(r"[A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=%]+")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
    r"(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?"
)
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}")
# *Source*: RFC 9110, section 5.6.2 (token) and 5.5 (field values; here without obs-text).
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_HEADER_VALUE = re.compile(r"([!-~]([ \t!-~]*[!-~])?)?")
_OURS = frozenset(
    {
        "connection", "content-length", "expect", "host", "keep-alive", "proxy-connection", "te",
        "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that belong to the connection: whoever sets them can split or redirect requests."""

_REFERENCE = re.compile(r"\$\{secret:[A-Za-z_][A-Za-z0-9_-]{0,63}\}")
_CREDENTIAL_NAME = re.compile(
    r"auth(?!or(?!i[sz]))|token(?!s)|secret|passw|credential|cookie|signature|session"
    r"|(api|access|private|subscription|app|account|functions)[-_]?key|\Akey\Z",
    re.IGNORECASE,
)
_CREDENTIAL_VALUE = re.compile(
    r"\s*(bearer|basic|digest|negotiate|token|apikey)\s"
    r"|(sk|pk|rk)[-_][A-Za-z0-9]|gh[opsu]_|github_pat_|xox[abprs]-|AKIA[0-9A-Z]|eyJ[A-Za-z0-9]",
    re.IGNORECASE,
)
_USE_A_REFERENCE = "write ${secret:NAME} instead of a literal"


def refers_to_secret(value: Any) -> bool:
    """Whether an endpoint or one of the headers asks for a secret."""
    texts = value.values() if isinstance(value, dict) else [value]
    return any(isinstance(text, str) and _REFERENCE.search(text) for text in texts)


def rest_faults(document: JsonObject) -> Iterator[str]:
    """Every fault of the fields that only REST and MCP tools have."""
    kind = document.get("type", "NATIVE")
    if not isinstance(kind, str):
        return  # the model names this fault
    fitting = FIELDS_OF.get(kind, frozenset[str]())
    for field in FIELDS:
        if document.get(field) is not None and field not in fitting:
            yield f"{field}: does not fit a tool of type {kind!s}"
    if not fitting:
        return
    yield from _wall_faults(document, kind)
    if kind == "REST":
        yield from _method_faults(document.get("method"))
        if document.get("endpoint") is None:
            yield "endpoint: a REST tool says where it goes: an https or http URL"
    timeout = document.get("timeout")
    if isinstance(timeout, int) and timeout > MAX_TIMEOUT_MS:
        yield f"timeout: over {MAX_TIMEOUT_MS} milliseconds"
    if isinstance(document.get("endpoint"), str):
        yield from _endpoint_faults(document["endpoint"])
    if isinstance(document.get("headers"), dict):
        yield from _headers_faults(document["headers"])


def _wall_faults(document: JsonObject, kind: str) -> Iterator[str]:
    if document.get("sandboxed", True) is False:
        # Without its wall a REST tool could ask any address of the host's network, and an
        # MCP server would be a program on the host: only the operator may say so, by name.
        yield (
            f"sandboxed: a definition of type {kind!s} cannot say false; only the operator's "
            "configuration may, and this version has no such setting"
        )
    if document.get("memory_limit_mb") is not None:
        yield f"memory_limit_mb: it could not be enforced on a tool of type {kind!s}"


def _method_faults(method: Any) -> Iterator[str]:
    if method not in METHODS:
        yield f"method: a REST tool says which: {', '.join(METHODS)}"


def _endpoint_faults(endpoint: str) -> Iterator[str]:
    text = _REFERENCE.sub("x", endpoint)
    if len(endpoint) > MAX_URL:
        yield f"endpoint: longer than {MAX_URL} characters"
        return
    if not _URL_TEXT.fullmatch(text) or _BAD_ESCAPE.search(text):
        yield (
            "endpoint: holds what a URL cannot (spaces, control characters, braces, a backslash, "
            "'#', letters beyond ASCII); write them as %XX, or leave them out"
        )
        return
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        yield "endpoint: not a URL"
        return
    if parts.scheme not in ("https", "http") or not text.startswith(f"{parts.scheme}://"):
        yield "endpoint: must be an absolute URL that begins with https:// or http://"
        return
    if "${" in endpoint.partition("//")[2].partition("/")[0]:
        yield "endpoint: a secret cannot decide which host is asked"
    if "@" in parts.netloc:
        yield "endpoint: a URL with a user name or password is not accepted; use a header"
        return
    pattern = _IPV6 if parts.netloc.startswith("[") else _HOST_NAME
    if not host or not pattern.fullmatch(host) or port == 0:
        yield "endpoint: has no valid host or port"
    query = parse_qsl(urlsplit(endpoint).query, keep_blank_values=True)
    for name, value in query:
        if _is_literal_credential(name, value):
            yield f"endpoint: the query parameter {name[:60]!a} looks like a credential; " + (
                _USE_A_REFERENCE
            )


def _headers_faults(headers: dict[Any, Any]) -> Iterator[str]:
    if len(headers) > MAX_HEADERS:
        yield f"headers: more than {MAX_HEADERS}"
        return
    seen: set[str] = set()
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            continue  # the model names this fault
        yield from _header_faults(name, value)
        if name.lower() in seen:
            yield f"headers: {name[:60]!a} is given twice"
        seen.add(name.lower())


def _header_faults(name: str, value: str) -> Iterator[str]:
    shown = f"headers: {name[:60]!a}"
    if not _HEADER_NAME.fullmatch(name):
        yield f"{shown} is not a header's name"
        return
    if name.lower() in _OURS:
        yield f"{shown} belongs to the connection and cannot be set"
    if len(value) > MAX_HEADER_VALUE or not _HEADER_VALUE.fullmatch(value):
        yield (
            f"{shown} has a value with control characters, letters beyond ASCII, space around it, "
            f"or more than {MAX_HEADER_VALUE} characters"
        )
    if "${" in _REFERENCE.sub("", value):
        yield f"{shown} holds a reference of no known form; secrets are ${{secret:NAME}}"
    if _is_literal_credential(name, value):
        yield f"{shown} looks like a credential; {_USE_A_REFERENCE}"


def _is_literal_credential(name: str, value: str) -> bool:
    if _REFERENCE.search(value):
        return False
    return bool(value and (_CREDENTIAL_NAME.search(name) or _CREDENTIAL_VALUE.match(value)))
