"""The commands `fumehood tools import …`, which make tool definitions from documents in other
formats.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fumehood.cli.options import directory

imports = typer.Typer(help="Definitions made from documents of other kinds.", no_args_is_help=True)


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
    from fumehood.rest.import_openapi import import_document
    from fumehood.rest.openapi import ImportOptions

    is_address = document.startswith(("https://", "http://"))
    options = ImportOptions(
        only=tuple(only or ()),
        no_approval=tuple(no_approval or ()),
        prefix=prefix,
        server=server,
        source=document if is_address else None,
    )
    import_document(document, options, directory(out), force=force)
