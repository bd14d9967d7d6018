"""Effects: what a call will change, computed before it is carried out."""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.model.errors import ApprovalExpired
from fumehood.model.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class Effect:
    """What a call will change."""

    shown: JsonObject
    base: str
    effect: str


class WorkspaceChanged(ApprovalExpired):
    """The workspace is not as it was when a human said yes."""
