"""Write down what the parts of the engine now cost outside themselves, if it is less than before.

Usage: `python scripts/lower_parts.py` counts, and lowers the numbers in engine/parts.toml. It never
raises one: it names those that have risen and exits 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.parts import ROOT, Code, Outside, read_parts, verdict, write_outside


def main() -> int:
    """Return 1 if a number has risen, else 0."""
    code, lowered, has_risen = Code(), {}, False
    for name, part in read_parts().items():
        found = code.count(part).outside
        lowered[name] = part.outside.lowered(found)
        is_ready = not found.importing and not part.deletable
        promise = "deletable" * part.deletable + "could be deletable?" * is_ready
        print(f"{name:14}{found}  with {len(part.lines)} other lines  {promise}".rstrip())
        for what in Outside.model_fields:
            held, now = getattr(part.outside, what), getattr(found, what)
            if now > held:
                has_risen = True
                print(f"    {verdict(what, held, now)}")
    write_outside(ROOT, lowered)
    return 1 if has_risen else 0


if __name__ == "__main__":
    sys.exit(main())
