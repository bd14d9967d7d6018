"""One attack as a row of the corpus: values only.

Invariants of every row: its program is bounded by itself in time and amount, so that it does
no harm where the wall under test does not hold; it reaches nothing but the bait of this run;
and beside it stands the nearest harmless program, which must pass in the same place.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from pathlib import Path

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.wall import RunEnding


class Harm(StrEnum):
    """What an attack that succeeds would have done (classes after gVisor's security policy)."""

    ESCAPE = "escape"
    HOST_LEAK = "host_leak"
    EXFIL = "exfil"
    LATERAL = "lateral"
    HOST_DOS = "host_dos"
    PEER_DOS = "peer_dos"
    INTERNAL_ESC = "internal_esc"
    INTERNAL_READ = "internal_read"
    SELF_DOS = "self_dos"
    INTEGRITY = "integrity"


class Topic(StrEnum):
    """What the scorecard puts together."""

    FLOOD = "floods"
    NETWORK = "network"
    HOST = "the host's own"
    KERNEL = "the kernel"
    RIGHTS = "rights"
    GUEST = "the guest"
    RESET = "reset"
    LANGUAGE = "language"


class Language(StrEnum):
    """What a program is written in, and so as what it is sent to a wall."""

    CALCULATOR = "calculator"
    RESTRICTED = "restricted_python"
    FUNCTION = "function"
    PYTHON = "python"


class Look(StrEnum):
    """What is looked at from outside, beside the bait and the host's clock, which always are."""

    PROCESSES = "processes"
    """The program's processes are seen while it runs, within their limit, and gone after it."""
    SEALED = "sealed"
    """While it runs the kernel says: no rights, no way to new ones, a filter."""
    UNBROKEN = "unbroken"
    """The guest is the same one after it."""
    LAYER = "layer"
    """Docker says that nothing of the container's file system was changed."""
    MEMORY_LIMIT = "memory_limit"
    """Docker says that the container has the memory that was asked for, and no swap."""
    NO_NETWORK = "no_network"
    """Docker says that the container has no network."""
    OTHER_CONTAINER = "other_container"
    """Docker says that there is one more container than before."""
    NO_OTHER_CONTAINER = "no_other_container"
    """Docker says that there is none that was not there: what ran before, ran in this one."""


class Value(Enum):
    """What is asked of a program's value where it is no plain one."""

    ANYTHING = "anything"
    SOMETHING = "something"
    """Neither empty, nor zero, nor nothing."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """How a program must end.

    `ends` are the names of `EndedBy`, for exceptions with the type (`exception:OSError`); any
    of them is right. `hits` is a limit that must be among those that refused something.
    """

    ends: tuple[str, ...]
    gives: object = Value.ANYTHING
    hits: str | None = None


@dataclass(frozen=True, slots=True)
class OnGvisor:
    """What is different under gVisor, and why that is no hole: a published limit of it."""

    why: str
    expected: Expectation | None = None
    """None where it ends as elsewhere."""
    not_looked_at: tuple[Look, ...] = ()
    is_slow: bool = False
    """Too slow there to be one of the quick ones."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One row.

    `before` is run first; with `by_stranger` the attack is another principal's than that was.
    """

    id: str
    topic: Topic
    harm: Harm
    tries: str
    language: Language
    code: str
    expected: Expectation
    twin: str
    twin_gives: object = Value.ANYTHING
    before: str | None = None
    by_stranger: bool = False
    looks: tuple[Look, ...] = ()
    wall_s: float = 5.0
    output_bytes: int = 65_536
    is_quick: bool = False
    on_gvisor: OnGvisor | None = None

    def is_quick_on(self, *, is_gvisor: bool) -> bool:
        """Whether it is one of the quick ones under one kind of runtime."""
        is_slow = is_gvisor and self.on_gvisor is not None and self.on_gvisor.is_slow
        return self.is_quick and not is_slow

    def expected_on(self, *, is_gvisor: bool) -> Expectation:
        """How it must end under one kind of runtime."""
        if is_gvisor and self.on_gvisor is not None and self.on_gvisor.expected is not None:
            return self.on_gvisor.expected
        return self.expected

    def looks_on(self, *, is_gvisor: bool) -> tuple[Look, ...]:
        """What is looked at under one kind of runtime."""
        if not is_gvisor or self.on_gvisor is None:
            return self.looks
        return tuple(look for look in self.looks if look not in self.on_gvisor.not_looked_at)


def ends(*names: str, gives: object = Value.ANYTHING, hits: str | None = None) -> Expectation:
    """An expectation, short enough for a table."""
    return Expectation(names, gives, hits)


def raises(*types: str, hits: str | None = None) -> Expectation:
    """That the program ends by an exception of one of these types."""
    return Expectation(tuple(f"exception:{name}" for name in types), hits=hits)


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
