"""A daemon with dangerous tools that record each run.

As a program (`python -m support.approving`, with `tests` on the path) it is `fumehood serve` with
those tools; they write to the file `ran` in its working directory.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from conftest import Daemon
from fumehood import tool
from support.scripted_daemon import daemon_of

RAN = "ran"


@tool(sandboxed=False, dangerous=True)
async def note(text: str, times: int = 1) -> dict[str, str]:
    """Write a line down, where everybody can see that it was done."""
    with Path(RAN).open("a", encoding="utf-8") as file:  # noqa: ASYNC230 - one short line
        file.write(f"{text!r} {times}\n")
    return {"noted": text}


@tool(sandboxed=False, dangerous=True)
async def hold(text: str) -> None:
    """Write a line down, and never end."""
    await note(text)
    await asyncio.Event().wait()


def ran(daemon: Daemon) -> list[str]:
    """The recorded runs, read from outside the daemon."""
    path = daemon.home / RAN
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def approving_daemon(
    home: Path | None = None, *, credential: str = "", **settings: str
) -> AbstractContextManager[Daemon]:
    """Run the daemon until ready; create its first approver unless a credential is given."""
    return daemon_of(
        "support.approving", home, approver=not credential, credential=credential, **settings
    )


def main() -> None:
    """Run `fumehood serve` with the tools."""
    from fumehood.cli.main import main as command
    from fumehood.http import server

    server.serve = partial(server.serve, tools=[note, hold])  # type: ignore[assignment]
    sys.argv = ["fumehood", "serve"]
    command()


if __name__ == "__main__":
    main()
