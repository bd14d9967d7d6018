"""`fumehood tools lint`, `compat` and `golden`: review tool definitions, and repeat recorded
calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import AsJson, SocketPath, read_bytes
from fumehood.cli.reach import calling
from fumehood.cli.show import show_json, wants_json
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import Finding, Severity, ToolDefinition
from fumehood.devtools.golden import check, read_golden, record, write_golden

golden = typer.Typer(help="Sequences of calls with recorded answers.", no_args_is_help=True)

Format = Literal["text", "json", "sarif"]
Linted = list[tuple[str, list["Finding"]]]
"""The origin of each definition (a file, or a tool's name), and the findings about the
definition."""

GoldenPath = Annotated[Path, typer.Argument(help="A golden sequence, as JSON.")]


def lint_tools(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Files, directories or names of tools; default: all of the engine."),
    ] = None,
    as_format: Annotated[
        Format | None, typer.Option("--format", help="text, json or sarif.")
    ] = None,
    fail_on: Annotated[
        Literal["error", "warning", "note"],
        typer.Option("--fail-on", help="Exit with 1 from this severity on."),
    ] = "error",
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Review definitions by the rules for tools that models use."""
    from fumehood.devtools.lint import lint

    documents = list(_targets(targets or [], socket, as_json))
    names = {str(document.get("name")) for _, document in documents}
    found: Linted = [(where, lint(document, names)) for where, document in documents]
    shape = as_format or ("json" if wants_json(as_json) else "text")
    if shape == "sarif":
        show_json(sarif_of(found))
    elif shape == "json":
        show_json(
            [
                {"tool": w, "findings": [f.model_dump(mode="json") for f in each]}
                for w, each in found
            ]
        )
    else:
        _show_text(found)
    order = list(Severity)
    worst = order[: order.index(Severity(fail_on)) + 1]
    if any(finding.severity in worst for _, findings in found for finding in findings):
        raise typer.Exit(ExitCode.TOOL_FAILED)


def compare_tools(
    old: Annotated[str, typer.Argument(help="A file, or name@version.")],
    new: Annotated[str, typer.Argument(help="A file, or name@version.")],
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show which callers a new version of a definition breaks, and the version it needs.

    Exit code 1: the new version's number promises more than it keeps.
    """
    from dataclasses import asdict

    from fumehood.devtools.compat import compare

    found = compare(_one(old, socket, as_json), _one(new, socket, as_json))
    note = found.migration_note()
    if wants_json(as_json):
        show_json(
            {
                "changes": [asdict(change) for change in found.changes],
                "breaking": len(found.breaking),
                "needed": found.needed,
                "made": found.made,
                "is_enough": found.is_enough,
                "migration_note": note,
            }
        )
    else:
        for change in found.breaking:
            say(f"breaks {change.breaks}: {change.path}: {change.message}")
        say(f"needs a step: {found.needed}; made: {found.made}\n")
        for line in note.splitlines():
            say(line)
    if not found.is_enough:
        raise typer.Exit(ExitCode.TOOL_FAILED)


@golden.command("record")
def record_golden(file: GoldenPath, socket: SocketPath = None) -> None:
    """Make the calls of a file, and record their answers in it."""
    with calling(socket) as client:
        calls = record(client, read_golden(file).calls)
    write_golden(file, calls)
    failed = sum(each.answer is not None and not each.answer.success for each in calls)
    say(f"Calls recorded: {len(calls)}. With an error: {failed}.")


@golden.command("check")
def check_golden(
    file: GoldenPath,
    run: Annotated[bool, typer.Option("--run", help="Make the calls, and compare data.")] = False,
    socket: SocketPath = None,
) -> None:
    """Check that recorded calls are still possible; with --run, that their answers are equal."""
    with calling(socket) as client:
        calls = read_golden(file).calls
        differences = list(check(client, calls, run=run))
    for difference in differences:
        say(visible(difference))
    if differences:
        raise typer.Exit(ExitCode.TOOL_FAILED)
    say(f"Calls as recorded: {len(calls)}.")


def sarif_of(found: Linted) -> JsonObject:
    """Convert lint findings to a SARIF document. *Source*: SARIF 2.1.0, sections 3.13 to 3.28."""
    from fumehood.devtools.lint import RULES

    results = [
        {
            "ruleId": finding.rule,
            "level": finding.severity.value,
            "message": {"text": f"{finding.path}: {finding.message}. {finding.remedy}"},
            "locations": [
                {
                    "physicalLocation": {"artifactLocation": {"uri": where.partition("#")[0]}},
                    "logicalLocations": [{"fullyQualifiedName": f"{where}/{finding.path}"}],
                }
            ],
        }
        for where, findings in found
        for finding in findings
    ]
    rules = [
        {
            "id": rule,
            "shortDescription": {"text": remedy},
            "defaultConfiguration": {"level": severity.value},
        }
        for rule, (severity, remedy) in RULES.items()
    ]
    return {
        "version": "2.1.0",
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "runs": [{"tool": {"driver": {"name": "fumehood", "rules": rules}}, "results": results}],
    }


def _show_text(found: Linted) -> None:
    count = 0
    for where, findings in found:
        for finding in findings:
            count += 1
            line = f"{where}: {finding.severity}: {finding.rule}: {finding.path}: {finding.message}"
            say(visible(f"{line}. {finding.remedy}"))
    say(f"Findings: {count}. Definitions: {len(found)}.")


def _targets(
    targets: list[str], socket: Path | None, as_json: bool
) -> Iterator[tuple[str, JsonObject]]:
    """Yield the origin and the content of each definition to review.

    A target is a file, a directory or the name of a tool. Without targets, all of the engine's
    tools are reviewed.
    """
    if not targets:
        with calling(socket, as_json=as_json) as client:
            for tool in client.tools():
                yield tool.name, _registered(tool)
    for target in targets:
        path = Path(target)
        if not path.exists():
            yield target, _registered(_served(target, socket, as_json))
            continue
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            is_one = file.suffix in (".json", ".toml", ".yaml", ".yml") and file.is_file()
            if path.is_dir() and not is_one:  # a pipe or a device could be read for ever
                continue
            for document in _documents(file):
                yield f"{file}#{document.get('name', '')}", document


def _registered(tool: ToolDefinition) -> JsonObject:
    """Return a tool's definition as a JSON document. `sandboxed` is left out if definitions of the
    tool's type must not set it.
    """
    is_remote = tool.type not in ("BUILTIN", "NATIVE")
    return tool.model_dump(mode="json", exclude={"sandboxed"} if is_remote else None)


def _documents(file: Path) -> list[JsonObject]:
    from fumehood.protocol.files import FileFault
    from fumehood.sandbox.trusted_files import MAX_FILE_BYTES

    try:
        from fumehood.definition_files.directory import read_documents
    except ModuleNotFoundError:
        fail(f"{file} needs the part definition_files, which is not installed.", ExitCode.USAGE)
    raw = read_bytes(str(file), str(file), MAX_FILE_BYTES)
    try:
        return read_documents(file.name, raw)
    except KeyError:
        fail(f"{file} is neither JSON nor TOML nor YAML.", ExitCode.USAGE)
    except FileFault as fault:
        fail(f"{file}: {fault}.", ExitCode.USAGE)


def _one(target: str, socket: Path | None, as_json: bool) -> ToolDefinition:
    """Return the definition in the file `target`. If there is no such file, return the engine's
    definition of the tool `target`.
    """
    from fumehood.registry.definitions import InvalidDefinition, parse_definition

    if not Path(target).is_file():
        return _served(target, socket, as_json)
    documents = _documents(Path(target))
    if len(documents) != 1:
        fail(f"{target} must hold one definition; it has {len(documents)}.", ExitCode.USAGE)
    try:
        return parse_definition(documents[0])
    except InvalidDefinition as error:
        fail(f"{target}: {error.message}", ExitCode.USAGE)


def _served(reference: str, socket: Path | None, as_json: bool) -> ToolDefinition:
    with calling(socket, as_json=as_json) as client:
        return client.tool(reference).tool
