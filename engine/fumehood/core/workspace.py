"""A workspace of a session: what is in it, and what became of its variables."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FileKind = Literal["file", "image"]
"""A file that a program wrote, or a picture that was taken of one of its figures."""

SessionState = Literal["kept", "rolled_back", "reset"]
"""Of a session's variables after a run: they are as the run left them; they are those from before
it; they are gone. Files are none of this: they stay as they are in all three cases.
"""

EntryKind = Literal["file", "directory", "link", "other"]
"""`other` is a pipe, a socket or a device, which is never read or written from outside."""

UPLOAD_PIECE_BYTES = 1 << 20
"""Size of one piece of an upload into a session."""


class WorkspaceEntry(BaseModel):
    """One file, directory, link or other thing in a workspace."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    path: str = Field(description="Relative to the workspace.")
    kind: EntryKind
    size: int = Field(description="Bytes.")
    modified_at: str = Field(description="As the session's programs left it.")
