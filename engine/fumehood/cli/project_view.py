"""The changes of a project on the command line. File names and contents are untrusted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fumehood.core.escaping import printable, visible

if TYPE_CHECKING:
    from fumehood.answers import ProjectDiff
    from fumehood.core.json_types import JsonObject


def file_line(one: JsonObject) -> str:
    """Return one changed file on one line."""
    source = f"{visible(one['old_path'])} → " if one.get("old_path") else ""
    conflict = f"  CONFLICT: {one['conflict']}" if one.get("conflict") else ""
    return f"{one['change']:<9} {source}{visible(one['path'])}{conflict}"


def write_diff(diff: str) -> None:
    """Write a diff: in colours on a terminal, where its text is escaped."""
    if not sys.stdout.isatty():
        sys.stdout.write(diff)
        return
    if not diff:
        return
    colours = {"+": "32", "-": "31", "@": "36", "d": "1"}
    # Only at "\n", as git does: after any other line end, content could imitate the diff itself.
    for line in printable(diff).removesuffix("\n").split("\n"):
        colour = colours.get(line[:1], "0")
        print(f"\x1b[{colour}m{line}\x1b[0m")


def notes(found: ProjectDiff, *, as_list: bool = False) -> Iterator[str]:
    """Yield what a diff, or a list of its files, does not say itself."""
    if not found.files:
        yield "Nothing has changed."
    for one in found.files:
        if one.conflict and not as_list:
            now = "" if one.change == "added" else "; the diff is against what it is now"
            yield f"{visible(one.path)}: CONFLICT: the host's file {one.conflict}{now}"
    for path in found.unseen:
        yield f"{visible(path)} is never applied: it is special, or a link out of the project"
    if found.truncated and not as_list:
        yield (
            "Not all content is shown: of binary and very large files only the names, which --stat "
            "lists. All of it is applied."
        )
