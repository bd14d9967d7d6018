"""Two texts as a unified diff, in bounded time and length for any texts.

Host side, pure; both texts are untrusted. Lines end at a line feed and nowhere else, as in POSIX
diff. `difflib.SequenceMatcher` takes cubic time at worst, so it only gets texts that it compares
within `MAX_STEPS`; beyond that the differing part is shown as removed and added as a whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import Match, SequenceMatcher

CONTEXT_LINES = 3

MAX_DIFF_BYTES = 16 * 1024
"""Size limit of one file's diff."""

MAX_STEPS = 4_000_000
"""Pairs of lines looked at, at some 25 ns each, so 0.15 s: measured with texts made to be slow."""

NO_NEWLINE = "\\ No newline at end of file\n"
"""*Source*: POSIX diff, "Diff Default Output Format"."""


@dataclass(frozen=True, slots=True)
class Diff:
    """The lines from the first `@@` on."""

    text: str
    is_truncated: bool
    """Lines were left out."""
    is_coarse: bool = False
    """The differing part was too large to compare line by line."""


def text_of(raw: bytes) -> str | None:
    """Decode bytes that a human can read; None for others."""
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def unified(before: str, after: str, max_bytes: int = MAX_DIFF_BYTES) -> Diff:
    """Compare two texts. File names are left out: a name may hold anything."""
    old, new = _lines(before), _lines(after)
    matcher = _Matcher(old, new)
    parts: list[str] = []
    room = max_bytes
    for part in _hunks(old, new, matcher):
        size = len(part.encode())
        if size > room:
            parts.append(_beginning(part, room))
            return Diff("".join(parts), is_truncated=True, is_coarse=matcher.is_coarse)
        room -= size
        parts.append(part)
    return Diff("".join(parts), is_truncated=False, is_coarse=matcher.is_coarse)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    last = lines.pop()
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _beginning(part: str, room: int) -> str:
    """As much of a line as fits, without half a character."""
    return part.encode()[:room].decode(errors="ignore")


class _Matcher(SequenceMatcher[int]):
    """Looks for equal lines only between the first and the last that differ."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        # Compared as numbers, so that long lines are read once.
        numbers: dict[str, int] = {}
        a = [numbers.setdefault(line, len(numbers)) for line in old]
        b = [numbers.setdefault(line, len(numbers)) for line in new]
        super().__init__(None, (), ())
        self.is_coarse = False
        self._matches = self._compare(a, b)

    def get_matching_blocks(self) -> list[Match]:
        return self._matches

    def _compare(self, a: Sequence[int], b: Sequence[int]) -> list[Match]:
        start, end = _shared_ends(a, b)
        a_end, b_end = len(a) - end, len(b) - end
        middle = _Middle(None, a[start:a_end], b[start:b_end])
        self.is_coarse = middle.most_steps > MAX_STEPS
        inner = [] if self.is_coarse else middle.get_matching_blocks()
        return [
            Match(0, 0, start),
            *(Match(start + match.a, start + match.b, match.size) for match in inner),
            Match(a_end, b_end, end),
            Match(len(a), len(b), 0),
        ]


class _Middle(SequenceMatcher[Hashable]):
    a: Sequence[Hashable]
    b: Sequence[Hashable]
    b2j: dict[Hashable, list[int]]

    @property
    def most_steps(self) -> int:
        """Every line and every pair of equal lines may be looked at once for each match found."""
        pairs = sum(len(self.b2j.get(line, ())) for line in self.a)
        return (len(self.a) + pairs) * min(len(self.a), len(self.b))


def _shared_ends(old: Sequence[int], new: Sequence[int]) -> tuple[int, int]:
    """How many lines both begin and end with; none counts twice."""
    most = min(len(old), len(new))
    start = 0
    while start < most and old[start] == new[start]:
        start += 1
    end = 0
    while end < most - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return start, end


def _hunks(old: Sequence[str], new: Sequence[str], matcher: _Matcher) -> Iterator[str]:
    """Heads and lines, one at a time, so that a long diff is never whole in memory."""
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
        yield f"@@ -{_range(a, b)} +{_range(c, d)} @@\n"
        for tag, first, last, new_first, new_last in group:
            if tag == "equal":
                yield from (_marked(" ", line) for line in old[first:last])
                continue
            yield from (_marked("-", line) for line in old[first:last])
            yield from (_marked("+", line) for line in new[new_first:new_last])


def _marked(mark: str, line: str) -> str:
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n{NO_NEWLINE}"


def _range(start: int, end: int) -> str:
    """*Source*: POSIX diff: a range of one line has no length, an empty one begins before."""
    length = end - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"
