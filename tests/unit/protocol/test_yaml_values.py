"""YAML read as plainly as JSON: the same values, and nothing that JSON could not say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol import yaml_values
from fumehood.protocol.files import MAX_VALUES, Lines, line_of
from fumehood.protocol.yaml_values import YamlError, loads


@pytest.fixture(params=["libyaml", "pure Python"], autouse=True)
def each_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library was built without libyaml, the answers are the same."""
    if request.param == "pure Python":
        monkeypatch.setattr(yaml_values, "_Loader", yaml.SafeLoader)


@pytest.mark.row("R4")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: [x, 'y']\nc:\n  - 1.5\n  - true\n", {"a": 1, "b": ["x", "y"], "c": [1.5, True]}),
        ("{a: ~, b: null, c: , d: ''}", {"a": None, "b": None, "c": None, "d": ""}),
        ("[yes, no, on, off, y, N]", ["yes", "no", "on", "off", "y", "N"]),
        ("[010, 0o10, 0x1f, -7, +7]", [10, 8, 31, -7, 7]),
        ("[1:30, 2026-01-01, 1_000, 1.2.3]", ["1:30", "2026-01-01", "1_000", "1.2.3"]),
        ("[1e3, .5, 5., -1.5E-2]", [1000.0, 0.5, 5.0, -0.015]),
        ("['1', \"true\", '~']", ["1", "true", "~"]),
        ("a: |\n  1\n  2\nb: >\n  x\n  y\n", {"a": "1\n2\n", "b": "x y\n"}),
        ("text", "text"),
        ("--- 5\n...\n", 5),
        ("# nothing but this\n- a\n", ["a"]),
        ("? a\n: b\n", {"a": "b"}),
    ],
)  # fmt: skip
def test_yaml_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    assert loads(text) == value
    assert repr(loads(text)) == repr(value)  # 1 is not True, and 10 not 10.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text("ab -:#", max_size=5), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(value=JSON)
def test_json_parsed_as_yaml_is_equal(value: Any) -> None:
    assert loads(json.dumps(value, ensure_ascii=False)) == value


REFUSED = {
    "nothing": ("", "it is empty"),
    "a comment": ("# x", "it is empty"),
    "two documents": ("a: 1\n---\nb: 2", "a second document"),
    "an anchor": ("a: &x 1", "anchors and aliases"),
    "an alias": ("a: *x", "anchors and aliases|not YAML"),
    "an alias in itself": ("&a [*a]", "anchors and aliases"),
    "an anchored key": ("&k a: 1", "anchors and aliases"),
    "a tag": ("a: !!str 1", "tags"),
    "a tag of Python": ("!!python/object/apply:os.system [id]", "tags"),
    "a tag of one's own": ("!x {}", "tags"),
    "a directive": ("%YAML 1.2\n---\na: 1", "directives"),
    "a key twice": ("a: 1\nb: 2\na: 3", r"the key 'a' is given twice \(line 3"),
    "a key twice, once quoted": ("a: 1\n'a': 3", "given twice"),
    "a key twice inside": ("x: {a: 1, a: 1}", "given twice"),
    "a number as key": ("1: a", "a key is not a string"),
    "a list as key": ("? [a]\n: b", "a key is not a string"),
    "an object as key": ("{{a: 1}: 2}", "a key is not a string"),
    "null as key": ("~: a", "a key is not a string"),
    "true as key": ("true: 1", "a key is not a string"),
    "infinity": ("a: -.inf", "NaN and infinity"),
    "no number": ("a: .NaN", "NaN and infinity"),
    "a tab": ("a:\n\t- b", "not YAML"),
    "an open bracket": ("[a", "not YAML"),
    "a control character": ("a: \x07", "not YAML"),
    "digits": ("9" * 5000, "too many digits"),
    "hexadecimal digits": ("0x" + "f" * 5000, "too many digits"),
    "levels": ("[" * 65 + "]" * 65, "nested deeper than 64"),
    "levels of objects": ("{a: " * 65 + "1" + "}" * 65, "nested deeper than 64"),
}


@pytest.mark.row("R4")
@pytest.mark.parametrize("case", REFUSED)
def test_yaml_beyond_json_is_refused_with_its_line(case: str) -> None:
    text, words = REFUSED[case]
    with pytest.raises(YamlError, match=words):
        loads(text)


def test_yaml_is_parsed_up_to_64_levels() -> None:
    value = loads("[" * 64 + "]" * 64)
    for _ in range(63):
        (value,) = value
    assert value == []


def test_document_with_too_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_VALUES == 200_000
    monkeypatch.setattr(yaml_values, "MAX_VALUES", 1000)
    with pytest.raises(YamlError, match="more than 1000 values"):
        loads("\n".join(f"- {i}" for i in range(1000)))
    assert len(loads("\n".join(f"- {i}" for i in range(998)))) == 998  # the twin


def test_yaml_value_without_a_line_uses_that_of_its_parent() -> None:
    lines: Lines = {}
    loads("a: 1\nb c:\n  - {h: {i: 1}}\n  - 2\n", lines)
    assert line_of(lines, ("b c", 0, "h", "i")) == 3
    assert line_of(lines, ("b c", 1)) == 4
    assert line_of(lines, ("a", "nothing")) == 1
    assert line_of(lines, ("nothing",)) is None
