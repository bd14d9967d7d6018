"""The import table: each module that a program may import, and its members for programs.

Guest side. A program never gets a real Python module, because it could reach other modules from
there (`json.codecs`, `re.enum.sys`, `statistics.sys`). Instead, it gets a `Module`, which has only
a name and members. Invariants: no member is a module, reads attributes by their names
(`operator.attrgetter`, `functools.update_wrapper`, `string.Formatter`), makes code
(`collections.namedtuple`, `dataclasses`), opens files, imports modules, sleeps or starts anything.
"""

from __future__ import annotations

import _strptime  # type: ignore[import-not-found]  # noqa: F401  # `datetime.strptime` imports it, and a sealed child opens no file
import bisect
import calendar  # noqa: F401  # `_strptime` needs it
import collections
import copy
import datetime
import decimal
import fractions
import functools
import heapq
import itertools
import json
import math
import operator
import random
import re
import statistics
import string
import textwrap
import types
from collections.abc import Callable, Mapping
from typing import Any

OWN_FILENAME = "<code>"


class Uncopied:
    """Base class of those objects of the sandbox that programs cannot copy. Copying them raises
    TypeError.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("this cannot be copied")


class Module(Uncopied):
    """The object that a program gets when it imports a module: a name and the module's members."""

    __slots__ = ("members", "name")

    def __init__(self, name: str, members: Mapping[str, Any]) -> None:
        self.name = name
        self.members = members

    def __getattr__(self, name: str) -> Any:
        """Return the member `name`. Python calls this for `from m import name`. Such an import was
        checked before the program started, so this method checks nothing.
        """
        try:
            return self.members[name]
        except KeyError:
            raise AttributeError(f"the module {self.name} has no {name!a} here") from None

    def __repr__(self) -> str:
        return f"<module {self.name!r}>"


Module.__name__ = Module.__qualname__ = "module"  # as Python's errors call it


class Hint:
    """A placeholder for a name of `typing`. It does nothing, because annotations of programs are
    never evaluated.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, _: Any) -> Hint:
        return self

    def __or__(self, _: Any) -> Hint:
        return self

    __ror__ = __or__

    def __call__(self, *_: Any, **__: Any) -> Hint:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __repr__(self) -> str:
        return f"typing.{self._name}"


def _members(module: Any, words: str) -> dict[str, Any]:
    """Return members of a Python module by name. `words` has their names, separated by spaces.
    Names that the module lacks in this Python version are omitted.
    """
    return {name: getattr(module, name) for name in words.split() if hasattr(module, name)}


def named(**functions: Any) -> dict[str, Any]:
    """Set the name of each function to its keyword, and return the functions by name."""
    # Python's messages about wrong arguments then show the name of the function that is replaced.
    for name, function in functions.items():
        function.__name__ = function.__qualname__ = name
    return functions


def _dumps(
    obj: Any,
    *,
    indent: Any = None,
    sort_keys: bool = False,
    ensure_ascii: bool = True,
    separators: tuple[str, str] | None = None,
    default: Callable[[Any], Any] | None = None,
) -> str:
    return json.dumps(
        obj,
        indent=indent,
        sort_keys=sort_keys,
        ensure_ascii=ensure_ascii,
        separators=separators,
        default=default,
    )


def _loads(
    s: str | bytes,
    *,
    object_hook: Callable[[Any], Any] | None = None,
    object_pairs_hook: Callable[[Any], Any] | None = None,
    parse_float: Callable[[str], Any] | None = None,
    parse_int: Callable[[str], Any] | None = None,
) -> Any:
    return json.loads(
        s,
        object_hook=object_hook,
        object_pairs_hook=object_pairs_hook,
        parse_float=parse_float,
        parse_int=parse_int,
    )


def _wraps(wrapped: Any) -> Callable[[Any], Any]:
    """Implement `functools.wraps` for functions of the program. Only three fixed attributes are
    copied from `wrapped`.
    """

    def decorate(function: Any) -> Any:
        if _is_own_function(function) and _is_own_function(wrapped):
            # Python's own `wraps` copies any attributes that the caller names.
            for name in ("__name__", "__qualname__", "__doc__"):
                setattr(function, name, getattr(wrapped, name))
        return function

    named(wraps=decorate)
    return decorate


def _is_own_function(function: Any) -> bool:
    return type(function) is types.FunctionType and function.__code__.co_filename == OWN_FILENAME


def _copy(x: Any) -> Any:
    return copy.copy(x)


def _deepcopy(x: Any) -> Any:
    return copy.deepcopy(x)


def _cast(_: Any, value: Any) -> Any:
    return value


_FLAGS = ("A", "ASCII", "I", "IGNORECASE", "M", "MULTILINE", "S", "DOTALL", "X", "VERBOSE")

_HINTS = (
    "Any", "Callable", "ClassVar", "DefaultDict", "Deque", "Dict", "Final", "FrozenSet",
    "Generator", "Generic", "Hashable", "Iterable", "Iterator", "List", "Literal", "Mapping",
    "MutableMapping", "NoReturn", "Optional", "Sequence", "Set", "Tuple", "Type", "TypeAlias",
    "TypeVar", "Union",
)  # fmt: skip

_STATIC: dict[str, dict[str, Any]] = {
    "bisect": _members(bisect, "bisect bisect_left bisect_right insort insort_left insort_right"),
    "collections": _members(collections, "Counter OrderedDict defaultdict deque"),
    "copy": named(copy=_copy, deepcopy=_deepcopy),
    "datetime": _members(datetime, "MAXYEAR MINYEAR UTC date datetime time timedelta timezone"),
    "decimal": _members(
        decimal,
        "Context Decimal DivisionByZero DecimalException Inexact InvalidOperation Overflow "
        "ROUND_CEILING ROUND_DOWN ROUND_FLOOR ROUND_HALF_DOWN ROUND_HALF_EVEN ROUND_HALF_UP "
        "ROUND_UP ROUND_05UP Underflow getcontext setcontext",
    ),
    "fractions": _members(fractions, "Fraction"),
    "functools": {
        **_members(functools, "cache cmp_to_key lru_cache partial reduce"),
        **named(wraps=_wraps),
    },
    "heapq": _members(
        heapq, "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest"
    ),
    "itertools": _members(
        itertools,
        "accumulate batched chain combinations combinations_with_replacement compress count cycle "
        "dropwhile filterfalse groupby islice pairwise permutations product repeat starmap "
        "takewhile tee zip_longest",
    ),
    "json": {"JSONDecodeError": json.JSONDecodeError, **named(dumps=_dumps, loads=_loads)},
    "math": _members(
        math,
        "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist e "
        "erf erfc exp exp2 expm1 fabs factorial floor fma fmod frexp fsum gamma gcd hypot inf "
        "isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf nan "
        "nextafter perm pi pow prod radians remainder sin sinh sqrt sumprod tan tanh tau trunc "
        "ulp",
    ),
    "operator": _members(
        operator,
        "abs add and_ concat contains countOf eq floordiv ge getitem gt index indexOf invert "
        "is_ is_not itemgetter le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv "
        "truth xor",
    ),
    "random": _members(
        random,
        "Random betavariate binomialvariate choice choices expovariate gammavariate gauss "
        "getrandbits lognormvariate normalvariate paretovariate randbytes randint random "
        "randrange sample seed shuffle triangular uniform vonmisesvariate weibullvariate",
    ),
    "re": {
        **_members(
            re, "compile error escape findall finditer fullmatch match search split sub subn"
        ),
        # Members of an enumeration would lead to the enumeration; numbers do as well.
        **{name: int(getattr(re, name)) for name in _FLAGS},
    },
    "statistics": _members(
        statistics,
        "NormalDist StatisticsError correlation covariance fmean geometric_mean harmonic_mean "
        "linear_regression mean median median_grouped median_high median_low mode multimode "
        "pstdev pvariance quantiles stdev variance",
    ),
    "string": _members(
        string,
        "ascii_letters ascii_lowercase ascii_uppercase capwords digits hexdigits octdigits "
        "printable punctuation whitespace",
    ),
    "textwrap": _members(textwrap, "dedent fill indent shorten wrap"),
    "typing": {
        **{name: Hint(name) for name in _HINTS},
        **named(cast=_cast),
    },
}

NEWER: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        "itertools": frozenset({"batched"}),
        "math": frozenset({"fma", "sumprod"}),
        "random": frozenset({"binomialvariate"}),
    }
)
"""Module → those of its members in the import table that older supported versions of Python
lack.
"""

MADE_FOR_EACH: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        "collections": frozenset({"namedtuple"}),
        "functools": frozenset({"total_ordering"}),
    }
)
"""Module → those of its members that are created separately for each program, because they make or
change the program's classes.
"""

MODULES: Mapping[str, frozenset[str]] = types.MappingProxyType(
    {
        name: frozenset(members) | MADE_FOR_EACH.get(name, frozenset())
        for name, members in sorted(_STATIC.items())
    }
)
"""Module → all its members. Import statements are checked against this table."""


FINDER = "_find_module_"
"""The name that the `ModuleFinder` has among a program's globals."""


class ModuleFinder:
    """Finds the modules that one program imports. Each module is created at its first import."""

    def __init__(self, made: Mapping[str, Mapping[str, Any]]) -> None:
        self._made = made  # what `MADE_FOR_EACH` names
        # Creating all modules in advance would add references to hundreds of objects. Python counts
        # references in the objects, so each child would get its own copy of their memory pages.
        self._found: dict[str, Module] = {}

    def find(self, name: str) -> Module:
        """Return the module `name` with the members that programs may use. Return an empty module
        if programs may not import this module.
        """
        if name not in self._found:
            members = _STATIC.get(name, {})
            made = self._made.get(name)
            found = {**members, **made} if made else members
            self._found[name] = Module(name, types.MappingProxyType(found))
        return self._found[name]


def import_module(name: Any, namespace: Any = None, *_: Any, **__: Any) -> Module:
    """Implement `__import__` for programs: look up the module `name`, without importing anything.
    Return an empty module if programs may not import it, or if no program has called this function.
    """
    finder = namespace.get(FINDER) if type(namespace) is dict else None
    # Python's C code also calls this function for modules that it needs itself, such as
    # `_strptime`. It ignores the result, and takes the real module from `sys.modules`.
    if type(finder) is not ModuleFinder or type(name) is not str:
        return Module("nothing", {})
    return finder.find(name)
