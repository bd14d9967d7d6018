"""Add gVisor as a runtime to Docker's configuration, and keep every other setting.

Usage: `register_runsc.py DAEMON_JSON RUNSC`. Exit status 0: added; 2: it was there; 1: the file
is not one that Docker reads, and was left as it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ARGUMENTS = ["--platform=ptrace", "--network=none"]
"""Without KVM; and containers have no network, which old versions fail to set up."""


def main(arguments: Sequence[str]) -> int:
    """Rewrite the file; the exit status."""
    path, program = Path(arguments[0]), arguments[1]
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        runtimes = settings.setdefault("runtimes", {})
        if "runsc" in runtimes:
            return 2
        runtimes["runsc"] = {"path": program, "runtimeArgs": ARGUMENTS}
    except (ValueError, AttributeError, TypeError):
        print(f"{path} is not as Docker reads it; it is left as it is.", file=sys.stderr)
        return 1
    _replace(path, json.dumps(settings, indent=2) + "\n")
    return 0


def _replace(path: Path, text: str) -> None:
    """Replace the file in one step, keeping its access rights."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.chmod(mode)
    new.replace(path)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
