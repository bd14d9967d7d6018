"""How answers look: JSON when piped or asked for, something to read on a terminal."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

from fumehood.cli.tables import Field, printable, show_table
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
    console.print(f"[dim]{escape(_summary(envelope))}[/]")
    if envelope.debug_info is not None:
        _print_data(console, envelope.debug_info)


def show_tools(definitions: list[ToolDefinition], *, as_json: bool) -> None:
    """A list of tools."""
    if as_json:
        show_json([tool.model_dump(mode="json") for tool in definitions])
        return
    rows = []
    for tool in definitions:
        marks = [tool.executor]
        marks += ["dangerous"] if tool.dangerous else []
        marks += [] if tool.sandboxed else ["in the host"]
        summary = tool.description.split(". ")[0].splitlines()[0]
        name = f"{tool.name}@{tool.version}"
        rows.append((name, ", ".join(marks), summary))
    show_table((Field("tool"), Field("runs as", drop=1), Field("what it does")), rows)


def _print_data(console: Console, data: JsonObject) -> None:
    for key, value in data.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        console.print(f"[bold]{escape(key)}[/]: {escape(printable(text))}")


def _summary(envelope: Envelope) -> str:
    metadata, sandbox = envelope.metadata, envelope.metadata.sandbox
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
