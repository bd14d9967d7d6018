"""One file of definitions: three formats, the same documents, and one reason where it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fumehood.registry.definition_file import (
    MAX_DEFINITIONS,
    FileFault,
    one_line,
    read_documents,
)

JSON = b'{"name": "a", "type": "REST", "tags": ["x", "y"], "timeout": 500, "dangerous": true}'
TOML = b'name = "a"\ntype = "REST"\ntags = ["x", "y"]\ntimeout = 500\ndangerous = true\n'
YAML = b"name: a\ntype: REST\ntags: [x, y]\ntimeout: 500\ndangerous: true\n"


@pytest.mark.row("R4")
@pytest.mark.parametrize(
    ("name", "data"), [("a.json", JSON), ("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)]
)
def test_three_formats_say_the_same(name: str, data: bytes) -> None:
    assert read_documents(name, data) == [json.loads(JSON)]


@pytest.mark.row("R4")
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b'[{"name": "a"}, {"name": "b"}]'),
        ("a.json", b'{"tools": [{"name": "a"}, {"name": "b"}]}'),
        ("a.toml", b'[[tools]]\nname = "a"\n[[tools]]\nname = "b"\n'),
        ("a.yaml", b"- name: a\n- name: b\n"),
        ("a.yaml", b"tools:\n- name: a\n- name: b\n"),
    ],
)
def test_list_of_definitions_is_read(name: str, data: bytes) -> None:
    assert read_documents(name, data) == [{"name": "a"}, {"name": "b"}]


FAULTS: dict[str, tuple[str, bytes, str]] = {
    "not JSON": ("a.json", b"{", "not JSON"),
    "not TOML": ("a.toml", b"a = ", "not TOML"),
    "not YAML": ("a.yaml", b"[a", "not YAML"),
    "empty JSON": ("a.json", b"", "not JSON"),
    "empty YAML": ("a.yaml", b"", "it is empty"),
    "not UTF-8, JSON": ("a.json", b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    "not UTF-8, TOML": ("a.toml", b'a = "\xff"', "not UTF-8 at byte 5"),
    "not UTF-8, YAML": ("a.yaml", b"a: \xff", "not UTF-8 at byte 3"),
    "UTF-16": ("a.yaml", "a: 1".encode("utf-16"), "NUL bytes"),
    "NUL, JSON": ("a.json", b'{"a": "\0"}', "NUL bytes"),
    "NUL, TOML": ("a.toml", b'a = "\0"', "NUL bytes"),
    "NUL, YAML": ("a.yaml", b"a: \0", "NUL bytes"),
    "key twice, JSON": ("a.json", b'{"a": 1, "a": 2}', "given twice"),
    "key twice, TOML": ("a.toml", b"a = 1\na = 2", "Cannot overwrite a value"),
    "table twice, TOML": ("a.toml", b"[a]\n[a]", "Cannot declare"),
    "key twice, YAML": ("a.yaml", b"a: 1\na: 2", "given twice"),
    "NaN, JSON": ("a.json", b'{"a": NaN}', "NaN"),
    "NaN, TOML": ("a.toml", b"a = nan", "NaN, infinity"),
    "infinity, TOML": ("a.toml", b"a = 1e999", "NaN, infinity"),
    "huge float, YAML": ("a.yaml", b"a: 1e999", "too large for a double"),
    "huge integer, JSON": ("a.json", b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
    "huge integer, TOML": ("a.toml", b"a = " + b"9" * 5000, "too many digits"),
    "huge hexadecimal, TOML": ("a.toml", b"a = 0x" + b"f" * 5000, "4300 digits"),
    "date, TOML": ("a.toml", b"sunset_date = 2026-01-01", "a date is not accepted"),
    "time, TOML": ("a.toml", b"a = 12:30:00", "a time is not accepted"),
    "moment, TOML": ("a.toml", b"a = 2026-01-01T00:00:00Z", "a datetime is not accepted"),
    "lone surrogate, JSON": ("a.json", b'{"a": "\\ud800"}', "lone surrogate"),
    "depth, JSON": ("a.json", b'{"a":' * 66 + b"1" + b"}" * 66, "nested deeper than 64"),
    "depth, TOML": ("a.toml", b"a = " + b"[" * 66 + b"1" + b"]" * 66, "nested deeper than 64"),
    "depth, YAML": ("a.yaml", b"[" * 66 + b"1" + b"]" * 66, "nested deeper than 64"),
    "depth by dots, TOML": ("a.toml", b"a" + b".a" * 64 + b" = 1", "more than 64 parts"),
    "a number": ("a.json", b"5", "neither a definition"),
    "a string": ("a.yaml", b"text", "neither a definition"),
    "a list of strings": ("a.json", b'["a"]', "neither a definition"),
    "tools is no list": ("a.json", b'{"tools": {"name": "a"}}', "not a list"),
    "something beside tools": ("a.json", b'{"tools": [], "x": 1}', "beside 'tools' there is 'x'"),
}  # fmt: skip


@pytest.mark.row("R4")
@pytest.mark.parametrize("case", FAULTS)
def test_file_that_cannot_be_used_says_why(case: str) -> None:
    name, data, words = FAULTS[case]
    with pytest.raises(FileFault, match=words) as caught:
        read_documents(name, data)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1001


@pytest.mark.row("R4")
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", json.dumps([{}] * (MAX_DEFINITIONS + 1)).encode()),
        ("a.toml", b"[[tools]]\n" * (MAX_DEFINITIONS + 1)),
        ("a.yaml", b"- {}\n" * (MAX_DEFINITIONS + 1)),
    ],
)
def test_too_many_definitions_are_refused_before_one_is_looked_at(name: str, data: bytes) -> None:
    with pytest.raises(FileFault, match="it holds 10001 tools; at most 10000"):
        read_documents(name, data)


def test_more_values_than_the_cap_are_refused() -> None:
    with pytest.raises(FileFault, match="more than 200000 values"):
        read_documents("a.json", b"[" + b"1," * 200_000 + b"1]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"), ("a\nb", "a\\x0ab"), ("\u202ex", "\\x202ex"),
        ("\x9b", "\\x9b"), ("ü€😀", "ü€😀"), ("\ud800", "\\xd800"),
    ],
)  # fmt: skip
def test_text_of_a_file_cannot_move_a_cursor(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_long_text_is_cut() -> None:
    value: Any = one_line("a" * 5000, 10)
    assert value == "a" * 10 + "…"
