"""Attacks as rows of the corpus, and how a wall's endings are compared with them. Values only.

Used by `doctor --attack` and by tests/adversarial. Invariants of every row: its program limits its
own time and amount, so that it does no harm if the wall under test fails; it reaches only the bait
of this run; and beside it is the nearest harmless program, its twin, which must pass in the same
place.
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
    """The harm of a successful attack (classes after gVisor's security policy)."""

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
    """The groups of the scorecard."""

    FLOOD = "floods"
    NETWORK = "network"
    HOST = "the host's own"
    KERNEL = "the kernel"
    RIGHTS = "rights"
    GUEST = "the guest"
    RESET = "reset"
    LANGUAGE = "language"


class Language(StrEnum):
    """The language of a program, and so how it is sent to a wall."""

    CALCULATOR = "calculator"
    RESTRICTED = "restricted_python"
    FUNCTION = "function"
    PYTHON = "python"


class Look(StrEnum):
    """A check from outside the wall. The bait and the host's clock are always checked."""

    PROCESSES = "processes"
    """The program's processes are seen while it runs, stay within their limit, and are gone
    afterwards."""
    SEALED = "sealed"
    """The kernel reports no capabilities, no_new_privs, and a filter."""
    UNBROKEN = "unbroken"
    """The guest is still the same one."""
    LAYER = "layer"
    """Docker reports no change of the container's file system."""
    MEMORY_LIMIT = "memory_limit"
    """Docker reports the requested memory limit, and no swap."""
    NO_NETWORK = "no_network"
    """Docker reports that the container has no network."""
    OTHER_CONTAINER = "other_container"
    """Docker reports one more container than before."""
    NO_OTHER_CONTAINER = "no_other_container"
    """Docker reports no new container: the previous program ran in the same one."""


class Value(Enum):
    """Expected values that are not plain."""

    ANYTHING = "anything"
    SOMETHING = "something"
    """Anything true: not empty, not zero, not None."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """How a program must end.

    `ends` are names of `EndedBy`, for exceptions with the type (`exception:OSError`); each of them
    is accepted, and the first is the usual one. `hits` is a limit that must be reported.
    """

    ends: tuple[str, ...]
    gives: object = Value.ANYTHING
    hits: str | None = None


@dataclass(frozen=True, slots=True)
class OnGvisor:
    """A difference under gVisor, and the reason why it is not a weakness."""

    why: str
    expected: Expectation | None = None
    """None if it ends as elsewhere."""
    not_looked_at: tuple[Look, ...] = ()
    is_slow: bool = False
    """Too slow there for `--quick`."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One row.

    `before` runs first; with `by_stranger` the attack itself is another principal's.
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
        """Whether `--quick` includes it."""
        is_slow = is_gvisor and self.on_gvisor is not None and self.on_gvisor.is_slow
        return self.is_quick and not is_slow

    def expected_on(self, *, is_gvisor: bool) -> Expectation:
        """The expected ending under this kind of runtime."""
        if is_gvisor and self.on_gvisor is not None and self.on_gvisor.expected is not None:
            return self.on_gvisor.expected
        return self.expected

    def looks_on(self, *, is_gvisor: bool) -> tuple[Look, ...]:
        """The checks under this kind of runtime."""
        if not is_gvisor or self.on_gvisor is None:
            return self.looks
        return tuple(look for look in self.looks if look not in self.on_gvisor.not_looked_at)


def ends(*names: str, gives: object = Value.ANYTHING, hits: str | None = None) -> Expectation:
    """An expectation, in short form."""
    return Expectation(names, gives, hits)


def raises(*types: str, hits: str | None = None) -> Expectation:
    """Expects an exception of one of these types."""
    return Expectation(tuple(f"exception:{name}" for name in types), hits=hits)


JAILED = str(Path(__file__).parent / "jailed")
"""The import path of the function that runs attacks in the jail."""

_VALUE_KEYS = {
    Language.CALCULATOR: "value",
    Language.RESTRICTED: "value",
    Language.FUNCTION: "data",
    Language.PYTHON: "value",
}


def arguments_of(language: Language, code: str) -> JsonObject:
    """The arguments that a wall is sent for this program."""
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
    """The ending in the form of `Expectation.ends`."""
    name = ending.ended_by.value
    if ending.ended_by is not EndedBy.EXCEPTION:
        return name
    claim = ending.claimed_error or {}
    told = claim.get("exception")
    kind = (told if isinstance(told, dict) else claim).get("type")
    return f"{name}:{kind[:40]}" if isinstance(kind, str) else name


def value_of(language: Language, ending: RunEnding) -> object:
    """The value of the program, as it claims."""
    return (ending.result or {}).get(_VALUE_KEYS[language])


def said_in(ending: RunEnding) -> str:
    """Everything that came back, as one text."""
    return json.dumps(asdict(ending), default=str, ensure_ascii=False)


def misses(expected: Expectation, language: Language, ending: RunEnding) -> list[str]:
    """The differences between an ending and its expectation, as text."""
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
