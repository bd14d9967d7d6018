"""`fumehood call`: one call, through the daemon or, with `--local`, in an embedded engine."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fumehood.cli.exits import ExitCode, document_of, exit_code_of, fail, say
from fumehood.cli.options import (
    Network,
    Packages,
    PlainCommand,
    SocketPath,
    TokenFile,
    json_object,
    read_bytes,
    require_seconds,
)
from fumehood.cli.reach import call_live, call_once
from fumehood.cli.show import show_envelope, wants_json
from fumehood.core.errors import RequiresHumanApproval
from fumehood.core.escaping import visible
from fumehood.core.json_types import JsonObject
from fumehood.core.pages import MAX_ITEMS, Pages
from fumehood.protocol import strict_json

if TYPE_CHECKING:
    from fumehood.core.envelope import Envelope

WAIT_AS_LONG_AS_ALLOWED = "allowed"
SECONDS = re.compile(r"-?[0-9.]+[smhd]?", re.ASCII)


class CallCommand(PlainCommand):
    """The command `call`. The value of its option `--wait` is optional, which typer does not
    support.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give the option `--wait` its default if it has no value. Refuse `--wait 30`, because only
        `--wait=30` is supported.
        """
        end = args.index("--") if "--" in args else len(args)
        for option, after in pairwise(args[:end]):
            if option == "--wait" and SECONDS.fullmatch(after):
                ctx.fail(
                    f"--wait takes seconds only after an equals sign: --wait={after}. Without "
                    "a value it waits as long as the engine allows."
                )
        given = [f"--wait={WAIT_AS_LONG_AS_ALLOWED}" if a == "--wait" else a for a in args[:end]]
        return super().parse_args(ctx, given + args[end:])


COMMAND_CLASS = CallCommand
"""The class from which `fumehood.cli.main` creates the command."""


def call(
    tool: Annotated[str, typer.Argument(help="The tool: name or name@version.")] = "",
    arguments: Annotated[
        str, typer.Argument(help="Arguments as JSON, @FILE, or - for standard input.")
    ] = "{}",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen; run nothing.")
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Embed an engine for this call; no daemon, no state.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds the tool may run.")] = None,
    memory: Annotated[int | None, typer.Option(help="MB of memory the tool may use.")] = None,
    package: Packages = None,
    network: Network = None,
    agent: Annotated[str | None, typer.Option(help="The agent to make the call for.")] = None,
    session: Annotated[str | None, typer.Option(help="The session to make the call in.")] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Run the call once per key, however often it is sent; auto derives the key "
            "from the call.",
        ),
    ] = None,
    new_call: Annotated[
        bool,
        typer.Option("--new-call", help="Ask for approval again, even if an equal call waits."),
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run it, even if an equal call was answered before.")
    ] = False,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Shorten texts of the answer to so many characters.")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Request debug_info (the configuration must allow it).")
    ] = False,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="[=SECONDS]",
            help="Wait for approval if it is needed, for as long as the engine allows.",
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show output and progress while it runs.")
    ] = False,
    fetch_all: Annotated[
        bool,
        typer.Option(
            "--all", help="Fetch every page of a list, and print its items as JSON lines."
        ),
    ] = False,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Make the calls of a file (- for standard input), many at once: a JSON array, or "
            "one JSON object a line.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole envelope as JSON.")] = False,
    token_file: TokenFile = None,
    socket: SocketPath = None,
) -> None:
    """Call a tool and show its envelope.

    With --stream, output is shown as it arrives, each stream on its own; if the envelope is shown
    as JSON, both go to standard error. Ctrl-C then cancels the call.

    With --batch, each call is {"tool": …, "arguments": {…}, "options": {…}}, and each answer is one
    line, in the order of the calls. Exit status 0 only if all succeeded, else 1.

    Exit status: 0 success, 1 the tool failed, 2 wrong usage, 3 waiting for approval,
    4 engine or sandbox unavailable.
    """
    if batch is not None:
        others = (
            tool, local, dry_run, stream, fetch_all, no_cache, debug, timeout, memory, package,
            network, agent, session, idempotency_key, new_call, max_length, wait, token_file,
        )  # fmt: skip
        if arguments != "{}" or any(option not in ("", False, None) for option in others):
            fail("--batch goes with --json and --socket only.", ExitCode.USAGE)
        try:
            from fumehood.batches.command import call_batch
        except ModuleNotFoundError:
            fail("--batch needs the part batches, which is not installed.", ExitCode.USAGE)
        raise typer.Exit(call_batch(batch, socket, as_json=wants_json(as_json)))
    if not tool:
        fail("A tool or --batch FILE is needed: fumehood call TOOL [ARGUMENTS].", ExitCode.USAGE)
    given: Mapping[str, object] = {
        "--stream": stream or None, "--socket": socket, "--wait": wait, "--session": session,
        "--idempotency-key": idempotency_key, "--token-file": token_file,
    }  # fmt: skip
    if local and (wrong := [option for option, value in given.items() if value is not None]):
        fail(
            f"--local embeds an engine for one call, and does not take {wrong[0]}.", ExitCode.USAGE
        )
    if fetch_all and (local or stream or dry_run or idempotency_key is not None):
        fail("--all goes without --local, --stream, --dry-run, --idempotency-key.", ExitCode.USAGE)
    require_seconds(timeout, "--timeout")
    parsed = read_arguments(arguments)
    options = options_of(
        dry_run=dry_run or None,
        timeout_seconds=timeout,
        memory_limit_mb=memory,
        packages=package,
        network=network,
        enable_cache=False if no_cache else None,
        max_length=max_length,
        debug=debug or None,
        agent_id=agent,
        session_id=session,
        idempotency_key=idempotency_key,
        new_call=new_call or None,
        wait_for_approval=None if wait is None else _waiting(wait),
    )
    if fetch_all:
        answer = _fetch_all(tool, parsed, options, socket, token_file=token_file)
    elif local:
        answer = document_of(_call_locally(tool, parsed, options))
    elif stream:
        is_json = wants_json(as_json)
        answer = call_live(tool, parsed, options, socket, as_json=is_json, token_file=token_file)
    else:
        answer = call_once(tool, parsed, options, socket, token_file=token_file)
    show_envelope(answer, as_json=wants_json(as_json))
    say_how_to_approve(answer)
    raise typer.Exit(exit_code_of(answer))


def _fetch_all(
    tool: str, arguments: JsonObject, options: dict[str, Any], socket: SocketPath, *,
    token_file: TokenFile,
) -> JsonObject:  # fmt: skip
    """Print the items of all pages, each on its own line, and end the command with exit code 0.

    If a call fails, or if the tool is not paginated, return the envelope of that call instead. By
    then, the items of earlier pages are already printed.
    """
    pages, shown = Pages(arguments, MAX_ITEMS), 0
    while not pages.is_over:
        answer = call_once(tool, pages.arguments, options, socket, token_file=token_file)
        if not answer["success"]:
            return answer
        try:
            pages.add(answer["data"])
        except ValueError:
            say(f"{tool} does not answer in pages. This is its one answer:", to_stderr=True)
            return answer
        for item in pages.items[shown:]:
            say(visible(strict_json.dumps(item).decode()))
        shown = len(pages.items)
    if shown == MAX_ITEMS:
        say(f"Stopped after {MAX_ITEMS} items.", to_stderr=True)
    if pages.is_cut:
        say(
            "Stopped: the tool gave a page twice, or an empty one, and says that more follow.",
            to_stderr=True,
        )
    raise typer.Exit(ExitCode.SUCCESS)


def say_how_to_approve(answer: JsonObject) -> None:
    """If a call waits for approval, print how to approve the call and how to fetch its answer."""
    error = answer["error"] or {"code": None}
    if error["code"] != RequiresHumanApproval.code or error.get("approval_id") is None:
        return
    lines = [
        f"The call waits for approval: {error['approval_id']}",
        f"An approver runs:  fumehood approvals approve {error['approval_id']}",
        f"Its answer then:   fumehood calls answer {answer['metadata']['call_id']}",
    ]
    say("\n".join(visible(line) for line in lines), to_stderr=True)


def _waiting(given: str) -> bool | float:
    if given == WAIT_AS_LONG_AS_ALLOWED:
        return True
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    require_seconds(seconds, "--wait=SECONDS")
    return seconds


def options_of(**given: Any) -> dict[str, Any]:
    """Return the options in `given` whose value is not None, as the options of a call."""
    return {name: value for name, value in given.items() if value is not None}


def read_arguments(given: str) -> JsonObject:
    """Read a call's arguments, which are a strict JSON object.

    `given` is the JSON text, `@FILE` for a file, or `-` for standard input.
    """
    raw: bytes | str = given
    if given == "-" or given.startswith("@"):
        raw = read_bytes(given.removeprefix("@"), "The file of arguments")
    hint = """ The arguments are one JSON object in quotes, such as '{"expression": "1 + 1"}'."""
    return json_object(raw, "The arguments", hint)


def _call_locally(tool: str, arguments: JsonObject, options: dict[str, Any]) -> Envelope:
    """Run one call in an embedded engine with a temporary state. Dangerous tools are refused."""
    import anyio

    from fumehood.cli.reach import read_config
    from fumehood.engine import Engine

    async def main(home: Path) -> Envelope:
        async with Engine(config=read_config(home=home)) as engine:
            return await engine.call(tool, arguments, **options)

    with tempfile.TemporaryDirectory(prefix="fumehood-") as home:
        return anyio.run(main, Path(home))
