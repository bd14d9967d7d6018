"""The commands for session files: `fumehood sessions files`, `get`, `put` and `rm`.

The names and contents of a session's files are treated as hostile. Files are saved in the same way
as by `fumehood run` (see `Saving`). Without `--force`, no existing local file is replaced. Only
regular files are sent, never the targets of links.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fumehood.cli.exits import ExitCode, fail, write
from fumehood.cli.options import AsJson, SocketPath, local, pages
from fumehood.cli.plain import plain_command
from fumehood.cli.reach import calling
from fumehood.cli.sessions import SessionId
from fumehood.cli.show import Column, as_table, show_json, wants_json
from fumehood.client import Client
from fumehood.client.files import SaveFailed, Saving, plain_file
from fumehood.core.escaping import printable, visible


def list_files(
    session: SessionId,
    path: Annotated[
        str, typer.Argument(help="A directory in it; default: the whole workspace.")
    ] = "",
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Include subdirectories.")
    ] = False,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """List the files of a session, by path."""
    with calling(socket, as_json=as_json) as client:
        fetch = partial(client.session_files, session, path, recursive=recursive, limit=100)
        items = [entry for page in pages(fetch) for entry in page.items]
    _show_files(items, as_json)


def get_file(
    session: SessionId,
    path: Annotated[str, typer.Argument(help="The file in the session.")],
    target: Annotated[
        str | None,
        typer.Argument(help="The target: a file, a directory, or - for standard output."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Copy a directory; . is the workspace.")
    ] = False,
    socket: SocketPath = None,
) -> None:
    """Copy a file or a directory from a session. It is saved completely, or not at all."""

    with calling(socket, is_payload=True) as client:
        if recursive:
            _save_directory(client, session, path, target)
        elif target == "-":
            _show_file(client, session, path)
        else:
            _save_file(client, session, path, target, force=force)


def put_file(
    session: SessionId,
    source: Annotated[
        str, typer.Argument(help="A regular file, a directory, or - for standard input.")
    ],
    path: Annotated[
        str | None, typer.Argument(help="Its path in the session; default: its name.")
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Fail if the file exists.")] = False,
    as_json: AsJson = False,
    socket: SocketPath = None,
) -> None:
    """Copy a file or a directory into a session. Existing files are replaced, unless --create is
    given for one file. Links in a directory are left out.
    """
    if path is None and source == "-":
        fail("Give the path in the session for standard input.", ExitCode.USAGE)
    name = path if path is not None else Path(source).name
    mode = "create" if create else "replace"
    done: Any
    with calling(socket, as_json=as_json) as client, local(source):
        if source == "-":
            done = client.put_file(session, name, sys.stdin.buffer, mode=mode)
        elif Path(source).is_dir() and not Path(source).is_symlink():
            if create:
                fail("--create is for one file.", ExitCode.USAGE)
            done = client.put_directory(session, source, "" if name == "." else name)
        else:
            with plain_file(Path(source), follow=False) as file:
                done = client.put_file(session, name, file, mode=mode)
    if wants_json(as_json):
        show_json(done.model_dump())
    else:
        print(f"{visible(done.path)}: {done.size} bytes")


delete_file = plain_command(
    "delete_file",
    arguments={
        "session": SessionId,
        "path": Annotated[str, typer.Argument(help="The file or directory in the session.")],
        "recursive": (
            Annotated[
                bool,
                typer.Option("--recursive", "-r", help="Delete a directory with its contents."),
            ],
            False,
        ),
    },
    scope=None,
)


_show_files = as_table(
    # A program chose the name, so it may contain line breaks. They must not start a new line.
    Column("path", lambda entry: visible(entry.path)),
    Column("kind", lambda entry: entry.kind, drop=2),
    Column("bytes", lambda entry: str(entry.size)),
    Column("changed", lambda entry: entry.modified_at, drop=1),
)


def _save_file(
    client: Client, session_id: str, path: str, target: str | None, *, force: bool
) -> None:
    """Save the session's file `path` as the local file `target`. If saving fails, end the command
    with a message.

    If `target` is a directory, the file keeps its own name. If `target` is None, this directory is
    the current one. If `force` is True, an existing file is replaced.
    """
    directory, name = _place(path, target)
    try:
        with Saving(directory, force=force) as saving:
            saving.save(
                {"filename": name, "url": path},
                lambda url, write: client.download_file(session_id, url, write),
            )
    except SaveFailed as reason:
        fail(f"{printable(name)} was not saved: {reason}", ExitCode.TOOL_FAILED)


def _save_directory(client: Client, session_id: str, path: str, target: str | None) -> None:
    from tarfile import TarError

    path = path.rstrip("/")
    inner = "" if path == "." else path
    if target == "-" or (target is None and not inner):
        fail("Name the local directory to create.", ExitCode.USAGE)
    made = Path(target if target is not None else inner.rpartition("/")[2])
    try:
        client.get_directory(session_id, inner, made)
    except (OSError, TarError) as error:
        why = error.strerror if isinstance(error, OSError) else "the archive is invalid"
        fail(f"{printable(str(made))} was not created: {why}.", ExitCode.TOOL_FAILED)


def _show_file(client: Client, session_id: str, path: str) -> None:
    """Write a file of the session to standard output. If that is a terminal, escape control
    characters.
    """
    if sys.stdout.isatty():
        write(sys.stdout, client.get_file(session_id, path).decode("utf-8", "replace"))
    else:
        client.download_file(session_id, path, sys.stdout.buffer.write)
        sys.stdout.buffer.flush()


def _place(path: str, target: str | None) -> tuple[Path, str]:
    """Return the local directory and the file name under which to save the session's file `path`.

    If `target` is None, these are the current directory and the file's own name. If `target` is a
    directory or ends with a slash, they are this directory and the file's own name. Otherwise,
    `target` is the path of the local file.
    """
    own_name = path.rpartition("/")[2]
    if target is None:
        return Path(), own_name
    where = Path(target)
    if target.endswith("/") or where.is_dir():
        return where, own_name
    return where.parent, where.name
