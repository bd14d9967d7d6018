"""The operator's settings of the webhook."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from fumehood.core.part import Setting
from fumehood.core.value import MASKED_URL, Value


class WebhookSettings(Value):
    """The address that is notified of approvals, and the secret that signs messages in both
    directions.
    """

    url: Annotated[str, MASKED_URL] = Field(pattern=r"^https?://", max_length=2000)
    secret_file: Path
    """A secret of at least 32 bytes, readable by the engine's user only."""
    timeout_seconds: float = Field(default=10, gt=0, le=60)
    attempts: int = Field(default=8, ge=1, le=50)
    replay_window_seconds: float = Field(default=300, ge=10, le=3600)
    """How far the time in a callback's signature may be from the engine's clock."""
    may_decide: bool = False
    """Whether a signed callback may decide, as the approver `webhook`."""


SETTINGS = {"webhook": Setting(WebhookSettings | None, None)}
