"""The gateway as a target: a gateway without an engine, and a service that programs may read from.

Host side. Invariants: the gateway never requests approval, and its only secret is the bait; the
service listens on loopback, and ends with the target.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fumehood.attack.bait import VARIABLE
from fumehood.attack.targets import Standing, Target
from fumehood.core.errors import EngineError, PermissionDenied
from fumehood.gateway.service import ENVIRONMENT, Gateway
from fumehood.gateway.settings import GatewaySettings
from fumehood.observe.log import quiet_logger
from fumehood.policy.model import CallFacts, Decision, Verdict
from fumehood.redaction.redactor import Redactor
from fumehood.registry.secrets import SecretBindings, SecretSettings
from fumehood.sandbox.connections import Connections
from fumehood.sandbox.streams import Stream
from fumehood.sandbox.wall import RunSinks


def gateway_target(containers: Target) -> Target:
    """Return the gateway as a target. The attacking programs run in `containers`.

    The gateway's settings name two hosts: a service on this machine, and `localhost`. Only the
    service may have an address that is not public. Therefore, the gateway must refuse requests to
    `localhost`.
    """

    @asynccontextmanager
    async def opened() -> AsyncIterator[Standing]:
        async with containers.open() as standing:
            with running_service() as service:
                open_to = [service.authority]
                async with lone_gateway([*open_to, "localhost"], open_to, VARIABLE) as (
                    stream, variables,
                ):  # fmt: skip
                    yield replace(
                        standing,
                        sinks=RunSinks(streams=(stream,)),
                        environment={**variables, "OPEN": f"http://{service.authority}"},
                        losses=service.losses,
                    )

    return replace(containers, wall="gateway", open=opened)


# -- a gateway without an engine ------------------------------------------------------------

OF_THE_SECRET = "SECRET"
"""The environment variable in which programs get the secret's placeholder."""


@asynccontextmanager
async def lone_gateway(
    hosts: Sequence[str], allowed: Sequence[str], secret: str
) -> AsyncIterator[tuple[Stream[Connections], Mapping[str, str]]]:
    """Run a gateway for `hosts`. Yield the stream that connects programs to the gateway, and the
    environment variables that the programs need.

    The default rules apply, and requests that need approval are refused. The hosts in `allowed` may
    have addresses that are not public. `secret` is the name of an environment variable of this
    process. Programs may use its value as a secret in requests to the hosts in `allowed`.
    """
    settings = GatewaySettings.model_validate({"hosts": hosts, "allowed_hosts": allowed})
    bound = SecretSettings(env=secret, hosts=settings.allowed_hosts, inside=OF_THE_SECRET)
    gateway = Gateway(
        settings, _by_default, None, SecretBindings({"bait": bound}), _forget, quiet_logger()
    )
    async with gateway.door(
        settings.hosts, _refuse, Redactor(), tool="run_python", call_id="attack",
        principal_id="attack", agent_id=None, session_id=None,
    ) as (door, stream):  # fmt: skip
        yield stream, {**ENVIRONMENT, **door.placeholders.environment}


def _by_default(facts: CallFacts) -> Decision:
    return Decision(Verdict.ASK, "default: nothing was set")


async def _refuse(*_: object) -> EngineError:
    return PermissionDenied("Nobody says yes here.")


async def _forget(*_: object) -> None:
    pass


# -- the service ----------------------------------------------------------------------------


FILL_BYTES = 64 * 1024
PART_BYTES = 7


class Service(ThreadingHTTPServer):
    """A service on loopback that programs may read from but not write to. Each write is recorded as
    a loss for the wall.

    The service answers with the path and the headers of the request, except in these cases:

    * `/?to=URL` redirects to the URL.
    * `/?fill=TEXT` gives a long answer.
    * `/?keep` also stores the request's `Authorization` header.
    * `/kept` answers with the stored header. If the request has the parameter `part` or a range
      header, the answer is only the requested part of the stored header.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.authority = f"127.0.0.1:{self.server_address[1]}"
        self.written: list[str] = []
        """The HTTP methods of the requests that were not reads."""
        self.kept = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a program was ended during its request."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def losses(self) -> list[str]:
        """Return a description of each kind of write that arrived since the last call of this
        method.
        """
        written, self.written[:] = list(self.written), []
        return [f"a {method} arrived that nobody allowed" for method in dict.fromkeys(written)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5
    server: Service

    def do_GET(self) -> None:
        if int(self.headers.get("content-length") or 0):
            self.server.written.append("GET with a body")
        address = urlsplit(self.path)
        asked = parse_qs(address.query, keep_blank_values=True)
        body = json.dumps({"path": self.path, **self.headers}).encode()
        status = 302 if "to" in asked else 200
        if "keep" in asked:
            self.server.kept = self.headers.get("authorization", "")
        if "fill" in asked:
            body = (asked["fill"][0] * FILL_BYTES).encode()[:FILL_BYTES]
        if address.path == "/kept":
            ranges = [value for name, value in self.headers.items() if "range" in name.lower()]
            part = [*asked.get("part", []), *(one.partition("=")[2] for one in ranges)]
            status, body = (206 if part else 200), self.server.kept.encode()
            if part:
                first = int(part[0].partition("-")[0])
                body = body[first : first + PART_BYTES]
        self.send_response(status)
        if "to" in asked:
            self.send_header("location", asked["to"][0])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.written.append(self.command)
        self.send_response(204)
        self.end_headers()

    do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815  # as the library names them

    def log_message(self, *values: object) -> None:
        """Do nothing, so that requests are not logged to stderr."""


@contextmanager
def running_service() -> Iterator[Service]:
    """Run a service during the block, and yield it."""
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
