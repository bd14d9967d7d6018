"""`fumehood run`: run a local program in a sandbox.

Invariant: output and figures are untrusted. On a terminal, text is escaped. A figure is drawn only
if it starts like a PNG of acceptable size, and only as base64 inside our own control sequences.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from fumehood.cli.call import options_of, say_how_to_approve
from fumehood.cli.exits import ExitCode, exit_code_of, fail, say, write
from fumehood.cli.options import (
    Network,
    Packages,
    SocketPath,
    directory,
    read_bytes,
    read_text,
    require_seconds,
)
from fumehood.cli.reach import (
    call_live,
    call_once,
    calling,
)
from fumehood.cli.show import (
    for_people,
    in_options,
    show_envelope,
)
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES
from fumehood.core.workspace_path import path_fault

if TYPE_CHECKING:
    from fumehood.client import Client

Download = Callable[[str, Callable[[bytes], object]], None]
"""Passes the content of a URL from an answer to a function, piece by piece."""

NEW = "new"
"""The value of `--session` for which a new session is created."""

PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
"""The beginning of every PNG: the signature, and the length and type of the first chunk.

*Source*: W3C PNG, 5.2 and 11.2.2.
"""

MAX_DRAWN_BYTES = 4 * 1024 * 1024
MAX_PIXELS = 25_000_000
"""Maximum number of pixels of a figure that is drawn. Without this limit, a few bytes of PNG could
fill gigabytes of the terminal's memory."""

CHUNK = 4096
"""Maximum characters of base64 in one control sequence. *Source*: kitty's graphics protocol."""


def run(
    program: Annotated[str, typer.Argument(metavar="FILE", help="The program, or - for stdin.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD]...", help="With --project: FILE and these are the command to run."
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            help="python, shell or javascript; default: by the file's name, python for stdin."
        ),
    ] = None,
    stdin: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The program's standard input, or - for stdin."),
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
        typer.Option(metavar="DIR", help="Save its files and figures below DIR."),
    ] = None,
    receipt: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save its receipt, for fumehood replay."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --save and --receipt replace files.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds it may run.")] = None,
    memory: Annotated[int | None, typer.Option(help="MB of memory it may use.")] = None,
    package: Packages = None,
    network: Network = None,
    agent: Annotated[str | None, typer.Option(help="The agent to run it for.")] = None,
    session: Annotated[
        str | None, typer.Option(help="The session to run it in, or new for one that stays.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Run a command in a copy of a project, and ask to apply it.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="NAME", help="The image of --session new or --project.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="The preset of --project's session.")
    ] = None,
    disk: Annotated[
        int | None, typer.Option(help="MB of a disk for --project: its files can be executed.")
    ] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Ask a human before its effect is put in.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show its output and progress while it runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole envelope as JSON.")] = False,
    socket: SocketPath = None,
) -> None:
    """Run a program in a sandbox and show what it printed.

    With --stream, output is shown as it arrives, and Ctrl-C cancels the program; if --json is
    given too, both streams go to standard error. Figures are saved to a new temporary directory,
    or below the directory of --save, and drawn if the terminal can.

    With --project DIR -- COMMAND, the directory is copied into a new session, the command runs
    there, and what it changed is shown and written back once an approver has said yes.

    Exit status: 0 success, 1 the program failed, 2 wrong usage, 3 waiting for approval,
    4 engine or sandbox unavailable.
    """
    require_seconds(timeout, "--timeout")
    _in_a_copy(
        directory(project),
        [program, *(words or ())],
        {
            "preset": preset,
            "image": image,
            "memory_mb": memory,
            "disk_mb": disk,
            "agent_id": agent,
        },
        (language, stdin, file, save, receipt, package, network, session, force, preview, stream),
        timeout,
        socket,
        as_json=as_json,
    )
    if force and save is None and receipt is None:
        fail("--force needs --save or --receipt.", ExitCode.USAGE)
    _require_new(receipt, force=force)
    if (image is not None and session != NEW) or preset is not None or disk is not None:
        fail(
            "--image goes with --session new or --project, --preset and --disk with --project.",
            ExitCode.USAGE,
        )
    if program == "-" and stdin == "-":
        fail("Standard input can be the program or its input, not both.", ExitCode.USAGE)
    chosen = LANGUAGES[_language(program, language)]
    tool, source = chosen.tool, chosen.source
    arguments: JsonObject = {source: read_text(program, f"The program {program[:80]!r}")}
    if stdin is not None:
        arguments["stdin"] = read_text(stdin, "The program's input")
    if file:
        arguments["files"] = files_to_send(file)
    if session == NEW:
        session = _new_session(socket, image, agent, memory, package, as_json=as_json)
        package = None
    options = options_of(
        timeout_seconds=timeout,
        memory_limit_mb=memory,
        agent_id=agent,
        packages=package,
        network=network,
        session_id=session,
        receipt=receipt is not None or None,
        preview=preview or None,
        cancel_on_disconnect=True,  # Ctrl-C cancels the program
    )
    if stream:
        answer = call_live(tool, arguments, options, socket, as_json=as_json)
    else:
        answer = call_once(tool, arguments, options, socket, as_json=as_json)
    with downloading(socket, as_json=as_json) as download:
        if as_json:
            show_envelope(answer, as_json=True)
        else:
            show_program(answer, download, with_files=save is None, with_output=not stream)
        is_saved = _save(answer, download, save, receipt, force=force, quiet=as_json)
    say_how_to_approve(answer)
    code = exit_code_of(answer)
    raise typer.Exit(code if is_saved or code else ExitCode.TOOL_FAILED)


def _in_a_copy(
    top: Path | None, command: list[str], wishes: JsonObject, others: tuple[object, ...],
    timeout: float | None, socket: Path | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Run `command` in a copy of the directory `top`, and end this command. If `top` is None, only
    check that `command` is a single word, and return.

    `wishes` are the options of the new session. `others` are the values of options that cannot be
    combined with `--project`. If any of these values is set, this command ends with an error.
    """
    if top is None:
        if len(command) > 1:
            fail("Words after the program are for --project DIR -- COMMAND.", ExitCode.USAGE)
        return
    if any(others):
        fail(
            "--project goes with --preset, --image, --memory, --disk, --timeout and --agent.",
            ExitCode.USAGE,
        )
    try:
        from fumehood.projects.run import run_on_project
    except ModuleNotFoundError:
        fail("--project needs the part projects, which is not installed.", ExitCode.USAGE)
    raise typer.Exit(run_on_project(top, command, wishes, timeout, socket, as_json=as_json))


def _require_new(receipt: Path | None, *, force: bool) -> None:
    """End the command if the receipt's file exists and `force` is False. This happens before
    anything runs.
    """
    if receipt is not None and not force and receipt.exists():
        fail(f"{receipt} exists already (--force replaces it). Nothing was run.", ExitCode.USAGE)


def _new_session(
    socket: Path | None,
    image: str | None,
    agent: str | None,
    memory: int | None,
    packages: list[str] | None,
    *,
    as_json: bool,
) -> str:
    """Create a session with these properties and return its id. The id is also printed on stderr,
    for use in the next command.
    """
    with calling(socket, as_json=as_json, is_payload=True) as client:
        record = client.create_session(
            image=image, agent_id=agent, memory_mb=memory, packages=packages
        )
    say(f"session: {record.id} (to end it: fumehood sessions end {record.id})", to_stderr=True)
    return record.id


@contextmanager
def downloading(socket: Path | None, *, as_json: bool) -> Iterator[Download]:
    """Yield a function that downloads a blob of the engine, given its URL and a function that
    writes the content. The client is only created when the yielded function is first used, because
    most answers need no download.
    """
    with ExitStack() as stack:

        @cache
        def client() -> Client:
            return stack.enter_context(calling(socket, as_json=as_json, is_call=True))

        yield lambda url, write: client().download_blob(url, write)


def _language(program: str, given: str | None) -> str:
    if given is None:
        suffix = ".py" if program == "-" else Path(program).suffix
        given = next((name for name, known in LANGUAGES.items() if suffix in known.suffixes), "")
    if given not in LANGUAGES:
        needed = "" if given else "The file name does not tell the language: "
        fail(f"{needed}--language takes {', '.join(LANGUAGES)}.", ExitCode.USAGE)
    return given


def show_program(
    answer: JsonObject, download: Download, *, with_files: bool, with_output: bool
) -> None:
    """Write the program's output to stdout and stderr, and the engine's messages to stderr.

    `download` fetches output that `answer` contains only in part. Without `with_output`, the output
    is not written. With `with_files`, the program's figures are also saved to a new directory and
    shown.
    """
    error, fields = answer["error"], _fields(answer)
    stderr = fields.get("stderr") or ""
    if with_output:
        write(sys.stdout, _whole(fields, "stdout", download))
        write(sys.stderr, stderr := _whole(fields, "stderr", download))
    said = _lines(fields, stderr, with_files=with_files)
    if error is not None:
        words = for_people if sys.stderr.isatty() else in_options
        said.append(f"{error['code']}: {words(error['message'])}")
    said += [f"warning: {in_options(warning)}" for warning in answer["metadata"]["warnings"]]
    for line in said:
        write(sys.stderr, line + "\n")
    if with_files and fields.get("images"):
        _save_figures(fields["images"], download)


def _fields(answer: JsonObject) -> JsonObject:
    """Return the result fields of a program's answer, which are in its data or its error's
    details.
    """
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
        lines.append(f"files: {names}. To save them: --save DIR")
    return lines


def _whole(fields: JsonObject, name: str, download: Download) -> str:
    """Return the whole text of the program's output stream `name`, which is `stdout` or `stderr`.

    The text is downloaded if the answer contains only its beginning and end.
    """
    for cut in (fields.get("truncation_info") or {}).get("fields", []):
        if cut["field"] == name and "resource_url" in cut:
            content = bytearray()
            download(cut["resource_url"], content.extend)
            return content.decode("utf-8", "replace")
    return fields.get(name) or ""


def _save_figures(figures: list[JsonObject], download: Download) -> None:
    """Save the figures to a new directory, print their paths, and draw them if the terminal can."""
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="fumehood-"))
    for figure in _saved(figures, download, directory, force=False):
        _show_figure(directory / figure["filename"])


def _show_figure(path: Path) -> None:

    say(visible(f"figure: {path}"), to_stderr=True)
    draw(path.read_bytes(), sys.stderr, os.environ)


def _save(
    answer: JsonObject, download: Download, directory: Path | None, receipt: Path | None, *,
    force: bool, quiet: bool,
) -> bool:  # fmt: skip
    """Save the files, figures and receipt that the options request. Return True if everything was
    saved.

    Files and figures are saved below `directory`, and the receipt as the file `receipt`. If a path
    is None, nothing is saved there. With `force`, existing files are replaced. Unless `quiet` is
    set, saved figures are also shown.
    """
    has_receipt = receipt is None or _save_receipt(answer, download, receipt, force=force)
    if directory is None:
        return has_receipt
    return _save_files(answer, download, directory, force=force, quiet=quiet) and has_receipt


def _save_files(
    answer: JsonObject, download: Download, directory: Path, *, force: bool, quiet: bool
) -> bool:
    """Save the answer's files and figures below `directory`. Return True if everything was saved.

    With `force`, existing files are replaced. Unless `quiet` is set, saved figures are also shown.
    """
    fields = _fields(answer)
    # A file may have a figure's name; the file wins.
    made = [*(fields.get("files") or []), *(fields.get("images") or [])]
    saved = list(_saved(made, download, directory, force=force))
    for entry in () if quiet else saved:
        if entry in (fields.get("images") or []):
            _show_figure(directory / entry["filename"])
    return len(saved) == len(made) and not fields.get("files_left_out")


def _save_receipt(answer: JsonObject, download: Download, file: Path, *, force: bool) -> bool:
    link = answer["metadata"].get("receipt")
    if link is None:
        say("There is no receipt: the program did not run.", to_stderr=True)
        return False
    entry = {"filename": file.name, **link}
    return bool(list(_saved([entry], download, file.absolute().parent, force=force)))


def _saved(
    made: list[JsonObject], download: Download, directory: Path, *, force: bool
) -> Iterator[JsonObject]:
    """Save files of an answer. Yield each file that was saved. For each other file, print the
    reason.
    """
    from fumehood.client.api_request import Refused
    from fumehood.client.files import SaveFailed, Saving

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


def files_to_send(given: Iterable[str]) -> list[JsonObject]:
    """Read local files, and return them as the tool's argument `files`.

    Each item of `given` is a path or has the form NAME=PATH. The program sees the file as NAME or,
    if no NAME is given, under the file's own name.
    """
    files: list[JsonObject] = []
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).name, text
        fault = path_fault(name)
        if fault is not None:
            fail(f"--file {text[:80]!r}: the name in the sandbox {fault}.", ExitCode.USAGE)
        raw = read_bytes(path, f"--file {text[:80]!r}")
        try:
            content = {"content": raw.decode("utf-8")}
        except UnicodeDecodeError:
            content = {"content_base64": base64.b64encode(raw).decode("ascii")}
        files.append({"path": name, **content})
    return files


def drawing_of(png: bytes, environ: Mapping[str, str]) -> str | None:
    """Return the control sequence that draws an image on this terminal, which `environ` describes.

    Return None if the terminal is not known to draw images, or if the image is too large or
    invalid.
    """
    if not _is_bearable_png(png):
        return None
    if environ.get("TMUX") or environ.get("TERM", "").startswith(("screen", "tmux")):
        return None  # screen and tmux do not forward such sequences
    if environ.get("KITTY_WINDOW_ID") or environ.get("TERM") in ("xterm-kitty", "xterm-ghostty"):
        return _for_kitty(png)
    if environ.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm"):
        return _for_iterm(png)
    return None


def draw(png: bytes, stream: TextIO, environ: Mapping[str, str]) -> None:
    """Draw an image on `stream`. Do nothing unless `stream` and standard output are a terminal that
    can draw images.
    """
    is_seen = stream.isatty() and sys.stdout.isatty()
    drawing = drawing_of(png, environ) if is_seen else None
    if drawing is not None:
        stream.write(drawing + "\n")
        stream.flush()


def _is_bearable_png(data: bytes) -> bool:
    if (
        len(data) > MAX_DRAWN_BYTES
        or len(data) < len(PNG_START) + 8
        or not data.startswith(PNG_START)
    ):
        return False
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    return 0 < width * height <= MAX_PIXELS


def _for_kitty(png: bytes) -> str:
    """Return the control sequence that draws an image in kitty.

    *Source*: kitty's graphics protocol: `a=T` draws, `f=100` is PNG, `q=2` suppresses replies.
    """
    text = base64.b64encode(png).decode("ascii")
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    drawn = []
    for number, chunk in enumerate(chunks):
        first = "a=T,f=100,q=2," if number == 0 else ""
        more = int(number < len(chunks) - 1)
        drawn.append(f"\x1b_G{first}m={more};{chunk}\x1b\\")
    return "".join(drawn)


def _for_iterm(png: bytes) -> str:
    """Return the control sequence that draws an image in iTerm2 and WezTerm. *Source*: iTerm2's
    inline images protocol.
    """
    text = base64.b64encode(png).decode("ascii")
    return f"\x1b]1337;File=inline=1;size={len(png)}:{text}\x07"
