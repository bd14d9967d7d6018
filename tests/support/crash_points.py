"""What SIGKILL leaves at every commit point of a scenario, from one run of it.

A scenario is a function `scenario(home, hook, say)`, plain or asynchronous, in a module that a
test can import by name. It opens its database in `home` with `commit_hook=hook`, and `say`s what a
caller would have received, a line each. Before and after each of its flushed commits the whole
process is stopped and its directory is copied: the copy has what a kill at that moment leaves on
the disk, because a kill loses no page that was written. Then the test examines the copy:

    for crash in crash_at_every_point("unit.store.test_x:scenario", home, CLEAN_ENVIRONMENT):
        assert nothing_is_lost(crash.home, crash.said)

The last one yielded is the end of the run: `crash.point` is None. The writer groups commits: a
scenario that waits for each of its writes has the same points each time. A scenario may also kill
itself at a moment of its own.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import importlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checked_once import check_once
from .postgres import chosen, copy_states, drop_state, use_postgres
from .preloaded import PYTHON

Hook = Callable[[str, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class CrashPoint:
    """A moment (`before` or `after`) of the commit with this number, from 1."""

    moment: str
    number: int

    def __str__(self) -> str:
        return f"{self.moment}-{self.number}"


@dataclass(frozen=True)
class Crash:
    """What a scenario has left at `point`, or at its end if that is None."""

    point: CrashPoint | None
    home: Path
    said: tuple[str, ...]
    was_killed: bool = False
    """Whether it ended because it killed itself."""

    def left(self) -> object:
        """What is on the disk and was said, to examine equal states once.

        Often nothing happens between a commit and the next one. A state in PostgreSQL has no bytes
        to compare.
        """
        if chosen():
            return self.point
        files = sorted(path for path in self.home.rglob("*") if path.is_file())
        found = [
            (str(path.relative_to(self.home)), hashlib.sha256(path.read_bytes()).digest())
            for path in files
            if not path.name.endswith("-shm")  # SQLite makes it anew
        ]
        return tuple(found), self.said


Run = Callable[[Path], Iterator[Crash]]
"""Runs a scenario in a directory; the copies are beside it. Raises AssertionError if it fails."""


def crash_at_every_point(
    scenario: str,
    home: Path,
    environment: Mapping[str, str],
    *,
    prepare: Callable[[Path], None] | None = None,
) -> Iterator[Crash]:
    """Run `module:function` in a directory under `home`, which `prepare` fills first."""
    with nursery(scenario, environment) as run:
        yield from crash_each(run, home, prepare)


def crash_each(
    run: Run, home: Path, prepare: Callable[[Path], None] | None = None
) -> Iterator[Crash]:
    """`crash_at_every_point` with an existing nursery, for many tests of one function."""
    place = home / "whole"
    place.mkdir(mode=0o700)
    if prepare is not None:
        prepare(place)
    return run(place)


@contextmanager
def nursery(scenario: str, environment: Mapping[str, str]) -> Iterator[Run]:
    """A process that has imported the scenario and forks for each run.

    It has no threads, unlike the test's own process, and importing takes longer than a run.
    """
    with subprocess.Popen(
        [PYTHON, "-m", "support.crash_points", scenario],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environment, **chosen()},
        cwd=Path(__file__).parents[1],
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(home: Path) -> Iterator[Crash]:
            requests.write(f"{home}\n")
            requests.flush()
            said: list[str] = []
            ended = ""
            try:
                for line in answers:
                    kind, _, text = line.rstrip("\n").partition(" ")
                    if kind == "said":
                        said.append(text)
                    elif kind == "point":
                        moment, number = text.split("-")
                        point = CrashPoint(moment, int(number))
                        copy = home.with_name(text)
                        yield Crash(point, copy, tuple(said))
                        for server in chosen().values():
                            drop_state(server, copy)
                    else:
                        ended = text
                        break
                assert ended in ("killed", "whole"), f"{scenario}: {ended or 'process is gone'}"
                yield Crash(None, home, tuple(said), was_killed=ended == "killed")
            finally:  # a test that stops early must leave no lines for the next run
                while not ended and (line := answers.readline()):
                    ended = line if line.startswith("ended ") else ""

        yield run
        requests.close()


def _serve(scenario: str) -> None:
    """In the nursery: fork one child per line."""
    module, _, name = scenario.partition(":")
    function = getattr(importlib.import_module(module), name)
    for server in chosen().values():
        use_postgres(setattr, server)
    check_once(setattr)
    gc.freeze()
    for line in sys.stdin:
        home = Path(line.rstrip("\n"))
        points, reached = os.pipe()
        seen, see = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(points)
            _run(function, home, reached, seen)
        os.close(reached)
        with os.fdopen(points) as lines:
            for point in lines:
                os.kill(child, signal.SIGSTOP)
                os.waitpid(child, os.WUNTRACED)
                shutil.copytree(home, home.with_name(point.strip()))
                for server in chosen().values():
                    copy_states(server, home, home.with_name(point.strip()))
                _tell(f"point {point.strip()}")
                os.kill(child, signal.SIGCONT)
                os.write(see, b"1")
        os.close(seen)
        os.close(see)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            _tell("ended killed")
        elif status == 0:
            _tell("ended whole")
        else:
            _tell(f"ended failed with status {status}")


def _run(function: Any, home: Path, reached: int, seen: int) -> None:
    """Run the scenario in a child; never returns."""

    def hook(moment: str, number: int) -> None:
        os.write(reached, f"{CrashPoint(moment, number)}\n".encode())
        os.read(seen, 1)

    try:
        outcome = function(home, hook, lambda text: _tell(f"said {text}"))
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _tell(line: str) -> None:
    """Write immediately and completely, because the process may die the next moment."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    _serve(sys.argv[1])
