"""Functions that print answers: as JSON if piped or requested, otherwise as text and tables.

Tables fit the terminal's width. Long cells are folded between words. If even that is not enough,
the least important columns are dropped, so that no word is broken.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from fumehood.cli.exits import document_of
from fumehood.cli.options import age
from fumehood.core.errors import (
    ERROR_CODES,
    CallerError,
    CallInProgress,
    CircuitOpen,
    EngineError,
    ExecutionError,
    RuleError,
    SandboxUnavailable,
    ShuttingDown,
)
from fumehood.core.escaping import indented, json_document, json_line, printable, visible
from fumehood.core.json_types import JsonObject

if TYPE_CHECKING:
    from fumehood.core.call_log import CallRecord
    from fumehood.core.envelope import Envelope
    from fumehood.core.status import CircuitStatus
    from fumehood.core.tool import ToolDefinition

BOLD, DIM, BOLD_RED, YELLOW = "1", "2", "1;31", "33"
"""Styles of text on a terminal. *Source*: ECMA-48, SGR."""

SHORTEST_WAIT_MS = 1_000
"""Shortest wait for approval, in milliseconds, that the summary of a call shows. Shorter times are
not waits for a human, but the engine's own work."""

EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Fields with these values are not shown on a terminal."""

FILE_CONTENT = "content_base64"
"""The key of an inline file's bytes. Importing this constant from the model would load too much
code."""

OPTIONS = {"memory_limit_mb": "--memory", "timeout_seconds": "--timeout"}
"""Maps the name of a call option to the name of the command line's option."""

_ADVICE = re.compile(
    rf"(allow more (?:memory )?(?:\(|with )|^)({'|'.join(OPTIONS)})"
    r"(?=\)|\.$| must be | could not be |: [0-9.e+]+ was asked for)"
)
"""Matches the advice in an engine's message to change one of `OPTIONS`."""

_TO_MODELS = re.compile(
    r" (?:Tell the user what you want to do\. .*"
    r"|Do not retry(?:; tell the user what you wanted to do"
    r"|[a-z, ]* in another way; ask the user how to continue)?\.)$",
    re.DOTALL,
)
"""Matches the end of an engine's message, if it is meant only for models."""

NOTHING_RAN = (CallerError, RuleError, CircuitOpen, SandboxUnavailable, ShuttingDown)
"""Classes of errors which mean that nothing ran, provided that the answer has no sandbox report."""


def wants_json(asked: bool) -> bool:
    """Return True if JSON was requested, or if stdout is not a terminal."""
    return asked or not sys.stdout.isatty()


def circuit_words(circuit: CircuitStatus) -> str:
    """Describe the state of a circuit, which suspends calls to a failing service. The text contains
    the number of recent failures, and the time until the next call to the service is allowed.
    """
    wait_ms = circuit.retry_after_ms
    then = f"; next trial in {math.ceil(wait_ms / 1000)} s" if wait_ms else ""
    return (
        f"{circuit.state.value.replace('_', '-')}, "
        f"{circuit.failures} of the last {circuit.requests} requests failed{then}"
    )


def show_json(value: Any) -> None:
    """Print a value as one JSON document. On a terminal, unsafe characters are written as JSON
    escapes.
    """
    if sys.stdout.isatty():
        document = json_document(value)
    else:
        document = json.dumps(value, ensure_ascii=False, indent=2)
    sys.stdout.write(document + "\n")


Show = Callable[[Any, bool], None]
"""Shows an answer. The second argument is True if the user requested JSON."""


class Column(NamedTuple):
    """One column of a table. `cell` returns a cell's text for an item.

    If the table is too wide, the column with the highest `drop` is left out first. A column whose
    `drop` is 0 is never left out. A `whole` column is not folded, so that users can copy its cells.
    """

    head: str
    cell: Callable[[Any], str] = str
    drop: int = 0
    whole: bool = False


def as_document(found: Any, _: bool = True) -> None:
    """Print a model, or a list of models, as JSON, even on a terminal.

    The second argument says whether the user requested JSON. It is ignored, and exists only because
    every function of the type `Show` takes it.
    """
    is_list = isinstance(found, list | tuple)
    show_json([_dumped(one) for one in found] if is_list else _dumped(found))


def as_text(write: Callable[[Any], None]) -> Show:
    """Return a function that prints an answer. The function takes the answer, and whether the user
    requested JSON.

    The function prints JSON if the user requested it, or if standard output is not a terminal.
    Otherwise, it prints the answer with `write`.
    """

    def show(found: Any, as_json: bool) -> None:
        (as_document if wants_json(as_json) else write)(found)

    return show


@as_text
def as_fields(found: Any) -> None:
    """Print the fields of a model, one per line."""
    show_fields(_dumped(found))


def as_table(*columns: Column) -> Show:
    """Return a function that prints a list of models. The function takes the list, and whether the
    user requested JSON.

    The function prints JSON if the user requested it, or if standard output is not a terminal.
    Otherwise, it prints a table with these columns.
    """

    def write(found: Sequence[Any]) -> None:
        show_table(columns, [[column.cell(one) for column in columns] for one in found])

    return as_text(write)


def _dumped(found: Any) -> Any:
    return found.model_dump(mode="json") if hasattr(found, "model_dump") else found


def show_envelope(envelope: Envelope | JsonObject, *, as_json: bool) -> None:
    """Print an envelope as JSON if `as_json` is True, otherwise as text.

    The text has the error or the fields of the result, without empty fields. It also has the
    warnings, and a last line that summarises the call.
    """
    document = document_of(envelope)
    if as_json:
        show_json(document)
        return
    error, metadata = document["error"], document["metadata"]
    if error is not None:
        message = indented(for_people(error["message"]))
        print(f"{styled(visible(error['code']), BOLD_RED)} {message}")
        show_fields(_with_content(error.get("details") or {}))
    else:
        show_fields(_with_content(document["data"]))
    for warning in metadata["warnings"]:
        print(f"{styled('warning', YELLOW)} {indented(in_options(warning))}")
    if metadata.get("idempotent_replay"):
        first = visible(metadata["call_id"] or "an earlier call")
        print(styled(f"stored answer of {first}; nothing ran again", DIM))
    fallback = metadata.get("fallback")
    if fallback is not None and fallback["answered"]:
        why = fallback["error"]["code"] if fallback["error"] is not None else "it failed"
        print(styled(visible(f"answered by the fallback {fallback['tool']}: {why}"), DIM))
    print(styled(visible(_summary(document)), DIM))
    show_fields(document.get("debug_info") or {})


def in_options(message: str) -> str:
    """Adapt the advice in an engine's message to the command line. Each name of a call option, such
    as `timeout_seconds`, is replaced by the command line's option, such as `--timeout`.
    """
    return _ADVICE.sub(lambda found: found[1] + OPTIONS[found[2]], message)


def for_people(message: str) -> str:
    """Rewrite an engine's message for a person at a terminal, without advice that is meant only for
    models.
    """
    return _TO_MODELS.sub("", in_options(message))


def styled(text: str, style: str) -> str:
    """Return trusted text with a style, or unchanged if standard output is not a terminal with
    styles.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return text if is_plain or not sys.stdout.isatty() else f"\x1b[{style}m{text}\x1b[0m"


def show_tools(
    found: list[tuple[ToolDefinition, str]], unavailable: Collection[str], *, as_json: bool
) -> None:
    """Print a list of tools with their sources. Tools whose names are in `unavailable` are marked
    as unable to run now.
    """

    if as_json:
        documents = [
            tool.model_dump(mode="json")
            | {"source": source, "can_run_now": tool.name not in unavailable}
            for tool, source in found
        ]
        show_json(documents)
        return
    rows = []
    for tool, source in found:
        applies = {
            "dangerous": tool.dangerous,
            "in the host": not tool.sandboxed,
            "disabled": not tool.is_active,
            "cannot run now": tool.name in unavailable,
        }
        marks = [tool.executor, *(mark for mark, is_so in applies.items() if is_so)]
        summary = tool.description.split(". ")[0].splitlines()[0]
        name = f"{tool.name}@{tool.version}"
        rows.append((name, ", ".join(marks), source, summary))
    fields = (
        Column("tool"), Column("runs as", drop=1), Column("from", drop=2), Column("description"),
    )  # fmt: skip
    show_table(fields, rows)
    if unavailable:
        print("Some cannot run now. For the reason: fumehood doctor", file=sys.stderr)


show_calls = as_table(
    Column("age", lambda call: age(datetime.fromisoformat(call.timestamp), datetime.now(UTC)), 1),
    Column("tool", lambda call: visible(call.tool_name)),
    Column("version", lambda call: call.tool_version or "", drop=4),
    Column("code", lambda call: call.code),
    Column("ms", lambda call: f"{call.execution_time_ms:.1f}", drop=2),
    Column("agent", lambda call: call.agent_id or "", drop=3),
    Column("call", lambda call: call.call_id, whole=True),
)
"""Prints a list of calls, in the order of the list."""


def show_call_line(record: CallRecord, *, as_json: bool) -> None:
    """Print one call on one line. Flush the output, because another program may be waiting for
    it.
    """
    if as_json:
        print(json.dumps(record.model_dump(mode="json")), flush=True)
        return
    at, today = datetime.fromisoformat(record.timestamp).astimezone(), datetime.now().astimezone()
    date = "" if at.date() == today.date() else f"{at:%Y-%m-%d} "
    parts = (
        f"{date}{at:%H:%M:%S}",
        visible(record.tool_name + (f"@{record.tool_version}" if record.tool_version else "")),
        record.code,
        f"{record.execution_time_ms:.1f} ms",
        record.agent_id or "",
        record.call_id,
    )
    print("  ".join(part for part in parts if part), flush=True)


def show_fields(fields: JsonObject) -> None:
    """Print an object, one line per field. A text of several lines begins on a new line."""
    for key, value in fields.items():
        text = indented(value) if isinstance(value, str) else in_options(json_line(value))
        between = "\n    " if "\n" in text.rstrip() else " "  # keeps tables aligned
        print(f"{styled(visible(key), BOLD)}:{between}{text}")


def _with_content(fields: JsonObject) -> JsonObject:
    """Return the fields that are not empty, or all fields if all are empty.

    File contents are replaced by their sizes.
    """
    return {
        key: _described(key, value) for key, value in fields.items() if value not in EMPTY
    } or fields


def _described(key: str, value: Any) -> Any:
    if key == FILE_CONTENT and isinstance(value, str):
        return _size(value)
    if isinstance(value, list) and any(map(_is_inline, value)):
        return "\n".join(
            visible(f"{item['filename']}: {item['content_type']}, {_size(item[FILE_CONTENT])}")
            if _is_inline(item)
            else json_line(item)
            for item in value
        )
    return value


def _is_inline(item: Any) -> bool:
    """Return True if an item is a file whose bytes are part of the answer."""
    keys = ("filename", "content_type", FILE_CONTENT)
    return isinstance(item, dict) and all(isinstance(item.get(key), str) for key in keys)


def _size(base64: str) -> str:
    size = len(base64) * 3 // 4 - base64[-2:].count("=")
    shown = f"{size / 1000:.0f} kB" if size >= 1000 else f"{size} bytes"
    return f"{shown} (--json shows it)"


def _summary(document: JsonObject) -> str:
    metadata, sandbox = document["metadata"], document["metadata"]["sandbox"]
    if metadata["tool_name"] is None:  # not a call: nothing could have run
        return str(metadata["trace_id"])
    where = (
        f"{sandbox['placement']}, {sandbox['isolation']}, ended by {sandbox['ended_by']}"
        if sandbox
        else _what_ran(document)
    )
    version = f"@{metadata['tool_version']}" if metadata["tool_version"] else ""
    usage = metadata["usage"]
    took = f"{metadata['execution_time_ms']:.1f} ms"
    waited_ms = metadata["performance"]["approval_ms"] or 0.0
    if waited_ms >= SHORTEST_WAIT_MS:
        took += f", of which {waited_ms:.1f} ms waiting for approval"
    return (
        f"{metadata['tool_name']}{version} · {took} · {where} · "
        f"{usage['cost']} {usage['currency']} · {metadata['trace_id']}"
    )


def _what_ran(document: JsonObject) -> str:
    """Describe what ran in a call whose answer, `document`, has no sandbox report.

    If the answer does not show what ran, the description says that it is unknown whether the call
    took effect.
    """
    error = document["error"]
    if document["metadata"].get("fallback") is not None:
        return "its own service was not asked"
    if error is None:
        if isinstance(document["data"].get("resolution"), dict):
            return "interrupted; an approver recorded that it took effect"
        return "nothing ran"
    code = error["code"]
    if code == ExecutionError.code and error.get("approval_id") is not None:
        return "interrupted; an approver recorded that it had no effect"
    if code == ExecutionError.code and document["metadata"]["performance"]["processing_ms"] is None:
        return "nothing ran"  # the preview had already shown that the call would fail
    if code == CallInProgress.code:
        return "still running"
    if issubclass(ERROR_CODES.get(code, EngineError), NOTHING_RAN):
        return "nothing ran"
    return "unknown whether it took effect"


# -- tables ----------------------------------------------------------------------------------


READABLE = 20
"""Minimum width, in characters, of a readable cell with long text. Cells with longer text are
folded."""

BETWEEN = 3
"""Number of characters between the texts of two columns: padding, rule, padding."""


def show_table(fields: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text as a table. Each row has one cell for each column. Cells are escaped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    kept = fitting(fields, cells, console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for index in kept:
        table.add_column(fields[index].head, overflow="fold", no_wrap=fields[index].whole)
    for row in cells:
        table.add_row(*(Text(row[index]) for index in kept))
    console.print(table)
    left_out = [field.head for index, field in enumerate(fields) if index not in kept]
    if left_out:
        print(f"Hidden columns: {', '.join(left_out)}. See --json.", file=sys.stderr)


def fitting(fields: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the indexes of the columns to show in a table that is `width` characters wide.

    Columns are left out, the highest `drop` first, until there is enough room to read the remaining
    columns. A column whose `drop` is 0 is never left out, even if the table is then too wide.
    """
    needed = [_readable(field, rows, index) + BETWEEN for index, field in enumerate(fields)]
    kept = list(range(len(fields)))
    for index in sorted(kept, key=lambda index: -fields[index].drop):
        if fields[index].drop == 0 or sum(needed[one] for one in kept) - 1 <= width:
            break
        kept.remove(index)
    return kept


def _readable(field: Column, rows: Sequence[Sequence[str]], index: int) -> int:
    """Return the minimum width, in characters, at which the column with this index is readable."""
    from rich.cells import cell_len

    cells = [field.head, *(row[index] for row in rows)]
    most = max(cell_len(line) for text in cells for line in text.split("\n"))
    if field.whole:
        return most
    word = max((cell_len(word) for text in cells for word in text.split()), default=0)
    return max(word, min(most, READABLE))
