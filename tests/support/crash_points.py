"""SIGKILL at every commit point of a scenario, one after the other.

A scenario is a function `scenario(home, hook, say)`, plain or asynchronous, in a module that a
test can import by name. It opens its database in `home` with `commit_hook=hook` and says what
it was promised (what a caller would have heard), a line each. For each moment around each of
its flushed commits it runs once, in a new directory and a process of its own that dies right
there; then the test looks at what is left:

    for crash in crash_at_every_point("unit.store.test_x:scenario", home, CLEAN_ENVIRONMENT):
        assert nothing_is_lost(crash.home, crash.said)

The last one yielded ran to its end: `crash.point` is None. Grouping of commits is the writer's:
a scenario that waits for each of its writes has the same points each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checked_once import check_once
from .preloaded import PYTHON

MOST_POINTS = 500
"""Upper bound of crash points, so that a test ends."""

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
    """A scenario killed at `point`, or one that ended by itself if that is None."""

    point: CrashPoint | None
    home: Path
    said: tuple[str, ...]


def crash_at_every_point(
    scenario: str,
    home: Path,
    environment: Mapping[str, str],
    *,
    prepare: Callable[[Path], None] | None = None,
) -> Iterator[Crash]:
    """Run `module:function` once for each point, in a directory of its own under `home`.

    `prepare` makes what a scenario finds there; it runs once, and what it made is copied.
    Raises AssertionError if a scenario fails by itself.
    """
    with nursery(scenario, environment, warm=True) as run:
        yield from crash_each(run, home, prepare)


def crash_each(
    run: Run, home: Path, prepare: Callable[[Path], None] | None = None
) -> Iterator[Crash]:
    """`crash_at_every_point` with an existing nursery, for many tests of one function."""
    prepared = home / "prepared"
    prepared.mkdir(mode=0o700)
    if prepare is not None:
        prepare(prepared)
    for number in itertools.count(1):
        assert number <= MOST_POINTS, "this scenario does not come to an end"
        for moment in ("before", "after"):
            point = CrashPoint(moment, number)
            place = home / str(point)
            shutil.copytree(prepared, place)
            said, was_killed = run(place, point)
            yield Crash(point if was_killed else None, place, said)
            if not was_killed:
                return


Run = Callable[[Path, CrashPoint], tuple[tuple[str, ...], bool]]


@contextmanager
def nursery(scenario: str, environment: Mapping[str, str], *, warm: bool = False) -> Iterator[Run]:
    """A process that has imported the scenario and forks for each run.

    It has no threads, as the test's own process may; to import anew each time takes longer
    than all the rest. A warm one has also played it once to its end: what libraries make at their
    first use takes longer than the scenario.
    """
    with subprocess.Popen(
        [PYTHON, "-m", "support.crash_points", scenario, *(["warm"] if warm else [])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment), text=True,
        cwd=Path(__file__).parents[1],
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(home: Path, point: CrashPoint) -> tuple[tuple[str, ...], bool]:
            requests.write(f"{point.moment} {point.number} {home}\n")
            requests.flush()
            said = []
            for line in answers:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "said":
                    said.append(text)
                else:
                    assert kind == "ended", text
                    assert text in ("killed", "whole"), f"{scenario} at {point}: {text}"
                    return tuple(said), text == "killed"
            raise AssertionError(f"{scenario} at {point}: the process is gone")

        yield run
        requests.close()


def _serve(scenario: str, *, warm: bool) -> None:
    """In the nursery: fork one child per line."""
    module, _, name = scenario.partition(":")
    function = getattr(importlib.import_module(module), name)
    check_once(setattr)
    gc.freeze()
    for line in sys.stdin:
        moment, number, home = line.rstrip("\n").split(" ", 2)
        if warm:
            _warm_up(function, Path(home))
            warm = False
        child = os.fork()
        if child == 0:
            _run(function, Path(home), CrashPoint(moment, int(number)))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            _tell("ended killed")
        elif status == 0:
            _tell("ended whole")
        else:
            _tell(f"ended failed with status {status}")


def _warm_up(function: Any, home: Path) -> None:
    """Run the scenario once in a copy of its directory; failures are reported by the child."""
    here, copy = Path.cwd(), home.with_name("warm")
    shutil.copytree(home, copy)
    with contextlib.suppress(Exception):
        _play(function, copy, lambda moment, number: None, lambda text: None)
    os.chdir(here)
    shutil.rmtree(copy)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.name != "log-writer":  # has no end
            thread.join(10)
            assert not thread.is_alive(), thread
    gc.collect()
    gc.freeze()


def _run(function: Any, home: Path, point: CrashPoint) -> None:
    """Run the scenario in a child; never returns."""

    def hook(moment: str, number: int) -> None:
        if (moment, number) == (point.moment, point.number):
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        _play(function, home, hook, lambda text: _tell(f"said {text}"))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _play(function: Any, home: Path, hook: Hook, say: Say) -> None:
    outcome = function(home, hook, say)
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)


def _tell(line: str) -> None:
    """Write immediately and completely, because the process may die the next moment."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    _serve(sys.argv[1], warm="warm" in sys.argv[2:])
