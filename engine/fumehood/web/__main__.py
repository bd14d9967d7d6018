"""The console as a child of `fumehood serve --web`: `python -m fumehood.web FD CONTROL CALLERS`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from fumehood.web.server import protect, run


def main() -> None:
    """Serve on the listening socket that was inherited from the parent process."""
    descriptor, control, callers = sys.argv[1:]
    protect(ends_with_parent=True)
    with socket.socket(fileno=int(descriptor)) as listener:
        run(listener, Path(control), Path(callers))


if __name__ == "__main__":
    main()
