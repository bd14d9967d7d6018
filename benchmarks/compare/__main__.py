"""Compare fumehood with its peers: `python -m benchmarks.compare PYTHON`, the Python of the peers.

Makes `docs/reference/comparison.md` and its plots. Exits 1 if the order of the peers differs from
that of the run before by more than a quarter.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.compare.peers import OWN_LIMIT_S, PEERS
from benchmarks.compare.programs import (
    ATTACKS,
    CANARY,
    EMPTY,
    MEGABYTE,
    NAMED,
    PANDAS,
    STANDARD,
    SUM,
    TOTAL,
    Attack,
    Seen,
    fill,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/comparison.md"
PLOT = ROOT / "docs/images/comparison-speed.svg"
LAST = ROOT / ".venv/compare/last.json"
PATIENCE_S = OWN_LIMIT_S + 10
"""After this the comparison gives up on a call, and on its worker."""
DATA_IMAGE = "fumehood-compare/python-data"
SETTLED_S = 5
"""After this a peer does nothing any more but wait: it has ended what it kept ready, or made it."""
SAME = 1.25
"""Two figures within this factor have no order."""


class Gone(Exception):
    """The worker died or does not answer."""


class Unable(Exception):
    """The peer cannot do this."""


class Worker:
    """The process of one peer."""

    def __init__(self, python: str, name: str, kind: str, *image: str, **environment: str) -> None:
        script = Path(__file__).with_name("worker.py")
        self.begun = time.perf_counter()
        self.process = subprocess.Popen(
            [python, str(script), name, kind, *image], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.about = self._answer(120)

    def ask(self, do: str, *, patience_s: float = 600, **asked: Any) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Gone("worker died") from None
        return self._answer(patience_s)

    def _answer(self, patience_s: float) -> Any:
        lines: list[str] = []
        stdout = self.process.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        reader.join(patience_s)
        if not lines:
            raise Gone("no answer")
        if not lines[0]:
            raise Gone("worker died")
        told = json.loads(lines[0])
        if "unable" in told:
            raise Unable(told["unable"])
        return told["ok"]

    def end(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.terminate()
        self.process.kill()
        self.process.wait()


@dataclass
class Measured:
    """All that was found about one peer."""

    version: str = ""
    speed: dict[str, float | str] = field(default_factory=dict)
    """A figure, or why there is none."""
    walls: dict[str, tuple[bool, str]] = field(default_factory=dict)
    """For each attack: whether it was held, and the words for the table."""


@contextmanager
def working(python: str, name: str, kind: str, *image: str, **more: str) -> Iterator[Worker]:
    worker = Worker(python, name, kind, *image, **more)
    try:
        yield worker
    finally:
        worker.end()


def try_to(work: Callable[[], float]) -> float | str:
    try:
        return work()
    except (Gone, Unable) as error:
        return str(error)


# -- speed -----------------------------------------------------------------------------------


def measure_speed(python: str, name: str) -> tuple[str, dict[str, float | str]]:
    """Measure a peer with its defaults. Raises Unable if it does not start."""
    found: dict[str, float | str] = {}

    def first() -> float:
        worker = Worker(python, name, "plain")
        try:
            worker.ask("times", code=EMPTY, count=1, wanted="x")
            return (time.perf_counter() - worker.begun) * 1000
        finally:
            worker.end()

    found["from nothing to the first answer, ms"] = try_to(
        lambda: median(first() for _ in range(3))
    )
    with working(python, name, "plain") as worker:
        version = worker.about["version"]

        def each(code: str, wanted: str, count: int = 15) -> float:
            worker.ask("times", code=code, count=1, wanted=wanted)
            return median(worker.ask("times", code=code, count=count, wanted=wanted))

        found["an empty program, ms"] = try_to(lambda: each(EMPTY, "x"))
        found["the standard library, ms"] = try_to(lambda: each(STANDARD, TOTAL))
        found["1 MB of output, ms"] = try_to(lambda: each(MEGABYTE, "x" * 1_000_000, 7))
        found["100 programs, 8 at once, ms"] = try_to(
            lambda: worker.ask("burst", code=EMPTY, count=100, wanted="x")
        )

        def second() -> float:
            worker.ask("sessions", count=1, code="x = 41")
            return median(worker.ask("session_times", code=EMPTY, count=15, wanted="x"))

        found["the next call of a session, ms"] = try_to(second)
        with suppress(Gone):
            worker.ask("end_sessions")
    with working(python, name, "plain") as worker:

        def memory() -> float:
            worker.ask("sessions", count=1, code="x = 41")
            time.sleep(SETTLED_S)
            before = private_mb()
            worker.ask("sessions", count=3, code="x = 41")
            time.sleep(SETTLED_S)
            return max(0.0, (private_mb() - before) / 3)

        found["memory of an idle session, MB"] = try_to(memory)
    if PEERS[name].lacks_pandas:
        found["pandas, ms"] = PEERS[name].lacks_pandas
        return version, found
    takes_image = name.startswith(("fumehood", "docker", "llm-sandbox, Docker"))
    with working(python, name, "plain", *([DATA_IMAGE] if takes_image else [])) as worker:
        found["pandas, ms"] = try_to(lambda: each_of(worker, PANDAS, SUM))
    return version, found


def each_of(worker: Worker, code: str, wanted: str) -> float:
    worker.ask("times", code=code, count=1, wanted=wanted)
    return median(worker.ask("times", code=code, count=7, wanted=wanted))


def private_mb() -> float:
    """Private memory of all processes of the machine, but this one and Docker's daemons, whose
    garbage is more than a session."""
    total = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.name() not in ("dockerd", "containerd"):
                total += process.memory_full_info().uss
    return total / (1 << 20)


# -- walls -----------------------------------------------------------------------------------


class Host:
    """What an attack could reach: files, a port and processes. Removes what it left."""

    PLACES = ("/tmp", "/var/tmp", "/root", "/home", "/etc", "/dev/shm")

    def __init__(self) -> None:
        self.mark = "m" + secrets.token_hex(5)
        self.connected = False
        self.listener = socket.create_server(("", 0))
        self.port = self.listener.getsockname()[1]
        self.hosts = ["127.0.0.1", *self._addresses()]
        threading.Thread(target=self._accept, daemon=True).start()
        for place in self.PLACES[:5]:
            Path(place, f"{self.mark}.secret").write_text(CANARY, encoding="utf-8")

    @staticmethod
    def _addresses() -> list[str]:
        """This machine's own addresses, that of Docker's bridge among them."""
        return [
            one.address
            for found in psutil.net_if_addrs().values()
            for one in found
            if one.family == socket.AF_INET and one.address != "127.0.0.1"
        ]

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.listener.accept()[0].close()
                self.connected = True

    def left(self) -> list[int]:
        """The processes that have the attack's name."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.name() == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def has_file(self) -> bool:
        return any(Path(place, f"{self.mark}.written").exists() for place in self.PLACES)

    def close(self) -> None:
        self.listener.close()
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        for place in self.PLACES:
            for kind in ("secret", "written", "big", "next"):
                Path(place, f"{self.mark}.{kind}").unlink(missing_ok=True)


def burning(worker: Worker) -> int:
    """How many of the worker's own processes still work, for example a thread that was given up."""
    with suppress(psutil.NoSuchProcess):
        own = psutil.Process(worker.process.pid)
        processes = [own, *own.children(recursive=True)]
        for one in processes:
            with suppress(psutil.Error):
                one.cpu_percent()
        time.sleep(0.5)
        found = 0
        for one in processes:
            with suppress(psutil.Error):
                found += one.cpu_percent() > 50
        return found
    return 0


def may_be_named(python: str, name: str) -> bool:
    """Whether programs of this peer can take a name by which the host finds them."""
    with working(python, name, "hard") as worker:
        return not worker.ask("run", code=fill(NAMED, mark="named"), patience_s=60)["said"]


def attack(python: str, name: str, one: Attack, preamble: str) -> tuple[bool, str]:
    """Run one attack on a peer with all its limits. Return whether it was held, and words."""
    host = Host()
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, len(host.left()))

    watcher = threading.Thread(target=watch, daemon=True)
    values = {"mark": host.mark, "hosts": host.hosts, "port": host.port}
    code = fill(preamble + one.code, **values)
    worker = Worker(python, name, "hard", CALLER_SECRET=CANARY)
    out, said, took, grown = "", "", None, 0.0
    try:
        watcher.start()
        begun = time.monotonic()
        try:
            told = worker.ask("run", code=code, patience_s=PATIENCE_S)
            out, said, grown = told["out"], told["said"], told["grown_mb"]
            took = time.monotonic() - begun
            if took >= OWN_LIMIT_S - 1:
                took, said = None, said or "nobody; its caller gives up"
            if one.then:
                out = worker.ask("run", code=fill(one.then, **values), patience_s=60)["out"]
        except Gone as gone:
            said = str(gone)
        time.sleep(1.5)
        left = len(host.left()) or burning(worker)
        seen = Seen(out, said, took, grown, left, most, host.has_file(), host.connected)
        fault = one.fault(seen)
        ended = said or "ends by itself"
        return fault is None, ended if fault is None else f"{fault} ({ended})"
    finally:
        done.set()
        if said in ("no answer", "worker died"):
            worker.kill()
        else:
            worker.end()
        host.close()


# -- the page --------------------------------------------------------------------------------

PAGE_TEXT = """# Comparison

`make compare` makes this page: fumehood beside what a user would pick instead, on the same work in one run, each in a
process of its own. The peers are installed by the command into an environment of their own. Made on {day}: Linux
{kernel}, {processors} processors, Docker {docker}.

## Speed

Each peer with its defaults; what could not be left out is said [below](#versions-and-options). Times are medians of 15
calls (7 for a megabyte and pandas; of a slow peer as many as ten seconds allow, and a burst of 20 s), as the caller of the peer's own Python interface or command waits for them.

![Time of an empty program and of a session's next call](../images/comparison-speed.svg)

{speed}

- **From nothing**: the caller's Python starts, and for fumehood also its daemon, until the first answer.
- **Memory of an idle session**: private memory of all processes that a session adds to the machine, the mean of three.
  Below 3 MB it is noise. What a peer keeps without sessions is not in it: fumehood's daemon and warm containers, a pool.
- **Bold**: the fastest. Differences within a quarter are noise.
- {notes}

## Walls

Each peer with every limit that its documentation offers. What an attack does is bounded; a process, a file or a
connection is looked for on the host, not asked for from the peer. A program that a peer's subset of Python cannot
express is held.

{walls}

"Prints 300 MB" is not held if the memory of the caller's process grows by more than 100 MB. "Starts 300 processes" is
not held if 250 run at once.

## What this does not show

- The attacks are twelve simple ones, chosen by the authors of fumehood, who mended what they found in it. No attack on a kernel is
  among them. All peers but pydantic-monty and smolagents' local one share the host's kernel, fumehood with its default
  runtime, too.
- smolagents' local interpreter and pydantic-monty are fast because no process or container is made: they run a subset of
  Python.
- Other limits than those in the table below would change a line, and so would a machine with more processors.

## What happened

{stories}

## Versions and options

{options}
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def figure(value: float | str) -> str:
    return "–" if isinstance(value, str) else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def marked(one: Measured, line: str, found: dict[str, Measured]) -> str:
    """A figure, in bold if it is the least; of memory none is."""
    figures = [value for peer in found.values() if isinstance(value := peer.speed[line], float)]
    is_least = line.endswith("ms") and one.speed[line] == min(figures, default=None)
    return f"**{figure(one.speed[line])}**" if is_least else figure(one.speed[line])


def write_page(found: dict[str, Measured], missing: dict[str, str]) -> None:
    lines = list(next(iter(found.values())).speed)
    notes = [
        f"{name}, {line}: {value}"
        for name, one in found.items()
        for line, value in one.speed.items()
        if isinstance(value, str)
    ]
    walls = [
        [
            attack.what,
            *("held" if one.walls[attack.what][0] else "**no**" for one in found.values()),
        ]
        for attack in ATTACKS
    ]
    held = [
        f"{sum(ok for ok, _ in one.walls.values())} of {len(ATTACKS)}" for one in found.values()
    ]
    stories = [
        f"### {name}\n\n"
        + table(
            ["attack", "held", "what happened"],
            [[what, "yes" if ok else "**no**", words] for what, (ok, words) in one.walls.items()],
        )
        for name, one in found.items()
    ]
    options = [
        [name, one.version, PEERS[name].options, PEERS[name].hard_options]
        for name, one in found.items()
    ] + [[name, "–", f"not compared: {why}", ""] for name, why in missing.items()]
    text = PAGE_TEXT.format(
        day=f"{datetime.now(UTC):%Y-%m-%d}", kernel=os.uname().release.split("-")[0],
        processors=os.cpu_count(), docker=found["docker run"].version if "docker run" in found else "–",
        speed=table(
            ["", *lines],
            [[name, *(marked(one, line, found) for line in lines)] for name, one in found.items()],
        ),
        notes="**–** has a reason:" + "".join(f"\n    - {one}" for one in notes),
        walls=table(["", *found], [*walls, ["**held**", *held]]),
        stories="\n\n".join(stories),
        options=table(["", "version", "options for speed", "options for walls"], options),
    )  # fmt: skip
    PAGE.write_text(text, encoding="utf-8")


def draw(found: dict[str, Measured]) -> None:
    """Draw the times of an empty program and of a session's next call."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "fumehood", "svg.fonttype": "none", "font.size": 9})
    names = [name for name, one in found.items() if isinstance(one.speed[EMPTY_LINE], float)]
    drawing = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = drawing.add_subplot()
    for shift, (line, label, hatch) in enumerate(
        ((EMPTY_LINE, "an empty program", ""), (SESSION_LINE, "a session's next call", "///"))
    ):
        values = [found[name].speed[line] for name in names]
        heights = [value if isinstance(value, float) else 0 for value in values]
        places = [place + 0.4 * shift for place in range(len(names))]
        bars = axes.barh(places, heights, 0.38, label=label, hatch=hatch)
        axes.bar_label(bars, [figure(value) if value else "" for value in heights], padding=2)
    axes.set_yticks([place + 0.2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds, logarithmic", xscale="log", xlim=(0.05, 100_000))
    axes.legend(frameon=False, loc="upper right")
    drawing.savefig(PLOT, metadata={"Date": None, "Creator": None})
    text = PLOT.read_text(encoding="utf-8")
    PLOT.write_text("\n".join(map(str.rstrip, text.splitlines())) + "\n", encoding="utf-8")


EMPTY_LINE = "an empty program, ms"
SESSION_LINE = "the next call of a session, ms"


def other_order(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """The pairs of peers that changed their order since the run before."""
    changed = []
    for line in (EMPTY_LINE, SESSION_LINE):
        for one in now:
            for other in now:
                figures = [
                    run.get(name, {}).get(line) for run in (before, now) for name in (one, other)
                ]
                if all(isinstance(value, float) for value in figures):
                    was, than, now_is, now_than = figures
                    if was * SAME < than and now_than * SAME < now_is:
                        changed.append(f"{line}: {one} was before {other}")
    return changed


def main() -> None:
    """Compare all peers, or those named in COMPARE_PEERS, separated by semicolons."""
    chosen = os.environ.get("COMPARE_PEERS", "")
    names = chosen.split(";") if chosen else list(PEERS)
    found: dict[str, Measured] = {}
    missing: dict[str, str] = {}
    for name in names:
        python = sys.executable if name == "fumehood" or "docker " in name else sys.argv[1]
        one = Measured()
        try:
            one.version, one.speed = measure_speed(python, name)
            preamble = NAMED if may_be_named(python, name) else ""
            for each in ATTACKS:
                one.walls[each.what] = attack(python, name, each, preamble)
        except (Gone, Unable) as error:
            missing[name] = str(error)
            print(f"{name}: {error}", flush=True)
            continue
        found[name] = one
        print(f"{name} {one.version}", flush=True)
        for line, value in one.speed.items():
            print(f"    {line:45} {figure(value)}{f' ({value})' if isinstance(value, str) else ''}")
        for what, (ok, words) in one.walls.items():
            print(f"    {what:45} {'held' if ok else 'NOT HELD'}: {words}", flush=True)
    if chosen:
        return
    write_page(found, missing)
    draw(found)
    speeds = {name: one.speed for name, one in found.items()}
    changed = []
    if LAST.exists():
        changed = other_order(json.loads(LAST.read_text(encoding="utf-8")), speeds)
        print("\n".join(changed) or "The order is that of the run before.")
    LAST.write_text(json.dumps(speeds), encoding="utf-8")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
