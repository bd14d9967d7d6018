"""The lines of a TOML text, which must agree with the parser on what stands where."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from fumehood.protocol.toml_lines import line_of, lines_of

TEXT = (
    '''\
a = 1
"b c".d = [
  1, # ] "
  "]",
]
[table]
e = """
[[no]]
f = 1
""""
g = '[['
[[list]]
h = { i = 1 }
[[list.inner]]
j = 1
[list.inner.deep]
k = 'x'
[[list.inner]]
j = 2
  [[ list ]]  # the second
'l' = '''
    "'''\n]\n'''\n"
    'm = "\\"["\n'
)
EXPECTED = {
    ("a",): 1,
    ("b c",): 2,
    ("b c", "d"): 2,
    ("table",): 6,
    ("table", "e"): 7,
    ("table", "g"): 11,
    ("list", 0): 12,
    ("list", 0, "h"): 13,
    ("list", 0, "inner", 0): 14,
    ("list", 0, "inner", 0, "j"): 15,
    ("list", 0, "inner", 0, "deep"): 16,
    ("list", 0, "inner", 0, "deep", "k"): 17,
    ("list", 0, "inner", 1): 18,
    ("list", 0, "inner", 1, "j"): 19,
    ("list", 1): 20,
    ("list", 1, "l"): 21,
    ("list", 1, "m"): 24,
}


def test_every_table_and_key_has_its_line() -> None:
    assert lines_of(TEXT) == EXPECTED


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("\n", "\r\n")])
def test_every_path_leads_to_what_the_parser_read(text: str) -> None:
    for path in lines_of(text):
        value: Any = tomllib.loads(text)
        for part in path:
            value = value[part]


def test_what_has_no_line_has_that_of_what_holds_it() -> None:
    lines = lines_of(TEXT)
    assert line_of(lines, ("list", 0, "h", "i")) == 13
    assert line_of(lines, ("b c", "d", 1)) == 2
    assert line_of(lines, ("nothing",)) is None
