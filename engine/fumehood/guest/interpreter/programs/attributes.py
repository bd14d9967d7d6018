"""The attribute table: for each type, every attribute that a program may read.

Guest side, asked by the guard `_getattr_` for each dot in a program. Invariants: a type
that has no row has no attributes; nothing here leads to a module, a frame, code, a
function's globals, a class's bases, or to text that is formatted with attribute access
(`str.format`). What a newer Python adds is not here, and so not allowed.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import itertools
import json
import random
import re
import statistics
import time
import types
from collections.abc import Mapping


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
        # exceptions: what they say, not where they were
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
        # functions with a memory
        type(functools.lru_cache(_words)): _words("cache_clear cache_info"),
        type(functools.lru_cache(_words).cache_info()): _words("hits misses maxsize currsize"),
        itertools.chain: _words("from_iterable"),
    }
)  # fmt: skip

WRITABLE: Mapping[type, frozenset[str]] = types.MappingProxyType(
    {decimal.Context: _words("prec rounding Emin Emax capitals clamp")}
)
"""Attributes of ours that a program may set; of its own objects it may set any."""

CONTAINERS = frozenset(
    {
        list, dict, bytearray, collections.deque, collections.Counter, collections.defaultdict,
        collections.OrderedDict,
    }
)  # fmt: skip
"""Types whose items a program may set and delete."""


@functools.cache
def allowed_on(kind: type) -> frozenset[str]:
    """The names that the table allows on this type, with those of its bases."""
    return frozenset().union(*(ATTRIBUTES.get(base, frozenset()) for base in kind.__mro__))
