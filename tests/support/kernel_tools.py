"""Functions as tools, for the kernel's contract: they use no part of the engine.

As a program (`python -m support.kernel_tools`, with `tests` on the path) it is a daemon with them,
whose settings come from the environment.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
from pydantic import Field

from fumehood import load_config, tool


@tool(sandboxed=False, read_only=True)
async def greet(name: Annotated[str, Field(max_length=20)]) -> dict[str, str]:
    """Greet somebody.

    Args:
        name: Who is greeted.
    """
    return {"greeting": f"Hello, {name}!"}


@tool(sandboxed=False, dangerous=True)
async def note(text: str, file: str) -> dict[str, str]:
    """Add a line to a file, where everybody can see that it was done."""
    async with await anyio.open_file(file, "a") as opened:
        await opened.write(f"{text}\n")
    return {"noted": text}


@tool(sandboxed=False)
def who() -> dict[str, int]:
    """Return the id of the process that runs this."""
    return {"pid": os.getpid()}


@tool(sandboxed=False)
def block() -> None:
    """Never return."""
    while True:
        time.sleep(60)


@tool
def read(file: str) -> dict[str, str]:
    """Read a file, inside the jail."""
    return {"text": Path(file).read_text()}


@tool
def double(number: int) -> dict[str, int]:
    """Double a number, inside the jail."""
    return {"doubled": 2 * number}


TOOLS = [greet, note, who, block, read, double]


def main() -> None:
    """Serve until a signal."""
    from fumehood.http.server import serve
    from fumehood.observe.log import make_logger

    anyio.run(partial(serve, load_config(), make_logger(), tools=[greet]))


if __name__ == "__main__":
    main()
