"""What is the sandbox's own: the two reasons for which it ends a program, and no copies.

Guest side. Invariant: neither reason is an `Exception`, and a program has no name for anything
above `Exception`, so `except` cannot catch them. `finally: return` can still swallow one;
the run therefore remembers that it happened, and `restricted` asks it at the end.
"""

from __future__ import annotations

from typing import Any


class Uncopied:
    """Something of the sandbox's own: a program that copies a function of it gets no second one."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("this cannot be copied")


class Refused(BaseException):
    """The program asked for something that the tables do not allow. The message says what."""


class OutputFull(BaseException):
    """The program has printed or returned more than its output limit."""
