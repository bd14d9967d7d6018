"""Whether a Python program may need what its image preloads: a look at its text before it runs.

Host side, pure. The answer chooses between two processes that behave alike: a wrong "no" costs the
program a plain import, a wrong "yes" costs a slower start. So every doubt is a "yes", and the text
is searched, not parsed: it is a stranger's.
"""

from __future__ import annotations

import re
import sys

MAX_CHARACTERS = 64 * 1024
"""Of a program that is searched. The start of a longer one matters less."""

_IMPORT = re.compile(r"\bfrom[ \t]+([\w.]+)[ \t]+import\b|\bimport\b[ \t]*([^\n;#]*)")
_DOUBT = re.compile(
    r"__import__|importlib|__builtins__|__loader__|__spec__|sys\.modules|\bmodules\b|\brunpy\b"
    r"|\bpkgutil\b|\bzipimport\b|pickle|\bexec\b|\beval\b|(?<![.\w])compile\b"
)
"""Other ways to a module."""


def needs_preloaded(code: str) -> bool:
    """Whether a program may import anything but modules of the standard library."""
    if len(code) > MAX_CHARACTERS or _DOUBT.search(code):
        return True
    return any(
        name.partition(".")[0] not in sys.stdlib_module_names
        for clause in _IMPORT.finditer(code)
        for name in _names(clause)
    )


def _names(clause: re.Match[str]) -> list[str]:
    """The modules of one import; what is no name is none of the standard library either."""
    source, imported = clause.groups()
    if source is not None:
        return [source]
    return [(part.split() or [""])[0] for part in imported.split(",")]
