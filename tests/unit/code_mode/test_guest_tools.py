"""The module `tools` in a program: signatures, what is sent, and calls from many threads."""

from __future__ import annotations

import inspect
import json
import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from fumehood.guest.core.pipes import MAX_CLAIM_BYTES
from fumehood.guest.given import tools
from fumehood.guest.given.tools import ABSENT, ToolCalls, ToolError, make_module
from fumehood.protocol import framing
from fumehood.protocol.framing import MAX_OPEN_CALLS

pytestmark = pytest.mark.row("B3")

PROPERTIES = {
    "limit": {"type": "integer", "default": 10},
    "query": {"type": "string", "description": "The words."},
    "from": {"type": "string"},
    "page": {"type": ["integer", "null"]},
}


def spec(name: str = "search", **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": PROPERTIES, "required": ["query"]}
    return {
        "name": name, "function": name.replace("-", "_"), "description": "Search.",
        "parameters": parameters, **fields,
    }  # fmt: skip


def sent_by(made: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[str, Any]:
    """The call that a function makes of its arguments."""
    seen: list[tuple[str, Any]] = []
    module = make_module([made], lambda name, arguments: seen.append((name, arguments)))
    getattr(module, made["function"])(*args, **kwargs)
    return seen[0]


def test_tool_function_has_the_signature_and_docstring_of_its_schema() -> None:
    function = make_module([spec()], lambda name, arguments: None).search
    assert str(inspect.signature(function)) == (
        "(query: str, limit: int = 10, page: Any = ABSENT, **others) -> dict"
    )
    assert inspect.getdoc(function) == "Search.\n\nquery: The words."
    assert (function.__name__, function.__module__) == ("search", "tools")


def test_only_given_arguments_of_a_tool_function_are_sent() -> None:
    assert sent_by(spec(), "a") == ("search", {"query": "a"})
    assert sent_by(spec(), "a", 5, page=None)[1] == {"query": "a", "limit": 5, "page": None}
    assert sent_by(spec(), query="a", page=ABSENT)[1] == {"query": "a"}
    assert sent_by(spec(), "a", **{"from": "b"})[1] == {"query": "a", "from": "b"}
    assert sent_by(spec() | {"name": "search@1.2.0"}, "a")[0] == "search@1.2.0"


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), (("a", 1, 2, 3), {}), (("a",), {"query": 1})]
)
def test_wrong_arguments_raise_a_type_error_naming_the_function(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError, match=r"search\(\): "):
        sent_by(spec(), *args, **kwargs)


def test_unknown_argument_is_refused_for_a_closed_schema() -> None:
    closed = spec(parameters={"type": "object", "properties": {"query": {}}})
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        sent_by(closed, "a", x=1)
    opened = spec(parameters={"properties": {"others": {}}, "additionalProperties": {}})
    assert sent_by(opened, others=1, x=2)[1] == {"others": 1, "x": 2}


HOSTILE = '"""\nimport os; os.environ["CANARY"] = "1"\n"""); raise SystemExit #'


def test_hostile_definition_text_is_never_executed() -> None:
    os.environ.pop("CANARY", None)
    properties = {HOSTILE: {"description": HOSTILE, "default": HOSTILE}, "a": {"default": HOSTILE}}
    made = spec(description=HOSTILE, parameters={"properties": properties, "required": [HOSTILE]})
    module = make_module([made], lambda name, arguments: arguments)
    assert module.search(**{HOSTILE: 1}) == {HOSTILE: 1}
    assert inspect.signature(module.search).parameters["a"].default == HOSTILE
    assert HOSTILE in (module.search.__doc__ or "")
    assert "CANARY" not in os.environ


# -- calls ---------------------------------------------------------------------------------


@dataclass
class Supervisor:
    """The other end of both pipes. It answers a call when the test says so."""

    calls_fd: int
    answers_fd: int
    decoder: framing.Decoder = field(default_factory=lambda: framing.Decoder(1 << 20))

    def calls(self, count: int) -> list[dict[str, Any]]:
        """The next calls."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            found += [one["call"] for one in self.decoder.feed(os.read(self.calls_fd, 1 << 16))]
        return found

    def sends(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        os.write(self.answers_fd, struct.pack("!I", len(body)) + body)

    def answers(self, call: dict[str, Any], data: Any) -> None:
        self.sends({"call": call["number"], "data": data})


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    calls_read, calls_write = os.pipe()
    answers_read, answers_write = os.pipe()
    monkeypatch.setattr(tools, "REPLY_FD", calls_write)
    monkeypatch.setattr(tools, "REQUEST_FD", answers_read)
    yield Supervisor(calls_read, answers_write)
    for descriptor in (calls_read, calls_write, answers_read):
        os.close(descriptor)


@pytest.fixture
def calls() -> ToolCalls:
    made = ToolCalls()
    made.open(threading.Lock())
    return made


def test_tool_calls_over_the_limit_of_open_calls_wait(
    supervisor: Supervisor, calls: ToolCalls
) -> None:
    with ThreadPoolExecutor(MAX_OPEN_CALLS + 1) as pool:
        asked = [pool.submit(calls.call, "t", {}) for _ in range(MAX_OPEN_CALLS + 1)]
        first = supervisor.calls(MAX_OPEN_CALLS)
        os.set_blocking(supervisor.calls_fd, False)
        with pytest.raises(BlockingIOError):
            supervisor.calls(1)
        os.set_blocking(supervisor.calls_fd, True)
        supervisor.answers(first[0], None)
        for call in (*first[1:], *supervisor.calls(1)):
            supervisor.answers(call, None)
        assert [one.result(10) for one in asked] == [None] * len(asked)


def test_unexpected_answer_is_dropped(supervisor: Supervisor, calls: ToolCalls) -> None:
    supervisor.sends({"call": 99, "data": "another's"})
    supervisor.sends({"call": 1, "data": "mine"})
    assert calls.call("t", {}) == "mine"


DEEP: Any = []
for _ in range(100):
    DEEP = [DEEP]

UNFIT = {
    "nan": ({"a": float("nan")}, "INVALID_PARAMS"),
    "bytes": ({"a": b"x"}, "INVALID_PARAMS"),
    "surrogate": ({"a": "\ud800"}, "INVALID_PARAMS"),
    "deep": ({"a": DEEP}, "INVALID_PARAMS"),
    "one-key-twice": ({1: "a", "1": "b"}, "INVALID_PARAMS"),
    "large": ({"a": "x" * MAX_CLAIM_BYTES}, "REQUEST_TOO_LARGE"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_arguments_that_json_cannot_represent_raise_and_the_next_call_works(
    name: str, supervisor: Supervisor, calls: ToolCalls
) -> None:
    arguments, code = UNFIT[name]
    with pytest.raises(ToolError) as raised:
        calls.call("t", arguments)
    assert raised.value.code == code
    supervisor.sends({"call": 2, "data": 1})
    assert calls.call("t", {}) == 1


def test_closed_pipe_ends_every_waiting_tool_call(supervisor: Supervisor, calls: ToolCalls) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(calls.call, "t", {}) for _ in range(4)]
        supervisor.calls(4)
        os.close(supervisor.answers_fd)
        for one in asked:
            with pytest.raises(ToolError, match="takes no more calls"):
                one.result(10)
