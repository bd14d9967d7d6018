"""Attacks as rows of the corpus, and the comparison of a run's ending with the expected ending.
Values only.

Used by `doctor --attack` and by tests/adversarial. Invariants of every row: the program limits its
own time and resources, so it does no harm even if the wall under test fails; the program reaches
only the bait of its run; the row has a twin, the most similar harmless program, which must pass on
the same wall.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path

from fumehood.core.errors import EndedBy
from fumehood.core.json_types import JsonObject
from fumehood.sandbox.wall import RunEnding


class Harm(StrEnum):
    """The harm that a successful attack does. The classes follow gVisor's security policy."""

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
    """The subject of an attack, by which the scorecard groups the rows."""

    FLOOD = "floods"
    NETWORK = "network"
    HOST = "the host's own"
    KERNEL = "the kernel"
    RIGHTS = "rights"
    GUEST = "the guest"
    RESET = "reset"
    LANGUAGE = "language"


class Language(StrEnum):
    """The language of an attack's program. It determines the arguments for the wall."""

    CALCULATOR = "calculator"
    RESTRICTED = "restricted_python"
    FUNCTION = "function"
    PYTHON = "python"


class Look(StrEnum):
    """An additional check of an attack, made from outside the wall. Apart from these checks, the
    host always checks the attack's duration, and whether the attack reached the bait. The bait
    consists of objects on this host that attacks try to reach.
    """

    PROCESSES = "processes"
    """The host can see the program's processes while the program runs, their number stays within
    the limit, and no process is left after the program's end."""
    SEALED = "sealed"
    """The Linux kernel reports that the processes have no capabilities, that `no_new_privs` is set,
    and that they have a seccomp filter."""
    UNBROKEN = "unbroken"
    """Neither the wall's guest process nor its containers were replaced or ended."""
    LAYER = "layer"
    """Docker reports no change in the container's image layer."""
    MEMORY_LIMIT = "memory_limit"
    """Docker reports the requested memory limit, and no swap."""
    NO_NETWORK = "no_network"
    """Docker reports that the container has no network."""
    OTHER_CONTAINER = "other_container"
    """Docker reports one more container than before."""


GVISOR, LANDLOCK = "gvisor", "landlock"
"""Kinds of runtimes on which results differ."""


class Value(Enum):
    """Placeholders for the value that a program must return, for attacks whose exact value cannot
    be predicted. Each placeholder stands for many values.
    """

    ANYTHING = "anything"
    SOMETHING = "something"
    """Any value that Python counts as true: not empty, zero or None."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """How a program must end.

    `ends` are the names of the accepted endings, the usual ending first. A name is a value of
    `EndedBy`; for an exception, the exception's type follows (`exception:OSError`). `gives` is the
    value that a program must return if it ends as `ok`. `hits` names a limit that the wall must
    report as reached.
    """

    ends: tuple[str, ...]
    gives: object = Value.ANYTHING
    hits: str | None = None


@dataclass(frozen=True, slots=True)
class Differs:
    """How an attack's result differs on one kind of runtime, and why the difference is not a
    weakness, or is one that the grade of this runtime names.
    """

    why: str
    expected: Expectation | None = None
    """The ending that is expected there, or None if the expected ending does not differ."""
    not_looked_at: tuple[Look, ...] = ()
    is_slow: bool = False
    """Whether the attack is too slow there to be part of `--quick`."""
    twin: str | None = None
    """The harmless program there, or None if it does not differ."""
    twin_gives: object = Value.ANYTHING
    """What that program gives, if it differs."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack: a program that tries to do harm, and how the program must end.

    `tries` describes the attack for the scorecard. `twin` is the harmless program that must succeed
    with the value `twin_gives`. `before` is a program that runs before the attack. If `by_stranger`
    is True, the attack runs for another principal than `before`. `wall_s` and `output_bytes` are
    the limits of the run, in seconds and bytes.
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
    wall_s: float = 10.0
    output_bytes: int = 65_536
    is_quick: bool = False
    on_gvisor: Differs | None = None
    on_landlock: Differs | None = None
    differs: Differs | None = None
    """The difference that `on` has applied."""

    def on(self, kind: str | None) -> Attack:
        """Return a copy of the attack for one kind of container runtime: `gvisor`, `landlock` (no
        namespaces), or None for all others.
        """
        differs = {GVISOR: self.on_gvisor, LANDLOCK: self.on_landlock}.get(kind or "")
        if differs is None:
            return self
        if differs.twin is not None:
            self = replace(self, twin=differs.twin, twin_gives=differs.twin_gives)
        return replace(
            self,
            differs=differs,
            expected=differs.expected or self.expected,
            looks=tuple(look for look in self.looks if look not in differs.not_looked_at),
            is_quick=self.is_quick and not differs.is_slow,
        )


def ends(*names: str, gives: object = Value.ANYTHING, hits: str | None = None) -> Expectation:
    """Return an `Expectation` with these fields. The tables of attacks use this short form."""
    return Expectation(names, gives, hits)


def raises(*types: str, hits: str | None = None) -> Expectation:
    """Return the `Expectation` that a program ends with an exception of one of these types."""
    return Expectation(tuple(f"exception:{name}" for name in types), hits=hits)


JAILED = str(Path(__file__).parent / "jailed")
"""The import path of the function that runs attacks in the jail."""


def arguments_of(language: Language, code: str) -> JsonObject:
    """Return the arguments that make a wall run the program `code`, written in `language`."""
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
    """Return the name of an ending, in the form of the names in `Expectation.ends`."""
    name = ending.ended_by.value
    if ending.ended_by is not EndedBy.EXCEPTION:
        return name
    claim = ending.claimed_error or {}
    told = claim.get("exception")
    kind = (told if isinstance(told, dict) else claim).get("type")
    return f"{name}:{kind[:40]}" if isinstance(kind, str) else name


def value_of(language: Language, ending: RunEnding) -> object:
    """Return the value that a program returned, or None if it returned no value. The value is
    untrusted. `language` is the language of the program, and `ending` is how its run ended.
    """
    return (ending.result or {}).get("data" if language is Language.FUNCTION else "value")


def said_in(ending: RunEnding) -> str:
    """Return everything that a run's ending contains as one text. The text is searched for a secret
    word that only the host knows, and that a program can obtain only by breaking the wall.
    """
    return json.dumps(asdict(ending), default=str, ensure_ascii=False)


def misses(expected: Expectation, language: Language, ending: RunEnding) -> list[str]:
    """Return a description of each difference between an ending and the expected ending. `language`
    is the language of the program that ended.
    """
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
