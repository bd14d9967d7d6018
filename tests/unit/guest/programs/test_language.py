"""The language of programs: what works, and what a program gets back where it fails."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.guest.interpreter import restricted
from fumehood.guest.interpreter.restricted import OutputFull

MAX_BYTES = 65_536


def _reply(code: str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    return restricted.run({"arguments": {"code": code}, "output_bytes": max_bytes})


def _value(code: str) -> Any:
    reply = _reply(code)
    assert "result" in reply, reply
    return reply["result"]["value"]


def _error(code: str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    reply = _reply(code, max_bytes)
    assert "error" in reply, reply
    error: dict[str, Any] = reply["error"]
    return error


PROGRAMS = {
    "loops": ("t = 0\nfor i in range(5):\n    if i == 3: continue\n    t += i\nelse:\n    t += 100\nt", 107),
    "while": ("n = 27\ns = 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    s += 1\ns", 111),
    "comprehensions": ("[[x for x in range(3) if x], {x % 2 for x in [1, 3]} == {1}, {k: 1 for k in 'a'}]",
                       [[1, 2], True, {"a": 1}]),
    "nested comprehension": ("[(x, y) for x in range(2) for y in range(x + 1)]", [[0, 0], [1, 0], [1, 1]]),
    "functions": ("def f(a, /, b, *c, d=4, **e): return [a, b, c, d, e]\nf(1, 2, 3, x=5)",
                  [1, 2, [3], 4, {"x": 5}]),
    "starred call": ("def f(*a, **k): return [a, k]\nf(*[1, 2], **{'function': 3})", [[1, 2], {"function": 3}]),
    "closure": (("def c():\n    n = 0\n    def i():\n        nonlocal n\n        n += 1\n        return n\n"
                "    return i\nf = c()\nf()\nf()"), 2),
    "global": ("x = 1\ndef f():\n    global x\n    x += 1\nf()\nx", 2),
    "lambda": ("sorted(['bb', 'a'], key=lambda w: len(w))", ["a", "bb"]),
    "generator": ("def g():\n    got = yield 1\n    yield got\ni = g()\n[next(i), i.send(5)]", [1, 5]),
    "yield from": ("def g():\n    yield from [1, 2]\nlist(g())", [1, 2]),
    "unpacking": ("a, (b, *c) = 1, (2, 3, 4)\nfor d, (e, f) in [(5, (6, 7))]: pass\n[a, b, c, d, e, f]",
                  [1, 2, [3, 4], 5, 6, 7]),
    "slices": ("x = list(range(6))\nx[1:3] = [9]\ndel x[-1]\n[x, x[::-1], 'abc'[1:]]",
               [[0, 9, 3, 4], [4, 3, 9, 0], "bc"]),
    "augmented items": (("d = {'a': [1]}\nd['a'][0] += 4\nd['b'] = 2\nd['b'] **= 3\nx = [1, 2]\n"
                        "x[0:1] += [7]\n[d, x]"), [{"a": [5], "b": 8}, [1, 7, 2]]),
    "augmented once": ("n = []\ndef i():\n    n.append(1)\n    return 0\nx = [1]\nx[i()] += 1\n[x, len(n)]",
                       [[2], 1]),
    "walrus": ("[y for x in range(4) if (y := x * 2) > 2]", [4, 6]),
    "f-string": ("w = 6\nf'{1/3:.{w - 3}f} {\"a\"!r:>{w}} {{}} {w=}'", "0.333    'a' {} w=6"),
    "try": (("def f(x):\n    try:\n        return 1 / x\n    except ZeroDivisionError as e:\n"
            "        return str(e)\n    finally:\n        print('f')\n[f(1), f(0)]"), [1.0, "division by zero"]),
    "raise from": (("class E(ValueError):\n    def __init__(self, n):\n        super().__init__(f'n {n}')\n"
                   "        self.n = n\ntry:\n    raise E(4) from None\nexcept E as e:\n    x = [e.n, e.args, str(e)]\nx"),
                   [4, ["n 4"], "n 4"]),
    "class": (("class P:\n    made = 0\n    def __init__(self, x):\n        self.x = x\n        P.made += 1\n"
              "    def __add__(self, o): return P(self.x + o.x)\n    def __eq__(self, o): return self.x == o.x\n"
              "    def __len__(self): return self.x\n    def __getitem__(self, i): return i * self.x\n"
              "    def __contains__(self, i): return i == self.x\n    def __call__(self, y): return self.x * y\n"
              "p = P(1) + P(2)\np.x += 1\n[p.x, len(p), p[2], 4 in p, p(10), p == P(4), P.made]"),
              [4, 4, 8, True, 40, True, 4]),
    "inheritance": (("class A:\n    def __init__(self): self.log = ['A']\n    def f(self): return 1\n"
                    "class B(A):\n    def __init__(self):\n        super().__init__()\n        self.log.append('B')\n"
                    "    def f(self): return super().f() + 1\nb = B()\n[b.log, b.f(), isinstance(b, A), type(b).__name__]"),
                    [["A", "B"], 2, True, "B"]),
    "property": (("class T:\n    def __init__(self): self.c = 1\n    @property\n    def f(self): return self.c * 2\n"
                 "    @f.setter\n    def f(self, v): self.c = v\nt = T()\nt.f = 4\nt.f += 1\nt.f"), 18),
    "class and static methods": (("class A:\n    @classmethod\n    def make(cls): return cls()\n    @staticmethod\n"
                                 "    def two(): return 2\n    def n(self): return A.two()\nA.make().n()"), 2),
    "iterator class": (("class R:\n    def __init__(self): self.n = 0\n    def __iter__(self): return self\n"
                       "    def __next__(self):\n        self.n += 1\n        if self.n > 3: raise StopIteration\n"
                       "        return self.n\nlist(R())"), [1, 2, 3]),
    "decorator": (("import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(*a):\n        f(*a)\n"
                  "        return f(*a)\n    return g\n@twice\ndef h(x): return x + 1\n[h(1), h.__name__]"), [2, "h"]),
    "memory of calls": (("import functools\n@functools.lru_cache(maxsize=None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n"
                        "[f(50), f.cache_info().misses]"), [12586269025, 51]),
    "ordering": (("import functools\n@functools.total_ordering\nclass V:\n    def __init__(self, v): self.v = v\n"
                 "    def __eq__(self, o): return self.v == o.v\n    def __lt__(self, o): return self.v < o.v\n"
                 "[V(2) >= V(1), V(1) > V(2)]"), [True, False]),
    "named tuple": (("from collections import namedtuple\nP = namedtuple('P', 'x y', defaults=[5])\np = P(1)\nx, y = p\n"
                    "[p.x, p.y, x + y, p == (1, 5), repr(P(y=2, x=3)), p[0]]"), [1, 5, 6, True, "P(x=3, y=2)", 1]),
    "named tuple as a base": (("from collections import namedtuple\nclass P(namedtuple('B', ['x'])):\n"
                              "    def double(self): return self.x * 2\nP(4).double()"), 8),
    "containers": (("from collections import Counter, defaultdict, deque, OrderedDict\nd = defaultdict(list)\n"
                   "d['a'].append(1)\nd['b'] += [2]\nc = Counter('hello')\nc['z'] += 3\nq = deque([1, 2], maxlen=2)\n"
                   "q.append(3)\n[dict(d), c.most_common(2), list(q), list(OrderedDict(a=1))]"),
                   [{"a": [1], "b": [2]}, [["z", 3], ["l", 2]], [2, 3], ["a"]]),
    "annotations": (("from __future__ import annotations\nfrom typing import Generic, List, Optional, TypeVar\n"
                    "T = TypeVar('T')\nGrid = List[List[int]]\nclass S(Generic[T]):\n    n: int = 0\n    m: Nowhere\n"
                    "def f(x: Optional[int | str] = None) -> 'List[T]': return [x]\nx: int = 3\n[f(1), S.n, x]"), [[1], 0, 3]),
    "main": ("def main(): return 5\nr = 0\nif __name__ == '__main__':\n    r = main()\nr", 5),
    "own name of Python's": ("input = [1]\ndef open(x): return x\nopen(input)", [1]),
    "conditional": ("1 if 2 > 1 else 0", 1),
    "assert": ("try:\n    assert 1 == 2, 'no'\nexcept AssertionError as e:\n    x = e.args\nx", ["no"]),
    "caught": ("try:\n    raise MemoryError\nexcept MemoryError:\n    x = 1\nx", 1),
    "no value": ("x = 1", None),
    "empty": ("", None),
    "text": ("'ä'.upper() + 'a,b'.split(',')[1] + '%s' % 1", "Äb1"),
    "several of one kind": ("a = b = [1]\na is b", True),
}  # fmt: skip


@pytest.mark.row("S2")
@pytest.mark.parametrize(("code", "value"), PROGRAMS.values(), ids=PROGRAMS)
def test_program_evaluates_to_the_expected_value(code: str, value: Any) -> None:
    assert _value(code) == value


WRONG_ARGUMENTS = {
    # a call with arguments that the function does not take, and what a program is told
    "type('X', (), {})": "type() takes 1 argument here, and 3 were given",
    "type()": "type() takes 1 argument here, and 0 were given",
    "type(1, x=2)": "type() takes 1 argument here, and 2 were given",
    "print(1, colour=2)": "print() got an unexpected keyword argument 'colour'",
    "from collections import namedtuple\nnamedtuple('A')":
        "namedtuple() missing 1 required positional argument: 'field_names'",
    "from collections import namedtuple\nnamedtuple('A', 'x', 1)":
        "namedtuple() takes 2 positional arguments but 3 were given",
    "from collections import namedtuple\nnamedtuple('A', 'x', rename=True)":
        "namedtuple() got an unexpected keyword argument 'rename'",
    "from functools import total_ordering\ntotal_ordering()":
        "total_ordering() missing 1 required positional argument: 'cls'",
    "from functools import total_ordering\ntotal_ordering(1, 2)":
        "total_ordering() takes 1 positional argument but 2 were given",
    "from functools import wraps\nwraps()": "wraps() missing 1 required positional argument: 'wrapped'",
    "from functools import wraps\nwraps(print)(1, 2)":
        "wraps() takes 1 positional argument but 2 were given",
    "print(**1)": "function() argument after ** must be a mapping, not int",
    "print(**{'sep': ''}, sep='')": "function() got multiple values for keyword argument 'sep'",
    "import math\nmath()": "'module' object is not callable",
    "import json\njson.dumps()": "dumps() missing 1 required positional argument: 'obj'",
    "import json\njson.dumps(1, 2)": "dumps() takes 1 positional argument but 2 were given",
    "import json\njson.loads('1', 2)": "loads() takes 1 positional argument but 2 were given",
    "import copy\ncopy.copy()": "copy() missing 1 required positional argument: 'x'",
    "import copy\ncopy.deepcopy(1, 2)": "deepcopy() takes 1 positional argument but 2 were given",
    "from typing import cast\ncast(int)": "cast() missing 1 required positional argument: 'value'",
}  # fmt: skip


@pytest.mark.parametrize(("code", "message"), WRONG_ARGUMENTS.items())
def test_wrong_arguments_raise_the_message_of_python(code: str, message: str) -> None:
    exception = _error(code)["details"]["exception"]
    assert (exception["type"], exception["message"]) == ("TypeError", message)


def test_print_is_collected_in_order_from_everywhere() -> None:
    code = (
        "print('a', 1, sep='-', end='')\ndef f():\n    print(' b')\nf()\n"
        "class A:\n    print('c')\n    def __str__(self): return 'own'\n"
        "print(A())\nlist(map(print, [1]))\n[print(x) for x in 'd']\nprint(end='e', flush=True)"
    )
    result = _reply(code)["result"]
    assert result["stdout"] == "a-1 b\nc\nown\n1\nd\ne"
    assert result["value"] is None
    assert result["value_repr"] is None


VALUES = [
    ("None", None, None),
    ("2**53 - 1", 2**53 - 1, "9007199254740991"),
    ("2**53", None, "9007199254740992"),
    ("float('nan')", None, "nan"),
    ("(1, 2)", [1, 2], "(1, 2)"),
    ("{1: 2}", None, "{1: 2}"),
    ("{'a': {1}}", None, "{'a': {1}}"),
    ("{3}", None, "{3}"),
    ("b'a'", None, "b'a'"),
    ("'\\ud800'", None, "'\\ud800'"),
    ("class A: pass\nA()", None, "<A object>"),
    ("10**5000", None, "an integer of 16610 bits"),
    ("[10**5000]", None, "[an integer of 16610 bits]"),
    ("x = []\nx.append(x)\nx", None, "[" * 50 + "[[...]]" + "]" * 50),
]


@pytest.mark.parametrize(("code", "value", "text"), VALUES)
def test_value_is_returned_as_json_or_as_text(code: str, value: Any, text: str | None) -> None:
    result = _reply(code)["result"]
    assert (result["value"], result["value_repr"]) == (value, text)


def test_repr_of_a_huge_value_is_cut_without_being_computed() -> None:
    text = restricted.short_repr(["x " * 10**7] * 10**5)
    assert restricted.MAX_REPR_CHARACTERS - 2 <= len(text) <= restricted.MAX_REPR_CHARACTERS
    assert text.rstrip("…").rstrip().endswith("x x")


def test_oversized_value_is_refused_before_it_is_walked() -> None:
    with pytest.raises(OutputFull):
        restricted.json_value([[0] * 10**6] * 10**6, 1000)


def test_traceback_through_a_library_shows_nothing_of_the_library() -> None:
    code = "import statistics\ndef f(): return statistics.mean([])\nf()"
    exception = _error(code)["details"]["exception"]
    assert exception["type"] == "StatisticsError"
    assert ".py" not in exception["traceback"]
    assert exception["traceback"].count("File") == 2


def test_traceback_of_a_deep_recursion_is_short() -> None:
    exception = _error("def f(): return f()\nf()")["details"]["exception"]
    assert exception["type"] == "RecursionError"
    assert len(exception["traceback"].splitlines()) < 30


def test_exception_with_a_failing_message_is_reported() -> None:
    code = "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E()"
    exception = _error(code)["details"]["exception"]
    assert (exception["type"], exception["message"]) == ("E", "")


def test_syntax_error_has_a_line() -> None:
    error = _error("x = 1\ny = (")
    assert error["kind"] == "exception"
    assert error["details"]["exception"]["line"] == 2
    assert error["details"]["exception"]["type"] == "SyntaxError"


REFUSED = {
    "before it runs": ("print(1)\n().__class__", ""),
    "while it runs": ("print(1)\n'a'.format()", "1\n"),
    "swallowed": ("print(1)\ndef f():\n    try:\n        'a'.format()\n    finally:\n        return\nf()\nprint(2)", "1\n2\n"),
}  # fmt: skip


@pytest.mark.row("S2")
@pytest.mark.parametrize(("code", "printed"), REFUSED.values(), ids=REFUSED)
def test_refused_program_ends_with_a_policy_error_even_if_it_catches_it(
    code: str, printed: str
) -> None:
    error = _error(code)
    assert error["kind"] == "policy"
    assert error["details"]["stdout"] == printed
    assert "(line " in error["message"]


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    "code",
    ["while True: print('x' * 100)", "print('x' * 10**6)", "'x' * 3000", "list(range(10**6))",
     "print('\\n' * 1500)", "try:\n    print('y' * 5000)\nfinally:\n    print('z')"],
)  # fmt: skip
def test_output_over_the_limit_keeps_its_beginning(code: str) -> None:
    error = _error(code, 2048)
    assert error["kind"] == "output"
    assert len(error["details"]["stdout"]) <= 2048
