"""Placeholders of secrets. A program gets a placeholder instead of a secret's value. The gateway
replaces the placeholder with the value in the program's requests.

Host side. Each call has its own placeholders, which cannot be guessed. Invariants:

* The value of a secret is sent only in the headers that the operator names for the secret, only to
  the hosts to which the operator has bound it, and only over TLS or to a host in
  `gateway.allowed_hosts`.
* The value never enters a sandbox, even if a host echoes it in the answer to the same request, or
  stores it and returns it in a later answer.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fumehood.core.errors import ExecutionError
from fumehood.core.hosts import network_matches
from fumehood.gateway.request import Headers, ProgramRequest, Refusal
from fumehood.outgoing.secret_values import SecretValues
from fumehood.registry.secrets import Origin, SecretSettings, host_and_port

PREFIX = "fhs_"
PLACEHOLDER_BYTES = 24
PLACEHOLDER_CHARACTERS = len(PREFIX) + 2 * PLACEHOLDER_BYTES

_BASIC = b"basic "

_RANGES = frozenset({b"range", b"ranges"})
"""Words in header names. A header whose name contains one of them requests only a part of a
resource, for example `Range`, `Request-Range`, `x-ms-range` and `x_ms_range`.
"""


class Placeholders:
    """The placeholders of one call's program, and the secrets that they stand for."""

    def __init__(
        self,
        bound: Mapping[str, SecretSettings],
        plain_hosts: Iterable[str],
        read: Callable[[str], Awaitable[str]],
        known: Mapping[str, SecretSettings] = MappingProxyType({}),
    ) -> None:
        """Create the placeholders of one call.

        Args:
            bound: the secrets that the program may use, by name.
            plain_hosts: the hosts that may receive secrets without TLS.
            read: returns the value of a secret, or raises ExecutionError if the secret has no
                value.
            known: all secrets of the engine, by name. The answers of a host are searched for every
                known secret that the host may have received.
        """
        self._plain_hosts = tuple(plain_hosts)
        self._read = read
        self._known = known
        self._bound = {
            f"{PREFIX}{secrets.token_hex(PLACEHOLDER_BYTES)}".encode(): (name, settings)
            for name, settings in bound.items()
        }

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that the program gets: the name of each variable → its
        placeholder.
        """
        return {
            settings.inside: placeholder.decode()
            for placeholder, (_, settings) in self._bound.items()
            if settings.inside is not None
        }

    def ends_program(self, name: str) -> bool:
        """Whether a program that misuses the secret `name` must be ended."""
        return any(
            settings.misuse == "end" for bound, settings in self._bound.values() if bound == name
        )

    def misused(self, request: ProgramRequest) -> tuple[str, str] | None:
        """Return None if the request misuses no placeholder. Otherwise, return two values about the
        first misuse: the name of the secret, and a clause that says how its placeholder is misused.
        """
        names = b"\n".join(name for name, _ in request.headers)
        in_text = self.within(request.url.encode() + b"\n" + names)
        if in_text is not None:
            return in_text, "it may only be in a header"
        for header, value in request.headers:
            for placeholder in self._of(value):
                name, settings = self._bound[placeholder]
                why = self._fault(request, header, placeholder)
                if settings.misuse != "pass" and why is not None:
                    return name, why
        return None

    def require_searchable(self, request: ProgramRequest) -> None:
        """Check that the answer to a request can be searched for secrets. No check is needed if the
        host of the request cannot know a secret.

        Raises Refusal if the request asks for a part of a resource, or opens a WebSocket.
        """
        if not self._of_host(request):
            return
        host = request.place.authority
        if request.is_upgrade:
            raise Refusal(
                403, "PERMISSION_DENIED", f"A secret is bound to {host}, so no WebSocket is opened "
                "to it: the host's messages could not be searched for the secret.",
            )  # fmt: skip
        for header, _ in request.headers:
            if _RANGES & set(re.split(rb"[^a-z0-9]+", header)):
                raise Refusal(
                    403, "PERMISSION_DENIED", f"A secret is bound to {host}, so its answers must "
                    f"be complete to be searched for the secret. Omit {header.decode()}.",
                )  # fmt: skip

    def within(self, data: bytes) -> str | None:
        """Return the name of a secret whose placeholder occurs in `data`, or None if there is none.

        Ignores secrets with the setting `misuse = "pass"`.
        """
        for placeholder, (name, settings) in self._bound.items():
            if settings.misuse != "pass" and placeholder in data:
                return name
        return None

    async def put_in(self, request: ProgramRequest) -> tuple[Headers, SecretValues]:
        """Replace the placeholders in the headers of a request by the values of the secrets.

        Return two values: the new headers, and the values of the secrets for which the answer must
        be searched.

        Raises:
            Refusal: a secret that is bound to the host has no usable value.
        """
        values = {name: await self._value(name) for name in self._of_host(request)}
        if not values:
            return request.headers, SecretValues()
        rows: list[tuple[bytes, bytes]] = []
        for header, value in request.headers:
            if header == b"accept-encoding":
                continue
            for placeholder in self._of(value):
                name, _ = self._bound[placeholder]
                if self._fault(request, header, placeholder) is None:
                    value = _replaced(value, placeholder, values[name].encode())
            rows.append((header, value))
        return (*rows, (b"accept-encoding", b"identity")), SecretValues(values.values())

    def _of_host(self, request: ProgramRequest) -> list[str]:
        """Return the names of all secrets that the host of the request may have received, on this
        port or another.
        """
        known = {**self._known, **dict(self._bound.values())}
        return [name for name, secret in known.items() if secret.is_of_host(request.place.host)]

    async def _value(self, name: str) -> str:
        try:
            return await self._read(name)
        except ExecutionError as error:
            raise Refusal(502, error.code, error.message) from None

    def _of(self, value: bytes) -> list[bytes]:
        plain = _plain(value) if self._bound else b""
        return [placeholder for placeholder in self._bound if placeholder in plain]

    def _fault(self, request: ProgramRequest, header: bytes, placeholder: bytes) -> str | None:
        """Return None if the placeholder may be replaced by the value of its secret in this header
        of the request. Otherwise, return a clause that says why not.
        """
        name, settings = self._bound[placeholder]
        place = request.place
        origin = Origin(place.scheme, place.host.strip("[]"), place.port)
        if not origin.is_in(settings.hosts):
            return f"the operator has not bound it to {place.authority}"
        if place.scheme != "https" and not origin.is_in(self._plain_hosts):
            return (
                "without TLS it is sent only to hosts in gateway.allowed_hosts, and only from the "
                "engine's own machine"
            )
        if header.decode("latin-1") not in settings.headers_of_programs:
            allowed = ", ".join(settings.headers_of_programs)
            return f"it may only be in these headers: {allowed} (secrets.{name}.headers)"
        return None


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that a trial held back. If a human approves it, it is sent with the secrets of the
    trial's program.
    """

    request: ProgramRequest
    body: bytes
    placeholders: Placeholders


class BodyWatch:
    """Searches the body of one request for placeholders. The body arrives in pieces."""

    def __init__(self, placeholders: Placeholders) -> None:
        self._placeholders = placeholders
        self._tail = b""

    def add(self, piece: bytes) -> str | None:
        """Search the next piece of the body. If a placeholder ends in this piece, return the name
        of its secret, otherwise None.
        """
        text = self._tail + piece
        self._tail = text[-PLACEHOLDER_CHARACTERS + 1 :]
        return self._placeholders.within(text)


def secrets_for(
    settings: Mapping[str, SecretSettings], tool: str, hosts: Iterable[str]
) -> dict[str, SecretSettings]:
    """Return the secrets, by name, for which the program of a call gets placeholders.

    `settings` are all secrets, `tool` is the name of the called tool, and `hosts` are the host
    patterns that the call names.
    """
    patterns = tuple(hosts)
    return {
        name: secret
        for name, secret in settings.items()
        if secret.inside is not None
        and (not secret.tools or tool in secret.tools)
        and any(_is_asked_for(host, patterns) for host in secret.hosts)
    }


def _is_asked_for(host: str, patterns: tuple[str, ...]) -> bool:
    name, port = host_and_port(host)
    return network_matches(name, int(port or 443), patterns)


def _plain(value: bytes) -> bytes:
    """Return the value of a header in the form in which it can contain a placeholder.

    If the value is for HTTP Basic authentication, these are the credentials, decoded from base64.
    Any other value is returned unchanged.
    """
    if value[: len(_BASIC)].lower() == _BASIC:
        try:
            return base64.b64decode(value[len(_BASIC) :].strip(), validate=True)
        except binascii.Error:
            return value
    return value


def _replaced(value: bytes, placeholder: bytes, secret: bytes) -> bytes:
    plain = _plain(value)
    if plain is value:
        return value.replace(placeholder, secret)
    return value[: len(_BASIC)] + base64.b64encode(plain.replace(placeholder, secret))
