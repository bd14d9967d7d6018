"""The approval channels that an operator can configure: one file each, one row each in `CHANNELS`.

Host side. To add one: write a subclass of `ApprovalChannel` (`base.py`) in a file of this folder,
its settings in `approvals/settings.py` and `config.py`, and its row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fumehood.approvals.channels.base import ApprovalChannel, ChannelContext
from fumehood.approvals.channels.webhook import WebhookChannel

CHANNELS: Mapping[str, Callable[[Any, ChannelContext], ApprovalChannel]] = {
    WebhookChannel.name: WebhookChannel,
}
"""Section of the configuration, which is also the channel's name → channel."""


def open_channels(
    settings: Mapping[str, Any], context: ChannelContext
) -> tuple[ApprovalChannel, ...]:
    """Make the channels whose settings are not None.

    Raises:
        ConfigError: the settings of one cannot be used.
    """
    return tuple(
        make(settings[name], context)
        for name, make in CHANNELS.items()
        if settings.get(name) is not None
    )
