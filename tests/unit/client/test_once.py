"""Responses read with the standard library alone."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest

from fumehood.client.once import Response

LENGTH, CHUNKED = b"content-length: ", b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [b"zz", b"-5", b"f" * 15, b"f" * 40, b"9" * 5000, b"\xff", b""])
@pytest.mark.parametrize(
    ("head", "read"),
    [
        (LENGTH, Response.read),
        (CHUNKED, Response.read),
        (CHUNKED, lambda response: list(response.events())),
    ],
    ids=["length", "chunk", "event"],
)
def test_malformed_size_is_a_response_that_broke_off(
    head: bytes, size: bytes, read: Callable[[Response], Any]
) -> None:
    def response(given: bytes) -> Response:
        return Response(BytesIO(b"HTTP/1.1 200 OK\r\n" + head + given + b"\r\n\r\n\r\n"))

    with pytest.raises(OSError, match="broke off"):
        read(response(size))
    assert not read(response(b"0"))  # the twin
