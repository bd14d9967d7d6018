"""`fumehood call --batch`: the calls of a file, many at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fumehood.cli.exits import ExitCode, document_of, fail
from fumehood.cli.options import one_line, read_bytes
from fumehood.cli.reach import calling
from fumehood.core.escaping import json_line, visible
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

GROUP = 16
GROUP_BYTES = 4 * 1024 * 1024
"""A request gets no further calls once its size exceeds this number of bytes. A batch is sent in
several requests, each with at most `GROUP` calls."""


def call_batch(file: str, socket: Path | None, *, as_json: bool) -> int:
    """Make the calls of a file in groups, and print one line for each answer.

    Return exit code 0 if all calls succeeded, or else 1.
    """
    calls = list(_parsed(read_bytes(file, "The file")))
    if not calls:
        fail("The file contains no calls.", ExitCode.USAGE)
    answered, status = 0, ExitCode.SUCCESS
    try:
        with calling(socket, is_call=True) as client, _progress(len(calls)) as show:
            for group in _groups(calls):
                answers = [document_of(envelope) for envelope in client.batch(group)]
                pairs = zip(group, answers, strict=True)
                show([_line(call, answer, as_json=as_json) for call, answer in pairs])
                answered += len(group)
                if not all(answer["success"] for answer in answers):
                    status = ExitCode.TOOL_FAILED
    except KeyboardInterrupt:
        print(
            f"Interrupted: {answered} of {len(calls)} calls are answered above. Some of the next "
            f"{GROUP} may have ended (fumehood calls list); the others were cancelled.",
            file=sys.stderr,
        )
        raise
    return status


def _parsed(raw: bytes) -> Iterator[Any]:
    """Yield the calls of a file, which contains a JSON array, or one JSON value per line."""
    raw = strict_json.unmarked(raw)
    is_array = raw.lstrip().startswith(b"[")
    for number, line in enumerate([raw] if is_array else raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = strict_json.loads(line)
        except strict_json.StrictJsonError as error:
            where = "" if is_array else f" in line {number}"
            fail(
                f"The calls cannot be read{where}: {error}. They are one JSON array, or one object "
                'a line, such as {"tool": "calculator", "arguments": {"expression": "1 + 1"}}.',
                ExitCode.USAGE,
            )
        if is_array:
            yield from value
        else:
            yield value


def _groups(calls: Iterable[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    size = 0
    for call in calls:
        group.append(call)
        size += len(strict_json.dumps(call))
        if len(group) == GROUP or size > GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextmanager
def _progress(total: int) -> Iterator[Callable[[list[str]], None]]:
    """Yield a function that prints the lines for a group of calls.

    If stderr is a terminal, a progress bar is shown there. The bar disappears while lines are
    printed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if not Console(stderr=True).is_interactive:
        yield _print
        return
    columns = (TextColumn("calls"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task("calls", total=total)

        def show(lines: list[str]) -> None:
            bar.stop()  # both streams may share the terminal
            _print(lines)
            bar.start()
            bar.advance(task, len(lines))

        yield show


def _print(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _line(call: Any, answer: JsonObject, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(answer)
    error = answer["error"]
    named = call.get("tool") if isinstance(call, dict) else None
    tool = answer["metadata"]["tool_name"] or (named if isinstance(named, str) else "?")
    code = "OK" if error is None else error["code"]
    said = json_line(answer["data"]) if error is None else error["message"]
    return f"{visible(code)}  {visible(tool[:80])}  {one_line(said, 100)}"
