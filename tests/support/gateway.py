"""Programs that reach the network, and names that lead to this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fumehood import Engine
from fumehood.gateway.in_engine import GatewayPart
from fumehood.outgoing import addresses

FETCH = """
import json, os, sys, urllib.error, urllib.request
def fetch(url, data=None, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
"""


@contextmanager
def names_here(*names: str) -> Iterator[None]:
    """Let these names lead to loopback."""
    real = addresses.socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        return real("127.0.0.1" if host in names else host, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addresses.socket, "getaddrinfo", resolve)
        yield


def gateway_part(engine: Engine) -> GatewayPart:
    """The part of an embedded engine that gives programs the network."""
    (found,) = [part for part in engine._made.parts if isinstance(part, GatewayPart)]
    return found
