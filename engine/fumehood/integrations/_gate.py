"""The engine's decision on a call, in the form that permission callbacks of frameworks need.

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
    """Request a decision. Return the reason for the model why the call must not run, or None.

    None means that the engine allowed the call.
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
    """Return the reason for the model why a call must not run, or None if it is allowed."""
    if decision.decision == "allow":
        return None
    return decision.reason if decision.code is None else f"{decision.code}: {decision.reason}"


def undecided(fault: Exception) -> str:
    """Return the reason for the model if there is no decision, for example without an engine."""
    return f"fumehood decided nothing, so the call must not run. {fault}"
