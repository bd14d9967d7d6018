"""The calculator: Python's arithmetic, exact division, and every failure by its kind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fumehood.guest.interpreter import sizes
from fumehood.guest.interpreter.calculator import MAX_DEPTH, evaluate, render, run
from fumehood.protocol.strict_json import MAX_INTEGER

MAX_BYTES = 65_536


def _run(expression: str, precision: int | None = None) -> dict[str, Any]:
    arguments = {"expression": expression, "precision": precision}
    return run({"arguments": arguments, "output_bytes": MAX_BYTES})


def _result(expression: str, precision: int | None = None) -> tuple[Any, str]:
    result = _run(expression, precision)["result"]
    return result["value"], result["text"]


@pytest.mark.parametrize(
    ("expression", "value", "text"),
    [
        ("5! + 2**10", 1144, "1144"),
        ("6/3", 2, "2"),
        ("1/4", 0.25, "0.25"),
        ("0.1 + 0.2", 0.30000000000000004, "0.30000000000000004"),
        ("-7 // 2", -4, "-4"),
        ("-7 % 3", 2, "2"),
        ("-3!", -6, "-6"),
        ("2**3!", 64, "64"),
        ("2**53 - 1", 2**53 - 1, "9007199254740991"),
        ("2**53", None, "9007199254740992"),
        ("-(2**53)", None, "-9007199254740992"),
        ("[2**53, 1]", [None, 1], "[9007199254740992, 1]"),
        ("1 < 2 < 3", True, "True"),
        ("1 < 2 > 3", False, "False"),
        ("3 or 1/0", 3, "3"),
        ("0 and 1/0", 0, "0"),
        ("not 0", True, "True"),
        ("1 if 0 else 2", 2, "2"),
        ("1 if 1 else 1/0", 1, "1"),
        ("(1,)", [1], "(1,)"),
        ("(1, 2)", [1, 2], "(1, 2)"),
        ("[]", [], "[]"),
        ("[1, [2.5, (3,)]]", [1, [2.5, [3]]], "[1, [2.5, (3,)]]"),
        ("divmod(7, 2)", [3, 1], "(3, 1)"),
        ("2 in [1, 2]", True, "True"),
        ("max(sqrt(16), 3)", 4.0, "4.0"),
        ("sum([1, 2, 3])", 6, "6"),
        ("round(2.5)", 2, "2"),
        ("  1 + 1 \n", 2, "2"),
        ("5 == 5.0", True, "True"),
        ("1 << 3 | 1", 9, "9"),
        ("~5", -6, "-6"),
        ("1_000", 1000, "1000"),
        ("0x10", 16, "16"),
        ("1e3", 1000.0, "1000.0"),
        ("isnan(nan)", True, "True"),
        ("10**400 // 10**399", 10, "10"),
    ],
)
def test_value_and_text(expression: str, value: Any, text: str) -> None:
    got, said = _result(expression)
    assert (got, said) == (value, text)
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("expression", "precision", "value", "text"),
    [
        ("1/3", 4, 0.3333, "0.3333"),
        ("2.5", 0, 2.0, "2.0"),
        ("3.5", 0, 4.0, "4.0"),
        ("0.125", 2, 0.12, "0.12"),
        ("2", 3, 2, "2"),
        ("10**20", 0, None, "100000000000000000000"),
        ("[1/3, (2/3,)]", 2, [0.33, [0.67]], "[0.33, (0.67,)]"),
        ("1 < 2", 2, True, "True"),
        ("1/3", None, 1 / 3, "0.3333333333333333"),
        ("1/3", 15, 0.333333333333333, "0.333333333333333"),
    ],
)
def test_precision_rounds_decimals_half_even_and_nothing_else(
    expression: str, precision: int | None, value: Any, text: str
) -> None:
    assert _result(expression, precision) == (value, text)


ERRORS = [
    # invalid: the text is no expression
    ("", "invalid", ""),
    ("1 +", "invalid", "cannot be read"),
    ("(", "invalid", "cannot be read"),
    ("a = 1", "invalid", "cannot be read"),
    ("1; 2", "invalid", "cannot be read"),
    ("import os", "invalid", "cannot be read"),
    ("5!!", "invalid", "not defined"),
    ("2^3", "invalid", "write **"),
    ("50%", "invalid", "write * 5 / 100"),
    ("1\x00", "invalid", ""),
    ("(" * 10_000 + "1" + ")" * 10_000, "invalid", ""),
    ("05", "invalid", "leading zeros"),
    ("max(1,000, 999)", "invalid", "write 1000 for 1,000"),
    ("max(1, 000)", "invalid", "000 behind a comma begins with a zero"),
    ("sum([1,\n000,2])", "invalid", "comma does not group digits"),
    ("1,000,000 + 1", "invalid", "comma does not group digits"),
    ("max(12,050, 3)", "invalid", "050 behind a comma begins with a zero"),
    ("max(1,000.5, 3)", "invalid", "comma does not group digits"),
    ("max(1,0_000)", "invalid", "comma does not group digits"),
    ("max(1,000!, 3)", "invalid", "comma does not group digits"),
    # policy: a table refused it
    ("().__class__", "policy", "attributes"),
    ("open('x')", "policy", ""),
    ("open(1)", "policy", "no function 'open'"),
    ("__import__(1)", "policy", "no function"),
    ("ｏｐｅｎ(1)", "policy", "no function"),
    ("sqrt", "policy", "call it"),
    ("é" * 5000, "policy", "no name"),
    ("'a' * 10**10", "policy", "strings"),
    ("[x for x in [1]]", "policy", "comprehensions"),
    ("9**9**9", "policy", "digits"),
    ("factorial(10**6)", "policy", "digits"),
    ("(10**6)!", "policy", "digits"),
    ("[0] * 10**9", "policy", "elements"),
    ("1 << 10**12", "policy", "digits"),
    ("comb(10**6, 10**5)", "policy", "digits"),
    ("round(5, -10**9)", "policy", "places"),
    ("-" * (MAX_DEPTH + 50) + "1", "policy", "nested deeper"),
    # exception: it has no value
    ("1/0", "exception", "division by zero"),
    ("1 % 0", "exception", "division by zero"),
    ("0**-1", "exception", "division by zero"),
    ("sqrt(-1)", "exception", ""),
    ("log(0)", "exception", ""),
    ("exp(1000)", "exception", "overflow"),
    ("2.0**10000", "exception", "overflow"),
    ("1e400", "exception", "not a finite number"),
    ("-inf", "exception", "not a finite number"),
    ("[1, nan]", "exception", "not a finite number"),
    ("(-8)**0.5", "exception", "complex"),
    ("[1] + 1", "exception", ""),
    ("sqrt([1])", "exception", ""),
    ("sqrt()", "exception", ""),
    ("sum()", "exception", "sum() missing 1 required positional argument"),
    ("round(1, 2, 3)", "exception", "round() takes from 1 to 2 positional arguments but 3"),
    ("comb(1)", "exception", "comb() missing"),
    ("pow(1)", "exception", "pow() missing"),
    ("max([])", "exception", ""),
    ("5.5!", "exception", "whole number"),
    ("(-1)!", "exception", "negative"),
    ("1 < [1]", "exception", ""),
]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("max(1, 0)", 1), ("max(1,0,0)", 1), ("max(1,0.5)", 1), ("max(1, 0e5)", 1), ("[1,0]", [1, 0]),
        ("max(1,0x1F)", 31), ("max(1,0b11)", 3), ("max(1000, 999)", 1000), ("max(1, 100)", 100),
        ("round(2.345,2)", 2.35), ("max(000, 1)", 1), ("max(1,(0),0)", 1), ("max(1,200, 3)", 200),
    ],
)  # fmt: skip
def test_comma_before_a_plain_zero_parts_two_numbers(expression: str, value: Any) -> None:
    assert _run(expression)["result"]["value"] == value


@pytest.mark.row("S2", "S4")
@pytest.mark.parametrize(("expression", "kind", "words"), ERRORS)
def test_each_failure_is_reported_with_its_kind(expression: str, kind: str, words: str) -> None:
    error = _run(expression)["error"]
    assert error["kind"] == kind
    assert words in error["message"]
    assert 0 < len(error["message"]) < 400
    assert "Traceback" not in error["message"]


def test_long_list_is_cut_soon_after_the_limit() -> None:
    shown = render([1] * 9000, None, 100)
    assert 100 < len(shown["text"]) < 200
    assert len(render([1] * 20, None, 100)["text"]) == 60


# -- the same as Python -------------------------------------------------------------------

numbers = st.integers(-99, 99).map(str) | st.floats(0, 99, width=16).map(repr)


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.sampled_from(
        ["+", "-", "*", "//", " % ", "**", "<", "<=", "==", "!=", ">", ">=", " and ", " or "]
    )
    return (
        st.builds(lambda a, op, b: f"({a}){op}({b})", inner, binary, inner)
        | st.builds(lambda op, a: f"{op}({a})", st.sampled_from(["-", "+", "not "]), inner)
        | st.builds(lambda a, b, c: f"(({a}) if ({b}) else ({c}))", inner, inner, inner)
        | st.builds(lambda a, b: f"max(({a}), ({b}))", inner, inner)
        | st.builds(lambda a: f"abs({a})", inner)
    )


expressions = st.recursive(numbers, _combine, max_leaves=6)


def _python(expression: str) -> Any:
    """Python's own answer; an exception's class where there is none."""
    try:
        return eval(expression, {"__builtins__": {}, "max": max, "abs": abs})  # ours, bounded
    except ArithmeticError as error:
        return type(error)
    except TypeError as error:
        return type(error)


def _is_small(expression: str) -> bool:
    return expression.count("**") <= 1


@given(expressions.filter(_is_small))
@example("(1)<(2)")
@example("(-2)**(-1)")
@example("(0)**(-1)")
def test_arithmetic_matches_python(expression: str) -> None:
    expected = _python(expression)
    if isinstance(expected, type):
        with pytest.raises(expected):
            evaluate(expression)
    elif isinstance(expected, int) and abs(expected) > MAX_INTEGER:
        with pytest.raises(sizes.TooLarge):
            evaluate(expression)
    else:
        value = evaluate(expression)
        assert (type(value), repr(value)) == (type(expected), repr(expected))


@given(st.integers(-(10**20), 10**20), st.integers(-(10**20), 10**20).filter(bool))
def test_division_matches_python_and_is_exact_for_whole_quotients(left: int, right: int) -> None:
    value = evaluate(f"({left}) / ({right})")
    assert value == (left // right if left % right == 0 else left / right)
    assert isinstance(value, int) is (left % right == 0)


@given(st.text(max_size=30) | st.text("0123456789+-*/().!%^ []<>=e,", max_size=30))
def test_any_text_ends_in_a_result_or_an_error_of_a_known_kind(text: str) -> None:
    answer = _run(text)
    assert answer.keys() in ({"result"}, {"error"})
    if "error" in answer:
        assert answer["error"]["kind"] in ("invalid", "policy", "exception")
