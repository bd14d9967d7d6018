"""Run pip with the environment markers of an image's Python. A separate program, run by its path.

Host side. pip's `--python-version` affects which files pip selects, but pip evaluates conditions
such as `python_version < "3.12"` for the Python that runs pip, so an image would lack packages that
only its own Python needs. This program makes pip evaluate these conditions with the values in the
first argument, a JSON object. If that has no effect in the installed version of pip, the program
fails before pip does anything. Usage: pip_for_image.py MARKERS ARGUMENT…
"""

from __future__ import annotations

import importlib
import json
import resource
import sys

ASKED = "platform_release"
"""The environment marker that is used to test whether the replacement has an effect."""

SIGN = "of-an-image"
"""The value of the marker `ASKED` in an image. No real system has this value."""


MAX_FILE_BYTES = 4 << 30
"""Size limit of each file that pip writes, and of pip's memory, because pip reads files that
anybody may have published. It equals the limit for all unpacked packages of an image (see
`unpacking`): some wheels that operators want are over 1 GB.
"""


def main(markers: str, arguments: list[str]) -> int:
    """Run pip with these environment markers, and return pip's exit status. If the markers have no
    effect, do not run pip, and return 3.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    environment = json.loads(markers)
    module = importlib.import_module("pip._vendor.packaging.markers")
    module.default_environment = lambda: dict(environment)  # type: ignore[attr-defined]
    if not module.Marker(f"{ASKED} == '{SIGN}'").evaluate():
        sys.stderr.write("This pip cannot be told which Python it works for.\n")
        return 3
    return int(importlib.import_module("pip._internal.cli.main").main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
