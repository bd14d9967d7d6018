"""Notation: `5!` becomes a call, and signs that mislead are refused with the cure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.guest.interpreter.calculator import NotationRefused, rewrite

REWRITES = [
    ("5!", "factorial(5)"),
    ("5 !", "factorial(5 )"),
    ("5.0!", "factorial(5.0)"),
    ("1_0!", "factorial(1_0)"),
    ("n!", "factorial(n)"),
    ("-3!", "-factorial(3)"),
    ("2**3!", "2**factorial(3)"),
    ("3!**2", "factorial(3)**2"),
    ("(2+1)!", "factorial((2+1))"),
    ("((2+1)!)!", "factorial((factorial((2+1))))"),
    ("sqrt(9)!", "factorial(sqrt(9))"),
    ("sqrt (9)!", "factorial(sqrt (9))"),
    ("comb(4!, 2)!", "factorial(comb(factorial(4), 2))"),
    ("[3!, 2]", "[factorial(3), 2]"),
    ("3!+4!", "factorial(3)+factorial(4)"),
    ("5!=120", "5!=120"),
    ("5! != 120", "factorial(5) != 120"),
    ("5!!=3", "factorial(5)!=3"),
    ("3! == 6", "factorial(3) == 6"),
    ("1 != 2", "1 != 2"),
    ("'5!'", "'5!'"),
    ('"^ %"', '"^ %"'),
    ("7 % 3", "7 % 3"),
    ("7%3", "7%3"),
    ("7 % -3", "7 % -3"),
    ("7 %-3", "7 %-3"),
    ("7%-3", "7%-3"),
    ("7 % (3)", "7 % (3)"),
    ("7 % 3!", "7 % factorial(3)"),
    # An operator that is a word is no function that is called.
    ("not (3)!", "not factorial((3))"),
    ("1 and (3)!", "1 and factorial((3))"),
    ("0 or (3)!", "0 or factorial((3))"),
    ("6 in (3)!", "6 in factorial((3))"),
    ("1 if (2)! else (3)!", "1 if factorial((2)) else factorial((3))"),
]

REFUSALS = [
    ("2^10", "write **"),
    ("2 ^ 10", "write **"),
    ("^", "write **"),
    ("50%", "write * 5 / 100"),
    ("50 %", "write * 5 / 100"),
    ("(50%)", "write * 5 / 100"),
    ("50% * 3", "write * 5 / 100"),
    ("50% of 3", "write * 5 / 100"),
    ("5% - 3", "write * 5 / 100"),
    ("5% + 3", "write * 5 / 100"),
    ("[5%, 3]", "write * 5 / 100"),
    ("5%%3", "write * 5 / 100"),
    ("5% if 1 else 2", "write * 5 / 100"),
    ("5% == 3", "write * 5 / 100"),
    ("5!!", "!! is not defined"),
    ("5! !", "!! is not defined"),
    ("(5)!!", "!! is not defined"),
    ("!5", "stands after the number"),
    ("!", "stands after the number"),
    ("5 + !", "stands after the number"),
    ("(!)", "stands after the number"),
    ("!!", "stands after the number"),
    ("not !", "stands after the number"),
    ("1 if ! else 2", "stands after the number"),
]


@pytest.mark.parametrize(("text", "python"), REWRITES)
def test_mathematical_notation_is_rewritten_to_python(text: str, python: str) -> None:
    assert rewrite(text) == python


@pytest.mark.parametrize(("text", "cure"), REFUSALS)
def test_misplaced_factorial_sign_is_refused_with_a_hint(text: str, cure: str) -> None:
    with pytest.raises(NotationRefused) as caught:
        rewrite(text)
    assert cure in str(caught.value)


@given(st.text("0123456789.+-*/()[], !%^=<>abe'\"\n٣", max_size=40))
def test_any_text_is_rewritten_or_refused_with_one_error_type(text: str) -> None:
    try:
        python = rewrite(text)
    except NotationRefused:
        return
    added = python.count("factorial(")
    # A space may come in front, so that a word does not grow together with the name.
    kept, shown = (each.replace(" ", "") for each in (text, python))
    assert len(shown) == len(kept) + added * len("factorial()") - added
