"""Effects: previews of a call's changes, for the human who decides on the call.

Host side, beside the executors. A preview changes nothing and is computed before an approval.
`Executor.preview` computes it; this module has its form, and diffs of files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from pydantic import Field

from fumehood.core.arguments import MAX_READ_BYTES
from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effect:
    """A preview of the changes that one call would make.

    `base` is a hash of the current state of everything that the call reads or changes. `effect` is
    a hash of the changes: each path that the call would change, in its new state, and each path
    that it would be refused to change.
    """

    shown: JsonObject
    """The preview for the human: `added`, `changed`, `removed`, `missing`, `kept`, `counts`,
    `truncated`, and `would_fail` if the call is known to fail.
    """
    base: str
    effect: str
    error: EngineError | None = field(default=None, compare=False)
    """The error with which the call would end, or None if it is not known to fail."""


async def diff_of(before: bytes, after: bytes) -> JsonObject:
    """Compare two contents of a file, and return fields for a preview.

    The result has the field `diff`, and flags if the diff is truncated or coarse. If there is no
    diff, the result has only the field `too_large` or `binary`, which gives the reason.
    """
    if max(len(before), len(after)) > MAX_READ_BYTES:
        return {"too_large": True}
    old, new = text_of(before), text_of(after)
    if old is None or new is None:
        return {"binary": True}
    # In a thread: the comparison of some texts is slow, and would block the event loop.
    diff = await anyio.to_thread.run_sync(unified, old, new)
    marks = {"diff_truncated": diff.is_truncated, "diff_coarse": diff.is_coarse}
    return {"diff": diff.text, **{mark: True for mark, is_set in marks.items() if is_set}}


def shown_changes(
    *,
    added: list[JsonObject] | None = None,
    changed: list[JsonObject] | None = None,
    removed: list[JsonObject] | None = None,
    missing: list[str] | None = None,
    kept: list[JsonObject] | None = None,
    count: int = 0,
    size: int = 0,
    truncated: bool = False,
    would_fail: EngineError | None = None,
) -> JsonObject:
    """Return the preview of a call's changes, as approvers see it.

    * `added`, `changed` and `removed` are entries for these files. `removed` need not contain all
      removed files.
    * `missing` are paths that do not exist. `kept` are entries for files that the call would not
      delete.
    * `count` is the number of all removed files, and `size` is their total size in bytes.
    * `truncated` says whether the preview omits entries.
    * `would_fail` is the error with which the call is known to fail.
    """
    shown: JsonObject = {
        "added": added or [],
        "changed": changed or [],
        "removed": removed or [],
        "missing": missing or [],
        "kept": kept or [],
        "counts": {
            "added": len(added or []),
            "changed": len(changed or []),
            "removed": count,
            "removed_bytes": size,
        },
        "truncated": truncated,
    }
    return shown if would_fail is None else {**shown, "would_fail": would_fail.message}


# -- diffs -------------------------------------------------------------------------------

CONTEXT_LINES = 3
"""Number of unchanged lines before and after each change in a diff."""

MAX_DIFF_BYTES = 16 * 1024
"""Maximum size of one file's diff, in bytes."""

NOTE_BYTES = 100
"""Bytes reserved for the notes at the end of a truncated diff."""

MAX_STEPS = 4_000_000
"""Maximum number of line comparisons for one diff: about 0.15 s with the slowest test texts."""

PART_STEPS = 500
"""Number of steps that are added for each compared part of two texts, for its fixed costs."""

NO_NEWLINE = "\\ No newline at end of file\n"
"""The line that follows a last line without a newline. *Source*: POSIX diff, its output format."""


Code = tuple[str, int, int, int, int]
"""One part of a comparison, in the form of an opcode of `SequenceMatcher`."""

Group = Sequence[Code]
"""One hunk, in the form in which `SequenceMatcher.get_grouped_opcodes` yields it."""


@dataclass(frozen=True, slots=True)
class Diff:
    """A unified diff without the two lines of file names, because these names could be any text."""

    text: str
    is_truncated: bool
    """Whether lines were left out because of the size limit."""
    is_coarse: bool = False
    """Whether some part is shown as one change, because it is too large to compare line by line."""
    steps: int = 0
    """Upper bound on the number of line comparisons that were made."""


def text_of(raw: bytes) -> str | None:
    """Decode UTF-8 text. Return None if the bytes are not text."""
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def unified(
    before: str, after: str, max_bytes: int = MAX_DIFF_BYTES, max_steps: int = MAX_STEPS
) -> Diff:
    """Return a unified diff of two texts, without the lines that name the files.

    The diff has at most `max_bytes` bytes. Its computation takes at most about `max_steps` line
    comparisons.
    """
    old, new = _lines(before), _lines(after)
    start, end = _shared_ends(old, new)
    # Only the lines between the first and the last difference, and their context, are compared.
    skipped, rest = max(0, start - CONTEXT_LINES), max(0, end - CONTEXT_LINES)
    old, new = old[skipped : len(old) - rest], new[skipped : len(new) - rest]
    matcher: Any = SequenceMatcher(None, old, new)
    is_coarse, steps = False, most_steps(matcher)
    if steps > max_steps:
        matcher.opcodes, is_coarse, steps = _in_parts(old, new, max_steps)
    groups: Iterable[Group] = matcher.get_grouped_opcodes(CONTEXT_LINES)
    text, is_truncated = _cut(_runs(old, new, groups, skipped), max_bytes)
    return Diff(text, is_truncated=is_truncated, is_coarse=is_coarse, steps=steps)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    last = lines.pop()
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def most_steps(matcher: Any) -> int:
    """Return the maximum number of steps that a comparison by `matcher`, a `SequenceMatcher`, can
    take.

    In the worst case, the search for each match visits all lines and all pairs of identical lines.
    """
    pairs = sum(len(matcher.b2j.get(line, ())) for line in matcher.a)
    return int((len(matcher.a) + pairs) * min(len(matcher.a), len(matcher.b)))


def _in_parts(
    old: Sequence[str], new: Sequence[str], max_steps: int
) -> tuple[list[Code], bool, int]:
    """Compare two texts part by part. The parts lie between lines that occur exactly once in each
    text, and have the same order in both.

    Return three values: the opcodes (as of `SequenceMatcher`), whether any part is shown as one
    change, and the number of steps taken. A part is shown as one change if the total number of
    steps would otherwise exceed `max_steps`.
    """
    codes: list[Code] = []
    is_coarse, steps = False, 0

    def add(tag: str, first: int, last: int, new_first: int, new_last: int) -> None:
        if codes and codes[-1][0] == tag == "equal":
            _, first, _, new_first, _ = codes.pop()
        if first < last or new_first < new_last:
            codes.append((tag, first, last, new_first, new_last))

    at = new_at = 0
    whole = (len(old), len(new))
    for here, new_here in [*_anchors(old, new), whole]:
        if steps + PART_STEPS > max_steps:  # treat the whole rest as one part
            here, new_here = whole
        if at < here or new_at < new_here:
            part, new_part = old[at:here], new[new_at:new_here]
            matcher = SequenceMatcher(None, part, new_part)
            found: Sequence[Code] = _one_change(part, new_part)
            if steps + PART_STEPS + most_steps(matcher) <= max_steps:
                steps += most_steps(matcher)
                found = matcher.get_opcodes()
            else:
                is_coarse = True
            steps = min(steps + PART_STEPS, max_steps)
            for tag, first, last, new_first, new_last in found:
                add(tag, at + first, at + last, new_at + new_first, new_at + new_last)
        at, new_at = min(here + 1, len(old)), min(new_here + 1, len(new))
        add("equal", here, at, new_here, new_at)
        if here == len(old) and new_here == len(new):
            break
    return codes, is_coarse, steps


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions of lines by which two texts can be aligned, as pairs: position in `old`,
    position in `new`.

    Each of these lines occurs exactly once in each text. If their order differs between the texts,
    only the longest series with the same order is returned. *Source*: patience diff.
    """
    counts, new_counts = Counter(old), Counter(new)
    places = {line: number for number, line in enumerate(new) if new_counts[line] == 1}
    ends: list[int] = []
    """Smallest position in the new text at which a series ends, for each length of a series."""
    series: list[tuple[int, int, Any]] = []
    """For each length, the last pair of positions in the series that `ends` refers to, and a link
    to the pair before it.
    """
    for number, line in enumerate(old):
        if counts[line] != 1 or line not in places:
            continue
        length = bisect_left(ends, places[line])
        pair = (number, places[line], series[length - 1] if length else None)
        ends[length : length + 1] = [places[line]]
        series[length : length + 1] = [pair]
    found: list[tuple[int, int]] = []
    last: Any = series[-1] if series else None
    while last is not None:
        found.append(last[:2])
        last = last[2]
    return found[::-1]


def _one_change(old: Sequence[str], new: Sequence[str]) -> Sequence[Code]:
    """Return opcodes that replace all old lines by all new ones, except identical lines at the
    start and the end.
    """
    start, end = _shared_ends(old, new)
    return [
        ("equal", 0, start, 0, start),
        ("replace", start, len(old) - end, start, len(new) - end),
        ("equal", len(old) - end, len(old), len(new) - end, len(new)),
    ]


def _shared_ends(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """Return the number of identical lines at the start and at the end. No line counts twice."""
    most = min(len(old), len(new))
    start = 0
    while start < most and old[start] == new[start]:
        start += 1
    end = 0
    while end < most - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return start, end


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of lines in a diff: either unchanged lines, or removed and added lines.

    If the run is the first of its hunk, `head` is the hunk's header. Otherwise, it is empty.
    """

    head: str
    sides: Sequence[tuple[str, Sequence[str]]]
    """Pairs of a mark (space, `-` or `+`) and the lines with this mark."""


def _runs(
    old: Sequence[str], new: Sequence[str], groups: Iterable[Group], skipped: int
) -> Iterator[_Run]:
    """Yield the runs of lines of a diff. `groups` are the diff's hunks.

    `old` and `new` are texts without their first `skipped` lines.
    """
    for group in groups:  # run by run, so that a long diff is never in memory as a whole
        (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
        head = f"@@ -{_range(skipped + a, skipped + b)} +{_range(skipped + c, skipped + d)} @@\n"
        for tag, first, last, new_first, new_last in group:
            if tag == "equal":
                yield _Run(head, [(" ", old[first:last])])
            else:
                yield _Run(head, [("-", old[first:last]), ("+", new[new_first:new_last])])
            head = ""


def _cut(runs: Iterable[_Run], room: int) -> tuple[str, bool]:
    """Return as many lines of a diff as fit into `room` bytes, and whether lines were left out. If
    so, notes at the end say how many.

    If a change does not fit, its removed lines and its added lines each get half of the room. If
    one side needs less than half, the other side gets the rest.
    """
    parts: list[str] = []
    left_out: Counter[str] = Counter()
    for run in runs:
        if left_out:
            left_out.update({mark: len(lines) for mark, lines in run.sides})
            continue
        parts.append(run.head)
        room -= len(run.head)
        texts = [[_marked(mark, line) for line in lines] for mark, lines in run.sides]
        sizes = [sum(len(text.encode()) for text in side) for side in texts]
        if sum(sizes) > room:
            room -= NOTE_BYTES
        for (mark, _), side, size in zip(run.sides, texts, sizes, strict=True):
            shown, whole = _fitting(side, max(room - sum(sizes) + size, room // len(sizes)))
            parts += shown
            left_out[mark] += len(side) - whole
        room -= sum(sizes)
        left_out += Counter()  # drops zeros
    for mark, what in (("-", "removed"), ("+", "added")):
        if left_out[mark]:
            parts.append(f"\\ {left_out[mark]:,} more {what} line{'s'[: left_out[mark] - 1]}\n")
    return "".join(parts), bool(left_out)


def _fitting(texts: Sequence[str], room: int) -> tuple[Sequence[str], int]:
    """Return as many of the first texts as fit into `room` bytes, and their number.

    If not even the first text fits, return the beginning of this text, and 0.
    """
    for number, text in enumerate(texts):
        size = len(text.encode())
        if size > room:
            start = text.encode()[: max(0, room)].decode(errors="ignore")  # whole characters
            return (texts[:number] if number or not start else [f"{start}\n"]), number
        room -= size
    return texts, len(texts)


def _marked(mark: str, line: str) -> str:
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n{NO_NEWLINE}"


def _range(start: int, end: int) -> str:
    """Format the range of a hunk, from the index `start` up to but not including the index `end`.

    *Source*: POSIX diff: the range of a single line has no length, and an empty range is given by
    the line before it.
    """
    length = end - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"
