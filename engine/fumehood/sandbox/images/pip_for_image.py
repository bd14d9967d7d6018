"""pip, told that it works for the Python of an image: a program of its own, run by its path.

Host side. `--python-version` of pip chooses files, but conditions such as
`python_version < "3.12"` are still judged by the Python that runs pip; an image would lack what
only its own Python needs. So they are judged by the first argument here, a JSON object. Fails
before it does anything where this pip cannot be told. Usage: pip_for_image.py MARKERS ARGUMENT…
"""

from __future__ import annotations

import importlib
import json
import sys

ASKED = "platform_release"
SIGN = "of-an-image"


def main(markers: str, arguments: list[str]) -> int:
    """Run pip. Returns its exit status."""
    environment = json.loads(markers)
    module = importlib.import_module("pip._vendor.packaging.markers")
    module.default_environment = lambda: dict(environment)  # type: ignore[attr-defined]
    if not module.Marker(f"{ASKED} == '{SIGN}'").evaluate():
        sys.stderr.write("This pip cannot be told which Python it works for.\n")
        return 3
    return int(importlib.import_module("pip._internal.cli.main").main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
