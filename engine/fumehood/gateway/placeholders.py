"""Secrets of programs: inside is a placeholder, and the gateway puts the value in on the way out.

Host side. Each call has placeholders of its own, which nobody can guess. Invariants: a value goes
only into headers of a request to a host that the operator has bound it to, over TLS or to a host
that is allowed not to be public; it never enters a sandbox, also not in an answer that echoes it.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping

from fumehood.core.errors import ExecutionError
from fumehood.core.hosts import network_matches
from fumehood.gateway.request import Headers, ProgramRequest, Refusal
from fumehood.redaction.secret_values import SecretValues
from fumehood.registry.secrets import Origin, SecretSettings

PREFIX = "fhs_"
PLACEHOLDER_BYTES = 24
PLACEHOLDER_CHARACTERS = len(PREFIX) + 2 * PLACEHOLDER_BYTES

_BASIC = b"basic "


class Placeholders:
    """The secrets that one call's program may use, by placeholder."""

    def __init__(
        self,
        bound: Mapping[str, SecretSettings],
        plain_hosts: Iterable[str],
        read: Callable[[str], Awaitable[str]],
    ) -> None:
        """`bound` are its secrets by name, and `plain_hosts` those that may get one without TLS.
        `read` returns the value of a secret. Raises ExecutionError if it has none.
        """
        self._plain_hosts = tuple(plain_hosts)
        self._read = read
        self._bound = {
            f"{PREFIX}{secrets.token_hex(PLACEHOLDER_BYTES)}".encode(): (name, settings)
            for name, settings in bound.items()
        }

    @property
    def environment(self) -> dict[str, str]:
        """Variable of the program → placeholder."""
        return {
            settings.inside: placeholder.decode()
            for placeholder, (_, settings) in self._bound.items()
            if settings.inside is not None
        }

    def ends_program(self, name: str) -> bool:
        """Whether the misuse of a secret ends the program."""
        return any(
            settings.misuse == "end" for one, settings in self._bound.values() if one == name
        )

    def misused(self, request: ProgramRequest) -> str | None:
        """Return the name of a secret whose placeholder is where it must not be, or None."""
        names = b"\n".join(name for name, _ in request.headers)
        found = self.within(request.url.encode() + b"\n" + names)
        for _, value in request.headers:
            for placeholder in self._of(value):
                name, settings = self._bound[placeholder]
                if settings.misuse != "pass" and not self._may_go(request, settings):
                    found = found or name
        return found

    def within(self, data: bytes) -> str | None:
        """Return the name of a secret whose placeholder is in these bytes, or None."""
        for placeholder, (name, settings) in self._bound.items():
            if settings.misuse != "pass" and placeholder in data:
                return name
        return None

    async def put_in(self, request: ProgramRequest) -> tuple[Headers, SecretValues]:
        """Return the headers with the values, and these, to take them out of the answer.

        Raises:
            Refusal: a secret has no usable value, or its answer could not be read for it.
        """
        values = SecretValues()
        used = {
            placeholder
            for _, value in request.headers
            for placeholder in self._of(value)
            if self._may_go(request, self._bound[placeholder][1])
        }
        if not used:
            return request.headers, values
        if request.is_upgrade:
            raise Refusal(
                403, "PERMISSION_DENIED", "A secret cannot be used for a WebSocket: what the host "
                "sends could not be searched for it.",
            )  # fmt: skip
        secrets_by_placeholder = {one: await self._value(self._bound[one][0]) for one in used}
        rows: list[tuple[bytes, bytes]] = []
        for name, value in request.headers:
            if name in (b"accept-encoding", b"range"):  # the whole answer is read for the values
                continue
            for placeholder, secret in secrets_by_placeholder.items():
                if placeholder in _plain(value):
                    value = _replaced(value, placeholder, secret.encode())
                    values.add([secret, value.decode("latin-1").partition(" ")[2] or secret])
            rows.append((name, value))
        return (*rows, (b"accept-encoding", b"identity")), values

    async def _value(self, name: str) -> str:
        try:
            return await self._read(name)
        except ExecutionError as error:
            raise Refusal(502, error.code, error.message) from None

    def _of(self, value: bytes) -> list[bytes]:
        plain = _plain(value) if self._bound else b""
        return [placeholder for placeholder in self._bound if placeholder in plain]

    def _may_go(self, request: ProgramRequest, settings: SecretSettings) -> bool:
        place = request.place
        origin = Origin(place.scheme, place.host.strip("[]"), place.port)
        is_bound = origin.is_in(settings.hosts)
        return is_bound and (place.scheme == "https" or origin.is_in(self._plain_hosts))


class BodyWatch:
    """Looks for placeholders in a body that comes in pieces."""

    def __init__(self, placeholders: Placeholders) -> None:
        self._placeholders = placeholders
        self._tail = b""

    def add(self, piece: bytes) -> str | None:
        """Return the name of a secret whose placeholder ends in this piece, or None."""
        text = self._tail + piece
        self._tail = text[-PLACEHOLDER_CHARACTERS + 1 :]
        return self._placeholders.within(text)


def secrets_for(
    settings: Mapping[str, SecretSettings], tool: str, hosts: Iterable[str]
) -> dict[str, SecretSettings]:
    """Return the secrets that programs of a tool get if their call asks for these hosts."""
    patterns = tuple(hosts)
    return {
        name: one
        for name, one in settings.items()
        if one.inside is not None
        and (not one.tools or tool in one.tools)
        and any(_is_asked_for(host, patterns) for host in one.hosts)
    }


def _is_asked_for(host: str, patterns: tuple[str, ...]) -> bool:
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not name or not port.isdigit():
        name, port = host, "443"
    return network_matches(name, int(port), patterns)


def _plain(value: bytes) -> bytes:
    """Return a header's value, with credentials of the scheme Basic decoded, as git sends them."""
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
