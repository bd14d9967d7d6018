"""The checks of the webhook in `fumehood doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fumehood.cli.findings import Finding
from fumehood.config import Config, ConfigError
from fumehood.webhook.channel import read_secret
from fumehood.webhook.settings import WebhookSettings


def check(config: Config) -> Iterator[Finding]:
    """Yield a finding about the webhook: whether its secret can be read."""
    chosen = config.of("webhook", WebhookSettings)
    if chosen is None:
        yield Finding("webhook", "ok", "none is configured")
        return
    try:
        read_secret(chosen.secret_file)
    except ConfigError as error:
        remedy = "Fix the secret's file; no engine starts with it."
        yield Finding("webhook", "missing", str(error), remedy)
        return
    may = "may" if chosen.may_decide else "may not"
    yield Finding("webhook", "ok", f"its secret can be read; a signed callback {may} decide")


def approvers(config: Config) -> Sequence[str]:
    """Return a list with a display name for the webhook if its callbacks may decide approvals.
    Otherwise, return an empty list.
    """
    chosen = config.of("webhook", WebhookSettings)
    return ["the webhook"] if chosen is not None and chosen.may_decide else []
