"""Plant a fault at each seam of a copy of the engine, and show that exactly its suite finds it.

Usage: `make planted`. Exits with 1 if a fault is found by another suite, or by none.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.seams import read_seams
from support.unplugged import copy_of_checkout


def main() -> int:
    """Print a row for each fault. Return the exit code."""
    seams, is_wrong = read_seams(), False
    with tempfile.TemporaryDirectory() as work:
        whole = copy_of_checkout(Path(work, "whole"))
        for planted in (None, *seams):
            tree = whole.copy(Path(work, planted or "sound"))
            if planted is not None:
                seams[planted].plant(tree)
            found = [name for name, seam in seams.items() if seam.finds_a_fault(tree)]
            is_right = found == ([planted] if planted is not None else [])
            is_wrong |= not is_right
            verdict = "ok" if is_right else "WRONG"
            print(
                f"{verdict}: {planted or 'no fault'}: found by {', '.join(found) or 'none'}",
                flush=True,
            )
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
