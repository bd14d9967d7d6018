"""JSON-RPC messages: what is one is read, and all else has its error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.mcp.server.messages import (
    INVALID_REQUEST,
    PARSE_ERROR,
    RpcError,
    encode_call,
    encode_result,
    read_message,
)

SOUND: list[dict[str, Any]] = [
    {"id": 1, "method": "tools/list"},
    {"id": "a", "method": "tools/call", "params": {"name": "x"}},
    {"method": "notifications/initialized"},
    {"id": "q", "result": {"action": "accept"}},
    {"id": "q", "error": {"code": -1, "message": "no"}},
]


@pytest.mark.parametrize("message", SOUND)
def test_each_kind_of_json_rpc_message_is_parsed(message: dict[str, Any]) -> None:
    whole = {"jsonrpc": "2.0", **message}
    assert read_message(json.dumps(whole).encode()) == whole


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", PARSE_ERROR),
        (b"\xff\xfe", PARSE_ERROR),
        (b"{", PARSE_ERROR),
        (b'{"jsonrpc":"2.0","jsonrpc":"2.0","method":"x"}', PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"n":NaN}}', PARSE_ERROR),
        (b"[" * 10_000, PARSE_ERROR),
        (b"[" * 10_000 + b"]" * 10_000, PARSE_ERROR),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":' + b'{"a":' * 99 + b"1" + b"}" * 100,
         PARSE_ERROR),
        (b"[]", INVALID_REQUEST),
        (b'[{"jsonrpc":"2.0","id":1,"method":"x"}]', INVALID_REQUEST),
        (b"7", INVALID_REQUEST),
        (b'{"id":1,"method":"x"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":null,"method":"x"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":true,"method":"x"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":{},"method":"x"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":"' + b"i" * 201 + b'","method":"x"}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"method":7}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":[1]}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","id":1,"result":{},"error":{}}', INVALID_REQUEST),
        (b'{"jsonrpc":"2.0","result":{}}', INVALID_REQUEST),
    ],
)  # fmt: skip
def test_malformed_json_rpc_message_has_its_error_code(raw: bytes, code: int) -> None:
    with pytest.raises(RpcError) as refused:
        read_message(raw)
    assert refused.value.code == code


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
KEYS = st.sampled_from(["jsonrpc", "id", "method", "params", "result", "error"])


@given(st.dictionaries(KEYS, st.just("2.0") | JSON))
def test_parsed_json_rpc_message_is_well_formed(document: dict[str, Any]) -> None:
    try:
        message = read_message(json.dumps(document).encode())
    except RpcError:
        return
    assert isinstance(message.get("method", ""), str)
    assert isinstance(message.get("params", {}), dict)
    assert not isinstance(message.get("id"), bool | float | dict | list)


def test_json_rpc_responses_and_requests_start_differently() -> None:
    assert encode_result("a", b"{}").startswith(b'{"jsonrpc":"2.0","id":')
    assert RpcError(-1, "no").encode(7).startswith(b'{"jsonrpc":"2.0","id":')
    assert not encode_call("x", {}, id="a").startswith(b'{"jsonrpc":"2.0","id":')
