"""`print` for programs: collected, bounded, and nobody's file.

Guest side. Invariant: what is kept never grows beyond the output limit; once it would
have, the run can only end as one that printed too much.
"""

from __future__ import annotations

from typing import Any

from fumehood.guest.interpreter.programs.refusal import OutputFull


class Printed:
    """What one program has printed so far."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._parts: list[str] = []
        self.is_full = False

    def text(self) -> str:
        """All of it, with what UTF-8 cannot hold shown by escapes."""
        return "".join(self._parts)

    def write(
        self, *values: Any, sep: Any = " ", end: Any = "\n", file: Any = None, flush: Any = False
    ) -> None:
        """`print(*values, sep=…, end=…)`; `flush` means nothing here, and `file` is refused.

        Raises:
            OutputFull: it is over the limit; what fitted is kept.
        """
        if file is not None:
            raise TypeError("print() takes no file here; all output is collected")
        between, last = _text_or(sep, " ", "sep"), _text_or(end, "\n", "end")
        for place, value in enumerate(values):
            if place:
                self._keep(between)
            self._keep(str(value))
        self._keep(last)

    def _keep(self, text: str) -> None:
        # Cut first: a text of the program's whole memory need not be encoded to be too long.
        encoded = text[: self._max_bytes + 1].encode("utf-8", "backslashreplace")
        room = self._max_bytes - self._bytes
        self._parts.append(encoded[:room].decode("utf-8", "ignore"))
        self._bytes += min(len(encoded), room)
        if len(encoded) > room:
            self.is_full = True
            raise OutputFull


def _text_or(value: Any, default: str, name: str) -> str:
    if value is None:
        return default
    if not isinstance(value, str):
        raise TypeError(f"{name} must be None or a string")
    return value


class PrintDoor:
    """What RestrictedPython's code takes for its print collector: one for all functions."""

    __slots__ = ("_call_print",)

    def __init__(self, printed: Printed) -> None:
        def write(
            *values: Any, sep: Any = " ", end: Any = "\n", file: Any = None, flush: Any = False
        ) -> None:
            printed.write(*values, sep=sep, end=end, file=file, flush=flush)

        write.__name__ = write.__qualname__ = "print"  # as Python says where arguments are wrong
        self._call_print = write  # a function: no way back to the collector
