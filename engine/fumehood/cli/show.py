"""How answers look: JSON when piped or asked for, something to read on a terminal."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from fumehood.cli.tables import Field, printable, show_table
from fumehood.model.call_log import CallRecord
from fumehood.model.envelope import Envelope
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition


def wants_json(asked: bool) -> bool:
    """JSON was asked for, or nobody is there to read anything else."""
    return asked or not sys.stdout.isatty()


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def show_envelope(envelope: Envelope, *, as_json: bool) -> None:
    """An envelope: whole as JSON, or its result and what it took."""
    document = json.loads(envelope.model_dump_json())
    if as_json:
        show_json(document)
        return
    console = Console(highlight=False)
    if envelope.error is not None:
        console.print(
            f"[bold red]{escape(envelope.error.code)}[/] {escape(envelope.error.message)}"
        )
        if envelope.error.details:
            _print_data(console, envelope.error.details)
    else:
        _print_data(console, envelope.data)
    for warning in envelope.metadata.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}")
    if envelope.metadata.idempotent_replay:
        first = escape(envelope.metadata.call_id or "an earlier call")
        console.print(f"[dim]the stored answer of {first}; nothing was run again[/]")
    console.print(f"[dim]{escape(_summary(envelope))}[/]")
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
        _on_one_line(tool),
        record.code,
        f"{record.execution_time_ms:.1f}",
        record.agent_id or "",
        record.call_id,
    )


def _on_one_line(text: str) -> str:
    """A name that somebody asked for may not begin a line of its own."""
    return printable(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def _print_data(console: Console, data: JsonObject) -> None:
    for key, value in data.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        console.print(f"[bold]{escape(key)}[/]: {escape(printable(text))}")


def _summary(envelope: Envelope) -> str:
    metadata, sandbox = envelope.metadata, envelope.metadata.sandbox
    if metadata.tool_name is None:  # no call: nothing could have run or cost anything
        return metadata.trace_id
    where = (
        f"{sandbox.placement}, {sandbox.isolation}, ended by {sandbox.ended_by}"
        if sandbox
        else "nothing ran"
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
