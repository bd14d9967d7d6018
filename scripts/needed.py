"""Print the test files that a change needs, as tests/needed.toml says. `make check` runs them.

Usage: `python scripts/needed.py [REVISIONS]`. Without an argument, the change is what differs from
the merge base with main, or on main from the commit before, with files that git does not know yet.
With one, such as `HEAD~3..HEAD~2`, it is what differs between those revisions.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("acceptance", "adversarial", "contract", "integration", "unit")
"""Below `tests`: those that `make test` runs."""


class Needs:
    """The table of a checkout. Raises ValueError if a path or a test in it names nothing."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self.all = frozenset(self._below(*(root / "tests" / folder for folder in FOLDERS)))
        table = tomllib.loads((root / "tests/needed.toml").read_text(encoding="utf-8"))
        parts = tomllib.loads((root / "engine/parts.toml").read_text(encoding="utf-8"))
        self.documentation = tuple(table["documentation"])
        self.always = self._files_of(table["always"])
        self.rows: dict[str, frozenset[str]] = {}
        """The tests of each path."""
        for row in table["row"]:
            tests = self._files_of(row["tests"])
            for path in _paths_of(row, parts):
                if path in self.rows or not (root / path).exists():
                    raise ValueError(f"tests/needed.toml: {path} has two rows or does not exist")
                self.rows[path] = tests

    def of(self, changed: Iterable[str]) -> frozenset[str]:
        """The test files that these changed files need."""
        needed: set[str] = set()
        for file in changed:
            needed |= self._of(file)
            if not file.startswith(self.documentation):
                needed |= self.always
        return frozenset(needed)

    def _of(self, file: str) -> frozenset[str]:
        if file in self.all:
            return frozenset({file})
        rows = [row for row in self.rows if file == row or _is_folder_of(row, file)]
        return self.rows[max(rows, key=len)] if rows else self.all

    def _below(self, *paths: Path) -> Iterator[str]:
        for path in paths:
            for file in path.rglob("test_*.py") if path.is_dir() else [path]:
                yield file.relative_to(self._root).as_posix()

    def _files_of(self, tests: list[str]) -> frozenset[str]:
        files: set[str] = set()
        for name in tests:
            found = self.all.intersection(self._below(*(self._root / "tests").glob(name)))
            if not found:
                raise ValueError(f"tests/needed.toml: no test matches {name}")
            files |= found
        return frozenset(files)


def _paths_of(row: dict[str, Any], parts: dict[str, Any]) -> Iterator[str]:
    yield from row.get("paths", ())
    for name in row.get("parts", ()):
        yield from (f"engine/fumehood/{file}" for file in parts[name]["files"])


def _is_folder_of(row: str, file: str) -> bool:
    return row.endswith("/") and file.startswith(row)


def changed_files(revisions: str | None = None, root: Path = ROOT) -> list[str]:
    """Paths below the checkout; for a renamed file, both its names."""

    def git(*arguments: str) -> str:
        done = subprocess.run(  # noqa: S603 - git, with names that git itself gave
            ["git", *arguments],  # noqa: S607 - a developer's own
            cwd=root,
            check=True,
            stdout=subprocess.PIPE,
        )
        return done.stdout.decode()

    unknown = ""
    if revisions is None:
        revisions = git("merge-base", "HEAD", "main").strip()
        if revisions == git("rev-parse", "HEAD").strip():
            revisions = "HEAD^"
        unknown = git("ls-files", "-z", "--others", "--exclude-standard")
    known = git("diff", "-z", "--name-only", "--no-renames", revisions)
    return [file for file in (known + unknown).split("\0") if file]


if __name__ == "__main__":
    print(*sorted(Needs().of(changed_files(*sys.argv[1:]))), sep="\n")
