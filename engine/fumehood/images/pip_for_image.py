"""Runs pip with the environment markers of the Python in an image. This is a separate program.
Usage: pip_for_image.py MARKERS ARGUMENT…

Host side. pip has the option `--python-version`, but this only affects which files pip selects.
Conditions such as `python_version < "3.12"` are still evaluated for the Python that runs pip, so an
image could lack packages that only its own Python needs. This program makes pip evaluate such
conditions with the values in MARKERS, a JSON object. If that has no effect in the installed version
of pip, the program fails before pip does anything.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys

ASKED = "platform_release"
"""The environment marker with which this program tests whether MARKERS have an effect."""

SIGN = "of-an-image"
"""The value of this environment marker in MARKERS. No real system has this value."""


MAX_FILE_BYTES = 4 << 30
"""Maximum size of each file that pip writes, and of pip's memory. pip needs these limits because it
reads files that anybody may have published. The value equals the limit for all unpacked packages of
an image (see `unpacking`), because some wheels that operators want are over 1 GB.
"""


def main(markers: str, arguments: list[str]) -> int:
    """Run pip with the environment markers in `markers`, a JSON object, and return pip's exit
    status. If the installed pip ignores these markers, return 3 without running pip.
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
