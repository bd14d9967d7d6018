"""`python -m benchmarks.simulate`: how calls are placed on up to 1,000 nodes, by simulation.

The engine's own placing code and queue, driven by simulated callers, nodes and times
(`simulated_cluster`). Prints the figures, and writes them with plots to `docs/`. With `--quick`, a
small simulation in seconds that writes nothing. The same seed gives the same figures, apart from
the times of the placing code, which are measured.
"""

from __future__ import annotations

import argparse
import gc
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.simulated_cluster import Caller, Figures, Plan, Simulation, mean_s

DOCS = Path(__file__).parent.parent / "docs"
SIZES = (10, 30, 100, 300, 1000)
CELLS = (10, 30, 100)
SLOTS = 10

LONG = Plan(
    machines=1000, slots=SLOTS, cells=[], seconds=360, warm_up=120, program_s=12, rare=0.01,
    deaths=20, drains=10,
)  # fmt: skip
"""Programs that are long enough for one engine to fill 10,000 slots."""

SHORT = Plan(machines=100, slots=SLOTS, cells=[], seconds=60, warm_up=20, program_s=2, sigma=1.2)
"""Programs of 4 seconds on average."""


def main() -> None:
    """Simulate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small simulation, in seconds")
    parser.add_argument("--seed", type=int, default=LONG.seed)
    options = parser.parse_args()
    if options.quick:
        print(table([("20 nodes", quick(options.seed))]))
        return
    whole = Simulation(full_plan(options.seed)).run()
    shared = Simulation(shared_plan(options.seed)).run()
    gc.freeze()  # or each collection would look at the figures above, within a time that is measured
    sizes = {
        (size, load): Simulation(sized_plan(size, load, options.seed)).run()
        for size in SIZES
        for load in (0.7, 1.3)
    }
    cells = {count: Simulation(celled_plan(count, options.seed)).run() for count in CELLS}
    neighbours = Simulation(neighbours_plan(options.seed)).run()
    page = write_page(whole, shared, neighbours, sizes, cells)
    print(page)
    draw(whole, shared, sizes)
    (DOCS / "reference/simulation.md").write_text(page, encoding="utf-8")


# -- what is simulated -----------------------------------------------------------------------


def quick(seed: int) -> Figures:
    """Simulate everything at once on a few nodes: nodes die and are drained, two engines share
    them, one with a principal who asks for all slots and more.
    """
    greedy = [Caller("greedy", 22, 30, 8), *_modest(6, 0.4, "modest")]
    plan = replace(
        SHORT, machines=20, slots=4, cells=[greedy, _modest(6, 0.4, "other")], rare=0.02,
        seconds=90, warm_up=10, deaths=6, drains=4, down_s=15, engine_s=0, seed=seed,
    )  # fmt: skip
    return Simulation(plan).run()


def full_plan(seed: int) -> Plan:
    """One engine with 1,000 nodes of ten slots, more calls than they can take, nodes that die."""
    calls_per_s = LONG.machines * SLOTS * 1.1 / mean_s(LONG)
    return replace(LONG, cells=[crowd(calls_per_s, burst=20, modest=50)], seed=seed)


def shared_plan(seed: int) -> Plan:
    """Four principals who each ask for all slots, and 20 who ask for a hundredth each."""
    calls_per_s = SHORT.machines * SLOTS / mean_s(SHORT)
    greedy = [Caller(f"greedy {number}", calls_per_s, 300, 8) for number in range(4)]
    modest = _modest(20, calls_per_s / 100, "modest")
    return replace(SHORT, cells=[greedy + modest], engine_s=0, seed=seed)


def neighbours_plan(seed: int) -> Plan:
    """The same in two cells: the greedy principals in one, five modest ones in the other."""
    (callers,) = shared_plan(seed).cells
    return replace(SHORT, cells=[callers[:4], callers[4:9]], engine_s=0, seed=seed)


def sized_plan(size: int, load: float, seed: int) -> Plan:
    """Some nodes, and the same load for each of them; the engine's own limit is left out."""
    calls_per_s = size * SLOTS * load / mean_s(SHORT)
    callers = crowd(calls_per_s, burst=max(1, size / 20), modest=20)
    return replace(
        SHORT, machines=size, cells=[callers], seconds=25, warm_up=10, engine_s=0, seed=seed
    )


def celled_plan(count: int, seed: int) -> Plan:
    """Several engines on 1,000 nodes, with 80 % of the slots' worth of calls between them."""
    calls_per_s = 1000 * SLOTS * 0.8 / mean_s(SHORT) / count / 5
    cells = [
        [Caller(f"cell {cell} {number}", calls_per_s, 5) for number in range(5)]
        for cell in range(count)
    ]
    return replace(SHORT, machines=1000, cells=cells, seconds=26, warm_up=12, seed=seed)


def _modest(count: int, calls_per_s: float, name: str) -> list[Caller]:
    return [Caller(f"{name} {number}", calls_per_s, 2) for number in range(count)]


def crowd(calls_per_s: float, burst: float, modest: int) -> list[Caller]:
    """One principal who makes two fifths of all calls, in large bursts, and many who are alike."""
    each = calls_per_s * 0.6 / modest
    return [
        Caller("greedy", calls_per_s * 0.4, burst * 10, 8),
        *(Caller(f"modest {number}", each, burst) for number in range(modest)),
    ]


# -- the page --------------------------------------------------------------------------------

INTRODUCTION = """\
`python -m benchmarks.simulate` makes this page in about two minutes; `--quick` takes seconds and writes nothing. It drives the engine's
own placing code and queue with simulated callers and nodes.

What is drawn, and where it comes from: the engine's processor time for one call, 2.5 ms; `run_python` in a warm container, 6 ms beside
the program; the reset, 15 ms ([measurements](measurements.md)); a new container, half a second
([container wall](../limitations/container-wall.md)); a call of a Ray actor on another node, 1.1 ms (p99 4.8 ms), and a killed node
that is noticed after 1.8 s, both measured with Ray. Nodes report once a second, so what an engine knows of other engines' use is up to
a second old. Times of programs are log-normal, at most ten minutes; so are the sizes of bursts. A tenth of the calls want a container of
their own, and six in ten are repeated by their callers if their node is lost.

Asserted throughout: no call is granted two slots or a node that is closed or full as its engine knows it, no principal gets more than
three quarters of the slots, and a call that must not be repeated begins once.
"""


def write_page(
    whole: Figures,
    shared: Figures,
    neighbours: Figures,
    sizes: dict[tuple[int, float], Figures],
    cells: dict[int, Figures],
) -> str:
    """Return the page."""
    most = max(running for _, running, _, _ in whole.samples)
    parts = [
        "# Simulation of a cluster",
        INTRODUCTION,
        "## A thousand nodes, one engine",
        f"""1,000 nodes of ten slots; 51 principals, one of whom makes two fifths of the calls, in
        bursts of hundreds. Programs take {mean_s(LONG):.0f} s on average, and the slowest of a
        hundred 40 times the median: one engine cannot start short ones fast enough to fill 10,000
        slots. {whole.counts["killed nodes"]} nodes are killed and come back, {LONG.drains} are
        drained for a while; one call in a hundred needs an image that every tenth node has.""",
        "![Programs that run and calls that wait, over time](../images/cluster-run.svg)",
        table([("1,000 nodes", whole)]),
        f"""Waiting is for a slot; the start of the program also includes the engine's own queue,
        which a burst fills: 400 calls take a second there. Up to {most:,} programs ran at once.
        {whole.counts["repeated"]} calls on killed nodes were repeated by their callers, once;
        {whole.ends["lost"]} that may not be repeated, or were lost twice, ended as `SANDBOX_LOST`.
        Calls that may not be repeated and began twice: 0. Slots granted twice: 0.""",
        "## Greedy and modest principals",
        """100 nodes, full for the whole time: four principals each ask for all slots, and 20 for a
        hundredth each. Programs take 4 s on average from here on.""",
        "![How long calls of greedy and modest principals wait](../images/cluster-waits.svg)",
        table(_by_appetite(shared), is_part=True),
        f"""The most that one principal had was {max(shared.shares.values())} % of the slots. A
        principal without waiting calls always finds a place in the queue; only those that fill it
        are refused. The same four, and five of the others, in two cells that share the nodes:""",
        table(_by_appetite(neighbours), is_part=True),
        f"""An engine sees a slot that another one frees up to a second late, when that one has long
        used it again. So one that has more than its part of the nodes leaves one slot in sixteen to
        those that have less; utilisation was {neighbours.utilisation:.0%}.""",
        "## From 10 to 1,000 nodes",
        """The same load for each node, 0.7 or 1.3 times what it can take. Placing a call includes
        giving its slot back; both are times of the real code on the machine that made this page.""",
        "![Time to place a call, by number of nodes](../images/cluster-growth.svg)",
        "\n".join(
            [
                "| nodes | load | placing a call | reading a report | waiting p50 | p95 | p99 |",
                "|---|---|---|---|---|---|---|",
                *(
                    f"| {size:,} | {load} | {one.micros('call'):.0f} µs | "
                    f"{one.micros('report'):.1f} µs | {' | '.join(waits(one.all_waits()))} |"
                    for (size, load), one in sizes.items()
                ),
            ]
        ),
        "## Many cells",
        """Several engines, each with its own queue, share 1,000 nodes; together they have calls for
        80 % of the slots. Two that place calls at the same moment do not know of each other, so
        some nodes get more than their slots for a while, and their programs share the processors.
        To make that rare, an engine that shares its nodes takes the best of three that it draws,
        not the least loaded one, which all others would take also. Overfull are the programs that
        begin on such a node.""",
        "\n".join(
            [
                "| cells | calls/s | used | overfull | fullest | start p50 | p95 | p99 | placing |",
                "|---|---|---|---|---|---|---|---|---|",
                *(
                    f"| {count} | {len(one.starts) / len(one.samples):,.0f} | "
                    f"{one.utilisation:.0%} | "
                    f"{one.counts['on an overfull node'] / max(1, len(one.starts)):.1%} | "
                    f"{one.fullest:.1f} × its slots | {' | '.join(waits(one.starts))} | "
                    f"{one.micros('call'):.0f} µs |"
                    for count, one in cells.items()
                ),
            ]
        ),
        """A node reports to each engine that has joined it, and keeps warm containers for each: with
        a hundred cells that is a hundred reports a second and, with `container.pool_min = 1`, a
        hundred warm containers. Set it to 0 there, or give each group of cells its own nodes.""",
        "## What it does not show",
        """Docker, the network and the database take the times above, whatever else they do. Reports
        cost the engine nothing but what the placing code does with them. Sessions, whose containers
        do not count as slots, are not simulated.""",
    ]
    return "\n\n".join(_wrapped(one) for one in parts) + "\n"


def _wrapped(text: str) -> str:
    if text.startswith(("#", "|", "!")) or text is INTRODUCTION:
        return text.rstrip()
    words = " ".join(text.split())
    return textwrap.fill(words, 130, break_long_words=False, break_on_hyphens=False)


def _by_appetite(figures: Figures) -> list[tuple[str, Figures]]:
    return [(name, only(figures, name)) for name in ("greedy", "modest")]


def table(rows: Iterable[tuple[str, Figures]], *, is_part: bool = False) -> str:
    """Return figures as a table; those of a part of the callers have no utilisation."""
    heads = ["", "calls", "waiting p50", "p95", "p99", "longest", "refused", "no slot in 30 s"]
    heads += [] if is_part else ["start p95", "utilisation", "own container", "warm", "new", "lost"]
    lines = [heads, ["---"] * len(heads)]
    for name, one in rows:
        line = [name, f"{sum(one.ends.values()):,}", *waits(one.all_waits())]
        line += [
            f"{max(one.all_waits(), default=0):.2f} s",
            part(one, "refused"),
            part(one, "late"),
        ]
        if not is_part:
            begun = max(1, len(one.starts))
            line += [waits(one.starts)[1], f"{one.utilisation:.0%}"]
            line += [f"{one.counts[source] / begun:.0%}" for source in ("its own", "warm", "new")]
            line += [f"{one.ends['lost']}"]
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def only(figures: Figures, prefix: str) -> Figures:
    """Return the figures of the principals whose names begin so."""
    ends: Counter[str] = Counter()
    for (who, end), count in figures.of_caller.items():
        ends[end] += count * who.startswith(prefix)
    mine = {who: one for who, one in figures.waits.items() if who.startswith(prefix)}
    return Figures(waits=mine, ends=ends)


def part(figures: Figures, end: str) -> str:
    """Return which part of the calls ended so."""
    return f"{figures.ends[end] / max(1, sum(figures.ends.values())):.1%}"


def waits(seconds: Sequence[float]) -> list[str]:
    """Return p50, p95 and p99."""
    ordered = sorted(seconds) or [0.0]
    return [f"{ordered[int(len(ordered) * at)]:.2f} s" for at in (0.5, 0.95, 0.99)]


def draw(whole: Figures, shared: Figures, sizes: dict[tuple[int, float], Figures]) -> None:
    """Draw the plots. The same figures give the same files."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "fumehood", "svg.fonttype": "none", "font.size": 9})

    def plot(name: str, x: str, y: str, lines: dict[str, tuple[Sequence, Sequence]], scale: str):
        figure = Figure(figsize=(6.4, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for label, points in lines.items():
            axes.plot(
                *points, label=label, marker="o" if len(points[0]) < 20 else "", linewidth=1.2
            )
        axes.set(xlabel=x, ylabel=y, xscale=scale, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        target = DOCS / f"images/cluster-{name}.svg"
        figure.savefig(target, metadata={"Date": None, "Creator": None})
        text = target.read_text(encoding="utf-8")
        target.write_text("\n".join(map(str.rstrip, text.splitlines())) + "\n", encoding="utf-8")

    times, running, waiting, slots = zip(*whole.samples, strict=True)
    shown = {"slots": slots, "programs that run": running, "calls that wait": waiting}
    plot("run", "seconds", "", {name: (times, ys) for name, ys in shown.items()}, "linear")
    levels = [one / 2 for one in range(1, 200)]
    curves = {
        name: ([quantile(only(shared, name).all_waits(), one / 100) for one in levels], levels)
        for name in ("modest", "greedy")
    }
    plot("waits", "seconds until a call has a slot", "% of the calls", curves, "linear")
    growth = {
        name: (SIZES, [sizes[size, load].micros("call") for size in SIZES])
        for name, load in (("with room (0.7)", 0.7), ("full (1.3)", 1.3))
    }
    plot("growth", "nodes", "µs to place a call", growth, "log")


def quantile(values: Sequence[float], at: float) -> float:
    """Return the value at a part of the order."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * at))]


if __name__ == "__main__":
    main()
