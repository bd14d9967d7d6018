"""The boundary of restricted programs: attempts to escape from the language or its process.

Each attack ends with exactly its code, its harmless twin succeeds in the same engine, no answer
contains anything from the host, and the host is unchanged afterwards.
"""

from __future__ import annotations

import json

import pytest

from adversarial.test_interpreter import leaks
from fumehood.attack.attack import Language
from support.attacks import Attack, Harm, refused_by_language
from support.http import SocketClient
from support.processes import children_of_guest, guest_of, is_gone
from support.wait import wait_until

POLICY, FAILED = "SANDBOX_VIOLATION", "EXECUTION_ERROR"
ESCAPE, LEAK, DOS = Harm.ESCAPE, Harm.HOST_LEAK, Harm.SELF_DOS

ATTACKS = [
    *refused_by_language(Language.RESTRICTED),
    # names of Python's that are not for programs
    Attack("open-full-width", LEAK, "ｏｐｅｎ('/etc/passwd')", POLICY, "ｓｔｒ('x')",
           "PEP 3131: identifiers are normalised (NFKC)"),
    Attack("open-by-alias", LEAK, "f = open\nf('/etc/passwd')", POLICY, "f = str\nf('x')"),
    Attack("open-as-a-default", LEAK, "def f(o=open): return o('/etc/passwd')\nf()", POLICY,
           "def f(o=str): return o('x')\nf()"),
    Attack("open-in-a-lambda-default", LEAK, "(lambda o=open: o(3))()", POLICY,
           "(lambda o=str: o(3))()"),
    Attack("open-as-a-decorator", LEAK, "@open\ndef f(): pass", POLICY,
           "@staticmethod\ndef f(): pass"),
    Attack("open-in-a-class-body", LEAK, "class A:\n    f = open", POLICY, "class A:\n    f = str"),
    Attack("open-in-an-f-string", LEAK, "f'{open(3)}'", POLICY, "f'{str(3)}'"),
    Attack("open-in-a-format-spec", LEAK, "f'{1:{open(3)}}'", POLICY, "f'{1:{5}}'"),
    Attack("open-after-being-bound", LEAK, "def g():\n    open = 1\nopen('/etc/passwd')", FAILED,
           "def g():\n    open = 1\n    return open\ng()"),
    Attack("eval-aliased", ESCAPE, "e = eval\ne('1')", POLICY, "e = int\ne('1')"),
    Attack("exec", ESCAPE, "exec('x = 1')", POLICY, "x = 1"),
    Attack("compile", ESCAPE, "compile('1', 'a', 'eval')", POLICY, "int('1')"),
    Attack("import-function-full-width", ESCAPE, "_＿import＿＿('os')", POLICY, "import math",
           "PEP 3131: a full-width low line is a low line, but for the first"),
    Attack("builtins-full-width", ESCAPE, "__ｂｕｉｌｔｉｎｓ__", POLICY, "ｍａｘ"),
    Attack("setattr", ESCAPE, "class A: pass\nsetattr(A, 'x', 1)", POLICY,
           "class A: pass\nA.x = 1"),
    Attack("vars", ESCAPE, "vars()", POLICY, "dict()"),
    Attack("globals", ESCAPE, "globals()['__builtins__']", POLICY, "dict(a=1)['a']"),
    Attack("locals", ESCAPE, "locals()", POLICY, "dict()"),
    Attack("dir", Harm.INTERNAL_READ, "dir([])", POLICY, "list([])"),
    Attack("id", Harm.INTERNAL_READ, "id([])", POLICY, "len([])"),
    Attack("input", DOS, "input()", POLICY, "str()"),
    Attack("breakpoint", ESCAPE, "breakpoint()", POLICY, "print()"),
    Attack("memoryview", Harm.INTERNAL_READ, "memoryview(b'a')", POLICY, "bytearray(b'a')"),
    Attack("base-exception", DOS, "try: 1/0\nexcept BaseException: 1", POLICY,
           "try: 1/0\nexcept Exception: 1"),
    Attack("type-with-three-arguments", ESCAPE, "type('A', (object,), {'__del__': 1})", FAILED,
           "type(1)"),
    Attack("type-of-a-type", ESCAPE, "type(type(1))", POLICY, "type(1)"),
    Attack("type-of-a-function", ESCAPE, "type(lambda: 1)", POLICY, "type('a')"),
    Attack("type-of-a-module", ESCAPE, "import math\ntype(math)", POLICY, "type(1.5)"),
    # attributes: the walks that have worked elsewhere
    Attack("class-walk-full-width", ESCAPE, "().__ｃｌａｓｓ__", POLICY, "().ｃｏｕｎｔ(1)",
           "PEP 3131"),
    Attack("function-globals", ESCAPE, "def f(): pass\nf.__globals__", POLICY,
           "def f(): pass\nf.__name__"),
    Attack("function-code", ESCAPE, "def f(): pass\nf.__code__", POLICY, "def f(): pass\nf()"),
    Attack("function-defaults-set", ESCAPE, "def f(a=1): pass\nf.__defaults__ = (2,)", POLICY,
           "def f(a=1): return a\nf(2)"),
    Attack("generator-code", ESCAPE, "(x for x in [1]).gi_code", POLICY, "next(x for x in [1])",
           "CVE-2023-37271"),
    Attack("generator-yield-from", ESCAPE, "def g():\n    yield from [1]\ng().gi_yieldfrom", POLICY,
           "def g():\n    yield from [1]\nlist(g())"),
    Attack("generator-frame-of-a-library", ESCAPE,
           "import heapq\nheapq.merge([1], [2]).gi_frame.f_globals", POLICY,
           "import heapq\nlist(heapq.merge([1], [2]))"),
    Attack("generator-frame-while-running", ESCAPE,
           "def f():\n    global x, f\n    x = g.gi_frame\n    yield\ng = f()\ng.send(None)", POLICY,
           "def f():\n    x = 1\n    yield x\ng = f()\ng.send(None)", "CVE-2023-37271"),
    Attack("with-traceback", ESCAPE, "try: 1/0\nexcept Exception as e: e.with_traceback(None)",
           POLICY, "try: 1/0\nexcept Exception as e: str(e)"),
    Attack("with-traceback-inherited", ESCAPE,
           "class P:\n    def with_traceback(self, t): pass\nclass E(Exception, P): pass\n"
           "E().with_traceback(None)", POLICY,
           "class P:\n    def shown(self, t): return t\nclass E(Exception, P): pass\n"
           "E().shown(None)"),
    Attack("with-traceback-by-super", ESCAPE,
           "class E(Exception):\n    def with_traceback(self, t):\n"
           "        return super().with_traceback(t)\nE().with_traceback(None)", POLICY,
           "class B(Exception):\n    def say(self): return 1\nclass E(B):\n"
           "    def say(self): return super().say()\nE().say()"),
    Attack("exception-context", ESCAPE, "try: 1/0\nexcept Exception as e: e.__context__", POLICY,
           "try: 1/0\nexcept Exception as e: repr(e)"),
    Attack("exception-object", ESCAPE, "import math\ntry: [].nope\nexcept AttributeError as e: e.obj",
           POLICY, "try: [].nope\nexcept AttributeError as e: e.args", "CVE-2024-47532"),
    Attack("exception-name", Harm.INTERNAL_READ, "try: nope\nexcept NameError as e: e.name", POLICY,
           "try: nope\nexcept NameError as e: e.args", "CVE-2024-47532"),
    Attack("exception-note", Harm.INTEGRITY, "try: 1/0\nexcept Exception as e: e.add_note('x')",
           POLICY, "try: 1/0\nexcept Exception as e: e.args"),
    Attack("exception-star", ESCAPE, "try: 1/0\nexcept* ZeroDivisionError: 1", POLICY,
           "try: 1/0\nexcept ZeroDivisionError: 1", "CVE-2025-22153"),
    Attack("exception-group", ESCAPE, "raise ExceptionGroup('x', [ValueError()])", POLICY,
           "try:\n    raise ValueError()\nexcept ValueError: pass", "CVE-2025-22153"),
    Attack("class-mro", ESCAPE, "class A: pass\nA.mro()", POLICY, "class A: pass\nA()"),
    Attack("class-subclasses", ESCAPE, "class A: pass\nA.__subclasses__()", POLICY,
           "class A: pass\nissubclass(A, object)"),
    Attack("bound-method-self", ESCAPE, "[].append.__self__", POLICY, "[].append(1)"),
    Attack("print-function", ESCAPE, "print.__globals__", POLICY, "print(1)"),
    Attack("print-closure", ESCAPE, "[print][0].__closure__", POLICY, "[print][0](1)"),
    Attack("property-function", ESCAPE,
           "class A:\n    @property\n    def x(self): return 1\nA.x.fget", POLICY,
           "class A:\n    @property\n    def x(self): return 1\nA().x"),
    Attack("partial-function", ESCAPE, "import functools\nfunctools.partial(print).func", POLICY,
           "import functools\nfunctools.partial(int, '3')()"),
    Attack("wrapped-function", ESCAPE,
           "import functools\n@functools.cache\ndef f(): pass\nf.__wrapped__", POLICY,
           "import functools\n@functools.cache\ndef f(): pass\nf()"),
    Attack("enumeration-class", ESCAPE, "import re\nre.compile('a').flags.value", FAILED,
           "import re\nre.compile('a').flags"),
    # text that is formatted with attribute access
    Attack("str-format", ESCAPE, "'{0.__class__}'.format(1)", POLICY, "f'{1}'", "CVE-2023-41039"),
    Attack("str-format-map", ESCAPE, "'{a.__class__}'.format_map({'a': 1})", POLICY,
           "'%(a)s' % {'a': 1}", "CVE-2023-41039"),
    Attack("str-format-unbound", ESCAPE, "str.format('{0.__class__}', 1)", POLICY,
           "str.upper('a')", "CVE-2023-41039"),
    Attack("str-format-mapped", ESCAPE, "list(map(str.format, ['{0.__class__}'], [1]))", POLICY,
           "list(map(str.upper, ['a']))", "CVE-2023-41039"),
    Attack("str-format-by-type", ESCAPE, "type('a').format('{0.__class__}', 1)", POLICY,
           "type('a').upper('a')"),
    Attack("string-formatter", ESCAPE, "import string\nstring.Formatter().format('{0.x}', 1)", POLICY,
           "import string\nstring.capwords('a b')", "CVE-2026-76825"),
    Attack("string-formatter-imported", ESCAPE, "from string import Formatter", POLICY,
           "from string import capwords", "CVE-2024-47532"),
    Attack("string-template", ESCAPE, "from string import Template", POLICY,
           "from string import digits"),
    Attack("f-string-attribute", ESCAPE, "f'{str.__mro__}'", POLICY, "f'{str}'",
           "CVE-2025-24359"),
    Attack("f-string-conversion", ESCAPE, "f'{().__class__!r}'", POLICY, "f'{()!r}'"),
    Attack("f-string-debug", ESCAPE, "f'{().__class__=}'", POLICY, "f'{()=}'"),
    # imports, and what modules lead to
    Attack("import-os-full-width", ESCAPE, "import ｏｓ", POLICY, "import ｍａｔｈ", "PEP 3131"),
    Attack("import-submodule", ESCAPE, "import os.path", POLICY, "import re"),
    Attack("import-submodule-of-an-allowed-one", ESCAPE, "import json.decoder", POLICY,
           "import json"),
    Attack("import-from-os", ESCAPE, "from os import system", POLICY, "from math import sqrt"),
    Attack("import-star", ESCAPE, "from math import *", POLICY, "from math import pi"),
    Attack("import-as-a-guard", ESCAPE, "from math import sqrt as _getattr_", POLICY,
           "from math import sqrt as root"),
    Attack("import-as-metaclass", ESCAPE, "from math import sqrt as __metaclass__", POLICY,
           "import math as m"),
    Attack("import-relative", ESCAPE, "from . import x", POLICY, "from math import pi as x"),
    Attack("import-sys-through-an-allowed-one", ESCAPE, "from statistics import sys", POLICY,
           "from statistics import mean", "RestrictedPython with modules"),
    Attack("import-slot-of-the-proxy", Harm.INTERNAL_READ, "from math import members", POLICY,
           "from math import pi"),
    Attack("import-future", Harm.INTEGRITY, "from __future__ import barry_as_FLUFL", POLICY,
           "from __future__ import annotations"),
    Attack("json-codecs", ESCAPE, "import json\njson.codecs.open('/etc/passwd')", POLICY,
           "import json\njson.dumps([])", "RestrictedPython with modules"),
    Attack("json-decoder", ESCAPE, "import json\njson.decoder.scanner", POLICY,
           "import json\njson.loads('[]')"),
    Attack("re-enum-sys", ESCAPE, "import re\nre.enum.sys.modules['os']", POLICY,
           "import re\nre.findall('a', 'a')", "RestrictedPython with modules"),
    Attack("statistics-sys", ESCAPE, "import statistics\nstatistics.sys", POLICY,
           "import statistics\nstatistics.median([1])", "CVE-2026-32640"),
    Attack("random-os", ESCAPE, "import random\nrandom._os.system('id')", POLICY,
           "import random\nrandom.random() < 1", "CVE-2025-5120"),
    Attack("collections-abc-sys", ESCAPE, "import collections\ncollections.abc.sys", POLICY,
           "import collections\ncollections.deque([1])"),
    Attack("operator-attrgetter", ESCAPE, "import operator\noperator.attrgetter('__class__')(1)",
           POLICY, "import operator\noperator.itemgetter(0)([1])"),
    Attack("operator-methodcaller", ESCAPE, "from operator import methodcaller", POLICY,
           "from operator import mul"),
    Attack("functools-update-wrapper", ESCAPE,
           "import functools, statistics\ndef f(): pass\nfunctools.update_wrapper(f, statistics.mean, "
           "(), ('__globals__',))\nsys", POLICY,
           "import functools\ndef f(): pass\nfunctools.wraps(f)(f)"),
    Attack("functools-wraps-arguments", ESCAPE,
           "import functools, statistics\ndef f(): pass\nfunctools.wraps(statistics.mean, "
           "updated=('__globals__',))(f)", FAILED,
           "import functools\ndef f(): pass\nfunctools.wraps(f)(f)"),
    Attack("functools-singledispatch", ESCAPE, "from functools import singledispatch", POLICY,
           "from functools import reduce"),
    Attack("dataclasses", ESCAPE, "import dataclasses", POLICY, "from collections import namedtuple"),
    Attack("enum", ESCAPE, "import enum", POLICY, "import typing"),
    Attack("datetime-sys", ESCAPE, "import datetime\ndatetime.sys", POLICY,
           "import datetime\ndatetime.date.min"),
    Attack("module-changed", Harm.INTEGRITY, "import math\nmath.pi = 3", POLICY,
           "import math\npi = math.pi"),
    Attack("module-members-changed", Harm.INTEGRITY, "import math\ndel math.pi", POLICY,
           "import math\ndel math"),
    Attack("library-class-changed", Harm.INTEGRITY,
           "import statistics\nstatistics.NormalDist.mean = 1", POLICY,
           "import statistics\nstatistics.NormalDist(0, 1).mean"),
    Attack("library-class-ordered", Harm.INTEGRITY,
           "import functools, random\nfunctools.total_ordering(random.Random)", POLICY,
           "import functools\n@functools.total_ordering\nclass A:\n    def __lt__(self, o): return 1"),
    Attack("module-copied", ESCAPE, "import copy, math\ncopy.deepcopy(math)", FAILED,
           "import copy, math\ncopy.deepcopy([1])"),
    Attack(
        "guards-copied", ESCAPE, "import copy\ncopy.deepcopy(type)", FAILED,
        "import copy\ncopy.deepcopy(len)", "a copied bound method has a copied self",
    ),
    Attack(
        "classes-copied", ESCAPE,
        "import copy, collections\ncopy.deepcopy([collections.namedtuple])", FAILED,
        "import copy, collections\ncopy.deepcopy([collections.deque])",
    ),
    Attack("context-traps", Harm.INTEGRITY, "import decimal\ndecimal.getcontext().clear_traps()", POLICY,
           "import decimal\ndecimal.getcontext().prec"),
    # classes, and what takes part in their making
    Attack("metaclass", ESCAPE, "class A(metaclass=type): pass", POLICY, "class A: pass"),
    Attack("class-keyword", ESCAPE, "class A(x=1): pass", POLICY, "class A(object): pass"),
    Attack("init-subclass", ESCAPE, "class A:\n    def __init_subclass__(c): pass", POLICY,
           "class A:\n    def __init__(c): pass"),
    Attack("descriptor", ESCAPE, "class A:\n    def __get__(self, o, t): pass", POLICY,
           "class A:\n    def __call__(self, o, t): pass"),
    Attack("set-name", ESCAPE, "class A:\n    def __set_name__(self, o, n): pass", POLICY,
           "class A:\n    def set_name(self, o, n): pass"),
    Attack("getattribute", ESCAPE, "class A:\n    def __getattribute__(self, n): pass", POLICY,
           "class A:\n    def __getitem__(self, n): pass"),
    Attack("getattr-method", ESCAPE, "class A:\n    def __getattr__(self, n): pass", POLICY,
           "class A:\n    def __contains__(self, n): pass"),
    Attack("new", ESCAPE, "class A:\n    def __new__(c): pass", POLICY,
           "class A:\n    def __init__(c): pass"),
    Attack("del-method", ESCAPE, "class A:\n    def __del__(self): pass", POLICY,
           "class A:\n    def close(self): pass"),
    Attack("reduce-method", ESCAPE, "class A:\n    def __reduce__(self): return (print, (1,))", POLICY,
           "class A:\n    def __repr__(self): return ''"),
    Attack("exit-method", ESCAPE, "class A:\n    def __exit__(self, *a): pass", POLICY,
           "class A:\n    def leave(self, *a): pass"),
    Attack("class-body-dunder", ESCAPE, "class A:\n    __slots__ = ('a',)", POLICY,
           "class A:\n    slots = ('a',)"),
    Attack("class-body-class", ESCAPE, "class A:\n    __class__ = int", POLICY,
           "class A:\n    kind = int"),
    Attack("class-body-loop", ESCAPE, "class A:\n    for __init_subclass__ in [1]: pass", POLICY,
           "class A:\n    for x in [1]: pass"),
    Attack("class-body-import", ESCAPE, "class A:\n    from math import sqrt as __getattr__", POLICY,
           "class A:\n    from math import sqrt"),
    Attack("class-body-walrus", ESCAPE, "class A:\n    [__get__ := 1]", POLICY,
           "class A:\n    [get := 1]"),
    Attack("class-body-nested-def", ESCAPE, "class A:\n    if 1:\n        def __del__(s): pass", POLICY,
           "class A:\n    def end(s): pass"),
    Attack("magic-function-outside", ESCAPE, "def __init__(): pass", POLICY, "def init(): pass"),
    Attack("subclass-of-str", ESCAPE, "class S(str): pass", POLICY, "class S: pass"),
    Attack("subclass-of-type", ESCAPE, "class M(type(int)): pass", POLICY, "class M(object): pass"),
    Attack("subclass-of-dict", ESCAPE, "class D(dict): pass", POLICY, "class D(Exception): pass"),
    Attack("subclass-of-random", ESCAPE, "import random\nclass R(random.Random): pass", POLICY,
           "import random\nrandom.Random(1).random()"),
    Attack("subclass-by-a-function", ESCAPE, "class A(print): pass", POLICY, "class A(Exception): pass"),
    Attack("class-of-an-instance-set", ESCAPE, "class A: pass\na = A()\na.__class__ = int", POLICY,
           "class A: pass\na = A()\na.kind = int"),
    Attack("class-attribute-init", ESCAPE, "class A: pass\nA.__init__", POLICY, "class A: pass\nA()"),
    Attack("super-init-of-another", ESCAPE,
           "def super(): return print\nsuper().__init__", POLICY,
           "class A:\n    def __init__(self): super().__init__()\nA()"),
    Attack("super-dunder", ESCAPE, "class A:\n    def f(self): return super().__reduce__()\nA().f()",
           POLICY, "class B:\n    def f(self): return 1\nclass A(B):\n"
           "    def f(self): return super().f()\nA().f()"),
    Attack("namedtuple-field", ESCAPE, "from collections import namedtuple\nnamedtuple('A', '__class__')",
           FAILED, "from collections import namedtuple\nnamedtuple('A', 'kind')(1).kind"),
    Attack("namedtuple-code", ESCAPE,
           "from collections import namedtuple\nnamedtuple('A', ['x=print(1)'])", FAILED,
           "from collections import namedtuple\nnamedtuple('A', ['x'])(1)"),
    Attack("namedtuple-name", ESCAPE, "from collections import namedtuple\nnamedtuple('a b', 'x')",
           FAILED, "from collections import namedtuple\nnamedtuple('ab', 'x')(1)"),
    # the guards themselves
    Attack("guard-rebound", ESCAPE, "_getattr_ = lambda o, n: o", POLICY, "get = lambda o, n: o"),
    Attack("guard-as-a-parameter", ESCAPE, "def f(_getattr_): return 'a'.format", POLICY,
           "def f(get): return 'a'.upper"),
    Attack("guard-as-a-positional-only-parameter", ESCAPE,
           "(lambda _getattr_, /: 'a'.format)(max)", POLICY, "(lambda get, /: 'a'.upper())(max)",
           "CVE-2026-55830"),
    Attack("guard-as-a-keyword-only-parameter", ESCAPE, "def f(*, _write_=int): pass", POLICY,
           "def f(*, write=int): pass", "CVE-2026-55830"),
    Attack("guard-as-rest-parameters", ESCAPE, "def f(*_getattr_, **_write_): pass", POLICY,
           "def f(*get, **write): pass", "CVE-2026-55830"),
    Attack("guard-as-a-loop-variable", ESCAPE, "for _getiter_ in [1]: pass", POLICY,
           "for getiter in [1]: pass"),
    Attack("guard-in-a-comprehension", ESCAPE, "[1 for _getattr_ in [max]]", POLICY,
           "[1 for get in [max]]"),
    Attack("guard-by-walrus", ESCAPE, "(_getattr_ := max)", POLICY, "(get := max)"),
    Attack("guard-by-except", ESCAPE, "try: 1/0\nexcept Exception as _getattr_: pass", POLICY,
           "try: 1/0\nexcept Exception as get: pass"),
    Attack("guard-by-global", ESCAPE, "def f():\n    global _getattr_", POLICY,
           "def f():\n    global get\n    get = 1"),
    Attack("guard-by-class-name", ESCAPE, "class _getattr_: pass", POLICY, "class Get: pass"),
    Attack("guard-by-function-name", ESCAPE, "def _getattr_(o, n): pass", POLICY,
           "def get(o, n): pass"),
    Attack("guard-deleted", ESCAPE, "del _getattr_", POLICY, "x = 1\ndel x"),
    Attack("guard-as-a-keyword", ESCAPE, "dict(_getattr_=1)", POLICY, "dict(get=1)"),
    Attack("guard-full-width", ESCAPE, "_getattr＿ = max", POLICY, "ｇｅｔ = max", "PEP 3131"),
    Attack("value-forged", Harm.INTEGRITY, "_value_ = 1", POLICY, "value = 1"),
    Attack("apply-keyword", ESCAPE, "dict(*[], **{'function': 1})['nope']", FAILED,
           "dict(*[], **{'function': 1})['function']"),
    Attack("print-rebound", Harm.INTEGRITY, "def print(*a): pass", POLICY, "def show(*a): pass"),
    Attack("printed-name", Harm.INTEGRITY, "printed", POLICY, "'printed'"),
    Attack("print-to-a-file", LEAK, "class F:\n    def write(s, t): pass\nprint(1, file=F())", FAILED,
           "print(1, file=None)"),
    Attack("refusal-swallowed-by-finally", ESCAPE,
           "def f():\n    try:\n        'a'.format()\n    finally:\n        return 5\nf()", POLICY,
           "def f():\n    try:\n        'a'.upper()\n    finally:\n        return 5\nf()"),
    Attack("refusal-caught-by-a-bare-except", ESCAPE, "try:\n    'a'.format()\nexcept:\n    pass", POLICY,
           "try:\n    1 / 0\nexcept:\n    pass"),
    Attack("refusal-swallowed-by-break", ESCAPE,
           "while True:\n    try:\n        'a'.format()\n    finally:\n        break", POLICY,
           "while True:\n    try:\n        'a'.upper()\n    finally:\n        break"),
    Attack("refusal-in-a-finaliser", ESCAPE,
           "def g():\n    try:\n        yield\n    finally:\n        'a'.format()\n"
           "x = g()\nnext(x)\ndel x", POLICY,
           "def g():\n    try:\n        yield\n    finally:\n        1 / 0\n"
           "x = g()\nnext(x)\ndel x", "Python writes what a finaliser raises to standard error"),
    Attack("refusal-in-a-repr", ESCAPE,
           "class A:\n    def __repr__(self): return 'a'.format()\nA()", POLICY,
           "class A:\n    def __repr__(self): return 'a'.upper()\nA()"),
    Attack("refusal-in-str-of-an-exception", ESCAPE,
           "class E(Exception):\n    def __str__(self): return 'a'.format()\nraise E", POLICY,
           "class E(Exception):\n    def __str__(self): return 'a'.upper()\n"
           "try: raise E\nexcept E as e: str(e)", "asked for when the program has ended"),
    Attack("refusal-swallowed-in-str-of-an-exception", ESCAPE,
           "class E(Exception):\n    def __str__(self):\n        try:\n            'a'.format()\n"
           "        finally:\n            return 'a'\nraise E", POLICY,
           "class E(Exception):\n    def __str__(self):\n        try:\n            'a'.upper()\n"
           "        finally:\n            return 'a'\ntry: raise E\nexcept E as e: str(e)"),
    Attack("print-flood-in-str-of-an-exception", Harm.HOST_DOS,
           "class E(Exception):\n    def __str__(self): print('x' * 10 ** 5)\nraise E",
           "OUTPUT_LIMIT_EXCEEDED",
           "class E(Exception):\n    def __str__(self):\n        print('x' * 10 ** 3)\n"
           "        return 'a'\ntry: raise E\nexcept E as e: str(e)"),
    # syntax that is not in the language
    Attack("with", LEAK, "with 1: pass", POLICY, "if 1: pass"),
    Attack("async", ESCAPE, "async def f(): pass", POLICY, "def f(): pass"),
    Attack("await-frame", ESCAPE, "async def f(): await 1\nf().cr_frame", POLICY,
           "def f(): yield 1\nnext(f())", "CVE-2023-37271"),
    Attack("async-comprehension", ESCAPE, "[x async for x in []]", POLICY, "[x for x in []]"),
    Attack("match-class", ESCAPE, "match 1:\n    case int(__class__=x): pass", POLICY,
           "if isinstance(1, int): pass"),
    Attack("match-attribute", ESCAPE, "match []:\n    case object(append=x): x(1)", POLICY,
           "[].append(1)"),
    Attack("match-value", ESCAPE, "import math\nmatch 1:\n    case math.pi: pass", POLICY,
           "import math\nmath.pi == 1"),
    Attack("matrix-product", DOS, "1 @ 2", POLICY, "1 * 2"),
    Attack("annotation-is-not-evaluated", ESCAPE, "def f(x: print(1) = ().__class__): pass", POLICY,
           "def f(x: print(1) = ()): pass"),
    Attack("dunder-attribute-set", ESCAPE, "class A: pass\nA.__getattr__ = max", POLICY,
           "class A: pass\nA.get = max"),
    Attack("dunder-attribute-augmented", ESCAPE, "class A: pass\nA.__x__ += 1", POLICY,
           "class A: pass\nA.x = 1\nA.x += 1"),
    Attack("private-attribute", Harm.INTERNAL_READ, "class A: pass\nA()._x", POLICY,
           "class A: pass\na = A()\na.x = 1"),
    Attack("tuple-item-set", Harm.INTEGRITY, "(1, 2)[0] = 3", FAILED, "[1, 2][0] = 3"),
    Attack("function-attribute-set", Harm.INTEGRITY, "def f(): pass\nf.x = 1", POLICY,
           "class A: pass\nA.x = 1"),
    Attack("name-of-an-instance", ESCAPE, "[].__name__", POLICY, "list.__name__"),
    Attack("nul", Harm.INTEGRITY, "1\x00", FAILED, "1"),
    Attack("syntax-error", Harm.INTEGRITY, "def f(:", FAILED, "def f(): pass"),
    Attack("return-outside", Harm.INTEGRITY, "return 1", FAILED, "1"),
    # exhaustion
    Attack("endless-loop", Harm.HOST_DOS, "while True: pass", "TIMEOUT", "while False: pass"),
    Attack("endless-generator", Harm.HOST_DOS, "import itertools\nsum(itertools.count())", "TIMEOUT",
           "import itertools\nsum(itertools.islice(itertools.count(), 3))"),
    Attack("endless-in-c", Harm.HOST_DOS, "10 ** 10 ** 8", "TIMEOUT", "10 ** 10"),
    Attack("endless-after-a-refusal", Harm.HOST_DOS,
           "try:\n    'a'.format()\nfinally:\n    while True: pass", "TIMEOUT",
           "try:\n    'a'.upper()\nfinally:\n    pass"),
    Attack("endless-pattern", Harm.HOST_DOS, "import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "TIMEOUT",
           "import re\nre.match('(a+)+$', 'a' * 40)"),
    Attack("endless-sort", Harm.HOST_DOS, "sorted(range(5), key=lambda x: 9 ** 9 ** 9)", "TIMEOUT",
           "sorted(range(5), key=lambda x: -x)"),
    Attack("endless-repr", Harm.HOST_DOS,
           "class A:\n    def __repr__(self):\n        while True: pass\nA()", "TIMEOUT",
           "class A:\n    def __repr__(self): return 'a'\nA()"),
    Attack("memory-list", DOS, "[0] * 10 ** 9", "MEMORY_LIMIT_EXCEEDED", "[0] * 10 ** 2"),
    Attack("memory-text", DOS, "'a' * 10 ** 10", "MEMORY_LIMIT_EXCEEDED", "'a' * 10"),
    Attack("memory-width", DOS, "f'{1:{10 ** 9}}'", "MEMORY_LIMIT_EXCEEDED", "f'{1:{10}}'"),
    Attack("memory-percent", DOS, "'%*d' % (10 ** 9, 1)", "MEMORY_LIMIT_EXCEEDED", "'%*d' % (9, 1)"),
    Attack("memory-doubling", DOS, "x = ['a' * 1000]\nwhile True: x += x", "MEMORY_LIMIT_EXCEEDED",
           "x = ['a']\nx += x"),
    Attack("memory-shift", DOS, "1 << 10 ** 10", "MEMORY_LIMIT_EXCEEDED", "1 << 10"),
    Attack("memory-range", DOS, "list(range(10 ** 9))", "MEMORY_LIMIT_EXCEEDED", "list(range(9))"),
    Attack("memory-unpacked", DOS, "[*range(10 ** 9)]", "MEMORY_LIMIT_EXCEEDED", "[*range(9)]"),
    Attack("memory-product", DOS, "import itertools\nlist(itertools.product(range(99), repeat=9))",
           "MEMORY_LIMIT_EXCEEDED", "import itertools\nlist(itertools.product([1], repeat=2))"),
    Attack("recursion", DOS, "def f(): return f()\nf()", FAILED, "def f(): return 1\nf()"),
    Attack("recursion-in-repr", DOS, "class A:\n    def __repr__(self): return repr(self)\nA()", FAILED,
           "class A:\n    def __repr__(self): return repr(1)\nA()"),
    Attack("recursion-in-c", DOS, "x = []\nfor i in range(10 ** 5): x = [x]\nstr(x)", FAILED,
           "x = []\nfor i in range(10): x = [x]\nstr(x)"),
    Attack("recursion-in-json", DOS, "import json\nx = []\nx.append(x)\njson.dumps(x)", FAILED,
           "import json\nx = []\nx.append(1)\njson.dumps(x)"),
    Attack("digits-to-text", DOS, "str(10 ** 5000)", FAILED, "str(10 ** 4000)"),
    Attack("text-to-digits", DOS, "int('9' * 5000)", FAILED, "int('9' * 4000)"),
    Attack("print-flood", Harm.HOST_DOS, "while True: print('x' * 1000)", "OUTPUT_LIMIT_EXCEEDED",
           "for i in range(3): print('x' * 1000)"),
    Attack("print-flood-swallowed", Harm.HOST_DOS,
           "for i in range(99):\n    try:\n        print('x' * 10000)\n    finally:\n        continue",
           "OUTPUT_LIMIT_EXCEEDED", "for i in range(3):\n    print('x' * 1000)"),
    Attack("print-flood-at-once", Harm.HOST_DOS, "print('x' * 10 ** 7)", "OUTPUT_LIMIT_EXCEEDED",
           "print('x' * 10 ** 3)"),
    Attack("print-flood-of-newlines", Harm.HOST_DOS, "print('\\n' * 60000)", "OUTPUT_LIMIT_EXCEEDED",
           "print('\\n' * 6000)"),
    Attack("long-value", Harm.HOST_DOS, "list(range(10 ** 5))", "OUTPUT_LIMIT_EXCEEDED",
           "list(range(10 ** 3))"),
    Attack("long-value-in-an-exception", Harm.HOST_DOS, "raise ValueError('x' * 10 ** 7)", FAILED,
           "try:\n    raise ValueError('x' * 10 ** 7)\nexcept ValueError: pass"),
    Attack("deep-program", DOS, "-" * 900 + "1", POLICY, "-" * 90 + "1"),
    Attack("deep-parentheses", DOS, "(" * 10_000 + "1" + ")" * 10_000, FAILED,
           "(" * 50 + "1" + ")" * 50),
    Attack("deep-blocks", DOS,
           "\n".join(" " * depth + "if 1:" for depth in range(101)) + "\n" + " " * 101 + "1", FAILED,
           "\n".join(" " * depth + "if 1:" for depth in range(50)) + "\n" + " " * 50 + "1"),
    Attack("wide-program", DOS, "x = 1\n" * 10_000 + "x[0]", FAILED, "x = 1\n" * 5_000),
    Attack("lone-surrogate-raised", Harm.PEER_DOS, "raise ValueError('\\ud800')", FAILED,
           "print('\\ud800'); '\\ud800'", "a reply that the host cannot read ended the guest"),
    Attack("not-a-number-raised", Harm.PEER_DOS, "raise ValueError(float('nan'))", FAILED,
           "[float('nan'), float('inf')]", "a reply that the host cannot read ended the guest"),
    Attack("deep-value", Harm.PEER_DOS, "x = []\nfor i in range(2000): x = [x]\nrepr(x)\nx[0][1]",
           FAILED, "x = []\nfor i in range(60): x = [x]\nx", "a reply deeper than the host reads"),
    Attack("pattern-debug", LEAK, "import re\nre.compile('(a|b)*' * 3000, 128)", POLICY,
           "import re\nre.compile('(a|b)*' * 3, 2)", "the compiler prints to the real output"),
    Attack("codec-import", LEAK, "'a'.encode('os')", FAILED, "'a'.encode('utf-8')",
           "codecs are modules which are imported by name"),
]  # fmt: skip


@pytest.mark.row("S2", "S4", "E1")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_program_ends_with_its_code_and_its_twin_succeeds(
    attack: Attack, client: SocketClient
) -> None:
    ended = client.run(attack.code, timeout_seconds=1 if attack.ends == "TIMEOUT" else 30)
    assert ended.code == attack.ends, ended.body
    text = json.dumps(ended.body)
    assert not [leak for leak in hidden() if leak in text]
    assert ended.body["metadata"]["sandbox"]["isolation"] == "call"
    twin = client.run(attack.twin)
    assert twin.body["success"] is True, twin.body["error"]


def hidden() -> list[str]:
    """Texts that no answer may contain; a traceback of the program's own lines is allowed."""
    return [leak for leak in leaks() if leak != "Traceback"] + ["RestrictedPython", '.py"']


def test_program_corpus_is_unique_and_large_enough() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 80
    assert len({attack.code for attack in ATTACKS}) == len(ATTACKS)
    assert {attack.harm for attack in ATTACKS} >= {ESCAPE, LEAK, Harm.HOST_DOS, Harm.INTEGRITY}
    assert len([attack for attack in ATTACKS if "CVE-" in attack.source]) >= 15


@pytest.mark.row("S2")
def test_no_state_leaks_between_programs(client: SocketClient) -> None:
    left = "import random, decimal\nsecret = 123456\nrandom.seed(1)\ndecimal.getcontext().prec = 3"
    assert client.run(left).body["success"]
    assert client.run("secret").code == FAILED
    assert client.run("import decimal\ndecimal.getcontext().prec").body["data"]["value"] == 28
    drawn = {client.run("import random\nrandom.random()").body["data"]["value"] for _ in range(4)}
    assert len(drawn) == 4


@pytest.mark.row("S2", "S4")
def test_program_attacks_leave_no_process_behind(start_daemon) -> None:
    daemon = start_daemon()
    client = daemon.client()
    assert client.run("1 + 1").body["success"]
    guest = guest_of(daemon.process.pid)
    for attack in ATTACKS[::6]:
        client.run(attack.code, timeout_seconds=0.2)
    # Zygote and two spares: whatever was forked for the attacks is gone.
    wait_until(lambda: len(children_of_guest(guest)) <= 3)
    assert guest_of(daemon.process.pid).pid == guest.pid
    everything = [guest, *guest.children(recursive=True)]
    client.close()
    assert daemon.stop() == 0
    assert all(is_gone(process) for process in everything)
