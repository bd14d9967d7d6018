"""What the clients raise: nobody answers, or the engine says no to what is no call."""

from __future__ import annotations

from fumehood.core.errors import EnvelopeError, FumehoodError


class DaemonUnavailable(FumehoodError):
    """No engine answers, or not in time. The message says what to do.

    `may_have_acted` is whether an engine may have received the request all the same: a call
    may then have run, and only its owner can tell whether it is safe to send it again.
    """

    def __init__(self, message: str, *, may_have_acted: bool = False) -> None:
        super().__init__(message)
        self.may_have_acted = may_have_acted


class Refused(EnvelopeError):
    """The engine refused a request that is no call; `envelope` says why, `code` in one word."""
