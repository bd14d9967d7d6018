"""Requests the engine's decision on a call, and converts it to the form that permission callbacks
of frameworks need.

Any failure counts as a refusal.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from fumehood.client.async_client import AsyncClient
from fumehood.core.decision import Decision
from fumehood.core.json_types import JsonObject


async def denial(
    client: AsyncClient | None,
    tool: str,
    arguments: JsonObject,
    context: JsonObject,
    options: dict[str, Any],
) -> str | None:
    """Request a decision on a call. Return None if the engine allows the call.

    Otherwise, return the reason why the call must not run, as a text for the model. The arguments
    have the same meaning as in `AsyncClient.decide`. If `client` is None, a new client is used.
    """
    try:
        async with AsyncExitStack() as resources:
            if client is None:
                client = await resources.enter_async_context(AsyncClient())
            decision = await client.decide(tool, arguments, context=context, **options)
    except Exception as fault:  # any failure means that there is no decision
        return undecided(fault)
    return refusal(decision)


def refusal(decision: Decision) -> str | None:
    """Return the reason why a decision does not allow its call, as a text for the model. Return
    None if it allows the call.
    """
    if decision.decision == "allow":
        return None
    return decision.reason if decision.code is None else f"{decision.code}: {decision.reason}"


def undecided(fault: Exception) -> str:
    """Return a text for the model which says why there is no decision, for example because no
    engine is running.
    """
    return f"fumehood decided nothing, so the call must not run. {fault}"
