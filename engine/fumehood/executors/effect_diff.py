"""Two texts as a unified diff, in bounded time and length, whatever the texts are.

Host side, pure; both texts are strangers'. Lines end at a line feed and nowhere else, so a diff
shows what `diff` would. Where the texts have little in common, or are long, what differs is shown
as gone and come as a whole: looking for more would cost time that whoever wrote them chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONTEXT_LINES = 3

MAX_DIFF_BYTES = 16 * 1024
"""Of one file's diff."""

MAX_COMPARED_LINES = 4000
MAX_EDITS = 400
"""Lines gone and come that are told apart; a diff of more would be longer than what is shown."""

NO_NEWLINE = "\\ No newline at end of file\n"
"""*Source*: POSIX diff, "Diff Default Output Format"."""


@dataclass(frozen=True, slots=True)
class Diff:
    """The lines from the first `@@` on, and whether some had to be left out."""

    text: str
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """`before[a:b]` stands where `after[c:d]` will; `is_same` where nothing changes."""

    is_same: bool
    a: int
    b: int
    c: int
    d: int


def text_of(raw: bytes) -> str | None:
    """The text that the bytes are, None where they are none that a human could read."""
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def unified(before: str, after: str, max_bytes: int = MAX_DIFF_BYTES) -> Diff:
    """What makes one text of the other. Without names of files: a name may hold anything."""
    old, new = _lines(before), _lines(after)
    parts: list[str] = []
    room = max_bytes
    for part in _hunks(old, new):
        size = len(part.encode())
        if size > room:
            parts.append(_beginning(part, room))
            return Diff("".join(parts), is_truncated=True)
        room -= size
        parts.append(part)
    return Diff("".join(parts), is_truncated=False)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    last = lines.pop()
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _beginning(part: str, room: int) -> str:
    """As much of a line as fits, without half a character."""
    return part.encode()[:room].decode(errors="ignore")


def _hunks(old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    """Heads and lines, one at a time, so that a long diff is never whole in memory."""
    for group in _groups(_blocks(old, new)):
        first, last = group[0], group[-1]
        removed, added = _range(first.a, last.b), _range(first.c, last.d)
        yield f"@@ -{removed} +{added} @@\n"
        for block in group:
            if block.is_same:
                yield from (_marked(" ", line) for line in old[block.a : block.b])
                continue
            yield from (_marked("-", line) for line in old[block.a : block.b])
            yield from (_marked("+", line) for line in new[block.c : block.d])


def _marked(mark: str, line: str) -> str:
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n{NO_NEWLINE}"


def _range(start: int, end: int) -> str:
    """*Source*: POSIX diff: a range of one line has no length, an empty one begins before."""
    length = end - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


def _groups(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Changes with a few lines around them; those that are near each other together."""
    group: list[_Block] = []
    for number, block in enumerate(blocks):
        if not block.is_same:
            group.append(block)
            continue
        is_first, is_last = number == 0, number == len(blocks) - 1
        length = block.b - block.a
        if not is_first and not is_last and length <= 2 * CONTEXT_LINES:
            group.append(block)
            continue
        if not is_first:
            kept = min(CONTEXT_LINES, length)
            group.append(_Block(True, block.a, block.a + kept, block.c, block.c + kept))
            yield group
        kept = min(CONTEXT_LINES, length)
        group = [_Block(True, block.b - kept, block.b, block.d - kept, block.d)]
    if any(not block.is_same for block in group):
        yield group


def _blocks(old: Sequence[str], new: Sequence[str]) -> list[_Block]:
    """What stays and what changes, in turn."""
    start, end = _shared_ends(old, new)
    a_end, c_end = len(old) - end, len(new) - end
    blocks = [_Block(True, 0, start, 0, start)] if start else []
    a = c = start
    for x, y, length in _runs(_common(old[start:a_end], new[start:c_end])):
        blocks.append(_Block(False, a, start + x, c, start + y))
        a, c = start + x + length, start + y + length
        blocks.append(_Block(True, start + x, a, start + y, c))
    if a < a_end or c < c_end:
        blocks.append(_Block(False, a, a_end, c, c_end))
    if end:
        blocks.append(_Block(True, a_end, len(old), c_end, len(new)))
    return blocks


def _shared_ends(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """How many lines both begin and end with; none counts twice."""
    most = min(len(old), len(new))
    start = 0
    while start < most and old[start] == new[start]:
        start += 1
    end = 0
    while end < most - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return start, end


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Pairs that follow each other on both sides, as their beginning and their number."""
    length = 0
    for number, (x, y) in enumerate(pairs):
        length += 1
        if number + 1 == len(pairs) or pairs[number + 1] != (x + 1, y + 1):
            yield x - length + 1, y - length + 1, length
            length = 0


def _common(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of equal lines that stay, of a shortest script; none where that is too much work.

    *Source*: E. W. Myers, "An O(ND) Difference Algorithm and Its Variations", 1986, figure 2.
    """
    n, m = len(old), len(new)
    if not n or not m or max(n, m) > MAX_COMPARED_LINES:
        return []
    furthest = {1: 0}
    trace: list[dict[int, int]] = []
    for edits in range(min(n + m, MAX_EDITS) + 1):
        trace.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            x = _step(furthest, k, edits)
            y = x - k
            while x < n and y < m and old[x] == new[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if x >= n and y >= m:
                return _pairs(trace, n, m)
    return []


def _step(furthest: dict[int, int], k: int, edits: int) -> int:
    """Where the way on diagonal `k` begins: one line down, or one to the right."""
    comes_down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
    return furthest[k + 1] if comes_down else furthest[k - 1] + 1


def _pairs(trace: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """The equal lines on the way that was found, walked back from its end."""
    pairs: list[tuple[int, int]] = []
    for edits in range(len(trace) - 1, -1, -1):
        furthest, k = trace[edits], x - y
        start = _step(furthest, k, edits)
        while x > start and y > start - k:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        comes_down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        if comes_down:
            y -= 1
        else:
            x -= 1
    return pairs[::-1]
