"""How answers look: JSON when piped or asked for, something to read on a terminal."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from fumehood.cli.escaping import indented, json_document, json_line, printable, visible
from fumehood.cli.tables import Field, show_table
from fumehood.model.call_log import CallRecord
from fumehood.model.envelope import Envelope
from fumehood.model.errors import (
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
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition

NOTHING_RAN = (CallerError, RuleError, CircuitOpen, SandboxUnavailable, ShuttingDown)
"""Without a sandbox's report these say that the call did not come so far."""


def wants_json(asked: bool) -> bool:
    """JSON was asked for, or nobody is there to read anything else."""
    return asked or not sys.stdout.isatty()


def show_json(value: Any) -> None:
    """One JSON document on stdout. On a terminal JSON escapes what that would obey."""
    if sys.stdout.isatty():
        document = json_document(value)
    else:
        document = json.dumps(value, ensure_ascii=False, indent=2)
    sys.stdout.write(document + "\n")


def show_envelope(envelope: Envelope, *, as_json: bool) -> None:
    """An envelope: whole as JSON, or its result and what it took."""
    document = json.loads(envelope.model_dump_json())
    if as_json:
        show_json(document)
        return
    console = Console(highlight=False)
    if envelope.error is not None:
        code = (visible(envelope.error.code), "bold red")
        console.print(Text.assemble(code, " ", indented(envelope.error.message)))
        if envelope.error.details:
            _print_data(console, envelope.error.details)
    else:
        _print_data(console, envelope.data)
    for warning in envelope.metadata.warnings:
        console.print(Text.assemble(("warning", "yellow"), " ", indented(warning)))
    if envelope.metadata.idempotent_replay:
        first = visible(envelope.metadata.call_id or "an earlier call")
        console.print(Text(f"the stored answer of {first}; nothing was run again", style="dim"))
    console.print(Text(visible(_summary(envelope)), style="dim"))
    if envelope.debug_info is not None:
        _print_data(console, envelope.debug_info)


def show_tools(found: list[tuple[ToolDefinition, str]], *, as_json: bool) -> None:
    """A list of tools, each with where it comes from."""
    if as_json:
        show_json([{**tool.model_dump(mode="json"), "source": source} for tool, source in found])
        return
    rows = []
    for tool, source in found:
        marks = [tool.executor]
        marks += ["dangerous"] if tool.dangerous else []
        marks += [] if tool.sandboxed else ["in the host"]
        summary = tool.description.split(". ")[0].splitlines()[0]
        name = f"{tool.name}@{tool.version}"
        rows.append((name, ", ".join(marks), source, summary))
    fields = (
        Field("tool"), Field("runs as", drop=1), Field("from", drop=2), Field("what it does"),
    )  # fmt: skip
    show_table(fields, rows)


def show_calls(records: list[CallRecord], *, as_json: bool) -> None:
    """A list of calls, as it comes."""
    if as_json:
        show_json([record.model_dump(mode="json") for record in records])
        return
    fields = (
        Field("when", whole=True), Field("tool"), Field("code"), Field("ms", drop=1),
        Field("agent", drop=2), Field("call", whole=True),
    )  # fmt: skip
    show_table(fields, [_columns(record) for record in records])


def show_call_line(record: CallRecord, *, as_json: bool) -> None:
    """One call on one line, at once: whoever reads may be waiting."""
    line = (
        json.dumps(record.model_dump(mode="json"))
        if as_json
        else "  ".join(text for text in _columns(record) if text)
    )
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show_fields(fields: JsonObject) -> None:
    """A flat object, one line a field."""
    _print_data(Console(highlight=False), fields)


def _columns(record: CallRecord) -> tuple[str, ...]:
    tool = record.tool_name + (f"@{record.tool_version}" if record.tool_version else "")
    return (
        record.timestamp,
        visible(tool),
        record.code,
        f"{record.execution_time_ms:.1f}",
        record.agent_id or "",
        record.call_id,
    )


def _print_data(console: Console, data: JsonObject) -> None:
    for key, value in data.items():
        text = printable(value) if isinstance(value, str) else json_line(value)
        console.print(Text.assemble((visible(key), "bold"), ": ", text))


def _summary(envelope: Envelope) -> str:
    metadata, sandbox = envelope.metadata, envelope.metadata.sandbox
    if metadata.tool_name is None:  # no call: nothing could have run or cost anything
        return metadata.trace_id
    where = (
        f"{sandbox.placement}, {sandbox.isolation}, ended by {sandbox.ended_by}"
        if sandbox
        else _what_ran(envelope)
    )
    name = (
        f"{metadata.tool_name}@{metadata.tool_version}"
        if metadata.tool_version
        else metadata.tool_name
    )
    return (
        f"{name} · {metadata.execution_time_ms:.1f} ms · {where} · "
        f"{metadata.usage.cost} {metadata.usage.currency} · {metadata.trace_id}"
    )


def _what_ran(envelope: Envelope) -> str:
    """What is known of a call of which no sandbox reported."""
    error = envelope.error
    if error is None:
        if isinstance(envelope.data.get("resolution"), dict):
            return "interrupted, and a human found that it took effect"
        return "nothing ran"
    if error.code == ExecutionError.code and error.approval_id is not None:
        return "interrupted, and a human found that it took no effect"
    if error.code == CallInProgress.code:
        return "it still runs"
    if issubclass(ERROR_CODES.get(error.code, EngineError), NOTHING_RAN):
        return "nothing ran"
    return "whether it acted is not known"
