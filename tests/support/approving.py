"""A daemon with dangerous tools that record each run.

As a program (`python -m support.approving`, with `tests` on the path) it is `fumehood serve` with
those tools; they write to the file `ran` in its working directory.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from conftest import CLEAN_ENVIRONMENT, Daemon, make_first_approver, wait_until_ready
from fumehood import tool
from support.preloaded import PYTHON

TESTS = Path(__file__).parents[1]
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


@contextmanager
def approving_daemon(home: Path, *, credential: str = "", **settings: str) -> Iterator[Daemon]:
    """Run the daemon until ready; create its first approver unless a credential is given."""
    credential = credential or make_first_approver(home)
    environment = {**CLEAN_ENVIRONMENT, "FUMEHOOD_HOME": str(home)}
    environment |= {f"FUMEHOOD_{key.upper()}": value for key, value in settings.items()}
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "support.approving"],
            env={**environment, "PYTHONPATH": str(TESTS)},
            cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    daemon = Daemon(process, home, environment, credential)
    try:
        yield wait_until_ready(daemon)
        assert daemon.stop() in (0, -9), daemon.log
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


def main() -> None:
    """Run `fumehood serve` with the tools."""
    from fumehood.cli.main import main as command
    from fumehood.http import server

    server.serve = partial(server.serve, tools=[note, hold])  # type: ignore[assignment]
    sys.argv = ["fumehood", "serve"]
    command()


if __name__ == "__main__":
    main()
