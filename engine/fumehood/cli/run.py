"""`fumehood run`: a program from a file, in a sandbox, as if it were run here.

Its standard output and error come out as its own. What a program writes is a stranger's: on a
terminal it is shown so that it can neither move the cursor nor change anything there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from fumehood.cli.answers import document_of
from fumehood.cli.escaping import printable, say, visible
from fumehood.cli.exits import ExitCode, exit_code_of, fail
from fumehood.cli.reach import SocketPath, call_once, calling
from fumehood.cli.sending import MAX_BYTES, files_to_send, read_text
from fumehood.cli.show import in_options, show_envelope
from fumehood.core.json_types import JsonObject

if TYPE_CHECKING:
    from fumehood.client import Client

Download = Callable[[str, Callable[[bytes], object]], None]
"""Hands the bytes behind an address of an answer to a function, piece by piece."""

LANGUAGES = {
    ".py": "python",
    ".sh": "shell",
    ".bash": "shell",
    ".js": "javascript",
    ".cjs": "javascript",
}
"""Suffix → language; the tool of a language is `run_` and its name."""


def run(
    program: Annotated[str, typer.Argument(metavar="FILE", help="The program, or - for stdin.")],
    language: Annotated[
        str | None,
        typer.Option(
            help="python, shell or javascript; default: by the file's name, python for stdin."
        ),
    ] = None,
    stdin: Annotated[
        str | None, typer.Option(metavar="FILE", help="What the program reads, or - for stdin.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Put a file into the working directory, under its name or as NAME=PATH.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write its files and figures below DIR."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --save replace files.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds it may run.")] = None,
    memory: Annotated[int | None, typer.Option(help="MB of memory it may use.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent that it is run for.")] = None,
    session: Annotated[str | None, typer.Option(help="The session that it is run in.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show its output and progress while it runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole envelope as JSON.")] = False,
    socket: SocketPath = None,
) -> None:
    """Run a program in a sandbox and show what it printed.

    With --stream that is shown as it comes, and Ctrl-C cancels the program; with --json besides,
    both of its streams go to standard error. Figures are saved to a new temporary directory,
    or below the directory of --save, and shown where the terminal can.

    Exit status: 0 success, 1 the program failed, 2 wrong usage, 3 waiting for approval,
    4 engine or sandbox unavailable.
    """
    if timeout is not None and not 0 < timeout < float("inf"):
        fail("--timeout takes a number of seconds over 0.", ExitCode.USAGE)
    if force and save is None:
        fail("--force goes with --save.", ExitCode.USAGE)
    if program == "-" and stdin == "-":
        fail("Standard input can be the program or what it reads, not both.", ExitCode.USAGE)
    language = _language(program, language)
    tool, source = f"run_{language}", "command" if language == "shell" else "code"
    arguments: JsonObject = {source: read_text(program, f"The program {program[:80]!r}")}
    if stdin is not None:
        arguments["stdin"] = read_text(stdin, "What the program reads")
    if file:
        arguments["files"] = files_to_send(file)
    _check_size(arguments, source)
    asked = {"timeout_seconds": timeout, "memory_limit_mb": memory, "agent_id": agent}
    asked["session_id"] = session
    options: dict[str, Any] = {k: value for k, value in asked.items() if value is not None}
    options["cancel_on_disconnect"] = True  # Ctrl-C is meant for the program
    if stream:
        from fumehood.cli.live import stream_call

        out = sys.stderr if as_json else sys.stdout
        with calling(socket, as_json=as_json, is_call=True) as client:
            answer = document_of(stream_call(client, tool, arguments, options, socket, stdout=out))
    else:
        answer = call_once(tool, arguments, options, socket, as_json=as_json)
    with _downloading(socket, as_json=as_json) as download:
        if as_json:
            show_envelope(answer, as_json=True)
        else:
            _show(answer, download, with_files=save is None, with_output=not stream)
        is_saved = save is None or _save(answer, download, save, force=force, quiet=as_json)
    code = exit_code_of(answer)
    raise typer.Exit(code if is_saved or code else ExitCode.TOOL_FAILED)


@contextmanager
def _downloading(socket: Path | None, *, as_json: bool) -> Iterator[Download]:
    """Downloads by a client that is made for the first of them: most answers need none."""
    with ExitStack() as stack:

        @cache
        def client() -> Client:
            return stack.enter_context(calling(socket, as_json=as_json, is_call=True))

        yield lambda url, write: client().download_blob(url, write)


def _language(program: str, given: str | None) -> str:
    known = list(dict.fromkeys(LANGUAGES.values()))
    if given is None:
        given = "python" if program == "-" else LANGUAGES.get(Path(program).suffix)
    if given is None:
        fail(
            f"The name does not say in which language this is. Add --language: {', '.join(known)}.",
            ExitCode.USAGE,
        )
    if given not in known:
        fail(f"--language takes {', '.join(known)}.", ExitCode.USAGE)
    return given


def _check_size(arguments: JsonObject, source: str) -> None:
    files = arguments.get("files", [])
    texts = [arguments[source], arguments.get("stdin", "")]
    texts += [file.get("content", file.get("content_base64")) for file in files]
    if sum(map(len, texts)) > MAX_BYTES:
        fail(
            "The program and what is sent with it are over 8 MB together; a file that is no text "
            "counts a third more.",
            ExitCode.USAGE,
        )


def _show(answer: JsonObject, download: Download, *, with_files: bool, with_output: bool) -> None:
    """What the program wrote, each to its own stream; what the engine says of it to stderr."""
    error, fields = answer["error"], _fields(answer)
    stderr = fields.get("stderr") or ""
    if with_output:
        _write(sys.stdout, _whole(fields, "stdout", download))
        _write(sys.stderr, stderr := _whole(fields, "stderr", download))
    said = _lines(fields, stderr, with_files=with_files)
    if error is not None:
        said.append(f"{error['code']}: {in_options(error['message'])}")
    said += [f"warning: {in_options(warning)}" for warning in answer["metadata"]["warnings"]]
    for line in said:
        _write(sys.stderr, line + "\n")
    if with_files and fields.get("images"):
        _save_figures(fields["images"], download)


def _fields(answer: JsonObject) -> JsonObject:
    """What a program's answer holds, whichever way the program ended."""
    fields: JsonObject = answer["data"]
    if answer["error"] is not None:
        fields = answer["error"].get("details") or {}
    return fields


def _lines(fields: JsonObject, stderr: str, *, with_files: bool) -> list[str]:
    lines = []
    exception = fields.get("exception")
    if isinstance(exception, dict) and exception["traceback"].strip() not in stderr:
        lines.append(exception["traceback"].rstrip("\n"))
    if (value := fields.get("value_repr")) not in (None, "None"):
        lines.append("value:" + ("\n" if "\n" in value else " ") + value)
    if with_files and (files := fields.get("files")):
        names = ", ".join(f"{file['filename']} ({file['size']} bytes)" for file in files)
        lines.append(f"files: {names}. To keep them: --save DIR")
    return lines


def _whole(fields: JsonObject, name: str, download: Download) -> str:
    """A stream, also where the answer holds only its ends."""
    for cut in (fields.get("truncation_info") or {}).get("fields", []):
        if cut["field"] == name and "resource_url" in cut:
            content = bytearray()
            download(cut["resource_url"], content.extend)
            return content.decode("utf-8", "replace")
    return fields.get(name) or ""


def _write(stream: TextIO, text: str) -> None:
    if stream.isatty():
        stream.write(printable(text))
    else:
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "replace"))
    stream.flush()


def _save_figures(figures: list[JsonObject], download: Download) -> None:
    """Write the figures to a new directory, say where they are, and draw them where that works.

    They were not asked for, so one that cannot be written is told of and changes nothing else.
    """
    import tempfile

    try:
        directory = Path(tempfile.mkdtemp(prefix="fumehood-"))
    except OSError as error:
        say(f"The figures cannot be saved: {error.strerror}. Use --save DIR.", to_stderr=True)
        return
    for figure in _saved(figures, download, directory, force=False):
        _show_figure(directory / figure["filename"])


def _show_figure(path: Path) -> None:
    from fumehood.cli.inline_images import draw

    say(visible(f"figure: {path}"), to_stderr=True)
    draw(path.read_bytes(), sys.stderr, os.environ)


def _save(
    answer: JsonObject, download: Download, directory: Path, *, force: bool, quiet: bool
) -> bool:
    """Write the files, and show the figures; whether all that the program made are there now."""
    fields = _fields(answer)
    # A file may have a figure's name; it comes first.
    made = [*(fields.get("files") or []), *(fields.get("images") or [])]
    saved = list(_saved(made, download, directory, force=force))
    for entry in () if quiet else saved:
        if entry in (fields.get("images") or []):
            _show_figure(directory / entry["filename"])
    return len(saved) == len(made) and not fields.get("files_left_out")


def _saved(
    made: list[JsonObject], download: Download, directory: Path, *, force: bool
) -> Iterator[JsonObject]:
    """Write files of an answer; those that are there now. The others are told of."""
    from fumehood.cli.saving import SaveFailed, Saving
    from fumehood.client.errors import Refused

    try:
        with Saving(directory, force=force) as saving:
            for entry in made:
                try:
                    saving.save(entry, download)
                except (SaveFailed, Refused) as reason:
                    say(f"{entry['filename']} was not saved: {reason}", to_stderr=True)
                else:
                    yield entry
    except SaveFailed as reason:
        fail(f"Nothing was saved: {reason}", ExitCode.TOOL_FAILED)
