"""Make the generated parts of the reference from the code.

Usage: `python scripts/make_reference.py` rewrites them; with `--check` it changes nothing,
prints a diff and exits 1 if a page is out of date.

docs/reference/errors.md and python.md are generated completely; in docs/reference/calculator.md,
restricted-python.md, http.md and files.md the text between the marker comments is.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

import fumehood
from fumehood.approvals.model import ApprovalState
from fumehood.approvals.transitions import TRANSITIONS
from fumehood.core.errors import (
    ENDING_ERRORS,
    ERROR_CODES,
    TOOL_CODE,
    TOOL_CODE_HTTP_STATUS,
    EndedBy,
    EngineError,
    Fault,
)
from fumehood.core.session import SessionStatus
from fumehood.guest.interpreter import calculator as expressions
from fumehood.guest.interpreter import guards, modules, nodes, restricted, sizes
from fumehood.http.app import CONTROL_OPERATIONS, OPERATIONS
from fumehood.http.endpoint import Needs, Operation
from fumehood.parts import tool_kinds
from fumehood.protocol import strict_json
from fumehood.registry.definitions import EXECUTORS
from fumehood.sandbox.session_states import TRANSITIONS as SESSION_TRANSITIONS
from fumehood.sandbox.session_states import Keeps
from fumehood_tools.calculator import calculator
from fumehood_tools.run_restricted_python import run_restricted_python

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
EXPLANATION = Path(__file__).resolve().parents[1] / "docs" / "explanation"
ENGINE = REFERENCE.parents[1] / "engine" / "fumehood"
WIDTH = 96

INTRO = """\
<!-- Made by scripts/make_reference.py from the code. Do not edit it here. -->
# Error codes

Every refusal and every failure has one code, in `error.code` of the [envelope](envelope.md).
The code determines the HTTP status of a call and the exit code of `fumehood call`.

- **fault** is the responsible party: {faults}.
- **retryable**: whether the unchanged call may be repeated. The envelope's `error.retryable`
  takes precedence: a single error may differ from the default of its code.
- **human review**: a person has to look at the error.
- **exit** is the exit code of `fumehood call`. `REQUIRES_HUMAN_APPROVAL` without an
  `error.approval_id` is 1: no approver exists, and nothing waits.
"""

ENDINGS = """\
## What ended a run

`metadata.sandbox.ended_by` says how a run ended, as measured outside the sandbox. A failed
program can only add that it ran out of memory, wrote too much or violated a rule; it can never
turn a failure into a success.
"""

ENDINGS_NOTE = """\
One case differs: text that is not an expression (a syntax error, `^`, a percent sign, `5!!`)
ends with `exception` but is answered with `INVALID_PARAMS`, because the caller can correct it.
Its process is replaced as after any other failure.
`sandbox_lost` is retryable only if the tool is `idempotent`.
"""

TOOL_CODES = """\
## A tool's own codes

A function can fail with its own code by raising
`ToolError("CITY_NOT_FOUND", "…")`. Such a code matches `{pattern}`
and differs from all codes above. Its HTTP status is {status}, its exit code 1. It is retryable
only if the tool says so.
"""

NOT_YET = """\
## Not enforced by this version

What this version cannot honour is refused, never accepted and ignored. [Tool
definition](tool-definition.md#fields) says of each field what is done with it; a definition with a
field that is refused is not registered.
"""

NOT_YET_NOTE = """\
Of the executors, only {executors} exist in this version. A tool with the
executor `mcp` whose server is not in the configuration can be registered; a call to it is
answered with `SANDBOX_UNAVAILABLE`.
"""


PYTHON = """\
<!-- Made by scripts/make_reference.py from the code. Do not edit it here. -->
# Public Python names

All that a program may import, and nothing else: other modules and names may change in any version.
A version that breaks one of these says so in the [changelog](../../CHANGELOG.md) and by its number,
as semantic versioning has it: before 1.0 that is the second one. [Python clients](python-client.md)
explains how to use them.

`name=` is a parameter with a default. What follows a `*` is given by name.

"""

ENGINE_NOTE = """\
An `Engine` has these methods in common with `Client`. Its other ones are for the daemon and parts.
"""

OTHER_MODULES = """\
## Other modules

`fumehood.testing` has fakes for tests of programs that embed an engine. An adapter needs the extra
of its name. `fumehood.core.part` and `fumehood.engine_part` are for
[parts](../howto/add-a-part.md). What else parts import changes more often than the rest.

"""

MODULES = (
    "fumehood.testing", "fumehood.integrations.*", "fumehood.core.part", "fumehood.engine_part",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Rewrite or check; the exit status."""
    check = "--check" in arguments
    stale = [path for path, make in PAGES.items() if _differs(path, make, check=check)]
    if stale and check:
        print("Out of date. Run: python scripts/make_reference.py", file=sys.stderr)
    return 1 if stale and check else 0


def errors_page(_: str) -> str:
    """The whole page of error codes."""
    pattern = TOOL_CODE.pattern
    *others, last = (f"`{name}`" for name in (*EXECUTORS, *tool_kinds()))
    executors = f"{', '.join(others)} and {last}"
    parts = [
        INTRO.format(faults=", ".join(f"`{fault}`" for fault in Fault)),
        _table(
            (
                "code", "HTTP", "fault", "retryable", "human review", "exit",
                "meaning",
            ),
            [_code_row(error) for error in sorted(ERROR_CODES.values(), key=_code_order)],
        ),
        ENDINGS,
        _table(("`ended_by`", "code"), [_ending_row(ended_by) for ended_by in EndedBy]),
        ENDINGS_NOTE,
        TOOL_CODES.format(pattern=pattern, status=TOOL_CODE_HTTP_STATUS),
        NOT_YET,
        NOT_YET_NOTE.format(executors=executors),
    ]  # fmt: skip
    return "\n".join(parts)


def calculator_page(page: str) -> str:
    """Return the calculator's page with its generated parts updated."""
    page = _between(page, "names", _names())
    return _between(page, "limits", _limits())


def restricted_python_page(page: str) -> str:
    """Return the page of restricted programs with its generated parts updated."""
    page = _between(page, "modules", _modules())
    page = _between(page, "names", _program_names())
    page = _between(page, "methods", _wrapped(f"`{name}`" for name in sorted(nodes.MAGIC_METHODS)))
    page = _between(page, "attributes", _attributes())
    return _between(page, "limits", _program_limits())


def http_page(page: str) -> str:
    """Return the HTTP page with its tables updated."""
    page = _between(page, "engine", _addresses(OPERATIONS))
    return _between(page, "control", _addresses(CONTROL_OPERATIONS))


def python_page(_: str) -> str:
    """The whole page of public names."""
    public = {name: getattr(fumehood, name) for name in fumehood.__all__}
    rows = [(f"`{name}`", _kind(value), _about(value)) for name, value in public.items()]
    members = "\n".join(section for name in public if (section := _section(name, public)))
    modules = [
        (f"`{module}`", ", ".join(f"`{name}`" for name in names))
        for pattern in MODULES
        for module, names in _modules_of(pattern)
    ]
    head = _table(("`from fumehood import …`", "kind", "what it is"), rows)
    return f"{PYTHON}{head}\n{members}\n{OTHER_MODULES}{_table(('module', 'names'), modules)}"


def _kind(value: Any) -> str:
    if not isinstance(value, type):
        return "function" if inspect.isfunction(value) else "JSON Schema"
    kinds = {Exception: "exception", Enum: "enumeration", BaseModel: "value"}
    return next((word for kind, word in kinds.items() if issubclass(value, kind)), "class")


def _about(value: Any) -> str:
    """The first sentence of a docstring, or for a schema its properties."""
    if isinstance(value, dict):
        return ", ".join(f"`{name}`" for name in value["properties"])
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")


def _section(name: str, public: Mapping[str, Any]) -> str:
    """The signature of a function or class, and its members, if there is more than a name."""
    value, note = public[name], ""
    if isinstance(value, dict):
        return ""
    lines = _signatures(name, value)
    twin = public.get(name.removeprefix("Async"), value)
    if twin is not value and lines[1:] == _signatures(name, twin)[1:]:
        return f"## {name}\n\nAs `{twin.__name__}`; its methods are awaited.\n"
    if value is fumehood.Engine:
        note = f"{ENGINE_NOTE}\n"
    shown = "\n".join(lines)
    return f"## {name}\n\n{note}```text\n{shown}\n```\n" if shown != name else ""


def _signatures(name: str, value: Any) -> list[str]:
    if inspect.isfunction(value):
        return [f"{name}({_parameters(value)})"]
    if issubclass(value, Enum):
        return [f"{name}.{each.name}" for each in value]
    if issubclass(value, BaseModel):
        return [f"{name}(*, {_fields(value)})", *_lines(value)]
    made = f"({_parameters(value)})" if _has_own_init(value) else ""
    return [f"{name}{made}", *_lines(value)]


def _has_own_init(value: type) -> bool:
    """Whether a caller makes one in our way, and not as any exception or not at all."""
    homes = [each for each in value.__mro__ if each.__module__.startswith("fumehood")]
    is_protocol = getattr(value, "_is_protocol", False)
    return not is_protocol and any("__init__" in vars(home) for home in homes)


def _fields(value: type[BaseModel]) -> str:
    fields = value.model_fields.items()
    return ", ".join(name if field.is_required() else f"{name}=" for name, field in fields)


def _lines(owner: type, prefix: str = "") -> Iterator[str]:
    """Each public member of our own, also those of a client's groups."""
    for name in dir(owner):
        home = next(each for each in reversed(owner.__mro__) if name in vars(each))
        if name.startswith("_") or not home.__module__.startswith("fumehood"):
            continue
        member = inspect.getattr_static(owner, name)
        if owner is fumehood.Engine and not hasattr(fumehood.Client, name):
            continue
        if isinstance(member, property):
            group = typing.get_type_hints(member.fget).get("return")
            if isinstance(group, type) and group.__module__.startswith("fumehood.client."):
                yield from _lines(group, f"{prefix}.{name}")
            else:
                yield f"{prefix}.{name}"
        elif callable(getattr(owner, name)):
            yield f"{prefix}.{name}({_parameters(getattr(owner, name))})"
        else:
            yield f"{prefix}.{name}"


def _parameters(value: Callable[..., Any]) -> str:
    shown: list[str] = []
    keywords_only = False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords_only:
            keywords_only = True
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        default = "" if parameter.default is parameter.empty else "="
        if parameter.name != "self":
            shown.append(f"{stars.get(parameter.kind, '')}{parameter.name}{default}")
    return ", ".join(shown)


def _modules_of(pattern: str) -> Iterator[tuple[str, list[str]]]:
    """Public names of modules, read from their text: an adapter imports its framework."""
    for path in sorted(ENGINE.parent.glob(f"{pattern.replace('.', '/')}.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        # What is loaded when it is used is imported there for type checkers.
        body += [inner for node in body if isinstance(node, ast.If) for inner in node.body]
        named = [
            alias.asname
            for node in body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname == alias.name
        ]
        named += [
            node.name
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        public = sorted(name for name in named if name and not name.startswith("_"))
        if public and not path.name.startswith("_"):
            yield ".".join(path.relative_to(ENGINE.parent).with_suffix("").parts), public


def files_page(page: str) -> str:
    """Return the page of the engine's files with its list updated."""
    return _between(page, "files", _files())


def _files() -> str:
    """Every file of the engine by package, with the first sentence of its docstring."""
    packages: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(ENGINE.rglob("*.py")):
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(words.split("\n\n")[0].split())
        if path.name != "__init__.py" and first:
            package = path.parent.relative_to(ENGINE).as_posix()
            packages.setdefault(package, []).append((f"`{path.name}`", first.replace("|", "\\|")))
    return "\n".join(
        f"### `{package}/`\n\n{_table(('file', 'what it is'), rows)}"
        for package, rows in packages.items()
    ).replace("### `./`", "### The package itself")


def approval_page(page: str) -> str:
    """Return the page of approvals with the diagram and the table of their transitions."""
    rows = [_Change(row.name, row.leaves, row.to, row.by, row.when) for row in TRANSITIONS.values()]
    made = _Change("", frozenset(), ApprovalState.PENDING, "", "")
    return _between(page, "transitions", _transitions(ApprovalState, [made], rows))


def sessions_page(page: str) -> str:
    """Return the page of sessions with the diagram and the table of their transitions."""
    rows = [
        _Change(
            row.name, row.leaves, row.to, row.by, row.when,
            " or ".join(keeps for keeps in Keeps if keeps in row.needs),
        )
        for row in SESSION_TRANSITIONS.values()
    ]  # fmt: skip
    made = [row for row in rows if not row.leaves]
    return _between(page, "transitions", _transitions(SessionStatus, made, rows))


class _Change(NamedTuple):
    """One row of a table of transitions."""

    name: str
    leaves: Collection[StrEnum]
    to: StrEnum | None
    by: str
    when: str
    needs: str = ""


def _transitions(states: type[StrEnum], made: Sequence[_Change], rows: Sequence[_Change]) -> str:
    """Return a diagram and a table of transitions. The changes `made` lead to the first states."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in made:
        assert row.to is not None
        edges.setdefault(("[*]", row.to), []).append(row.name)
    for row in rows:
        for state in states:
            if row.to is not None and state in row.leaves:
                edges.setdefault((state, row.to), []).append(row.name)
    drawn = [
        f"    {source} --> {to}" + (f": {', '.join(names)}" if any(names) else "")
        for (source, to), names in edges.items()
    ]
    diagram = "\n".join(["```mermaid", "stateDiagram-v2", *drawn, "```"])
    has_needs = any(row.needs for row in rows)
    table = _table(
        ("change", "from", "to", "by", "when", *(["only with"] if has_needs else [])),
        [
            (
                row.name,
                ", ".join(f"`{state}`" for state in states if state in row.leaves),
                f"`{row.to}`" if row.to is not None else "stays",
                row.by,
                row.when,
                *([row.needs] if has_needs else []),
            )
            for row in rows
        ],
    )
    return f"{diagram}\n\n{table}"


PAGES: dict[Path, Callable[[str], str]] = {
    EXPLANATION / "approval.md": approval_page,
    EXPLANATION / "sessions.md": sessions_page,
    REFERENCE / "errors.md": errors_page,
    REFERENCE / "calculator.md": calculator_page,
    REFERENCE / "restricted-python.md": restricted_python_page,
    REFERENCE / "http.md": http_page,
    REFERENCE / "files.md": files_page,
    REFERENCE / "python.md": python_page,
}


def _differs(path: Path, make: Callable[[str], str], *, check: bool) -> bool:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = make(old)
    if old == new:
        return False
    if check:
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), path.name, f"{path.name}, made anew", lineterm=""
        )
        print("\n".join(lines))
    else:
        path.write_text(new, encoding="utf-8")
    return True


def _code_order(error: type[EngineError]) -> tuple[int, str]:
    return error.http_status, error.code


def _code_row(error: type[EngineError]) -> list[str]:
    return [
        f"`{error.code}`",
        str(error.http_status),
        error.fault.value,
        _yes(error.retryable),
        _yes(error.human_review),
        str(error.exit_code),
        (inspect.getdoc(error) or "").splitlines()[0],
    ]


def _ending_row(ended_by: EndedBy) -> list[str]:
    error = ENDING_ERRORS[ended_by]
    return [f"`{ended_by.value}`", f"`{error.code}`" if error is not None else "success"]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _names() -> str:
    functions = _wrapped(f"`{name}`" for name in sorted(expressions.FUNCTIONS))
    constants = ", ".join(f"`{name}`" for name in expressions.CONSTANTS)
    return f"Functions:\n{functions}\n\nConstants: {constants}; and `True` and `False`."


def _limits() -> str:
    properties = calculator.parameters["properties"]
    places = properties["precision"]
    rows = [
        ["text of the expression", f"{properties['expression']['maxLength']:,} characters"],
        ["nesting", f"{expressions.MAX_DEPTH:,} levels of the syntax tree"],
        ["integer", f"{strict_json.MAX_INTEGER_DIGITS:,} decimal digits"],
        ["list or tuple", f"{sizes.MAX_ELEMENTS:,} elements"],
        ["`precision`", f"{places['minimum']} to {places['maximum']} decimal places"],
    ]
    return _table(("limit", "maximum"), rows).strip()


def _modules() -> str:
    rows = [
        [f"`{name}`", ", ".join(f"`{member}`" for member in sorted(members | _newer(name)))]
        for name, members in modules.MODULES.items()
    ]
    return _table(("module", "members"), rows).strip()


def _newer(module: str) -> frozenset[str]:
    return modules.NEWER.get(module, frozenset())


def _program_names() -> str:
    functions = _wrapped(f"`{name}`" for name in sorted({*nodes.FUNCTIONS, *nodes.MADE_FOR_EACH}))
    exceptions = _wrapped(f"`{name}`" for name in nodes.EXCEPTIONS)
    constants = ", ".join(f"`{name}`" for name in nodes.CONSTANTS)
    return f"Functions:\n{functions}\n\nExceptions:\n{exceptions}\n\nConstants: {constants}."


def _attributes() -> str:
    rows = [
        [_type_name(kind), ", ".join(f"`{name}`" for name in sorted(allowed))]
        for kind, allowed in guards.ATTRIBUTES.items()
    ]
    return _table(("type", "attributes"), rows).strip()


def _type_name(kind: type) -> str:
    if kind is re.error:  # whose own name differs between versions of Python
        return "`re.error`"
    home = kind.__module__
    return f"`{kind.__name__}`" if home == "builtins" else f"`{home.lstrip('_')}.{kind.__name__}`"


def _program_limits() -> str:
    code = run_restricted_python.parameters["properties"]["code"]
    rows = [
        ["text of the program", f"{code['maxLength']:,} characters"],
        ["nesting", f"{nodes.MAX_DEPTH:,} levels of the syntax tree"],
        ["depth of `value`", f"{strict_json.MAX_VALUE_DEPTH} lists and objects"],
        ["`value_repr`", f"{restricted.MAX_REPR_CHARACTERS:,} characters"],
    ]
    return _table(("limit", "maximum"), rows).strip()


def _addresses(operations: Sequence[Operation]) -> str:
    head = ("method", "address", "effect", "caller", "body", "answer")
    return _table(head, [_address_row(operation) for operation in operations]).strip()


def _address_row(operation: Operation) -> list[str]:
    who = {
        Needs.NOBODY: "anyone",
        Needs.CALLER: "a caller",
        Needs.APPROVER: "`approve`",
        Needs.ADMIN: "`admin`",
        Needs.SIGNATURE: "the signature",
    }
    kind = f"`{operation.data.__name__}`" if operation.data is not None else "an object"
    if operation.media is not None:
        kind = "bytes"
    return [
        f"`{operation.method}`",
        f"`{operation.path}`",
        operation.words[0],
        who[operation.needs],
        _body(operation),
        f"{kind}, no envelope" if operation.plain else kind,
    ]


def _body(operation: Operation) -> str:
    if operation.upload is not None:
        return "bytes"
    return f"`{operation.body.__name__}`" if operation.body is not None else ""


def _wrapped(words: Iterable[str]) -> str:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) + 2 > WIDTH:
            lines.append("")
        lines[-1] += f"{word}, "
    return "\n".join(line.rstrip() for line in lines).rstrip(",") + "."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _between(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in page or end not in page:
        raise SystemExit(f"The page lacks the markers {begin} and {end}.")
    before, rest = page.split(begin, 1)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
