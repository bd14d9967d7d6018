"""Bars, charts and formatted values for the console's templates.

Lengths are numbers that become SVG attributes. The text of a chart is HTML, so that users can
select and enlarge it, and screen readers can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from fumehood.answers import CallDetails
from fumehood.core.envelope import NetworkReport
from fumehood.core.tool import ToolDefinition
from fumehood.parts import tool_kinds


@dataclass(frozen=True, slots=True)
class Bar:
    """One stage on a time line. `start` and `length` are percentages of the line's length."""

    name: str
    start: float
    length: float
    ms: float


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a bar chart. Positions and heights are percentages of the chart's size."""

    name: str
    address: str
    left: float
    width: float
    whole: float
    """Height of the column."""
    inner: float
    """Height of the column's lower part, which has another colour."""
    words: str
    """The column's values, as text."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One bar chart. `of_whole` and `of_inner` are the labels for the columns and for their lower
    parts, for example "calls" and "of them failed".
    """

    title: str
    of_whole: str
    of_inner: str
    most: str
    """The value of the highest column, as text."""
    columns: tuple[Column, ...]


def time_line(stages_ms: Mapping[str, float]) -> list[Bar]:
    """Return one bar for each stage. Each bar begins where the previous bar ends."""
    total = sum(stages_ms.values()) or 1.0
    bars, passed = [], 0.0
    for name, ms in stages_ms.items():
        bars.append(Bar(name, part_of(passed, total), max(part_of(ms, total), 0.4), ms))
        passed += ms
    return bars


def share(amount: float, whole: float) -> float:
    """Return the length of a bar: `amount` as a percentage of `whole`, at most 100."""
    return min(part_of(max(amount, 0.0), whole), 100.0) if whole > 0 else 0.0


def chart_of(
    title: str,
    of_whole: str,
    of_inner: str,
    steps: Sequence[tuple[str, str, float, float]],
    shown: Callable[[float], str],
) -> Chart:
    """Return a chart with one column for each step. A step is a name, an address, the column's
    value and the value of the column's lower part.

    `of_whole` and `of_inner` are the labels for the columns and for their lower parts. `of_inner`
    is empty if the columns have no lower parts. `shown` formats a value.
    """
    most = max((whole for _, _, whole, _ in steps), default=0.0)
    width = 100 / max(len(steps), 1)
    columns = []
    for number, (name, address, whole, inner) in enumerate(steps):
        words = f"{shown(whole)} {of_whole}"
        words += f", {shown(inner)} {of_inner}" if of_inner else ""
        columns.append(
            Column(
                name=name, address=address, words=words,
                left=round(number * width + width * 0.1, 3), width=round(width * 0.8, 3),
                whole=part_of(whole, most), inner=part_of(inner, most),
            )
        )  # fmt: skip
    return Chart(title, of_whole, of_inner, shown(most), tuple(columns))


def part_of(amount: float, whole: float) -> float:
    """Return `amount` as a percentage of `whole` for an SVG attribute, or 0 if `whole` is 0."""
    return round(100 * amount / whole, 3) if whole else 0.0


FAIR, GOOD = 0.95, 0.99
"""A tool whose success rate is below one of these rates is shown in another colour."""


def ms(number: float) -> str:
    """Format milliseconds in a suitable unit, such as seconds."""
    if number >= 60_000:
        return f"{number / 60_000:.1f} min"
    if number >= 1000:
        return f"{number / 1000:.2f} s"
    return f"{number:.0f} ms" if number >= 10 else f"{number:.2f} ms"


def money(text: str) -> str:
    """Format an amount of money without trailing zeros. Zero becomes an empty text."""
    amount = Decimal(text)
    return f"{amount.normalize():,f}" if amount else ""


def figure(number: float) -> str:
    """Format a number: whole numbers without decimals, other numbers from 1 with two decimals, and
    smaller numbers with four.
    """
    if number == int(number):
        return f"{int(number):,}"
    return f"{number:,.2f}" if number >= 1 else f"{number:.4f}"


def percent(part: float, whole: float) -> str:
    """Format `part` as a rounded percentage of `whole`. 100 % is only shown if it is exact."""
    if not whole:
        return "–"
    rounded = round(100 * part / whole, 1)
    return f"{rounded if part == whole else min(rounded, 99.9):g} %"


def health_of(part: float, whole: float) -> str:
    """Return the CSS class for the success rate of `part` successes in `whole` calls."""
    rate = part / whole if whole else 1.0
    return "good" if rate >= GOOD else "warn" if rate >= FAIR else "bad"


def size_of(number: Any) -> str:
    """Format a number of bytes. Any other value becomes an empty text."""
    return size(number) if type(number) is int else ""


_PLACES = {
    "code": ("container", "It runs untrusted programs."),
}
"""Maps the kind of an executor to the place where its tools run, and the reason."""

_JAIL = ("jail", "A function of an installed package, in a process without rights.")
_HOST = ("host", "A function that the operator trusts. It is not sandboxed.")


def place_of(tool: ToolDefinition) -> tuple[str, str]:
    """Return the place where a tool runs, and a sentence that gives the reason."""
    kind = tool.executor.partition(":")[0]
    if kind == "function":
        return _JAIL if tool.sandboxed else _HOST
    if kind in _PLACES:
        return _PLACES[kind]
    added = tool_kinds().get(tool.executor)
    if added is None:
        return "unknown", "This console does not know its executor."
    return added.place, added.why


def limits_in_words(limits: Mapping[str, Any]) -> str:
    """Format the limits of a call, such as `30 s · 512 MB of memory`."""
    forms = (
        ("timeout_seconds", "{:g} s"), ("cpu_seconds", "{:g} s of processor"),
        ("memory_mb", "{:,} MB of memory"),
    )  # fmt: skip
    known = [(limits.get(name), form) for name, form in forms]
    words = [form.format(value) for value, form in known if isinstance(value, int | float)]
    output = limits.get("output_bytes")
    return " · ".join([*words, f"{size(output)} of output"] if type(output) is int else words)


def size(number: float) -> str:
    """Format a number of bytes in a suitable unit, such as KB."""
    number = min(number, 1 << 60)  # a hostile number may be too large for a float
    for unit in ("bytes", "KB", "MB"):
        if number < 1000:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def call_facts(details: CallDetails) -> list[tuple[str, str]]:
    """Return what the page of a call shows about the call as text, for example its time and its
    cost. Each item is a name and a value. Items without a value are left out.
    """
    call = details.call
    cost, ended_by = money(call.cost), call.ended_by or ""
    facts = [
        ("Time", ms(call.execution_time_ms)),
        ("Processor", ms(call.cpu_ms) if call.cpu_ms is not None else ""),
        ("Cost", f"{cost} {call.currency}" if cost else ""),
        ("Tokens", f"{call.input_tokens:,} in · {call.output_tokens:,} out"),
        ("Ended by", ended_by.replace("_", " ") if ended_by != "ok" else ""),
        ("Cache", "answered from the cache" if call.cache_hit else ""),
        ("Network", network_in_words(call.network) if call.network is not None else ""),
    ]
    return [(name, value) for name, value in facts if value]


def network_in_words(network: NetworkReport) -> str:
    """Describe a program's network use."""
    hosts = ", ".join(f"{host} ({count})" for host, count in network.hosts.items())
    refused = f", {network.denied} refused" if network.denied else ""
    held = f", {network.held} held for approval" if network.held else ""
    replayed = f", {network.replayed} answered from a receipt" if network.replayed else ""
    sizes = f"{size(network.bytes_out)} out, {size(network.bytes_in)} in"
    return f"{network.requests} requests{held}{refused}{replayed}: {hosts or 'none'}; {sizes}"


FILTERS: dict[str, Callable[..., Any]] = {
    "call_facts": call_facts, "figure": figure,
    "health_of": health_of, "instant": datetime.fromisoformat, "limits_in_words": limits_in_words,
    "money": money, "ms": ms, "percent": percent, "place_of": place_of, "share": share,
    "size": size, "size_of": size_of,
}  # fmt: skip
