"""Writing untrusted text to a terminal. The escaping itself is in `core/escaping.py`.

All text that does not come from the command line's own code goes through here or there: answers,
program output, names, reasons, files.
"""

from __future__ import annotations

import sys
from typing import TextIO

from fumehood.core.escaping import escapes as escapes
from fumehood.core.escaping import indented as indented
from fumehood.core.escaping import json_document as json_document
from fumehood.core.escaping import json_line as json_line
from fumehood.core.escaping import json_lines as json_lines
from fumehood.core.escaping import printable as printable
from fumehood.core.escaping import visible as visible


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a message that may contain untrusted text."""
    print(printable(text), file=sys.stderr if to_stderr else sys.stdout)


def write(stream: TextIO, text: str) -> None:
    """Write untrusted text: escaped on a terminal, unchanged elsewhere."""
    if stream.isatty():
        stream.write(printable(text))
    else:
        stream.flush()
        stream.buffer.write(text.encode("utf-8", "replace"))
    stream.flush()
