"""Arguments as a form, and back: a form that is sent as it came gives equal arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.escaping import printable
from fumehood.web.arguments import arguments_of, errors_of, fields_of
from fumehood.web.view import Form, Problem
from support.web import SCHEMA

pytestmark = pytest.mark.row("A6")

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["a\r\nb", "a\nb", "\n", "", " x ", "a\u202eb", "\x1b[31m", "\t", "ﾠ", "</textarea>", "\"&'<"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*SCHEMA["properties"]]) | TEXTS.filter(
    lambda name: not {"\0", "\r"} & set(name)
)  # type: ignore[misc]


def as_a_browser_sends(fields: Any) -> Form:
    """Texts as a browser sends them: every line end is CR LF."""
    sent = []
    for one in fields:
        assert printable(one.value) == one.value
        if one.is_given:
            sent.append((f"given:{one.name}", "1"))
        text = re.sub(r"\r\n|\r|\n", "\r\n", one.value)
        sent.append((f"{one.kind}:{one.name}", text))
    return Form(sent)


@given(
    st.dictionaries(NAMES, VALUES, max_size=5), st.sampled_from([SCHEMA, None, {"properties": 3}])
)
def test_unchanged_form_gives_equal_arguments(arguments: dict[str, Any], schema: Any) -> None:
    fields = fields_of(arguments, schema)
    found, errors = arguments_of(as_a_browser_sends(fields))
    assert errors == {}
    assert found == arguments
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in arguments.items()}


@pytest.mark.parametrize(
    ("arguments", "schema", "words"),
    [
        ({"a\rb": 1, "a\nb": 2}, None, "names that no form can hold"),
        ({"a\0": 1}, None, "names that no form can hold"),
        ({}, {"properties": {f"a{n}": {} for n in range(1001)}}, "too long to edit here"),
        ({"a": "x" * 200_000}, None, "too long to edit here"),
    ],
)
def test_arguments_that_a_form_would_change_are_refused_for_editing(
    arguments: dict[str, Any], schema: Any, words: str
) -> None:
    with pytest.raises(Problem, match=words):
        fields_of(arguments, schema)


def test_form_fields_have_the_types_of_the_schema() -> None:
    found = {
        one.name: one for one in fields_of({"to": "a", "text": "x\ny", "more": {"a": 1}}, SCHEMA)
    }
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds == {
        "to": "text", "text": "text", "times": "number", "urgent": "choice", "folder": "choice",
        "tags": "json", "more": "json",
    }  # fmt: skip
    assert found["to"].is_required
    assert not found["text"].is_required
    assert not found["to"].is_long
    assert found["text"].is_long
    assert found["folder"].choices == ('"sent"', '"drafts"')
    assert not found["times"].is_given
    assert found["more"].is_given
    assert "Whom to write to." in found["to"].label


@pytest.mark.parametrize(("name", "is_long"), [("code", True), ("sql", True), ("to", False)])
def test_empty_field_of_a_program_has_several_lines(name: str, is_long: bool) -> None:
    (field,) = fields_of({}, {"properties": {name: {"type": "string"}}})
    assert field.is_long is is_long


def test_unreadable_form_field_shows_its_error() -> None:
    form = Form(
        [("given:times", "1"), ("number:times", "two"), ("given:tags", "1"), ("json:tags", "[1,"),
         ("given:to", "1"), ("text:to", "a"), ("text:text", "is left out")]
    )  # fmt: skip
    arguments, errors = arguments_of(form)
    assert arguments == {"to": "a"}
    assert errors["times"] == "This is not a number."
    assert errors["tags"].startswith("This is not valid JSON: Expecting")


@pytest.mark.parametrize(("text", "given"), [("", {}), ("false", {"urgent": False})])
def test_choice_is_given_unless_it_is_empty(text: str, given: dict[str, Any]) -> None:
    found, errors = arguments_of(Form([("choice:urgent", text)]))
    assert (found, errors) == (given, {})


@pytest.mark.parametrize("text", ["1e999", "NaN", "Infinity", "0x1", "1_000", "１", "--1", ""])
def test_form_field_that_is_not_a_number_is_refused(text: str) -> None:
    found, errors = arguments_of(Form([("given:n", "1"), ("number:n", text)]))
    assert found == {}
    assert errors


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (("to",), {"to"}),
        (("/text/3",), {"text"}),
        (("arguments.to",), {"to"}),
        (("/arguments/a~1b",), {"a/b"}),
        (None, {""}),
    ],
)
def test_edit_form_shows_a_refusal_at_its_fields(fields: Any, names: set[str]) -> None:
    assert errors_of(fields, "No.") == dict.fromkeys(names, "No.")
