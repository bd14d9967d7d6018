"""Function results that an envelope cannot hold: a clear error in every placement, and no harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from conftest import running_daemon
from support.http import SocketClient
from support.packages import install

pytestmark = pytest.mark.row("E1", "S1")

CANARY = "canary-7d1f"

GIFTS = '''
from fumehood import ToolError, tool

class Mute:
    """Has no words for itself."""
    def __repr__(self):
        raise RuntimeError("canary-7d1f")
    __str__ = __repr__

class Liar:
    """Has no class, and nothing else."""
    def __getattribute__(self, name):
        raise RuntimeError("canary-7d1f")

class MuteError(Mute, Exception):
    pass

class Odd(BaseException):
    pass

def nested(kind):
    value = kind()
    for _ in range(10_000):
        value = [value] if kind is list else {"a": value}
    return value

def circle(kind):
    value = kind()
    value.append(value) if kind is list else value.update(a={"b": value})
    return value

def fail(error):
    raise error

GIFTS = {
    "fine": lambda: {"a": [1, 2.5, None, True, "é"]},
    "set": lambda: {1},
    "set-within": lambda: {"a": frozenset([1])},
    "bytes": lambda: "é".encode(),
    "integer-key": lambda: {1: "a"},
    "nan": lambda: float("nan"),
    "infinity-within": lambda: {"a": [float("inf")]},
    "set-of-objects": lambda: {object()},
    "undecodable-bytes": lambda: b"\\xff",
    "bytes-key": lambda: {b"\\xff": 1},
    "lone-surrogate": lambda: "\\ud800",
    "huge-number": lambda: 10 ** 5000,
    "list-in-itself": lambda: circle(list),
    "object-in-itself": lambda: circle(dict),
    "10000-lists": lambda: nested(list),
    "10000-objects": lambda: nested(dict),
    "object": object,
    "function": lambda: fail,
    "repr-raises": Mute,
    "nested-repr-raises": lambda: {"a": [Mute()]},
    "key-whose-repr-raises": lambda: {Mute(): 1},
    "nested-attribute-access-raises": lambda: {"a": [Liar()]},
    "attribute-access-raises": Liar,
    "too-long": lambda: "x" * (3 << 20),
    "raises-error-whose-repr-raises": lambda: fail(MuteError()),
    "raises-exit": lambda: fail(SystemExit(3)),
    "raises-base-exception": lambda: fail(Odd("canary-7d1f")),
    "raises-group": lambda: fail(BaseExceptionGroup("canary-7d1f", [Odd()])),
    "own-error": lambda: fail(ToolError("NO_CITY", ValueError("No such city."), details=[1])),
    "own-error-with-invalid-retry-time": lambda: fail(
        ToolError("NO_CITY", "No.", retry_after_ms="soon")
    ),
    "own-error-with-too-deep-details": lambda: fail(
        ToolError("NO_CITY", "No.", details={"a": nested(list)})
    ),
    "own-error-with-unprintable-details": lambda: fail(
        ToolError("NO_CITY", "No.", details={"a": Mute()})
    ),
}

@tool(sandboxed=False)
async def give_here(what: str):
    """Give it in the engine's process."""
    return GIFTS[what]()

@tool(sandboxed=False)
def give_in_worker(what: str):
    """Give it in a worker process."""
    return GIFTS[what]()

@tool
def give_in_jail(what: str):
    """Give it in the jail."""
    return GIFTS[what]()

tools = [give_here, give_in_worker, give_in_jail]
'''

UNFIT = "The tool's result cannot be represented in JSON"
DETAILS_UNFIT = "The details of the tool's own error cannot be represented in JSON"
HIDDEN = "The tool failed internally. Its owner can find the reason in the log"


@dataclass(frozen=True)
class Gift:
    """A function's result and the expected answer: data, or an error code and message text.

    `in_jail` is the message text in the jail, where the author's failures reach the caller.
    """

    name: str
    data: Any = None
    code: str | None = "EXECUTION_ERROR"
    says: str = UNFIT
    in_jail: str = ""
    details: Any = None


TABLE = (
    Gift("set", data={"value": [1]}, code=None),
    Gift("set-within", data={"a": [1]}, code=None),
    Gift("bytes", data={"value": "é"}, code=None),
    Gift("integer-key", data={"1": "a"}, code=None),
    *map(Gift, (
        "nan", "infinity-within", "set-of-objects", "undecodable-bytes", "bytes-key",
        "lone-surrogate", "huge-number", "list-in-itself", "object-in-itself", "10000-lists",
        "10000-objects", "object", "function", "repr-raises", "nested-repr-raises",
        "key-whose-repr-raises", "nested-attribute-access-raises", "attribute-access-raises",
    )),
    Gift("too-long", code="OUTPUT_LIMIT_EXCEEDED", says="Ask for less."),
    Gift("raises-error-whose-repr-raises", says=HIDDEN,
         in_jail="The function failed with MuteError"),
    Gift("raises-exit", says=HIDDEN, in_jail="The function failed with SystemExit"),
    Gift("raises-base-exception", says=HIDDEN, in_jail="The function failed with Odd"),
    Gift("raises-group", says=HIDDEN, in_jail="The function failed with BaseExceptionGroup"),
    Gift("own-error", code="NO_CITY", says="No such city.", details={"value": [1]}),
    Gift("own-error-with-invalid-retry-time", code="NO_CITY", says="No."),
    Gift("own-error-with-too-deep-details", says=DETAILS_UNFIT),
    Gift("own-error-with-unprintable-details", says=DETAILS_UNFIT),
)  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketClient]:
    variables = install(tmp_path_factory.mktemp("packages"), "gifts", GIFTS)
    with running_daemon(variables, host_tools="give_here,give_in_worker") as daemon:
        client = daemon.client()
        yield client
        client.close()
        assert "internal_error" not in daemon.log


@pytest.mark.parametrize(
    "tool",
    [
        "give_here",
        "give_in_worker",
        pytest.param("give_in_jail", marks=pytest.mark.needs("landlock")),
    ],
)
@pytest.mark.parametrize("gift", TABLE, ids=lambda gift: gift.name)
def test_any_function_result_becomes_data_or_a_clear_error(
    client: SocketClient, tool: str, gift: Gift
) -> None:
    answer = client.call(tool, {"what": gift.name}).body
    if gift.code is None:
        assert (answer["error"], answer["data"]) == (None, gift.data)
        return
    in_jail = tool == "give_in_jail"
    error = answer["error"]
    assert (error["code"], error["retryable"]) == (gift.code, False)
    assert (gift.in_jail or gift.says if in_jail else gift.says) in error["message"]
    if gift.code == "NO_CITY":
        assert error.get("details") == gift.details
    assert in_jail or CANARY not in json.dumps(answer)
    ended_by = "output" if gift.code == "OUTPUT_LIMIT_EXCEEDED" else "exception"
    assert answer["metadata"]["sandbox"]["ended_by"] == ended_by
    assert answer["data"] == {}
    if not in_jail:  # where each call has a process of its own
        twin = client.call(tool, {"what": "fine"}).body
        assert twin["data"] == {"a": [1, 2.5, None, True, "é"]}
