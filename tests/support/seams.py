"""The seams of `tests/seams.toml`, and what their suites find in a copy of the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass

from support.parts import PACKAGE, ROOT
from support.unplugged import Tree

SEAMS = "tests/seams.toml"


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One row: the suite of a seam, and the fault that it finds."""

    suite: tuple[str, ...]
    file: str
    text: str
    fault: str

    def plant(self, tree: Tree) -> None:
        """Put the fault into a copy of the engine. Raises ValueError if its place is not there."""
        path = f"{PACKAGE}/{self.file}"
        code = (tree.root / path).read_text(encoding="utf-8")
        if code.count(self.text) != 1:
            raise ValueError(f"{path} has {self.text!r} {code.count(self.text)} times, not once")
        tree.write(path, code.replace(self.text, self.fault))

    def finds_a_fault(self, tree: Tree) -> bool:
        """Whether a test of the suite fails with the engine of this copy.

        Raises:
            RuntimeError: the suite cannot run.
        """
        first, *others = self.suite
        path = os.pathsep.join([*tree.import_path, str(ROOT / "tests")])
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", f"tests/{first}", *others],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        )  # fmt: skip
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"{first}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
        return ended.returncode == 1


def read_seams() -> dict[str, Seam]:
    """Read the table, by the seams' names."""
    table = tomllib.loads((ROOT / SEAMS).read_text(encoding="utf-8"))
    return {name: Seam(**{**row, "suite": tuple(row["suite"])}) for name, row in table.items()}
