"""Secrets of REST and MCP tools: their values, and which definitions may refer to them.

Host side. A definition refers to a secret as `${secret:NAME}`. The operator's configuration binds
this name to the secret's source, to tools and to hosts. Invariants: a reference to a secret is
refused, at registration and again at the call, if the secret is not bound to the tool and to the
host of the tool's endpoint; a secret's value is read for one call, never stored, and never shown in
a message.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fumehood.core.errors import ExecutionError
from fumehood.core.tool import (
    MAX_HEADER_VALUE,
    SECRET_REFERENCE,
    ToolDefinition,
    is_header_value,
)
from fumehood.core.value import Value
from fumehood.observe.log import Logger, quiet_logger
from fumehood.protocol.strict_json import unmarked
from fumehood.redaction.redactor import MIN_SECRET_CHARACTERS
from fumehood.sandbox.trusted_files import Untrusted, read_private

SECRET_NAME = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$"

KEYRING_WAIT_S = 10.0
"""Seconds that a call waits for another call to finish reading the keyring."""

_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?)(:[0-9]{1,5})?")


def _lower_host(value: str) -> str:
    host = value.lower()
    if not _HOST.fullmatch(host):
        raise ValueError("must be a host, or a host and a port, such as api.internal:8080")
    return host


HostPattern = Annotated[str, AfterValidator(_lower_host)]
"""A host, which stands for all of its ports, or a host and a port. It must match exactly. IPv6
addresses are in brackets."""

_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$"), AfterValidator(str.lower)]


class Settings(Value):
    """Base class for groups of the operator's settings."""


class RestSettings(Settings):
    """The operator's settings for all REST tools."""

    allowed_hosts: tuple[HostPattern, ...] = ()
    """Hosts that REST tools may reach although their addresses are not public."""
    stream_kb: int = Field(default=1024, ge=1, le=1024 * 1024)
    """Maximum size of the answer of a tool with `streaming`, in KiB."""


class KeyringEntry(Settings):
    """An entry in the keyring of the Unix user that runs the engine."""

    service: str = Field(min_length=1, max_length=200)
    username: str = Field(min_length=1, max_length=200)


class SecretSettings(Settings):
    """The operator's settings for one secret: its source, and the tools and hosts that may get
    it.
    """

    env: str | None = Field(default=None, min_length=1, max_length=200)
    """The name of a variable in the engine's environment that contains the secret."""
    file: Path | None = None
    """A file that contains the secret and that only the engine's user can read."""
    keyring: KeyringEntry | None = None
    """An entry in the user's keyring. It is read with the optional package `keyring`."""
    tools: tuple[str, ...] = ()
    """Names of the tools whose definitions may refer to the secret, or whose programs get the
    secret's placeholder. If `inside` is given, an empty list means all programs."""
    hosts: tuple[HostPattern, ...] = Field(min_length=1)
    inside: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")
    """The environment variable in which programs get the secret's placeholder."""
    headers: tuple[_HeaderName, ...] = ()
    """Names of the headers in which programs may send the secret, in addition to `Authorization`. A
    host might store the values of other headers and return them."""
    misuse: Literal["refuse", "end", "pass"] = "refuse"
    """What happens to a request that misuses the secret's placeholder. A request may contain the
    placeholder only in `Authorization` or in one of `headers`, and only if the request goes to one
    of the `hosts`. `refuse` refuses a misuse. `end` also ends the program. `pass` forwards the
    request unchanged, without the secret's value."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if [self.env, self.file, self.keyring].count(None) != 2:
            raise ValueError("a secret needs one of `env`, `file` and `keyring`")
        if not self.tools and self.inside is None:
            raise ValueError("a secret needs `tools`, or `inside` for programs")
        if self.file is not None and not self.file.is_absolute():
            raise ValueError("`file` must be an absolute path")
        return self

    @property
    def headers_of_programs(self) -> tuple[str, ...]:
        """All headers in which programs may send the secret. The names are in lower case."""
        return tuple(dict.fromkeys(("authorization", *self.headers)))

    def is_of_host(self, host: str) -> bool:
        """Return whether the secret may be sent to `host` on at least one port. If `host` is an
        IPv6 address, it must be in brackets.
        """
        return any(host_and_port(pattern)[0] == host for pattern in self.hosts)


def host_and_port(pattern: str) -> tuple[str, str]:
    """Split a host pattern into its host and its port. The port is "" if the pattern has none."""
    host, _, port = pattern.rpartition(":")
    return (host, port) if host and port.isdigit() else (pattern, "")


KEYRING_FAULTS = {
    "KeyringLocked": ("the keyring is locked", "Unlock it."),
    "NoKeyringError": ("the engine's user has no keyring on this host", "Set one up."),
}
"""Name of an exception of the package `keyring` → the reason that is shown, and the remedy."""


class KeyringFault(Exception):
    """The keyring cannot be read. `args` contains the reason, and the remedy for the operator."""


AllSecrets = dict[Annotated[str, Field(pattern=SECRET_NAME)], SecretSettings]


@dataclass(frozen=True, slots=True)
class Origin:
    """The scheme, the host and the port of a URL. The host is in lower case and has no brackets."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """Return the origin of a URL. Raises ValueError if the URL is not an http or https URL."""
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in ("https", "http") or not host:
            raise ValueError("not an http or https URL")
        return cls(parts.scheme, host, parts.port or (443 if parts.scheme == "https" else 80))

    @property
    def shown_host(self) -> str:
        """The host in the form that it has in a URL: in brackets if it is an IPv6 address."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def shown(self) -> str:
        """The host in the form that it has in the configuration and in a `Host` header. The port
        follows the host unless it is the default port of the scheme.
        """
        usual = {"https": 443, "http": 80}[self.scheme]
        return self.shown_host if self.port == usual else f"{self.shown_host}:{self.port}"

    def is_in(self, hosts: Collection[str]) -> bool:
        """Return whether a list of host patterns contains this host, either without a port or with
        the same port.
        """
        return self.shown_host in hosts or f"{self.shown_host}:{self.port}" in hosts


class SecretBindings:
    """The operator's secrets, and the tools and hosts that may get them.

    `environment` contains the environment variables. If there are no settings, every reference to a
    secret is refused.
    """

    def __init__(
        self,
        settings: Mapping[str, SecretSettings] = MappingProxyType({}),
        rest: RestSettings | None = None,
        environment: Mapping[str, str] = os.environ,
        log: Logger | None = None,
    ) -> None:
        self._log = log
        self.settings = settings
        """All secrets by name."""
        self._allowed_hosts = (rest or RestSettings()).allowed_hosts
        self._environment = environment
        self._keyring_lock = threading.Lock()

    def value(self, name: str) -> str:
        """Read and return the value of a secret. May block. The caller must already have checked
        that the request may contain the secret.

        Raises:
            ExecutionError: the secret has no usable value.
        """
        secret = self.settings[name]
        try:
            value = self._read(secret)
        except (OSError, UnicodeDecodeError, Untrusted):
            value = None
        except KeyringFault as fault:
            reason, remedy = fault.args
            raise self._unusable(name, f"cannot be read ({reason})", remedy) from None
        if value is None or len(value) < MIN_SECRET_CHARACTERS or not is_header_value(value):
            variable = f"environment variable {secret.env}" if secret.env is not None else None
            source = variable or ("file" if secret.file is not None else "keyring's entry")
            raise self._unusable(
                name, "has no usable value",
                f"Set its {source} to a line of {MIN_SECRET_CHARACTERS} to {MAX_HEADER_VALUE} "
                "printable ASCII characters. A file must be readable by the engine's user only.",
            )  # fmt: skip
        return value

    def report_unusable(self, names: Collection[str] | None = None) -> list[str]:
        """Log a warning for each secret that has no usable value now. Return the names of these
        secrets. May block.

        If `names` is given, only these secrets are checked. Secrets in a keyring are not checked,
        because a keyring may ask its user to unlock it.
        """
        found = []
        for name, secret in self.settings.items():
            if secret.keyring is None and (names is None or name in names):
                try:
                    self.value(name)
                except ExecutionError:
                    found.append(name)
        return found

    def _unusable(self, name: str, reason: str, remedy: str) -> ExecutionError:
        """Log why a secret cannot be used, and the remedy, for the operator. Return the error for
        the caller. The error does not contain the remedy.
        """
        log = self._log or quiet_logger()
        log.warning("secret.unusable", secret=name, reason=reason, remedy=remedy)
        return ExecutionError(
            f"The secret {name!r} {reason}, so nothing was sent. The log tells the operator what "
            "to do. Do not retry."
        )

    def faults(self, definition: ToolDefinition) -> list[str]:
        """Return a fault for each secret that a definition refers to and that the tool may not
        use.
        """
        return [
            f"{field}: {fault}"
            for field, text in _texts(definition)
            for name in dict.fromkeys(SECRET_REFERENCE.findall(text))
            if (fault := self._fault(name, definition)) is not None
        ]

    def values(self, definition: ToolDefinition) -> dict[str, str]:
        """Return the values of all secrets that a definition refers to, by name.

        May block, because it may read files or the keyring.

        Raises:
            ExecutionError: a secret is not bound to this tool and host, or has no usable value.
        """
        names = {n for _, text in _texts(definition) for n in SECRET_REFERENCE.findall(text)}
        return {name: self._value(name, definition) for name in sorted(names)}

    def _fault(self, name: str, definition: ToolDefinition) -> str | None:
        secret = self.settings.get(name)
        if secret is None:
            return f"the configuration has no secret {name!r}; the operator can add secrets.{name}"
        if definition.name not in secret.tools:
            return f"the secret {name!r} is not bound to the tool {definition.name}"
        if definition.endpoint is None:
            return f"the secret {name!r} is for a host, and the definition has no endpoint"
        origin = Origin.of(SECRET_REFERENCE.sub("x", definition.endpoint))
        if not origin.is_in(secret.hosts):
            return f"the secret {name!r} is not bound to the endpoint's host {origin.shown}"
        if origin.scheme != "https" and not origin.is_in(self._allowed_hosts):
            return (
                f"the secret {name!r} cannot go to an http address, where others can read it; use "
                "https, or name the host in rest.allowed_hosts"
            )
        return None

    def _value(self, name: str, definition: ToolDefinition) -> str:
        fault = self._fault(name, definition)
        if fault is not None:  # the definition was registered, so this is a fault of the engine
            raise ExecutionError(f"The call cannot be sent: {fault}. Do not retry.")
        return self.value(name)

    def _read(self, secret: SecretSettings) -> str | None:
        if secret.keyring is not None:
            return self._read_keyring(secret.keyring)
        if secret.file is None:
            return self._environment.get(secret.env or "")
        text = unmarked(read_private(secret.file)).decode("ascii")
        return text.removesuffix("\n").removesuffix("\r")

    def _read_keyring(self, entry: KeyringEntry) -> str:
        """Return the password of an entry in the keyring. Blocks while another call reads the
        keyring, but at most `KEYRING_WAIT_S` seconds, and then while the keyring waits for its
        user.

        Raises:
            KeyringFault: the keyring cannot be read or has no such entry, or the other call takes
                too long.
        """
        if find_spec("keyring") is None:
            raise KeyringFault(
                "the extra for keyrings is not installed",
                "Install it: pip install 'PATH_OF_THE_CHECKOUT[keyring]'.",
            )
        # A keyring may wait for its user to unlock it, so only one call at a time reads it.
        if not self._keyring_lock.acquire(timeout=KEYRING_WAIT_S):
            raise KeyringFault("the keyring does not answer", "Unlock it.")
        try:
            import keyring

            found = keyring.get_password(entry.service, entry.username)
        except Exception as fault:  # from any backend; its message could contain anything
            kind = type(fault).__name__
            unknown = (f"the keyring's backend failed: {kind}", "Repair it, or choose another.")
            raise KeyringFault(*KEYRING_FAULTS.get(kind, unknown)) from None
        finally:
            self._keyring_lock.release()
        if found is None:
            raise KeyringFault("the keyring has no such entry", "Add it.")
        return found


NO_SECRETS = SecretBindings()


def _texts(definition: ToolDefinition) -> list[tuple[str, str]]:
    """Return the texts in a definition that may refer to secrets, as pairs of the field's name and
    the text.
    """
    headers = (definition.headers or {}).values()
    return [("endpoint", definition.endpoint or ""), *(("headers", value) for value in headers)]
