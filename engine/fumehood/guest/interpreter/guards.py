"""The guards: the functions that a compiled program calls instead of accessing objects itself.

Guest side. RestrictedPython compiles `a.b` to `_getattr_(a, "b")`. So a program can do only what
the guards allow. Invariants: an attribute can be read only if the table of its object's type allows
it; only containers, a few library objects, and the program's own classes and their instances can be
changed; every refusal is remembered, even if the program swallows it. A class of the program has
`type` as its metaclass, and its bases can only be `object`, exceptions and other classes of the
program. The methods of such a class cannot take part in attribute access, class creation or
copying.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import itertools
import json
import keyword
import operator
import random
import re
import statistics
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fumehood.guest.interpreter.modules import Module, Uncopied, named
from fumehood.guest.interpreter.nodes import MAGIC_METHODS, Refused


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TEXT = """
capitalize center count endswith expandtabs find index isalnum isalpha isascii isdigit islower
isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace
rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title
translate upper zfill maketrans
"""
_DICT = "clear copy fromkeys get items keys pop popitem setdefault update values"
_SET = """
copy difference intersection isdisjoint issubset issuperset symmetric_difference union
"""
_DATE = """
year month day ctime fromisocalendar fromisoformat fromordinal fromtimestamp isocalendar
isoformat isoweekday replace strftime timetuple today toordinal weekday max min resolution
"""
_TIME = """
hour minute second microsecond tzinfo fold isoformat fromisoformat replace strftime utcoffset
dst tzname max min resolution
"""

ATTRIBUTES: Mapping[type, frozenset[str]] = types.MappingProxyType(
    {
        str: _words(_TEXT + "casefold encode isdecimal isidentifier isnumeric isprintable"),
        bytes: _words(_TEXT + "decode fromhex hex"),
        bytearray: _words(
            _TEXT + "decode fromhex hex append clear copy extend insert pop remove reverse"
        ),
        int: _words(
            "real imag numerator denominator conjugate bit_length bit_count as_integer_ratio "
            "to_bytes from_bytes is_integer"
        ),
        float: _words("real imag conjugate as_integer_ratio is_integer hex fromhex"),
        complex: _words("real imag conjugate"),
        list: _words("append clear copy count extend index insert pop remove reverse sort"),
        tuple: _words("count index"),
        range: _words("count index start stop step"),
        slice: _words("start stop step indices"),
        dict: _words(_DICT),
        set: _words(
            _SET + "add clear difference_update discard intersection_update pop remove "
            "symmetric_difference_update update"
        ),
        frozenset: _words(_SET),
        types.GeneratorType: _words("send throw close"),
        property: _words("getter setter deleter"),
        # exceptions: their messages, but not their tracebacks
        BaseException: _words("args"),
        StopIteration: _words("value"),
        json.JSONDecodeError: _words("msg doc pos lineno colno"),
        re.error: _words("msg pattern pos lineno colno"),
        # collections
        collections.Counter: _words("elements most_common subtract total"),
        collections.OrderedDict: _words("move_to_end"),
        collections.deque: _words(
            "append appendleft clear copy count extend extendleft index insert maxlen pop popleft "
            "remove reverse rotate"
        ),
        collections.defaultdict: _words("default_factory"),
        # datetime
        datetime.date: _words(_DATE),
        datetime.time: _words(_TIME),
        datetime.datetime: _words(
            _DATE + _TIME + "astimezone combine date now strptime time timestamp timetz "
            "utcfromtimestamp utcnow utctimetuple"
        ),
        datetime.timedelta: _words("days seconds microseconds total_seconds max min resolution"),
        datetime.timezone: _words("utc utcoffset dst tzname fromutc max min"),
        type(datetime.date.min.isocalendar()): _words("year week weekday"),
        time.struct_time: _words(
            "tm_year tm_mon tm_mday tm_hour tm_min tm_sec tm_wday tm_yday tm_isdst"
        ),
        # numbers
        decimal.Decimal: _words(
            "adjusted as_integer_ratio as_tuple canonical compare compare_signal compare_total "
            "conjugate copy_abs copy_negate copy_sign exp fma from_float imag is_canonical "
            "is_finite is_infinite is_nan is_normal is_qnan is_signed is_snan is_subnormal is_zero "
            "ln log10 logb max max_mag min min_mag next_minus next_plus next_toward normalize "
            "number_class quantize radix real remainder_near rotate same_quantum scaleb shift sqrt "
            "to_eng_string to_integral to_integral_exact to_integral_value"
        ),
        decimal.DecimalTuple: _words("sign digits exponent"),
        decimal.Context: _words(
            "prec rounding Emin Emax capitals clamp copy create_decimal divide sqrt power"
        ),
        fractions.Fraction: _words(
            "numerator denominator limit_denominator as_integer_ratio from_decimal from_float "
            "conjugate real imag is_integer"
        ),
        statistics.NormalDist: _words(
            "mean median mode stdev variance pdf cdf inv_cdf overlap quantiles samples zscore "
            "from_samples"
        ),
        type(statistics.linear_regression([0, 1], [0, 1])): _words("slope intercept"),
        random.Random: _words(
            "betavariate binomialvariate choice choices expovariate gammavariate gauss getrandbits "
            "lognormvariate normalvariate paretovariate randbytes randint random randrange sample "
            "seed shuffle triangular uniform vonmisesvariate weibullvariate"
        ),
        # text
        re.Pattern: _words(
            "findall finditer flags fullmatch groups match pattern search split sub subn"
        ),
        re.Match: _words(
            "end endpos expand group groupdict groups lastgroup lastindex pos re span start string"
        ),
        # functions with a cache
        type(functools.lru_cache(_words)): _words("cache_clear cache_info"),
        type(functools.lru_cache(_words).cache_info()): _words("hits misses maxsize currsize"),
        itertools.chain: _words("from_iterable"),
    }
)  # fmt: skip

WRITABLE: Mapping[type, frozenset[str]] = types.MappingProxyType(
    {decimal.Context: _words("prec rounding Emin Emax capitals clamp")}
)
"""Type of a library object → the attributes that a program may set on it. On instances of its own
classes, a program may set any attribute.
"""

CONTAINERS = frozenset(
    {
        list, dict, bytearray, collections.deque, collections.Counter, collections.defaultdict,
        collections.OrderedDict,
    }
)  # fmt: skip
"""Types whose items a program may set and delete."""


@functools.cache
def allowed_on(kind: type) -> frozenset[str]:
    """Return the names of the attributes that a program may read on objects of the type `kind`.
    These are the names that `ATTRIBUTES` has for this type and for its bases.
    """
    return frozenset().union(*(ATTRIBUTES.get(base, frozenset()) for base in kind.__mro__))


IN_PLACE: Mapping[str, Callable[[Any, Any], Any]] = types.MappingProxyType(
    {
        "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv,
        "//=": operator.ifloordiv, "%=": operator.imod, "**=": operator.ipow,
        "<<=": operator.ilshift, ">>=": operator.irshift,
        "&=": operator.iand, "|=": operator.ior, "^=": operator.ixor,
    }
)  # fmt: skip

_UNCHANGEABLE = (
    bool, int, float, complex, str, bytes, tuple, range, frozenset, set, slice, type(None),
)  # fmt: skip
"""Types whose items and attributes Python itself refuses to change, with its usual messages."""

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)

_MADE_BY_THE_COMPILER = frozenset(
    {
        "__module__", "__qualname__", "__doc__", "__classcell__", "__firstlineno__",
        "__static_attributes__", "__orig_bases__",
    }
)  # fmt: skip

_KNOWN_TYPES = frozenset(ATTRIBUTES) | {bool, type(None), object}


class Guards(Uncopied):
    """The guards of one program: the functions that its compiled code calls to access objects. Each
    guard checks whether the access is allowed. `refusal` is the exception for the first access that
    was refused, or None.
    """

    def __init__(self) -> None:
        self.classes = ProgramClasses()
        self.refusal: Refused | None = None

    def table(self) -> dict[str, Any]:
        """Return all guards by name. The names are those under which RestrictedPython's compiled
        code calls the guards.
        """
        return {
            "_getattr_": self.get_attribute,
            "_getitem_": operator.getitem,
            "_getiter_": _same,
            "_iter_unpack_sequence_": _first,
            "_unpack_sequence_": _first,
            "_write_": self.changeable,
            "_inplacevar_": _in_place,
            "_inplace_item_": self.change_item,
            "_inplace_attribute_": self.change_attribute,
            "_apply_": _apply,
            "_name_of_": self.name_of,
            "_super_init_": self.super_init,
            "__metaclass__": self.make_class,
        }

    def refused(self, why: str) -> Refused:
        """Record in `refusal` that an access was refused, and return the exception that the guard
        must raise. `why` is the exception's message. If an access was refused before, that earlier
        exception is returned instead.
        """
        self.refusal = self.refusal or Refused(why)
        return self.refusal

    def get_attribute(self, holder: Any, name: str) -> Any:
        """Return `holder.name`, if the attribute table or the program's class allows it.

        Raises:
            Refused: the attribute is not allowed.
            AttributeError: the attribute does not exist.
        """
        kind = type(holder)
        if type(name) is not str or name.startswith("_"):
            raise self.refused("attributes that begin with an underscore are not allowed")
        if kind is Module:
            if name not in holder.members:
                raise self.refused(f"the module {holder.name} has no {name[:40]!a} here")
            return holder.members[name]
        if kind is super:
            return self._get_from_super(holder, name)
        is_class = issubclass(kind, type)
        owner: type = holder if is_class else kind
        if owner in self.classes:
            defined = self.classes.defines(owner.__mro__, name)
            is_own = not is_class and name in getattr(holder, "__dict__", ())
            if defined or (defined is None and is_own):
                return getattr(holder, name)
        if name in allowed_on(owner):
            return getattr(holder, name)
        if any(name in vars(base) for base in (*owner.__mro__, *kind.__mro__)):
            what = owner.__name__[:40]
            raise self.refused(f"the attribute {name[:40]!a} of {what} is not allowed")
        what = f"type object {owner.__name__!r}" if is_class else f"{kind.__name__!r} object"
        raise AttributeError(f"{what} has no attribute {name!r}")

    def changeable(self, holder: Any) -> Any:
        """Return the object on which the program may set and delete items and attributes instead of
        `holder`. This is `holder` itself, or a stand-in that allows only certain attributes.

        Raises Refused if programs may not change `holder`.
        """
        kind = type(holder)
        if kind in CONTAINERS or kind in self.classes or kind in _UNCHANGEABLE:
            return holder
        if kind in WRITABLE:
            return _Writer(self, holder, WRITABLE[kind])
        if issubclass(kind, type) and holder in self.classes:
            return holder
        raise self.refused(f"a {kind.__name__[:40]} cannot be changed from a program")

    def change_item(self, sign: str, holder: Any, place: Any, value: Any) -> None:
        """Execute `holder[place] += value`, but with the operator `sign`, which is `+=` or a
        similar one.
        """
        target = self.changeable(holder)
        target[place] = IN_PLACE[sign](holder[place], value)

    def change_attribute(self, sign: str, holder: Any, name: str, value: Any) -> None:
        """Execute `holder.name += value`, but with the operator `sign`, which is `+=` or a similar
        one.
        """
        target = self.changeable(holder)
        setattr(target, name, IN_PLACE[sign](self.get_attribute(holder, name), value))

    def make_class(self, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        """Create and return a class that the program defines. Raises Refused if programs may not
        use one of the bases, or define one of the members.
        """
        try:
            return self.classes.make(name, bases, namespace)
        except Refused as refusal:
            raise self.refused(str(refusal)) from None

    def name_of(self, holder: Any) -> str:
        """Return `holder.__name__`, if `holder` is a class or a function. Otherwise, raise
        Refused.
        """
        if isinstance(holder, _NAMED) and type(name := holder.__name__) is str:
            return name
        raise self.refused("only classes and functions have a name")

    def super_init(self, holder: Any) -> Any:
        """Return `holder.__init__`, if `holder` is a `super` object. Otherwise, raise Refused."""
        if type(holder) is not super:
            raise self.refused("__init__ can only be reached through super()")
        return holder.__init__  # type: ignore[misc]

    def type_of(self, *values: Any, **keywords: Any) -> type:
        """Implement `type(value)`. Raises Refused if programs may not use the type of the value."""
        if len(values) != 1 or keywords:
            given = len(values) + len(keywords)
            raise TypeError(f"type() takes 1 argument here, and {given} were given")
        kind = type(values[0])
        if kind in self.classes or kind in _KNOWN_TYPES or issubclass(kind, Exception):
            return kind
        raise self.refused(f"the type {kind.__name__[:40]} is not for programs")

    def total_ordering(self, *values: Any, **keywords: Any) -> Any:
        """Implement `functools.total_ordering`. Raises Refused if the class was not defined by the
        program.
        """
        kind = _one_class(*values, **keywords)
        if kind not in self.classes:
            raise self.refused("only a class of the program can be ordered")
        return functools.total_ordering(kind)

    def _get_from_super(self, holder: Any, name: str) -> Any:
        owner, this = holder.__self_class__, holder.__thisclass__
        if owner in self.classes and this in owner.__mro__:
            order = owner.__mro__[owner.__mro__.index(this) + 1 :]
            defined = self.classes.defines(order, name)
            if defined or (defined is False and name in allowed_on(owner)):
                return getattr(holder, name)
        raise self.refused(f"super() has no {name[:40]!a} here")


class _Writer:
    """A stand-in for one object, through which a program can set only certain attributes of this
    object.
    """

    __slots__ = ("_guards", "_holder", "_names")
    _guards: Guards
    _holder: Any
    _names: frozenset[str]

    def __init__(self, guards: Guards, holder: Any, names: frozenset[str]) -> None:
        object.__setattr__(self, "_guards", guards)
        object.__setattr__(self, "_holder", holder)
        object.__setattr__(self, "_names", names)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise self._guards.refused(f"the attribute {name[:40]!a} cannot be set")
        setattr(self._holder, name, value)

    def __delattr__(self, name: str) -> None:
        raise self._guards.refused(f"the attribute {name[:40]!a} cannot be deleted")


def _one_class(cls: Any) -> Any:
    return cls


named(total_ordering=_one_class)


def _same(iterable: Any) -> Any:
    # Iteration reads no attribute that a program could choose, so it needs no guard.
    return iterable


def _first(iterable: Any, _spec: Any, _getiter: Any) -> Any:
    return iterable


def _in_place(sign: str, value: Any, other: Any) -> Any:
    return IN_PLACE[sign](value, other)


def _apply(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


# Python's error about a wrong argument after `**` names `_apply`, so it gets a general name.
named(function=_apply)
_apply.__module__ = "builtins"


class ProgramClasses(Uncopied):
    """The classes that one program has created."""

    def __init__(self) -> None:
        self._made: set[type] = set()

    def __contains__(self, kind: type) -> bool:
        return kind in self._made

    def make(self, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
        """Create a class of the program and return it. `namespace` contains the members of the
        class.

        Raises:
            Refused: programs may not use one of the bases, or define one of the members.
        """
        for base in bases:
            if not self._may_be_base(base):
                raise Refused(f"{_name(base)} cannot be a base class here")
        for member in namespace:
            if member.startswith("_") and member not in MAGIC_METHODS | _MADE_BY_THE_COMPILER:
                if member == "_":
                    continue
                raise Refused(f"a class here cannot define {member[:40]!a}")
        if not bases or bases == (object,):
            # Python's default shows the object's address in memory.
            namespace.setdefault("__repr__", _plain_repr)
        made = type(name, bases, namespace)
        self._made.add(made)
        return made

    def named_tuple(self, *values: Any, **keywords: Any) -> type:
        """Implement `collections.namedtuple` for programs.

        Raises:
            ValueError: a name is not an identifier, is a keyword, begins with an underscore or is
                repeated, or there are more defaults than fields.
        """
        # The library's own function uses `eval` and frames.
        name, fields, defaults = _name_and_fields(*values, **keywords)
        names = tuple(fields.replace(",", " ").split() if type(fields) is str else map(str, fields))
        given = tuple(defaults or ())
        name = str(name)  # only once: a program's object may return another text the next time
        _check_fields((name, *names))
        if len(set(names)) < len(names) or len(given) > len(names):
            raise ValueError("field names must differ, and defaults be no more than fields")
        filled = dict(zip(names[len(names) - len(given) :], given, strict=True))

        def make(cls: type, /, *values: Any, **keywords: Any) -> Any:
            rest = names[len(values) :]
            if len(values) > len(names) or not keywords.keys() <= set(rest):
                raise TypeError(f"{name}() takes {', '.join(names)}, each once")
            given_now = {**filled, **keywords}
            missing = [field for field in rest if field not in given_now]
            if missing:
                raise TypeError(f"{name}() lacks {', '.join(missing)}")
            return tuple.__new__(cls, (*values, *(given_now[field] for field in rest)))

        def represent(self: Any) -> str:
            pairs = zip(names, tuple.__iter__(self), strict=True)
            return f"{name}({', '.join(f'{field}={value!r}' for field, value in pairs)})"

        made = type(
            name,
            (tuple,),
            {
                "__slots__": (),
                "__new__": make,
                "__repr__": represent,
                "__getnewargs__": lambda self: tuple(self),  # for copies
                **{
                    field: property(operator.itemgetter(place)) for place, field in enumerate(names)
                },
            },
        )
        self._made.add(made)
        return made

    def defines(self, order: Iterable[type], name: str) -> bool | None:
        """Return True if the program has defined the class from which the member `name` is taken,
        and False if it is another class. This class is the first one in `order`, a method
        resolution order, that has the member. Return None if no class has it.
        """
        for kind in order:
            if name in vars(kind):
                return kind in self._made
        return None

    def _may_be_base(self, base: Any) -> bool:
        if not isinstance(base, type):
            return False
        if issubclass(base, BaseExceptionGroup):
            return False
        return base is object or base in self._made or issubclass(base, Exception)


def _name_and_fields(typename: Any, field_names: Any, *, defaults: Any = None) -> Any:
    return typename, field_names, defaults


named(namedtuple=_name_and_fields)


def _plain_repr(self: Any) -> str:
    return f"<{type(self).__name__} object>"


def _check_fields(names: tuple[str, ...]) -> None:
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise ValueError(f"{name[:40]!a} cannot be the name of a field or a type here")


def _name(base: Any) -> str:
    return base.__name__[:40] if isinstance(base, type) else "this"
