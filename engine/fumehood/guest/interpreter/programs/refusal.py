"""The two exceptions with which the sandbox ends a program, and a base class without copies.

Guest side. Invariant: neither exception is an `Exception`, and a program has no name for anything
above `Exception`, so `except` cannot catch them. `finally: return` can still swallow one, so the
run remembers that it was raised, and `restricted` checks that at the end.
"""

from __future__ import annotations

from typing import Any


class Uncopied:
    """An object of the sandbox that cannot be copied: a program that copies a function containing
    it gets a TypeError.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("this cannot be copied")


class Refused(BaseException):
    """The program used something that the tables do not allow, which the message names."""


class OutputFull(BaseException):
    """The program has printed or returned more than its output limit."""
