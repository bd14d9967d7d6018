"""Defence in depth of restricted programs: each layer holds if the one before it fails.

Each attack works in plain Python. With the syntax table disabled, RestrictedPython refuses it;
with that also disabled, the guards do; and with every table disabled, the system-call filter
of a sealed child does.
"""

from __future__ import annotations

import ast
import signal
from typing import Any

import pytest
from RestrictedPython import compile_restricted_exec, safe_builtins

from adversarial.test_interpreter_wall import REFUSED, WORKED, _ends
from fumehood.guest.interpreter import nodes, restricted
from fumehood.guest.interpreter.nodes import Refused, compile_program

BEYOND_SYNTAX = {
    "class-walk": "().__class__.__base__.__subclasses__()",
    "generator-frame": "(x for x in [1]).gi_frame",
    "guard-rebound": "_getattr_ = max",
    "guard-as-a-parameter": "lambda _getattr_, /: 1",
    "metaclass": "class A(metaclass=max): pass",
    "import-as-a-guard": "from math import sqrt as _getattr_",
    "except-star": "try: pass\nexcept* ValueError: pass",
    "match": "match 1:\n    case _: pass",
    "coroutine": "async def f(): pass",
}
BEYOND_POLICY = {
    "class": ((), "__class__"), "globals": (lambda: 1, "__globals__"), "format": ("", "format"),
    "format-map": ("", "format_map"), "format-unbound": (str, "format"),
    "frame": ((x for x in [1]), "gi_frame"), "code": ((x for x in [1]), "gi_code"),
    "traceback": (ValueError(), "__traceback__"), "with-traceback": (ValueError(), "with_traceback"),
    "object": (AttributeError(), "obj"), "self": ([].append, "__self__"),
    "mro": (int, "mro"), "function": (property(len), "fget"), "own-function": (_ends, "__code__"),
}  # fmt: skip

ESCAPES = {
    "file-through-json": ("import json\njson.codecs.open('/etc/hostname')", REFUSED),
    "file-through-a-class": (
        ("[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'FileLoader'][0]"
        "('x', '/etc/hostname').get_data('/etc/hostname')"), REFUSED),
    "process-through-random": ("import random\nrandom._os.fork() or random._os._exit(0)", signal.SIGSYS),
    "socket-through-a-frame": (
        ("g = (g.gi_frame.f_builtins for _ in [1])\n"
        "next(g)['__import__']('socket').socket()"), signal.SIGSYS),
    "signal-through-statistics": (
        "import os, statistics\nstatistics.sys.modules['os'].kill(os.getppid(), 0)", signal.SIGSYS),
    "command-through-globals": (
        "import re\nre.enum.sys.modules['os'].execv('/bin/true', ['true'])", signal.SIGSYS),
}  # fmt: skip


@pytest.mark.row("S2")
@pytest.mark.parametrize("code", BEYOND_SYNTAX.values(), ids=BEYOND_SYNTAX)
def test_restricted_python_refuses_attack_without_the_syntax_table(code: str) -> None:
    with pytest.raises(Refused):
        nodes.check(ast.parse(code))
    with pytest.raises(Refused):
        compile_program(ast.parse(code))


@pytest.mark.row("S2")
@pytest.mark.parametrize(("holder", "name"), BEYOND_POLICY.values(), ids=BEYOND_POLICY)
def test_attribute_guard_refuses_attack_without_the_compiler(holder: Any, name: str) -> None:
    assert hasattr(holder, name)  # control: it is there to be taken
    run = restricted.Run("", 1000)
    with pytest.raises(Refused):
        run.namespace()["_getattr_"](holder, name)
    assert run._guards.refusal is not None


@pytest.mark.row("S2")
def test_control_program_escapes_with_stock_guards_and_real_modules() -> None:
    """The same language without the import table: one attribute access reaches the system."""
    code = compile_restricted_exec("import statistics\nfound = statistics.sys.modules").code
    namespace: dict[str, Any] = {
        "__builtins__": {**safe_builtins, "__import__": __import__}, "_getattr_": getattr,
    }  # fmt: skip
    exec(code, namespace)
    assert "os" in namespace["found"]


@pytest.mark.row("S2")
@pytest.mark.parametrize(("code", "ends"), ESCAPES.values(), ids=ESCAPES)
def test_wall_stops_escape_with_every_table_disabled(code: str, ends: int) -> None:
    assert restricted.Run(code, 1000).reply()["error"]["kind"] == "policy"

    def run() -> None:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})

    expected = (None, ends) if ends == signal.SIGSYS else (ends, None)
    assert _ends(run, sealed=True) == expected


@pytest.mark.parametrize("code", [code for code, _ in ESCAPES.values()], ids=ESCAPES)
def test_control_same_escape_works_without_the_wall(code: str) -> None:
    exit_code, signal_number = _ends(
        lambda: exec(compile(code, "<code>", "exec"), {"__name__": "__main__"}), sealed=False
    )
    assert signal_number is None
    assert exit_code in (WORKED, 0)  # 0: another program took the process over


@pytest.mark.row("S2")
def test_program_builtins_match_the_table() -> None:
    extra = set(nodes.BUILT_INS) - set(nodes.STATIC)
    assert extra == {"__import__", "__build_class__"}
