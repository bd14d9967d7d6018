"""The module `tools` of a program: other tools of the engine, as functions.

Guest side, in the child. A call is sent to the supervisor through the reply pipe, and its answer
arrives through the request pipe. Nothing here is a security check: a program can write the same
frames itself, so the host checks each frame. Descriptions and schemas are data; no source code is
generated from them.
"""

from __future__ import annotations

import inspect
import json
import keyword
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from fumehood.guest.core.pipes import (
    CHUNK_BYTES,
    MAX_CLAIM_BYTES,
    REPLY_FD,
    REQUEST_FD,
    write_all,
)
from fumehood.protocol import framing, strict_json

_TYPES = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict,
}  # fmt: skip

Send = Callable[[str, dict[str, Any]], Any]
"""Calls a tool, given its name and arguments, and returns its answer."""


class ToolError(Exception):
    """A tool call failed or was refused. `error` is the error as the engine has sent it. Its fields
    are also attributes, such as `code` and `message`.
    """

    def __init__(self, error: dict[str, Any]) -> None:
        self.error = error
        self.code = str(error.get("code"))
        self.message = str(error.get("message"))
        self.retryable = error.get("retryable") is True
        self.details = error.get("details")
        super().__init__(f"{self.code}: {self.message}")


ToolError.__module__ = "tools"


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()
"""The default of an optional parameter without a default in its schema. It is never sent."""


class ToolCalls:
    """Sends the tool calls of programs, and receives their answers. `open` must be called before
    each program. In a session, one object serves all programs.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._number = 0

    @property
    def is_open(self) -> bool:
        """Whether this process may call tools now."""
        return self._pid == os.getpid()

    def open(self, writing: threading.Lock) -> None:
        """Allow tool calls from this process. Every thread that writes a frame to the reply pipe
        must hold the lock `writing`.
        """
        self._writing = writing
        self._slots = threading.BoundedSemaphore(framing.MAX_OPEN_CALLS)
        self._changed = threading.Condition()
        self._decoder = framing.Decoder(sys.maxsize)  # the engine limits its answers
        self._is_reading = False
        self._expected: set[int] = set()
        self._answers: dict[int, dict[str, Any]] = {}
        self._pid = os.getpid()

    def close(self) -> None:
        """Refuse further calls. If a frame is being written, first wait until it is complete."""
        if self._pid:
            with self._writing:
                self._pid = 0

    def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool, wait for its answer, and return the answer's data. Any thread may use this
        method.

        Raises:
            ToolError: the call failed, or was refused.
        """
        if not self.is_open:
            raise _refused("Tools can be called only while the program runs, from its own process.")
        with self._slots:
            number = self._send(tool, arguments)
            try:
                answer = self._await(number)
            finally:
                self._expected.discard(number)
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer.get("data")

    def _send(self, tool: str, arguments: dict[str, Any]) -> int:
        with self._writing:
            if not self.is_open:
                raise _refused("The program is over.")
            self._number = number = self._number + 1
            frame = _frame(number, tool, arguments)
            self._expected.add(number)
            write_all(REPLY_FD, frame)
        return number

    def _await(self, number: int) -> dict[str, Any]:
        """Wait for the answer to the call `number`, and return it. If several threads wait, one of
        them reads the answers and passes them on to the others.
        """
        with self._changed:
            while number not in self._answers:
                if self._is_reading:
                    self._changed.wait()
                    continue
                self._is_reading = True
                self._changed.release()
                try:
                    messages = self._read()
                finally:
                    self._changed.acquire()
                    self._is_reading = False
                    self._changed.notify_all()
                for message in messages:
                    if message["call"] in self._expected:
                        self._answers[message["call"]] = message
            return self._answers.pop(number)

    def _read(self) -> list[dict[str, Any]]:
        chunk = os.read(REQUEST_FD, CHUNK_BYTES)
        if not chunk:
            raise _refused("The engine takes no more calls of this program.")
        return [json.loads(body) for body in self._decoder.bodies(chunk)]


def _frame(number: int, tool: str, arguments: dict[str, Any]) -> bytes:
    """Return the encoded message of one tool call. Raises ToolError if the arguments are not JSON,
    or if the message is too long.
    """
    try:
        strict_json.loads(strict_json.dumps(arguments), max_depth=strict_json.MAX_VALUE_DEPTH)
    except (TypeError, ValueError, RecursionError) as fault:
        raise ToolError(
            _error("INVALID_PARAMS", f"The arguments of {tool} are not JSON: {fault}.")
        ) from None
    frame = framing.encode({"call": {"number": number, "tool": tool, "arguments": arguments}})
    if len(frame) > MAX_CLAIM_BYTES:
        raise ToolError(
            _error(
                "REQUEST_TOO_LARGE",
                f"The call of {tool} has {len(frame)} bytes, {MAX_CLAIM_BYTES} are allowed.",
            )
        )
    return frame


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "retryable": False}


def _refused(message: str) -> ToolError:
    return ToolError(_error("PERMISSION_DENIED", message))


# -- the module ----------------------------------------------------------------------------


def make_module(tools: Sequence[dict[str, Any]], call: Send) -> types.ModuleType:
    """Return the module `tools` for a program. The module has one function for each tool
    description in `tools`. Each function makes its tool call with `call`.
    """
    module = types.ModuleType("tools", "Other tools. A call that fails raises ToolError.")
    functions = [_function(tool, call) for tool in tools]
    for function in functions:
        setattr(module, function.__name__, function)
    module.__dict__.update(ToolError=ToolError, ABSENT=ABSENT)
    module.__dict__["__all__"] = [function.__name__ for function in functions] + ["ToolError"]
    return module


def _function(tool: dict[str, Any], call: Send) -> Callable[..., Any]:
    """Return a Python function that calls `tool` with the arguments that the function gets. `call`
    makes the tool call. Arguments with the value `ABSENT` are not sent.
    """
    name, signature = tool["name"], _signature(tool["parameters"])
    others = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as fault:
            raise TypeError(f"{tool['function']}(): {fault}") from None
        arguments |= arguments.pop(others, {})
        try:
            return call(name, {key: v for key, v in arguments.items() if v is not ABSENT})
        except ToolError as failed:
            raise failed.with_traceback(None) from None  # hides the frames of this module

    function.__name__ = function.__qualname__ = tool["function"]
    function.__module__ = "tools"
    function.__doc__ = _documentation(tool)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _signature(parameters: dict[str, Any]) -> inspect.Signature:
    """Return the signature of the function for a tool. `parameters` is the JSON schema of the
    tool's parameters. Required parameters come first, then optional ones, and then `**others` if
    needed. `**others` takes arguments that are not in the schema, or whose names are not valid in
    Python.
    """
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    named = [name for name in properties if _is_plain(name)]
    made = [
        _parameter(name, properties[name], is_required=name in required)
        for name in sorted(named, key=lambda name: name not in required)
    ]
    if len(named) < len(properties) or parameters.get("additionalProperties", False) is not False:
        others = "others"
        while others in named:
            others += "_"
        made.append(inspect.Parameter(others, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(made, return_annotation=dict)


def _is_plain(name: str) -> bool:
    """Return whether `name` can be the name of a parameter of a Python function. Names with
    characters outside ASCII cannot.
    """
    # Python normalizes identifiers, so an argument with a name outside ASCII could not be passed.
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _parameter(name: str, schema: Any, *, is_required: bool) -> inspect.Parameter:
    schema = schema if isinstance(schema, dict) else {}
    kind = schema.get("type")
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=inspect.Parameter.empty if is_required else schema.get("default", ABSENT),
        annotation=_TYPES.get(kind, Any) if isinstance(kind, str) else Any,
    )


def _documentation(tool: dict[str, Any]) -> str:
    properties = tool["parameters"].get("properties") or {}
    lines = [
        f"{name}: {schema['description']}"
        for name, schema in properties.items()
        if isinstance(schema, dict) and "description" in schema
    ]
    return "\n".join([tool["description"], *(["", *lines] if lines else [])])


class Maker:
    """Creates a new module `tools` for each program of this process. In a session, one process runs
    several programs, one after the other.
    """

    def __init__(self) -> None:
        self._calls = ToolCalls()

    def make(self, sent: Any, writing: threading.Lock) -> types.ModuleType:
        """Create and return the module `tools` for a program, and allow tool calls from now on.
        `sent` are the tool descriptions from the host. Every thread that writes a message must hold
        the lock `writing`.
        """
        self._calls.open(writing)
        return make_module(sent, self._calls.call)

    def close(self) -> None:
        """Refuse all further tool calls of the program."""
        self._calls.close()
