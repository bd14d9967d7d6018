"""A workspace of a session: what its files are called, and what became of its variables."""

from __future__ import annotations

from typing import Literal

FileKind = Literal["file", "image"]
"""A file that a program wrote, or a picture that was taken of one of its figures."""

SessionState = Literal["kept", "rolled_back", "reset"]
"""Of a session's variables after a run: they are as the run left them; they are those from before
it; they are gone. Files are none of this: they stay as they are in all three cases.
"""
