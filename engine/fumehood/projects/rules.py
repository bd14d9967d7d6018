"""The rules in a project's `.gitignore` files, which say which paths are left out.

Host side, pure functions over untrusted text. The rules are those of git, except that the user's
own rules and those in `.git` do not count. `fnmatch` matches each name in a path, in time
proportional to the length of the name. So the rules of a repository cannot keep the engine busy.
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
"""No path in a project may contain a directory with this name, because git can execute files in
it.
"""

_ALSO_GIT = frozenset({GIT, "git~1"})
"""The names that some file systems treat as `.git`, in the form that `plain` returns."""

GIT_NAMES = ("HEAD", "objects", "refs", "commondir")
"""The names in a directory by which git recognizes that the directory is a repository."""

_IGNORED = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Matches the characters that case-insensitive file systems ignore when they compare names.
*Source*: the Unicode property Default_Ignorable_Code_Point.
"""

STAGING_PREFIX = ".fumehood-apply-"
"""How the name of a staging directory begins. New contents are staged in such a directory of the
project.
"""

PROOF_PREFIX = ".fumehood-project-"
"""How the name of the file begins with which a claimant proves write access to a directory. No
session may write a file with such a name. Otherwise, the agent in the session could claim the
directory.
"""

MAX_RULES = 10_000
MAX_RULES_BYTES = 1 << 20
"""Maximum total size in bytes of all `.gitignore` files of one tree. `MAX_RULES` limits the number
of rules in them.
"""

MAX_TESTS = 50_000_000
"""Maximum number of comparisons for one tree. Each compares a name in a path with a pattern in a
rule. This many comparisons take a thread about 10 s.
"""

_MAGIC = frozenset("*?[\\")


@dataclass(frozen=True, slots=True)
class _Rule:
    parts: tuple[re.Pattern[str] | None, ...]
    """One pattern for each name in a path. None (`**`) matches any number of names."""
    is_negated: bool
    is_for_directories: bool


def is_never(path: str) -> bool:
    """Whether a path can never be part of a project, whatever the `.gitignore` files say."""
    return any(map(_is_never_named, path.split("/")))


def git_directories(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the directories that git would treat as repositories although they are not called
    `.git`. `paths` are all paths in the project. Such directories matter, because git executes
    programs that the file `config` of a repository names.

    Each result is a normalized path (see `plain`) that ends with a slash, or "" for the top
    directory. *Source*: is_git_directory of git.
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
    """Return the normal form of a path. If any file system treats two paths as equal, their normal
    forms are equal. *Source*: is_hfs_dotgit and is_ntfs_dotgit of git.
    """
    if not path.isascii():
        path = "".join(one for one in path if unicodedata.category(one) != "Cf")
        path = _IGNORED.sub("", path)
    names = (name.partition(":")[0].rstrip(" .") for name in path.split("/"))
    return "/".join(names).casefold()


def _is_never_named(name: str) -> bool:
    if name.startswith((STAGING_PREFIX, PROOF_PREFIX)):
        return True
    # Some file systems treat a backslash as a slash.
    return not _ALSO_GIT.isdisjoint(map(plain, name.split("\\")))


class TooManyRules(Exception):
    """Raised if the evaluation of the rules of a tree would take too much time or memory. The
    message is a clause.
    """

    def __init__(self) -> None:
        super().__init__("the .gitignore files have too many rules")


class IgnoreRules:
    """The `.gitignore` rules of one tree of directories. `leave_out` says whether the rules leave
    out a path.

    The caller must call `add` for all directories above a path before it calls `leave_out` for the
    path. If there are too many rules, both methods raise `TooManyRules` instead of applying only
    some.
    """

    def __init__(self) -> None:
        self._bytes_left = MAX_RULES_BYTES
        self._rules_left = MAX_RULES
        self._tests_left = MAX_TESTS
        self._by_directory: dict[str, Sequence[_Rule]] = {}
        self._known: dict[str, bool] = {"": False}
        """Directory → whether the rules leave it out. This remembers the results for
        directories.
        """

    def add(self, directory: str, text: str) -> None:
        """Add the rules of the `.gitignore` file in `directory`. `text` is the content of the
        file.
        """
        lines = _lines(text)
        self._bytes_left -= len(text.encode())
        self._rules_left -= sum(map(_has_rule, lines))
        if self._bytes_left < 0 or self._rules_left < 0:
            raise TooManyRules
        rules = [rule for line in lines if (rule := _parse(line)) is not None]
        self._by_directory[directory] = rules[::-1]

    def leave_out(self, path: str, *, is_directory: bool) -> bool:
        """Whether the rules leave out `path`, or a directory above it. `is_directory` says whether
        `path` is a directory itself.
        """
        above = path.rpartition("/")[0]
        if above not in self._known:
            self._known[above] = self.leave_out(above, is_directory=True)
        return self._known[above] or self._is_matched(path, above, is_directory=is_directory)

    def _is_matched(self, path: str, above: str, *, is_directory: bool) -> bool:
        if _is_never_named(path.rpartition("/")[2]):
            return True
        directory = above
        while True:  # the nearest file with a matching rule decides, by its last such rule
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
    """Return the names that the top `.gitignore` file leaves out in every directory. `text` is the
    content of this file. Files and directories with such a name can be skipped without further
    checks.

    If the file contains a negated rule, return no names, because such a rule could include a name
    again.
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
    """Split the text of a `.gitignore` file into lines, in the same way as git. *Source*: git's
    dir.c, add_patterns_from_buffer.
    """
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
    if made[-1] is None:  # `a/**` matches everything in a, but not a itself
        made = (*made, _pattern("*"))
    return _Rule(made, is_negated, is_for_directories)


def _without_spaces(line: str) -> str:
    """Return a line without the spaces at its end. Escaped spaces are kept."""
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    return line


def _pattern(part: str) -> re.Pattern[str]:
    """Compile the pattern for one name in a rule. git's backslash escapes are converted, because
    `fnmatch` does not know them.
    """
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
    """Return whether a rule matches a path, and the number of comparisons that this took. `wanted`
    contains the rule's pattern for each name, or None for `**`. `parts` are the names in the path.

    The number of comparisons is at most the product of the two lengths. If a comparison fails, the
    search goes back only to the last `**`.
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
