"""Notation that Python does not have: postfix `!`, and the signs that mislead.

Guest side, text in and text out, before Python's own parser. `5!` becomes `factorial(5)`;
`^` and a percent sign are refused with the cure, because Python would quietly compute
something else. Invariant: what comes out is parsed and checked like any other text, so a
mistake here can make an expression wrong, never powerful.
"""

from __future__ import annotations

import keyword
import re

_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<string>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*')
    | (?P<number>0[xXoObB][0-9a-fA-F_]+
                |(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d[\d_]*)?[jJ]?)
    | (?P<name>[^\W\d]\w*)
    | (?P<operator>\*\*|//|<<|>>|<=|>=|==|!=|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_AFTER_PERCENT_SIGN = frozenset("*/)%],<>=!&|") | {"**", "//", "<<", ">>", "<=", ">=", "==", "!="}


_WORDS = frozenset(keyword.kwlist) - {"True", "False", "None"}
"""Words that are operators: what follows `not` or `in` in parentheses is no call of them."""


class NotationRefused(Exception):
    """The text uses a sign that means something else here. The message has the cure."""


def rewrite(text: str) -> str:
    """Python text for the calculator's notation.

    Raises:
        NotationRefused: `^`, a percent sign, `5!!`, or a `!` with nothing before it.
    """
    if "#" in text or "\\\n" in text:
        raise NotationRefused("comments and continued lines are not part of an expression")
    if "!" not in text and "^" not in text and "%" not in text:
        return text
    tokens = [(match.lastgroup or "", match.group()) for match in _TOKEN.finditer(text)]
    _refuse_misleading_signs(tokens)
    return _rewrite_factorials(tokens)


def _refuse_misleading_signs(tokens: list[tuple[str, str]]) -> None:
    for index, (kind, token) in enumerate(tokens):
        if kind != "operator":
            continue
        if token == "^":
            raise NotationRefused("^ is not the power sign here; write ** (2**10)")
        if token == "%" and _is_percent_sign(tokens, index):
            raise NotationRefused(
                "% between two operands is the remainder; for percent write * 5 / 100"
            )


def _is_percent_sign(tokens: list[tuple[str, str]], index: int) -> bool:
    """No operand follows; or `5% - 3`, where the spacing says percent and Python remainder."""
    following = [t for t in tokens[index + 1 :] if t[0] != "space"][:1]
    if not following or following[0][1] in _AFTER_PERCENT_SIGN:
        return True
    if following[0][0] == "name" and following[0][1] in ("of", "and", "or", "if", "else", "in"):
        return True
    attached = index > 0 and tokens[index - 1][0] != "space"
    spaced = index + 1 < len(tokens) and tokens[index + 1][0] == "space"
    return following[0][1] in ("+", "-") and attached and spaced


def _rewrite_factorials(tokens: list[tuple[str, str]]) -> str:
    """One pass: `starts` remembers where the operand that ends at each token began."""
    out: list[str] = []
    opened: list[int] = []
    operand: int | None = None  # index in `out` of the operand that ends here, if any
    finished = False  # … and it is itself a factorial
    for kind, token in tokens:
        if kind == "space":
            out.append(token)
            continue
        if kind == "operator" and token == "!":
            if finished:
                raise NotationRefused(
                    "!! is not defined here; for the factorial of a factorial write (n!)!"
                )
            if operand is None:
                raise NotationRefused("! stands after the number that it belongs to, as in 5!")
            # A word in front (`not(3)!`) must not grow together with the function's name.
            apart = " " if operand and out[operand - 1][-1:].isalnum() else ""
            out[operand] = f"{apart}factorial(" + out[operand]
            out.append(")")
            finished = True
            continue
        if token in ("(", "["):
            # A call keeps its function's name as part of the operand: sqrt(9)! is 3!.
            is_call = operand is not None and token == "("
            opened.append(operand if is_call and operand is not None else len(out))
            operand, finished = None, False
        elif token in (")", "]"):
            operand, finished = (opened.pop() if opened else None), False
        else:
            is_operand = kind in ("number", "name", "string") and token not in _WORDS
            operand, finished = (len(out) if is_operand else None), False
        out.append(token)
    return "".join(out)
