"""Expressions and restricted programs that attack the interpreter wall.

The interpreter refuses these programs before they run, because its tables of permitted syntax and
names do not contain what they use. As a second defence, the process that runs a program is sealed.
The attacks' checks confirm this from outside the process.
"""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.attack.attack import Attack, Harm, Language, Look, Topic, ends

CALCULATOR, RESTRICTED = Language.CALCULATOR, Language.RESTRICTED
REFUSED = ends("policy")
SLOW = "pow(7, 10**4200, 10**4200 + 7)"
"""An expression that calculates for some seconds and cannot be interrupted."""

_REFUSED = (
    # id, harm, what it tries, language, attack, twin
    ("big-power", Harm.SELF_DOS, "a tower of powers", CALCULATOR, "9**9**9", "9**9"),
    ("big-factorial", Harm.SELF_DOS, "the factorial of a million", CALCULATOR, "factorial(10**6)",
     "factorial(10)"),
    ("big-shift", Harm.SELF_DOS, "a number of a billion bits", CALCULATOR, "1 << 10**9", "1 << 9"),
    ("big-list", Harm.SELF_DOS, "a list of a billion elements", CALCULATOR, "[0]*10**9", "[0]*10"),
    ("read-host-file", Harm.HOST_LEAK, "open a file of the host", RESTRICTED,
     "open('@FILE@').read()", "str('@FILE@')"),
    ("read-host-file-full-width", Harm.HOST_LEAK, "open a file under another spelling (PEP 3131)",
     RESTRICTED, "ｏｐｅｎ('@FILE@').read()", "ｓｔｒ('@FILE@')"),
    ("open-in-an-expression", Harm.HOST_LEAK, "open a file from an expression", CALCULATOR,
     "open('@FILE@')", "abs(1)"),
    ("import-system", Harm.ESCAPE, "import the module of system functions", RESTRICTED, "import os",
     "import math"),
    ("import-by-function", Harm.ESCAPE, "import by calling the function itself", RESTRICTED,
     "__import__('os')", "import math"),
    ("reach-loopback", Harm.EXFIL, "connect to a listener on the host's loopback", RESTRICTED,
     "import socket\nsocket.create_connection(('127.0.0.1', @PORT@)).sendall(b'@KNOCK@')",
     "import json\njson.dumps(1)"),
    ("evaluate", Harm.ESCAPE, "evaluate text", RESTRICTED, "eval('1')", "int('1')"),
    ("class-walk", Harm.ESCAPE, "walk from a tuple to every class (CVE-2025-9959)", RESTRICTED,
     "().__class__.__base__.__subclasses__()", "().count(1)"),
    ("class-walk-in-an-expression", Harm.ESCAPE, "the same from an expression", CALCULATOR,
     "().__class__.__base__.__subclasses__()", "()"),
    ("frame-walk", Harm.ESCAPE, "walk from a generator to its caller (CVE-2023-37271)", RESTRICTED,
     "(x for x in [1]).gi_frame.f_back", "list(x for x in [1])"),
    ("function-globals", Harm.ESCAPE, "walk from a library's function to its module", RESTRICTED,
     "import statistics\nstatistics.mean.__globals__['sys']",
     "import statistics\nstatistics.mean([1, 2])"),
    ("traceback-walk", Harm.ESCAPE, "walk from an error to the frames below it", RESTRICTED,
     "try: 1/0\nexcept Exception as e: e.__traceback__.tb_frame",
     "try: 1/0\nexcept Exception as e: e.args"),
    ("format-walk", Harm.ESCAPE, "walk within a format (CVE-2025-24359)", CALCULATOR,
     "f'{sqrt.__self__}'", "sqrt(4)"),
    ("get-attribute", Harm.ESCAPE, "read an attribute by its name as text", RESTRICTED,
     "getattr((), 'count')", "().count(1)"),
    ("builtins-name", Harm.ESCAPE, "name the table of built-in functions", RESTRICTED,
     "__builtins__", "max"),
)  # fmt: skip
_QUICK = {"big-power", "read-host-file", "import-system", "class-walk", "frame-walk"}
_TOPICS = {"big": Topic.FLOOD, "read": Topic.HOST, "open": Topic.HOST, "reach": Topic.NETWORK}


def _rows() -> Iterator[Attack]:
    for name, harm, tries, language, code, twin in _REFUSED:
        topic = _TOPICS.get(name.split("-")[0], Topic.LANGUAGE)
        yield Attack(
            name, topic, harm, tries, language, code, REFUSED, twin, is_quick=name in _QUICK
        )


_FLOODS = (
    Attack(
        "output-flood", Topic.FLOOD, Harm.HOST_DOS, "print endlessly", RESTRICTED,
        code="for n in range(1000000): print('x' * 1000)",
        expected=ends("output"),
        twin="print('x')\n1",
        is_quick=True,
    ),
    Attack(
        "memory-hog", Topic.FLOOD, Harm.HOST_DOS, "use four times the memory", RESTRICTED,
        code="held = []\nfor n in range(256): held.append(bytearray(1000000))\nlen(held)",
        expected=ends("memory"),
        twin="len(bytearray(1000000))",
        twin_gives=1_000_000,
        is_quick=True,
    ),
    Attack(
        "cpu-spin", Topic.FLOOD, Harm.HOST_DOS, "compute past the deadline", RESTRICTED,
        code="total = 0\nfor n in range(10**9): total += n",
        expected=ends("wall_time"),
        twin="sum(range(1000))",
        looks=(Look.PROCESSES, Look.UNBROKEN),
        wall_s=0.5,
        is_quick=True,
    ),
    Attack(
        "one-long-step", Topic.FLOOD, Harm.HOST_DOS,
        "pass the deadline in one step that cannot be interrupted", CALCULATOR,
        code=f"{SLOW} + {SLOW}",
        expected=ends("wall_time"),
        twin="pow(7, 4, 9)",
        looks=(Look.PROCESSES, Look.UNBROKEN),
        wall_s=0.5,
    ),
)  # fmt: skip

_GUEST = (
    Attack(
        "capabilities", Topic.RIGHTS, Harm.ESCAPE, "hold privileges, or run without a filter",
        RESTRICTED,
        code="total = 0\nfor n in range(10**9): total += n",
        expected=ends("wall_time"),
        twin="1",
        looks=(Look.SEALED,),
        wall_s=0.4,
        is_quick=True,
    ),
    Attack(
        "left-names", Topic.RESET, Harm.LATERAL, "find names of the previous program",
        RESTRICTED,
        before="import math\nleft = 42\nmath.pi",
        code="left",
        expected=ends("exception"),
        twin="left = 42\nleft",
        twin_gives=42,
        is_quick=True,
    ),
)  # fmt: skip

ATTACKS = (*_FLOODS, *_rows(), *_GUEST)
