"""The interpreter's boundary: expressions that try to escape from the calculator.

Each attack ends with exactly its code, its harmless twin succeeds in the same engine, no answer
contains anything from the host, and the host is unchanged afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fumehood.attack.attack import Language
from support.attacks import Attack, Harm, refused_by_language
from support.http import SocketClient
from support.processes import children_of_guest, guest_of, is_gone
from support.wait import wait_until

CANARY = "canary-5f2b7c91"
SLOW = "pow(7, 10**4200, 10**4200 + 7)"

ATTACKS = [
    *refused_by_language(Language.CALCULATOR),
    # growth: a short text that is years of work or more memory than there is
    Attack("tower-nested", Harm.SELF_DOS, "(9**99)**(9**9)", "SANDBOX_VIOLATION", "(9**9)**9"),
    Attack("power-function", Harm.SELF_DOS, "pow(9, 9**9)", "SANDBOX_VIOLATION", "pow(9, 9)"),
    Attack("factorial-sign", Harm.SELF_DOS, "(10**6)!", "SANDBOX_VIOLATION", "10!"),
    Attack("factorial-twice", Harm.SELF_DOS, "(9!)!", "SANDBOX_VIOLATION", "(3!)!"),
    Attack("combinations", Harm.SELF_DOS, "comb(10**9, 10**4)", "SANDBOX_VIOLATION", "comb(9, 4)"),
    Attack("permutations", Harm.SELF_DOS, "perm(10**6, 10**5)", "SANDBOX_VIOLATION", "perm(6, 5)"),
    Attack("permutations-all", Harm.SELF_DOS, "perm(10**6)", "SANDBOX_VIOLATION", "perm(6)"),
    Attack("least-common-multiple", Harm.SELF_DOS,
           "lcm(10**4000 + 1, 10**4000 + 3)", "SANDBOX_VIOLATION", "lcm(4, 6)"),
    Attack("product", Harm.SELF_DOS, "prod([10**4000] * 9999)", "SANDBOX_VIOLATION", "prod([2, 3])"),
    Attack("list-repetition-twice", Harm.SELF_DOS, "[0]*9999*9999", "SANDBOX_VIOLATION", "[0]*9*9"),
    Attack("tuple-repetition", Harm.SELF_DOS, "10**9 * (0, 1)", "SANDBOX_VIOLATION", "2 * (0, 1)"),
    Attack("list-concatenation", Harm.SELF_DOS,
           "[0]*9999 + [0]*9999", "SANDBOX_VIOLATION", "[0] + [1]"),
    Attack("string-repetition", Harm.SELF_DOS, '"a"*10**10', "SANDBOX_VIOLATION", "3*10**10"),
    Attack("round-to-negative-digits", Harm.SELF_DOS, "round(1, -10**9)", "SANDBOX_VIOLATION",
           "round(1234, -2)"),
    Attack("sum-of-lists", Harm.SELF_DOS, "sum([[1]*9, [2]*9], [])", "EXECUTION_ERROR",
           "sum([1, 2], 3)"),
    Attack("literal-in-hex", Harm.SELF_DOS, "0x" + "f" * 9000, "SANDBOX_VIOLATION", "0xff"),
    Attack("literal-in-decimal", Harm.SELF_DOS, "9" * 4301, "INVALID_PARAMS", "9" * 4300),
    Attack("long-output", Harm.HOST_DOS, "[10**4299]*9999", "OUTPUT_LIMIT_EXCEEDED", "[10**4]*9"),
    Attack("literal-in-hex-inside", Harm.SELF_DOS, "0x" + "f" * 20_000 + " % 7",
           "SANDBOX_VIOLATION", "0xff % 7"),
    Attack("literal-in-hex-in-a-list", Harm.SELF_DOS, "[0x" + "f" * 20_000 + "]",
           "SANDBOX_VIOLATION", "[0xff]"),
    Attack("combinations-just-over", Harm.SELF_DOS, "comb(14300, 7150)", "SANDBOX_VIOLATION",
           "comb(14000, 7000)"),
    Attack("deep-result", Harm.PEER_DOS, "[" * 62 + "]" * 62, "SANDBOX_VIOLATION",
           "[" * 16 + "]" * 16, "a reply deeper than the host reads ended the whole guest"),
    Attack("deep-result-beyond-frames", Harm.PEER_DOS, "[" * 150 + "]" * 150, "SANDBOX_VIOLATION",
           "[[1], [2]]"),
    Attack("endless-time", Harm.HOST_DOS, f"{SLOW} + {SLOW}", "TIMEOUT", "pow(7, 4, 9)"),
    # depth: the parser's stack, the walker's and the evaluator's
    Attack("parentheses", Harm.SELF_DOS, "(" * 10_000 + "1" + ")" * 10_000, "INVALID_PARAMS",
           "(" * 50 + "1" + ")" * 50),
    Attack("parentheses-left-open", Harm.SELF_DOS, "(" * 30_000, "INVALID_PARAMS", "(1)"),
    Attack("unary-minus", Harm.SELF_DOS, "-" * 30_000 + "1", "INVALID_PARAMS", "-" * 50 + "1"),
    Attack("unary-below-the-parser", Harm.SELF_DOS, "-" * 900 + "1", "SANDBOX_VIOLATION", "--1"),
    Attack("power-chain", Harm.SELF_DOS, "1" + "**1" * 2000, "SANDBOX_VIOLATION", "1**1**1"),
    Attack("sum-chain", Harm.SELF_DOS, "1" + "+1" * 9000, "INVALID_PARAMS", "1" + "+1" * 400),
    Attack("sum-chain-below-the-parser", Harm.SELF_DOS, "1" + "+1" * 600, "SANDBOX_VIOLATION",
           "1" + "*1" * 400),
    Attack("nested-calls", Harm.SELF_DOS, "abs(" * 400 + "1" + ")" * 400, "INVALID_PARAMS",
           "abs(" * 150 + "1" + ")" * 150),
    # language: everything that is not arithmetic
    Attack("comprehension", Harm.SELF_DOS, "[x for x in [1]*9 for y in [1]*9]", "SANDBOX_VIOLATION",
           "[1]*9"),
    Attack("generator", Harm.SELF_DOS, "sum(1 for x in [1, 2])", "SANDBOX_VIOLATION", "sum([1, 2])"),
    Attack("dictionary", Harm.SELF_DOS, "{1: 2}", "SANDBOX_VIOLATION", "[1, 2]"),
    Attack("set", Harm.SELF_DOS, "{1, 2}", "SANDBOX_VIOLATION", "(1, 2)"),
    Attack("lambda", Harm.SELF_DOS, "(lambda: 1)()", "SANDBOX_VIOLATION", "abs(1)"),
    Attack("walrus", Harm.INTEGRITY, "(pi := 3)", "SANDBOX_VIOLATION", "pi"),
    Attack("assignment", Harm.INTEGRITY, "pi = 3", "INVALID_PARAMS", "pi == 3"),
    Attack("statement", Harm.ESCAPE, "import os", "INVALID_PARAMS", "1"),
    Attack("two-statements", Harm.ESCAPE, "1; 2", "INVALID_PARAMS", "1"),
    Attack("starred", Harm.SELF_DOS, "max(*[1, 2])", "SANDBOX_VIOLATION", "max([1, 2])"),
    Attack("keywords", Harm.SELF_DOS, "round(1.5, ndigits=0)", "SANDBOX_VIOLATION", "round(1.5, 0)"),
    Attack("subscript", Harm.INTERNAL_READ, "[1, 2][0]", "SANDBOX_VIOLATION", "[1, 2]"),
    Attack("string", Harm.INTERNAL_READ, "'a'", "SANDBOX_VIOLATION", "1"),
    Attack("bytes", Harm.INTERNAL_READ, "b'a'", "SANDBOX_VIOLATION", "1"),
    Attack("complex-literal", Harm.INTERNAL_READ, "1j", "SANDBOX_VIOLATION", "1"),
    Attack("none", Harm.INTERNAL_READ, "None", "SANDBOX_VIOLATION", "True"),
    Attack("ellipsis", Harm.INTERNAL_READ, "...", "SANDBOX_VIOLATION", "True"),
    Attack("call-of-a-call", Harm.INTERNAL_ESC, "abs(1)(2)", "SANDBOX_VIOLATION", "abs(1)"),
    Attack("function-as-value", Harm.INTERNAL_ESC, "[abs]", "SANDBOX_VIOLATION", "[abs(1)]"),
    # ways out that have worked elsewhere
    Attack("open-full-width", Harm.HOST_LEAK, "ｏｐｅｎ('/etc/passwd')", "SANDBOX_VIOLATION",
           "ａｂｓ(1)", "PEP 3131: identifiers are normalised (NFKC)"),
    Attack("open-full-width-no-text", Harm.HOST_LEAK, "ｏｐｅｎ(3)", "SANDBOX_VIOLATION", "ａｂｓ(3)",
           "PEP 3131"),
    Attack("open-descriptor", Harm.HOST_LEAK, "open(3)", "SANDBOX_VIOLATION", "abs(3)"),
    Attack("print", Harm.EXFIL, "print(1)", "SANDBOX_VIOLATION", "abs(1)",
           "asteval adds print to every symbol table"),
    Attack("import", Harm.ESCAPE, "__import__('os')", "SANDBOX_VIOLATION", "abs(1)"),
    Attack("eval", Harm.ESCAPE, "eval('1')", "SANDBOX_VIOLATION", "abs(1)"),
    Attack("getattr", Harm.ESCAPE, "getattr(1, 'real')", "SANDBOX_VIOLATION", "abs(1)"),
    Attack("type", Harm.ESCAPE, "type(1)", "SANDBOX_VIOLATION", "int(1)"),
    Attack("attribute", Harm.ESCAPE, "(1).real", "SANDBOX_VIOLATION", "(1)"),
    Attack("function-globals", Harm.ESCAPE, "sqrt.__self__.__loader__", "SANDBOX_VIOLATION",
           "sqrt(4)"),
    Attack("frame-walk", Harm.ESCAPE, "(x for x in [1]).gi_frame.f_back", "SANDBOX_VIOLATION",
           "[1]", "CVE-2023-37271"),
    Attack("f-string", Harm.ESCAPE, "f'{1:{2}}'", "SANDBOX_VIOLATION", "1", "CVE-2025-24359"),
    Attack("format-method", Harm.ESCAPE, "'{0.__class__}'.format(1)", "SANDBOX_VIOLATION", "1",
           "CVE-2023-41039"),
    Attack("dunder-name", Harm.ESCAPE, "__builtins__", "SANDBOX_VIOLATION", "pi"),
    Attack("asteval-internals", Harm.INTERNAL_READ, "symtable", "SANDBOX_VIOLATION", "tau"),
    Attack("class-walk-before-factorial-sign", Harm.ESCAPE, "().__class__!", "SANDBOX_VIOLATION",
           "3!"),
    Attack("sign-hidden-in-a-string", Harm.ESCAPE, "'5!' + open('x')", "SANDBOX_VIOLATION", "5!"),
    # text that readers may take for something else
    Attack("power-sign", Harm.INTEGRITY, "2^10", "INVALID_PARAMS", "2**10"),
    Attack("percent-sign", Harm.INTEGRITY, "200 * 5%", "INVALID_PARAMS", "200 * 5 / 100"),
    Attack("percent-then-minus", Harm.INTEGRITY, "200 + 5% - 3", "INVALID_PARAMS", "7 % -3"),
    Attack("double-factorial", Harm.INTEGRITY, "5!!", "INVALID_PARAMS", "(3!)!"),
    Attack("factorial-sign-without-operand", Harm.INTEGRITY, "!5", "INVALID_PARAMS", "5!"),
    Attack("nul", Harm.INTEGRITY, "1\x00 + 1", "INVALID_PARAMS", "1 + 1"),
    Attack("right-to-left-override", Harm.INTEGRITY, "1 \u202e+ 1", "INVALID_PARAMS", "1 + 1"),
    Attack("parser-warning-number", Harm.SELF_DOS, "1if 1else open(2)", "SANDBOX_VIOLATION",
           "1if 1else 2", "the parser warns on standard error, which a sealed child may not touch"),
    Attack("parser-warning-escape", Harm.SELF_DOS, "'\\d'", "SANDBOX_VIOLATION", "4"),
    Attack("parser-warning-identity", Harm.SELF_DOS, "1 is 1", "SANDBOX_VIOLATION", "1 == 1"),
    Attack("comment-hides-a-parenthesis", Harm.INTEGRITY, "(2+1 # )! 7\n!)", "INVALID_PARAMS",
           "(2+1!)"),
    Attack("continued-line-hides-a-percent-sign", Harm.INTEGRITY, "10% \\\n- 3", "INVALID_PARAMS",
           "10 % -3"),
    Attack("thousands-separator", Harm.INTEGRITY, "1,000 + 1", "INVALID_PARAMS", "(1, 1000 + 1)"),
    Attack("thousands-separator-in-a-call", Harm.INTEGRITY, "max(1,000, 999)", "INVALID_PARAMS",
           "max(1, 0, 999)", "Python reads ,000 as a zero of its own"),
    Attack("decimal-comma", Harm.INTEGRITY, "2,5 + 1", "INVALID_PARAMS", "2.5 + 1"),
    Attack("empty", Harm.INTEGRITY, "   ", "INVALID_PARAMS", " 1 "),
    # results that no number can hold
    Attack("not-a-number", Harm.INTEGRITY, "inf - inf", "EXECUTION_ERROR", "min(1, inf)"),
    Attack("infinity", Harm.INTEGRITY, "1e308 * 10", "EXECUTION_ERROR", "1e307 * 10"),
    Attack("infinity-in-a-list", Harm.INTEGRITY, "[1, inf]", "EXECUTION_ERROR", "[1, 2]"),
    Attack("complex-result", Harm.INTEGRITY, "(-1)**0.5", "EXECUTION_ERROR", "(-1)**2"),
    Attack("division-by-zero", Harm.INTEGRITY, "1/0", "EXECUTION_ERROR", "0/1"),
    Attack("math-domain-error", Harm.INTEGRITY, "log(-1)", "EXECUTION_ERROR", "log(1)"),
    Attack("overflow", Harm.INTEGRITY, "exp(1000)", "EXECUTION_ERROR", "exp(1)"),
    Attack("negative-shift", Harm.INTEGRITY, "1 << -1", "EXECUTION_ERROR", "1 << 1"),
]  # fmt: skip


def leaks() -> list[str]:
    """Texts that no answer may contain."""
    return [
        str(Path(__file__).parents[2]), sys.prefix, os.environ.get("HOME", "/root") + "/",
        "Traceback", "asteval", "root:x:0", CANARY, "/proc", "supervisor",
    ]  # fmt: skip


@pytest.mark.row("S2", "S4", "E1")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_expression_ends_with_its_code_and_its_twin_succeeds(
    attack: Attack, client: SocketClient
) -> None:
    ended = client.calculate(attack.code, timeout_seconds=0.5)
    assert ended.code == attack.ends, ended.body["error"]
    text = json.dumps(ended.body)
    assert not [leak for leak in leaks() if leak in text]
    twin = client.calculate(attack.twin)
    assert twin.body["success"] is True, twin.body["error"]


def test_expression_corpus_is_unique_and_large_enough() -> None:
    assert len({attack.code for attack in ATTACKS}) == len(ATTACKS) >= 80
    assert {attack.harm for attack in ATTACKS} >= {Harm.ESCAPE, Harm.HOST_LEAK, Harm.HOST_DOS}


@pytest.mark.row("S2")
def test_no_state_leaks_between_expressions(client: SocketClient) -> None:
    client.calculate("(secret := 123456)")
    client.calculate("[pi, e][0]")
    assert client.calculate("secret").code == "SANDBOX_VIOLATION"
    assert client.calculate("pi").body["data"]["value"] == pytest.approx(3.14159265)


@pytest.mark.row("S2", "S4")
def test_expression_attacks_leave_no_process_behind(start_daemon) -> None:
    daemon = start_daemon()
    client = daemon.client()
    assert client.calculate("1 + 1").body["success"]
    guest = guest_of(daemon.process.pid)
    for attack in ATTACKS[:40]:
        client.calculate(attack.code, timeout_seconds=0.2)
    # Zygote, one resident, two spares: whatever was forked for the attacks is gone.
    wait_until(lambda: len(children_of_guest(guest)) <= 4)
    assert guest_of(daemon.process.pid).pid == guest.pid
    everything = [guest, *guest.children(recursive=True)]
    client.close()
    assert daemon.stop() == 0
    assert all(is_gone(process) for process in everything)


@pytest.mark.row("S2")
@pytest.mark.parametrize(
    ("expression", "value"), [("not(0)!", False), ("5 in(5)!", None), ("1 if(0)! else 2", 1)]
)
def test_factorial_after_keyword_is_parsed_correctly(
    client: SocketClient, expression: str, value: object
) -> None:
    answer = client.calculate(expression)
    if value is None:  # a number is no list; what matters is that it was read
        assert answer.code == "EXECUTION_ERROR"
    else:
        assert answer.body["data"]["value"] == value
