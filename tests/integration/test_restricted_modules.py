"""Every importable function works in a sealed child.

A library that imports or opens a file on first use would fail there, since nothing can be opened.
Each member of each module is called at least once; the guest's memory stays what it is.
"""

from __future__ import annotations

import json

import pytest

from fumehood.guest.interpreter.modules import MODULES
from support.http import SocketClient

CALLS: dict[str, dict[str, str]] = {
    "bisect": {
        "bisect": "bisect.bisect([1, 3], 2)", "bisect_left": "bisect.bisect_left([1], 1)",
        "bisect_right": "bisect.bisect_right([1], 1)", "insort": "bisect.insort([1, 3], 2)",
        "insort_left": "bisect.insort_left([1], 1)", "insort_right": "bisect.insort_right([1], 1)",
    },
    "collections": {
        "Counter": "(collections.Counter('aab') - collections.Counter('a')).most_common()",
        "OrderedDict": "collections.OrderedDict(a=1).move_to_end('a')",
        "defaultdict": "collections.defaultdict(int)['a']", "deque": "collections.deque([1]).pop()",
        "namedtuple": "collections.namedtuple('P', 'x')(1).x",
    },
    "copy": {"copy": "copy.copy([1])", "deepcopy": "copy.deepcopy({1: [2]})"},
    "datetime": {
        "MAXYEAR": "datetime.MAXYEAR", "MINYEAR": "datetime.MINYEAR", "UTC": "str(datetime.UTC)",
        "date": "datetime.date.today().strftime('%A %d %B %G-W%V')",
        "datetime": "datetime.datetime.strptime('Mon 1 Jan 2024 +0100', '%a %d %b %Y %z').isoformat()",
        "time": "datetime.time(1, 2).isoformat()",
        "timedelta": "str(datetime.timedelta(days=1) * 2)",
        "timezone": "datetime.datetime.now(datetime.timezone.utc).astimezone().tzname()",
    },
    "decimal": {
        "Context": "str(decimal.Context(prec=3).divide(decimal.Decimal(1), decimal.Decimal(3)))",
        "Decimal": "str(decimal.Decimal('1.10').quantize(decimal.Decimal('0.1'), decimal.ROUND_UP))",
        "getcontext": "decimal.getcontext().prec",
        "setcontext": "decimal.setcontext(decimal.Context(prec=5))",
    },
    "fractions": {"Fraction": "str(fractions.Fraction('0.125') + fractions.Fraction(1, 3))"},
    "functools": {
        "cache": "functools.cache(len)('a')", "lru_cache": "functools.lru_cache(maxsize=2)(len)('a')",
        "cmp_to_key": "sorted([2, 1], key=functools.cmp_to_key(lambda a, b: a - b))",
        "partial": "functools.partial(int, base=2)('11')",
        "reduce": "functools.reduce(lambda a, b: a * b, [2, 3])",
        "wraps": "functools.wraps(len)(lambda: 1)()",
        "total_ordering": "callable(functools.total_ordering)",
    },
    "heapq": {
        "heapify": "heapq.heapify([2, 1])", "heappop": "heapq.heappop([1])",
        "heappush": "heapq.heappush([], 1)", "heappushpop": "heapq.heappushpop([1], 2)",
        "heapreplace": "heapq.heapreplace([1], 2)", "merge": "list(heapq.merge([1], [2]))",
        "nlargest": "heapq.nlargest(2, [1, 2, 3])", "nsmallest": "heapq.nsmallest(1, [2, 1])",
    },
    "itertools": {
        name: f"list(itertools.islice(itertools.{name}({arguments}), 3))" for name, arguments in {
            "accumulate": "[1, 2]", "batched": "'abc', 2", "chain": "[1], [2]",
            "combinations": "'abc', 2", "combinations_with_replacement": "'ab', 2",
            "compress": "'ab', [1, 0]", "count": "3", "cycle": "'a'", "dropwhile": "bool, [1, 0]",
            "filterfalse": "bool, [1, 0]", "groupby": "'aab'", "islice": "'abc', 2",
            "pairwise": "'abc'", "permutations": "'abc'", "product": "'ab', repeat=2",
            "repeat": "1", "starmap": "pow, [(2, 3)]", "takewhile": "bool, [1, 0]", "tee": "'a'",
            "zip_longest": "'ab', 'c'",
        }.items()
    },
    "json": {"dumps": "json.dumps({'a': [1.5, None]}, indent=2, sort_keys=True)",
             "loads": "json.loads('{\"a\": [1, true]}', object_hook=dict)"},
    "math": {
        name: f"math.{name}({arguments})" for name, arguments in {
            "acosh": "1", "atan2": "1, 2", "ceil": "1.5", "comb": "5, 2", "copysign": "1, -1",
            "dist": "[0], [1]", "factorial": "5", "floor": "1.5", "fma": "1.0, 2.0, 3.0",
            "fmod": "5, 3", "fsum": "[1, 2]",
            "gcd": "4, 6", "hypot": "3, 4", "isclose": "1, 1", "isqrt": "9", "lcm": "4, 6",
            "ldexp": "1.5, 2", "log": "8, 2", "nextafter": "1, 2", "perm": "5, 2", "pow": "2, 3",
            "prod": "[1, 2]", "remainder": "5, 3", "sumprod": "[1], [2]",
        }.items()
    },
    "operator": {
        "contains": "operator.contains([1], 1)", "countOf": "operator.countOf([1], 1)",
        "indexOf": "operator.indexOf([1], 1)", "getitem": "operator.getitem([1], 0)",
        "concat": "operator.concat([1], [2])", "itemgetter": "operator.itemgetter(0, 1)([1, 2])",
        **{name: f"operator.{name}(3)" for name in (
            "abs", "index", "invert", "neg", "not_", "pos", "truth")},
    },
    "random": {
        "Random": "random.Random('seed').random()", "choice": "random.choice([1])",
        "choices": "random.choices([1, 2], weights=[1, 2], k=3)", "expovariate": "random.expovariate(1)",
        "getrandbits": "random.getrandbits(8)", "randbytes": "len(random.randbytes(3))",
        "randint": "random.randint(1, 6)", "random": "random.random()",
        "randrange": "random.randrange(9)", "sample": "random.sample(range(9), 3)",
        "seed": "random.seed('text')", "shuffle": "random.shuffle([1, 2])",
        "triangular": "random.triangular()", "binomialvariate": "random.binomialvariate(5, 0.5)",
        "paretovariate": "random.paretovariate(2)",
    },
    "re": {
        "compile": "re.compile(r'(?i)(\\w+)\\s\\1').flags", "escape": "re.escape('a.b')",
        "findall": "re.findall('[à-ü]+', 'äöü', re.I | re.M)", "finditer": "len(list(re.finditer('a', 'aa')))",
        "fullmatch": "re.fullmatch('a', 'a').span()", "match": "re.match('(?P<x>a)', 'a').groupdict()",
        "search": "re.search('b', 'ab').expand(r'<\\g<0>>')", "split": "re.split(',', 'a,b')",
        "sub": "re.sub('(a)', r'<\\1>', 'ab')", "subn": "re.subn('a', lambda m: m[0] * 2, 'ab')",
    },
    "statistics": {
        "NormalDist": "statistics.NormalDist(0, 1).inv_cdf(0.5) + len(statistics.NormalDist(0, 1).samples(3))",
        "correlation": "statistics.correlation([1, 2, 3], [1, 2, 4])",
        "covariance": "statistics.covariance([1, 2], [1, 2])",
        "linear_regression": "statistics.linear_regression([1, 2], [3, 5]).slope",
        "quantiles": "statistics.quantiles([1, 2, 3])", "mode": "statistics.mode('aab')",
        "multimode": "statistics.multimode('aab')",
    },
    "string": {"capwords": "string.capwords('a b')"},
    "textwrap": {
        "dedent": "textwrap.dedent('  a\\n  b')", "indent": "textwrap.indent('a', '> ')",
        **{name: f"textwrap.{name}('one two three four', 9)" for name in ("fill", "shorten", "wrap")},
    },
    "typing": {"cast": "typing.cast(int, 1)", "TypeVar": "str(typing.TypeVar('T'))"},
}  # fmt: skip
ONE = {"math": "(0.5)", "statistics": "([1, 2, 4])", "random": "(1, 2)", "operator": "(3, 2)"}


def _program(module: str) -> str:
    """A program that calls each member as listed above, or in the module's default way."""
    lines = [f"import {module}", "found = {}"]
    for member in sorted(MODULES[module]):
        usual = f"{module}.{member}{ONE.get(module, '')}"
        call = CALLS.get(module, {}).get(member)
        if call is None and module in ONE and not _is_constant(module, member):
            call = usual
        lines.append(f"found[{member!r}] = str({call or f'{module}.{member}'})")
    return "\n".join([*lines, "found"])


def _is_constant(module: str, member: str) -> bool:
    return (module == "math" and member in ("e", "pi", "tau", "inf", "nan")) or member.endswith(
        "Error"
    )


@pytest.mark.row("S2")
@pytest.mark.parametrize("module", MODULES)
def test_every_allowed_module_member_works_in_the_sealed_child(
    client: SocketClient, module: str
) -> None:
    answer = client.run(_program(module))
    assert answer.body["success"], json.dumps(answer.body["error"], indent=1)
    assert answer.body["data"]["value"].keys() == MODULES[module]


@pytest.mark.row("S2")
def test_codecs_work_and_local_time_is_utc_in_the_sealed_child(client: SocketClient) -> None:
    code = (
        "import datetime\n"
        "now = datetime.datetime.now()\n"
        "['ä'.encode(c).decode(c) for c in ('utf-8', 'latin-1', 'utf-16', 'ascii' if 0 else 'utf-32')], "
        "now.astimezone().tzname(), now.year > 2023"
    )
    assert client.run(code).body["data"]["value"] == [["ä"] * 4, "UTC", True]
