"""Shows the changes of a project on the command line. Names and contents are treated as hostile."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fumehood.answers import ProjectDiff
from fumehood.core.escaping import aligned, visible
from fumehood.core.json_types import JsonObject


def file_line(one: JsonObject) -> str:
    """Return a line of text that describes the change of one file."""
    source = f"{visible(one['old_path'])} → " if one.get("old_path") else ""
    conflict = f"  CONFLICT: {one['conflict']}" if one.get("conflict") else ""
    return f"{one['change']:<9} {source}{visible(one['path'])}{conflict}"


def write_diff(diff: str) -> None:
    """Write a diff to standard output. On a terminal, escape it and add colours."""
    if not sys.stdout.isatty():
        sys.stdout.write(diff)
        return
    if not diff:
        return
    colours = {"+": "32", "-": "31", "@": "36", "d": "1"}
    # Lines end only at "\n", as in git. After any other line end, content could imitate the diff
    # itself.
    for line in aligned(diff).removesuffix("\n").split("\n"):
        colour = colours.get(line[:1], "0")
        print(f"\x1b[{colour}m{line}\x1b[0m")


def notes(found: ProjectDiff, *, as_list: bool = False) -> Iterator[str]:
    """Yield remarks about what the printed diff does not show. `as_list` says that a list of files
    was printed instead of the diff.
    """
    if not found.files:
        yield "Nothing has changed."
    for one in found.files:
        if one.conflict and not as_list:
            no_diff = "" if one.change == "added" else ", so no diff of it is shown"
            yield f"{visible(one.path)}: CONFLICT: the host's file {one.conflict}{no_diff}"
    for path in found.unseen:
        yield f"{visible(path)} is never applied: it is special, or a link out of the project"
    if found.truncated and not as_list:
        is_applied = not any(one.conflict for one in found.files)
        yield (
            "Not all content is shown: of binary and very large files, and of files in conflict, "
            f"only the names.{' All of it is applied.' if is_applied else ''}"
        )
