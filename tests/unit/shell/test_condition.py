"""The condition `runs` of a policy's rules."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.policy.loader import parse_policy
from fumehood.policy.model import Verdict
from fumehood_tools.run_shell import run_shell
from support.policies import decide, facts, faults, rule

DENY = '[[rules]]\nid = "r"\ndecision = "deny"\n'


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('runs = ["/bin/rm"]', "rule 'r': when[0].runs: '/bin/rm' is not the name of a program"),
        ('runs = ["-x"]', "when[0].runs: '-x' is not the name of a program"),
        ("runs = [\"rm '*'\"]", "is not the name of a program, without a path, and plain words"),
        ("runs = []", "when[0].runs: must not be empty"),
        ("runs = [1]", "when[0].runs[0]: entry 1 must be a string"),
        (
            'runs = ["rm"]',
            "rule 'r': when[0].runs: no tool that the rule matches takes a 'command' or 'argv'",
        ),
        (
            '[[rules.when]]\nargument = "/to"\nruns = ["rm"]',
            "rule 'r': when[0]: argument is needed, or runs without it",
        ),
        ('[[rules.when]]\nruns = ["rm"]\nprefix = "a"', "when[0]: exactly one of these is needed"),
    ],
)
def test_fault_in_the_condition_is_named(text: str, told: str) -> None:
    found = faults(DENY + text)
    assert any(told in fault for fault in found), found


@pytest.mark.row("A1")
def test_key_of_the_rule_is_short_for_a_condition() -> None:
    short, long = (
        parse_policy("p.toml", (DENY + text).encode(), [("sh", "1.0.0")]).rules
        for text in ('runs = ["rm"]', '[[rules.when]]\nruns = ["rm"]')
    )
    assert short == long
    (other,) = parse_policy("p.toml", f'{DENY}runs = ["mv"]'.encode(), [("sh", "1.0.0")]).rules
    assert (other,) != short


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("program", "command", "matches"),
    [
        ("rm -r", "rm -fr x", True),
        ("rm -r -f", "rm -rf x", True),
        ("rm -rf", "rm -fr x", False),  # compared as it is written
        ("rm -r", "rm --recursive x", False),
        ("git push --force", "git push -u origin --force", True),
        ("git push --force", "git push --force=x", True),
        ("git push --force", "git push --force-with-lease", False),
        ("docker compose down", "docker compose -f x down", True),
        ("docker compose down", "docker compose up down", False),
        ("git push", "git commit -m push", False),
        ("git push", 'git commit -m "$X"', False),
        ("git push", "git -c $X", None),
        ("find -delete", "find * -name x", None),
        ("git commit -m", 'git commit "$X"', None),
    ],
)
def test_condition_matches_first_operands_and_any_options(
    program: str, command: str, matches: bool | None
) -> None:
    found = decide(facts(run_shell, {"command": command}), rule("deny", runs=[program]))
    told = None if found.reason else found.verdict is Verdict.DENY
    assert told is matches


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    ("arguments", "doubt"),
    [
        ({"command": "eval x"}, "eval runs text that is not analysed"),
        ({"command": "git $X"}, "an argument of the command is not literal"),
        ({}, "there is no command"),
    ],
)
def test_doubt_is_explained(arguments: dict[str, Any], doubt: str) -> None:
    denies = rule("deny", runs=["git push"])
    assert decide(facts(run_shell, arguments), denies).reason == f"In doubt: {doubt}."
