"""`fumehood tools …`: list, show, review, add, replace, remove, enable and disable tools."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fumehood.cli.exits import ExitCode, fail, say
from fumehood.cli.options import (
    AsJson,
    ControlSocketPath,
    CredentialStdin,
    SocketPath,
    ToolName,
    directory,
    json_object,
    pages,
    read_bytes,
)
from fumehood.cli.plain import plain
from fumehood.cli.reach import calling, controlling
from fumehood.cli.show import circuit_words, show_json, show_tools, wants_json
from fumehood.client.golden import check, read_golden, record, write_golden
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import Finding, Severity, ToolDefinition

tools = typer.Typer(help="The tools of the running engine.", no_args_is_help=True)

imports = typer.Typer(help="Definitions made from documents of other kinds.", no_args_is_help=True)
tools.add_typer(imports, name="import")
golden = typer.Typer(help="Sequences of calls with recorded answers.", no_args_is_help=True)
tools.add_typer(golden, name="golden")

DefinitionFile = Annotated[Path, typer.Argument(help="A file with the definition as JSON.")]
Pinned = Annotated[str, typer.Argument(help="name@version")]
Format = Literal["text", "json", "sarif"]
Linted = list[tuple[str, list["Finding"]]]
"""The findings of each definition, with its origin."""

GoldenPath = Annotated[Path, typer.Argument(help="A golden sequence, as JSON.")]


@tools.command("list")
def list_tools(
    category: Annotated[str | None, typer.Option(help="Only this category.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only tools with this tag.")] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="BUILTIN, NATIVE, REST or MCP only.")
    ] = None,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """List the tools with their sources."""
    found: list[tuple[ToolDefinition, str]] = []
    unavailable: set[str] = set()
    with calling(socket, as_json=as_json) as client:
        fetch = partial(client.tools_page, category=category, tag=tag, type=kind, limit=100)
        for page in pages(fetch):
            found += [(tool, page.sources.get(tool.name, "")) for tool in page.items]
            unavailable.update(page.unavailable)
    show_tools(found, unavailable, as_json=wants_json(as_json))


@tools.command("show")
def show_tool(
    name: ToolName,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Show one tool's definition, and whether calls to its service are suspended."""
    with calling(socket, as_json=as_json) as client:
        details = client.tool(name)
    show_json(details.tool.model_dump(mode="json"))
    if details.circuit is not None:  # not on stdout, where the definition can be used again
        words = circuit_words(details.circuit)
        typer.echo(f"circuit to {details.circuit.upstream}: {words}", err=True)
    show_findings(details.findings)


@tools.command("add")
def add(
    file: DefinitionFile,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Register one version of a REST or MCP tool. Needs a credential with admin."""
    document = _read(file)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        show_findings(client.tools.add(document).findings)


@tools.command("replace")
def replace(
    name: Pinned,
    file: DefinitionFile,
    credential_stdin: CredentialStdin = False,
    socket: ControlSocketPath = None,
) -> None:
    """Replace the definition of a registered version."""
    document = _read(file)
    with controlling(socket, credential_stdin=credential_stdin) as client:
        show_findings(client.tools.replace(name, document).findings)


plain(
    tools,
    "tools.remove",
    "Remove a registered version.",
    arguments={"name": Pinned},
)
plain(
    tools,
    "tools.enable",
    "Enable one version, or all versions, of a tool.",
    arguments={"name": ToolName},
)
plain(
    tools,
    "tools.disable",
    "Disable one version, or all versions, of a tool: calls are refused.",
    arguments={"name": ToolName},
)


@imports.command("openapi")
def import_openapi(
    document: Annotated[
        str, typer.Argument(help="A file, an http or https address, or - for standard input.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Only this tool, operation or tag; * is any text. Repeatable."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", help="Write one file for each tool into this directory."),
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Begin the names of tools and secrets with this.")
    ] = "",
    server: Annotated[
        str | None,
        typer.Option("--server", help="The address of the service, instead of the document's."),
    ] = None,
    no_approval: Annotated[
        list[str] | None,
        typer.Option(
            "--no-approval",
            help="This tool changes something and runs without approval; * is any text. "
            "Repeatable.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files of --out.")] = False,
) -> None:
    """Make definitions of REST tools from an OpenAPI 3.0 or 3.1 document.

    Without --out they are printed as JSON, which is a file for the directory of definitions.
    """
    from fumehood.cli.import_openapi import import_document
    from fumehood.registry.openapi import ImportOptions

    is_address = document.startswith(("https://", "http://"))
    options = ImportOptions(
        only=tuple(only or ()),
        no_approval=tuple(no_approval or ()),
        prefix=prefix,
        server=server,
        source=document if is_address else None,
    )
    import_document(document, options, directory(out), force=force)


def _read(file: Path) -> JsonObject:
    return json_object(read_bytes(str(file), str(file)), str(file))


# -- review ---------------------------------------------------------------------------------


@tools.command("lint")
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
    from fumehood.registry.lint import lint

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


@tools.command("compat")
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

    from fumehood.registry.compat import compare

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
    """Convert the findings to SARIF. *Source*: SARIF 2.1.0, sections 3.13 to 3.28."""
    from fumehood.registry.lint import RULES

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
    """Yield each definition with its origin."""
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
    """Return the document without `sandboxed` if the engine sets it: definitions may not."""
    is_remote = tool.type not in ("BUILTIN", "NATIVE")
    return tool.model_dump(mode="json", exclude={"sandboxed"} if is_remote else None)


def _documents(file: Path) -> list[JsonObject]:
    from fumehood.protocol.files import FileFault
    from fumehood.registry.directory import read_documents
    from fumehood.sandbox.trusted_files import MAX_FILE_BYTES

    raw = read_bytes(str(file), str(file), MAX_FILE_BYTES)
    try:
        return read_documents(file.name, raw)
    except KeyError:
        fail(f"{file} is neither JSON nor TOML nor YAML.", ExitCode.USAGE)
    except FileFault as fault:
        fail(f"{file}: {fault}.", ExitCode.USAGE)


def _one(target: str, socket: Path | None, as_json: bool) -> ToolDefinition:
    """Return the definition in a file, or of a running engine."""
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


def show_findings(findings: Any) -> None:
    """Print the findings of a registered tool on standard error."""
    for each in findings:
        say(visible(f"{each.rule}: {each.path}: {each.message}. {each.remedy}"), to_stderr=True)
