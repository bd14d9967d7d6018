"""A program's request, parsed so strictly that no server can understand it differently.

Values only. Invariants:

* The host and the port of a request are those to which the gateway connects.
* The `Host` header names the same host and port.
* Headers that concern only one connection are never passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fumehood.core.hosts import MAX_PORT, host_of
from fumehood.core.json_types import JsonObject

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""The methods that change nothing on a server. *Source*: RFC 9110, section 9.2.1."""

WEBSOCKET = "WEBSOCKET"
"""The method that policy rules and approvers see for a request to open a WebSocket."""

TUNNEL = "TUNNEL"
"""The method that policy rules see for a TLS connection that is passed through without
decryption.
"""

_OVERRIDES = frozenset({
    b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-original-url",
    b"x-rewrite-url",
})  # fmt: skip
"""Headers in which a request can name another method or URL, which some servers then use."""

METHODS = READS | {"POST", "PUT", "PATCH", "DELETE"}

Headers = tuple[tuple[bytes, bytes], ...]

_OF_A_CONNECTION = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-authentication-info", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"expect", b"alt-svc",
})  # fmt: skip
"""Headers that concern only one connection, or with which an answer could make a client bypass the
gateway. *Source*: RFC 9110, section 7.6.1.
"""

_USUAL_PORTS = {"https": 443, "http": 80}


class Refusal(Exception):
    """Raised if the gateway answers a request itself instead of sending it.

    The program gets the HTTP status `status`, and the error code `code` with `message`.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class HostFailure(Refusal):
    """Raised if a host failed, so that there is no answer to pass on. The gateway has refused
    nothing.
    """


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request is sent: a scheme, a host in its canonical form, and a port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, scheme: str, authority: str) -> Place:
        """Parse `authority`, which has the form `HOST` or `HOST:PORT`. Without a port, the place
        has the default port of `scheme`.

        Raises Refusal if clients could read `authority` in different ways, or if the port is
        invalid.
        """
        if not authority or set("/?#@") & set(authority):
            raise malformed("its host is missing or ambiguous")
        host = host_of(f"{scheme}://{authority}/")
        _, _, port = authority.rpartition("]")[2].rpartition(":") if ":" in authority else ("",) * 3
        if host is None or (port and not 0 < int(port) <= MAX_PORT):
            raise malformed("its host is ambiguous, or its port is invalid")
        return cls(scheme, host, int(port) if port else _USUAL_PORTS[scheme])

    @property
    def authority(self) -> str:
        """The host as in a `Host` header. The port follows it, unless it is the scheme's
        default.
        """
        usual = _USUAL_PORTS.get(self.scheme)
        return self.host if self.port == usual else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """A request of a program, without its body."""

    method: str
    place: Place
    target: str
    """The path and the query of the URL."""
    headers: Headers
    """All headers except `Host`, `Content-Length` and those that concern only one connection."""
    length: int | None
    """The size of the body in bytes, or None if the body is sent in chunks of unknown total
    size.
    """
    is_upgrade: bool
    """Whether the request opens a WebSocket."""

    @property
    def url(self) -> str:
        return f"{self.place.scheme}://{self.place.authority}{self.target}"

    @property
    def head_bytes(self) -> int:
        """The size of the URL and the headers in bytes. These bytes count as sent, because a
        program could use the URL and the headers to send data.
        """
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    @property
    def is_read(self) -> bool:
        """Whether the request changes nothing on its server, if the server keeps to the semantics
        of HTTP methods.
        """
        names = {_as_servers_read(name) for name, _ in self.headers}
        return (
            self.method in READS and self.length == 0 and not self.is_upgrade
            and not names & _OVERRIDES
        )  # fmt: skip

    def facts(self) -> JsonObject:
        """Return the values that policy rules can test: the request's method, URL, host, port, path
        and query.
        """
        path, _, query = self.target.partition("?")
        return {
            "method": WEBSOCKET if self.is_upgrade else self.method,
            "url": self.url,
            "host": self.place.host,
            "port": self.place.port,
            "path": path,
            "query": query,
        }


def read_request(
    method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], inside: Place | None
) -> ProgramRequest:
    """Parse the head of a request. `target` is the target in the request line, unchanged.

    If the request arrived through a tunnel, `inside` is the place to which the tunnel leads.
    Otherwise, it is None.

    Raises:
        Refusal: the request is ambiguous, or the gateway does not pass on requests of this form.
    """
    rows = tuple((name.lower(), value) for name, value in headers)
    name, where = method.decode("ascii"), target.decode("ascii", "replace")
    if name not in METHODS:
        raise Refusal(405, "METHOD_NOT_ALLOWED", f"The gateway does not pass {name[:20]} on.")
    place, path = (inside, where) if inside is not None else _absolute(where)
    if not path.startswith("/") and not (path == "*" and name == "OPTIONS"):
        raise malformed("its target is not a path")
    if not path.isascii() or any(character <= " " for character in path):
        raise malformed("its target has characters that must be escaped")
    if "#" in path:
        raise malformed("its target has a fragment, which servers read differently")
    if _climbs(path):
        raise malformed("its path has segments that lead upwards, which servers read differently")
    given = dict(rows)
    if (
        b"host" in given
        and Place.of(place.scheme, given[b"host"].decode("ascii", "replace")) != place
    ):
        raise malformed("its Host header names another host than its connection or target")
    if b"content-length" in given and b"transfer-encoding" in given:
        raise malformed("it has both Content-Length and Transfer-Encoding")
    is_upgrade = b"upgrade" in given
    if is_upgrade and (given[b"upgrade"].lower() != b"websocket" or name != "GET"):
        raise Refusal(501, "NOT_IMPLEMENTED", "The gateway passes no upgrade on but WebSocket.")
    named = {header.strip().lower() for header in given.get(b"connection", b"").split(b",")}
    dropped = _OF_A_CONNECTION | {b"host", b"content-length"}
    return ProgramRequest(
        name, place, path,
        tuple(
            row for row in rows
            if row[0] not in named and _as_servers_read(row[0]) not in dropped
        ),
        None if b"transfer-encoding" in given else int(given.get(b"content-length", b"0")),
        is_upgrade,
    )  # fmt: skip


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer without those that concern only one connection."""
    rows = [(name.lower(), value) for name, value in headers]
    named = {
        header.strip().lower() for name, value in rows if name == b"connection"
        for header in value.split(b",")
    }  # fmt: skip
    return [row for row in rows if row[0] not in _OF_A_CONNECTION | named]


def _absolute(target: str) -> tuple[Place, str]:
    scheme, slashes, rest = target.partition("://")
    if not slashes or scheme.lower() != "http":
        raise malformed("a proxy needs an absolute http URL as the target, or CONNECT for https")
    end = min((at for at in map(rest.find, "/?") if at >= 0), default=len(rest))
    path = rest[end:]
    return Place.of("http", rest[:end]), path if path.startswith("/") else f"/{path}"


def _as_servers_read(name: bytes) -> bytes:
    """Return a header's name as some servers read it: every character except letters and digits is
    replaced by `-`.

    These servers convert the names of headers to names of variables. *Source*: RFC 3875, section
    4.1.18.
    """
    return re.sub(rb"[^a-z0-9]", b"-", name)


def _climbs(target: str) -> bool:
    """Whether the path in `target` contains a segment `.` or `..`. Escaped forms, which only some
    servers decode, count too.
    """
    path = target.partition("?")[0].lower()
    for escaped, plain in (("%2e", "."), ("%2f", "/"), ("%5c", "/"), ("\\", "/")):
        path = path.replace(escaped, plain)
    return any(part.partition(";")[0] in (".", "..") for part in path.split("/"))


def malformed(why: str) -> Refusal:
    """Return the refusal of a request that is invalid or ambiguous. `why` is a clause for the
    message.
    """
    return Refusal(400, "INVALID_REQUEST", f"The gateway does not pass this request on: {why}.")
