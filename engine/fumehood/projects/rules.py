"""What a project's `.gitignore` files leave out.

Host side, pure functions over untrusted text. The rules are git's, but for those of the user and
the repository outside of the project. Each part of a path is matched by `fnmatch`, whose patterns
take time in proportion to the text: a repository's rules must not keep the engine busy.
*Source*: gitignore(5).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate

from fumehood.protocol.strict_json import BYTE_ORDER_MARK

FILE_NAME = ".gitignore"

GIT = ".git"
"""Name that is never part of a project: what git reads there, it can also run."""

_ALSO_GIT = frozenset({GIT, "git~1"})
"""Names, as `plain` returns them, that file systems with short names take for it."""

GIT_NAMES = ("HEAD", "objects", "refs", "commondir")
"""Names by which git takes a directory for a repository."""

_IGNORED = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that file systems without case leave out when they compare names. *Source*: the
property Default_Ignorable_Code_Point of Unicode.
"""

STAGING_PREFIX = ".fumehood-apply-"
"""Name prefix of a directory in a project where changes wait until they are put in place."""

PROOF_PREFIX = ".fumehood-project-"
"""Name prefix of the file that shows that its maker can write in a directory. No session may write
one: its agent could then name that directory.
"""

MAX_RULES = 10_000
MAX_RULES_BYTES = 1 << 20
"""Rules of all files of one tree together, and bytes of their texts."""

MAX_TESTS = 50_000_000
"""Comparisons of a part of a path with a part of a rule, for one tree: about 10 s of a thread."""

_MAGIC = frozenset("*?[\\")


@dataclass(frozen=True, slots=True)
class _Rule:
    parts: tuple[re.Pattern[str] | None, ...]
    """A pattern for each part of a path; None stands for any number of parts."""
    is_negated: bool
    is_for_directories: bool


def is_never(path: str) -> bool:
    """Whether no project has this path, whatever its rules say."""
    return any(map(_is_never_named, path.split("/")))


def git_directories(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the directories that git takes for repositories although they are not called `.git`.
    It runs what their `config` names. Each begins a path of `plain`: it ends with a slash, or is
    empty for the top. *Source*: is_git_directory of git.
    """
    head, objects, refs, commondir = map(plain, GIT_NAMES)
    names: dict[str, set[str]] = {}
    for path in paths:
        top, slash, name = plain(path).rpartition("/")
        if name in (head, objects, refs, commondir):
            names.setdefault(f"{top}{slash}", set()).add(name)
    return tuple(
        top
        for top, found in names.items()
        if head in found and (commondir in found or {objects, refs} <= found)
    )


def plain(path: str) -> str:
    """Return one path for all those that some file system takes for the same. *Source*:
    is_hfs_dotgit and is_ntfs_dotgit of git.
    """
    if not path.isascii():
        path = "".join(one for one in path if unicodedata.category(one) != "Cf")
        path = _IGNORED.sub("", path)
    names = (name.partition(":")[0].rstrip(" .") for name in path.split("/"))
    return "/".join(names).casefold()


def _is_never_named(name: str) -> bool:
    if name.startswith((STAGING_PREFIX, PROOF_PREFIX)):
        return True
    # On some file systems, what is behind a backslash is in the directory before it.
    return not _ALSO_GIT.isdisjoint(map(plain, name.split("\\")))


class TooManyRules(Exception):
    """The rules of a tree would take too much time or memory. The message is a clause."""

    def __init__(self) -> None:
        super().__init__("the .gitignore files have too many rules")


class IgnoreRules:
    """The rules of one tree. Add each directory's before asking for what is in it. Both raise
    `TooManyRules`, because a part of the rules could let in what the others leave out.
    """

    def __init__(self) -> None:
        self._bytes_left = MAX_RULES_BYTES
        self._rules_left = MAX_RULES
        self._tests_left = MAX_TESTS
        self._by_directory: dict[str, Sequence[_Rule]] = {}
        self._known: dict[str, bool] = {"": False}
        """Directory → whether it is left out."""

    def add(self, directory: str, text: str) -> None:
        """Add the rules of a directory's file."""
        lines = _lines(text)
        self._bytes_left -= len(text.encode())
        self._rules_left -= sum(map(_has_rule, lines))
        if self._bytes_left < 0 or self._rules_left < 0:
            raise TooManyRules
        rules = [rule for line in lines if (rule := _parse(line)) is not None]
        self._by_directory[directory] = rules[::-1]

    def leave_out(self, path: str, *, is_directory: bool) -> bool:
        """Whether a path is left out, or a directory above it."""
        above = path.rpartition("/")[0]
        if above not in self._known:
            self._known[above] = self.leave_out(above, is_directory=True)
        return self._known[above] or self._is_matched(path, above, is_directory=is_directory)

    def _is_matched(self, path: str, above: str, *, is_directory: bool) -> bool:
        if _is_never_named(path.rpartition("/")[2]):
            return True
        directory = above
        while True:  # the nearest file decides, and its last rule that matches
            rules = self._by_directory.get(directory, ())
            if rules:
                inner = path[len(directory) + 1 :] if directory else path
                parts = inner.split("/")
                for rule in rules:
                    if rule.is_for_directories and not is_directory:
                        continue
                    does_fit, tests = _fits(rule.parts, parts)
                    self._tests_left -= tests
                    if self._tests_left < 0:
                        raise TooManyRules
                    if does_fit:
                        return not rule.is_negated
            if not directory:
                return False
            directory = directory.rpartition("/")[0]


def plain_names(text: str) -> tuple[str, ...]:
    """Return names that a top `.gitignore` leaves out everywhere: what is called so need not be
    looked at. There are none if a rule takes something in again.
    """
    names: list[str] = []
    for line in _lines(text)[:MAX_RULES]:
        name = line.rstrip(" ")
        if name.startswith("!"):
            return ()
        if name and not name.startswith("#") and "/" not in name and not _MAGIC & set(name):
            names.append(name)
        elif name.endswith("/") and "/" not in name[:-1] and not _MAGIC & set(name):
            names.append(name[:-1])
    return tuple(names)


def _lines(text: str) -> list[str]:
    """Return the lines as git reads them. *Source*: git's dir.c, add_patterns_from_buffer."""
    lines = text.removeprefix(BYTE_ORDER_MARK).split("\n")
    return [line.removesuffix("\r") for line in lines]


def _has_rule(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def _parse(line: str) -> _Rule | None:
    line = _without_spaces(line)
    if not line or line.startswith("#"):
        return None
    is_negated = line.startswith("!")
    line = line[is_negated:]
    is_for_directories = line.endswith("/")
    line = line.rstrip("/") if is_for_directories else line
    if not line:
        return None
    is_anchored = "/" in line
    parts = line.lstrip("/").split("/")
    if not is_anchored:
        parts = ["**", *parts]
    try:
        made = tuple(None if part == "**" else _pattern(part) for part in parts)
    except re.error:
        return None
    if made[-1] is None:  # `a/**` matches what is in a, and not a itself
        made = (*made, _pattern("*"))
    return _Rule(made, is_negated, is_for_directories)


def _without_spaces(line: str) -> str:
    """Remove trailing spaces that are not escaped."""
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    return line


def _pattern(part: str) -> re.Pattern[str]:
    """Compile one part, whose escapes `fnmatch` does not know."""
    glob, at, is_in_class = "", 0, False
    while at < len(part):
        character = part[at]
        if character == "\\" and not is_in_class:
            at += 1
            character = part[at : at + 1] or "\\"
            glob += f"[{character}]" if character in "*?[" else character
        elif character == "[" and not is_in_class and "]" in part[at + 2 :]:
            is_in_class = True
            glob += character
            if part[at + 1] in "^!":
                at += 1
                glob += "!"
            if part[at + 1] == "]":
                at += 1
                glob += "]"
        else:
            is_in_class = is_in_class and character != "]"
            glob += "[[]" if character == "[" and not is_in_class else character
        at += 1
    return re.compile(translate(glob))


def _fits(wanted: Sequence[re.Pattern[str] | None], parts: Sequence[str]) -> tuple[bool, int]:
    """Whether a rule matches all parts of a path, and how many comparisons that took. Goes back to
    its last `**` only, like a glob with one star, so that these are bounded by the product of both
    lengths.
    """
    if len(wanted) == 2 and wanted[0] is None and wanted[1] is not None:  # most rules
        return wanted[1].match(parts[-1]) is not None, 1
    at = here = tests = 0
    back: tuple[int, int] | None = None
    while here < len(parts):
        tests += 1
        if at < len(wanted):
            pattern = wanted[at]
            if pattern is None:
                back = (at, here)
                at += 1
                continue
            if pattern.match(parts[here]):
                at, here = at + 1, here + 1
                continue
        if back is None:
            return False, tests
        at, here = back[0] + 1, back[1] + 1
        back = (back[0], here)
    return all(pattern is None for pattern in wanted[at:]), tests + 1
