"""How a program of the corpus is sent to a wall, and how its ending is read. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from fumehood.attack.attack import Expectation, Language, Value
from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.wall import RunEnding

JAILED = str(Path(__file__).parent / "jailed")
"""The import path of the function as which attacks run in the jail."""

_VALUE_KEYS = {
    Language.CALCULATOR: "value",
    Language.RESTRICTED: "value",
    Language.FUNCTION: "data",
    Language.PYTHON: "value",
}


def arguments_of(language: Language, code: str) -> JsonObject:
    """What a wall is sent for this program."""
    match language:
        case Language.CALCULATOR:
            return {"expression": code}
        case Language.RESTRICTED:
            return {"code": code}
        case Language.FUNCTION:
            return {
                "module": "fumehood_attempt",
                "name": "attempt",
                "import_path": JAILED,
                "arguments": {"code": code},
            }
        case Language.PYTHON:
            return {"code": code, "stdin": None, "files": []}


def name_of(ending: RunEnding) -> str:
    """How it ended, as `Expectation.ends` has it."""
    name = ending.ended_by.value
    if ending.ended_by is not EndedBy.EXCEPTION:
        return name
    claim = ending.claimed_error or {}
    told = claim.get("exception")
    kind = (told if isinstance(told, dict) else claim).get("type")
    return f"{name}:{kind[:40]}" if isinstance(kind, str) else name


def value_of(language: Language, ending: RunEnding) -> object:
    """What the program gave; its own word."""
    return (ending.result or {}).get(_VALUE_KEYS[language])


def said_in(ending: RunEnding) -> str:
    """Everything that came back, as one text."""
    return json.dumps(asdict(ending), default=str, ensure_ascii=False)


def misses(expected: Expectation, language: Language, ending: RunEnding) -> list[str]:
    """What of an ending is not as it must be, in words."""
    faults = []
    name = name_of(ending)
    if name not in expected.ends:
        faults.append(f"it ended as {name} and not as {' or '.join(expected.ends)}")
    elif ending.ended_by is EndedBy.OK:
        value = value_of(language, ending)
        if not _is(value, expected.gives):
            faults.append(f"it gave {_short(value)} and not {_short(expected.gives)}")
    if expected.hits is not None and expected.hits not in ending.limits_hit:
        faults.append(f"nothing says that the limit {expected.hits} refused anything")
    return faults


def _is(value: object, wanted: object) -> bool:
    if wanted is Value.ANYTHING:
        return True
    if wanted is Value.SOMETHING:
        return bool(value)
    return type(value) is type(wanted) and value == wanted


def _short(value: object) -> str:
    text = value.value if isinstance(value, Value) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
