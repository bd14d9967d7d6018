"""What the clients raise: nobody answers, or the engine says no to what is no call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fumehood.model.envelope import Envelope


class DaemonUnavailable(Exception):
    """No engine answers, or not in time. The message says what to do.

    `may_have_acted` is whether an engine may have received the request all the same: a call
    may then have run, and only its owner can tell whether it is safe to send it again.
    """

    def __init__(self, message: str, *, may_have_acted: bool = False) -> None:
        super().__init__(message)
        self.may_have_acted = may_have_acted


class Refused(Exception):
    """The engine refused; `envelope` says why, `code` in one word."""

    def __init__(self, envelope: Envelope) -> None:
        super().__init__(envelope.error.message if envelope.error is not None else "refused")
        self.envelope = envelope

    @property
    def code(self) -> str:
        """The error code."""
        return self.envelope.error.code if self.envelope.error is not None else "INTERNAL_ERROR"
